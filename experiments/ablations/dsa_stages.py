"""Measures the effect of each stage of the DSA adaptation, and the remaining gap to dense attention (GLM-5 2.1.1).

    glm5 run dsa_stages:tiny --workdir=DIR     # or :small

From one trained dense model per seed, all arms train on the same number of tokens:

- dense: continues as before;
- warm-up only: the indexers train on dense attention, and the unchanged trunk is then used sparsely;
- full: the paper's way, a warm-up and then the sparse stage;
- sparse at once: the sparse stage with untrained indexers;
- keys annealed: likewise, but from all keys down to the final k, by halves.

All except dense are evaluated with k keys, whatever they train with. Reported, with all seeds and their spread:

- exact retrieval during training and at the end, and its difference to dense (and between full and warm-up only: 90%
  of dense against 99.6% in the paper's Table 6 at 128K) on paired samples;
- tokens until an arm is within half a percent of dense at equal tokens;
- the largest rise of the training loss over its lowest value before (the dense model's included);
- gradient norms.

The paper leaves some values open. They are tuned on the first seed of :tiny: four questions for each context, so that
all arms train on the task of the evaluation; a rate of 1e-3, a fifth of the dense model's. Indexers warm up at the
paper's rates.

:tiny    for two CPU cores, 128 tokens, 16 keys: 128 steps of 2,048 tokens an arm, half a minute each, and
         two or three minutes for each dense model; a quarter of an hour in all.
:small   for one accelerator: pretrain.py:small and midtrain.py:small, then 2,800 steps at 32K tokens and 512
         keys for each arm.
"""

import functools
import math
import pathlib
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.ablations.arms import AblationRuns, last_stage, outcome
from experiments.ablations.command import ablate
from experiments.ablations.dsa_adaptation import (
    DENSE,
    FULL,
    WARM_UP,
    DsaStudy,
    arms,
    score_arm,
    small,
    tiny,
)
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from glm5_jax.evals.ruler import Score, compare
from glm5_jax.metrics.metrics_log import read
from glm5_jax.training.experiment import choose
from glm5_jax.training.pretraining import ExperimentConfig

SEEDS = (0, 1, 2)
TARGET = 0.005  # of exact retrieval


def get_config(variant: str = "tiny") -> DsaStudy:
    """Returns the variant's study. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


class History(NamedTuple):
    """Values of a training after the dense model, {step over all stages: value}.

    Attributes:
      scores: exact retrieval.
      losses: training loss in nats per token; step 0 has the dense model's final one.
      trunk, indexer: norms of the gradients of trunk and indexers, where they train.
    """

    scores: dict[int, float]
    losses: dict[int, float]
    trunk: dict[int, float]
    indexer: dict[int, float]


def read_history(dense: pathlib.Path, folders: Iterable[pathlib.Path]) -> History:
    """Returns the history from the workdirs of the last dense stage and of the stages after it."""
    result, first = History({}, {0: outcome(dense)["train_loss"]}, {}, {}), 0
    for folder in folders:
        rows = read(folder)
        for row in rows:
            step = first + row["step"]
            exact = [x for name, x in row.items() if re.fullmatch(r"ruler/.*/exact", name)]
            if exact:
                result.scores[step] = statistics.fmean(exact)
            trunk = [row[f"grad_norm/{g}"] for g in ("adamw", "muon") if f"grad_norm/{g}" in row]
            if trunk:
                result.trunk[step] = math.hypot(*trunk)
            if "grad_norm/indexer" in row:
                result.indexer[step] = row["grad_norm/indexer"]
            if "loss/ce" in row:
                result.losses[step] = row["loss/ce"]
        first += rows[-1]["step"]
    return result


def largest_rise(losses: Sequence[float]) -> float:
    """Returns the largest rise of a loss over its lowest value before."""
    lowest = np.minimum.accumulate(losses)
    return float(np.max(np.asarray(losses[1:]) - lowest[:-1]))


def step_of_parity(scores: dict[int, float], dense: dict[int, float]) -> int | None:
    """Returns the first step at which an arm is within `TARGET` of dense at the same step; None if there is none."""
    return next((s for s in sorted(scores) if s and scores[s] >= dense[s] - TARGET), None)


def compare_stages(runs: AblationRuns, study: DsaStudy, command: str) -> Finding:
    """Trains and compares all arms."""
    study_arms = arms(study, runs.workdir)
    rows, histories = {}, {}
    before = len(study.dense(runs.workdir))
    for name, arm in study_arms.items():
        trials = [arm.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        folders = [runs.folders(trial) for trial in trials]
        histories[name] = [
            read_history(stage_folders[before - 1], stage_folders[before:])
            for stage_folders in folders
        ]
    tokens = last_stage(study_arms[DENSE].stages, ExperimentConfig).batch.end
    return finding(study, command, rows, histories, tokens)


def finding(
    study: DsaStudy,
    command: str,
    rows: dict[str, list[dict]],
    histories: dict[str, list[History]],
    tokens: int,
) -> Finding:
    """Returns tables, plots and verdicts from the rows and histories of the arms {name: by seed}.

    Arms with a diverged training are named and left out. Raises ValueError if dense or full is one of them.

    Args:
      study: the study.
      command: command line of the run.
      rows, histories: {name: by seed}.
      tokens: tokens of a step.
    """
    # Leave out diverged arms.
    diverged = [name for name, of_arm in rows.items() if any(r["loss"] is None for r in of_arm)]
    rows = {name: of_arm for name, of_arm in rows.items() if name not in diverged}
    if lacking := {DENSE, FULL} & set(diverged):
        raise ValueError(
            f"{', '.join(sorted(lacking))} diverged; nothing to compare with. Lower rate"
        )
    histories = {name: histories[name] for name in rows}
    # Verdicts and curves of the others.
    reached = {
        name: [step_of_parity(h.scores, dense.scores) for h, dense in zip(of_arm, histories[DENSE])]
        for name, of_arm in histories.items()
    }
    verdicts = [
        _parity_target(rows),
        _stages(rows),
        *(_tokens_to_parity(name, reached[name], study, tokens) for name in rows if name != DENSE),
        *(f"{name}: a training diverged; left out" for name in diverged),
    ]
    scores = curves(
        _lines(histories, lambda h: {s: 100 * x for s, x in h.scores.items()}),
        y_label="Exact retrieval, %",
    )
    losses = curves(_lines(histories, lambda h: h.losses), y_label="Training loss, nats", log=True)
    norms = curves(_lines(histories, lambda h: h.trunk), y_label="Gradient norm", log=True)
    return Finding(
        title="The stages of the DSA adaptation",
        command=command,
        verdicts=tuple(verdicts),
        tables=(_retrieval(study, tokens, rows, histories, reached), _stability_table(histories)),
        plots=(
            Plot(scores, f"By steps after the dense model, with {study.keys} keys but for dense."),
            Plot(losses, "With the keys of the stage; a warm-up's is that of the dense model."),
            Plot(norms, "Of the trunk, where it trains."),
        ),
    )


def _retrieval(study, tokens, rows, histories, reached) -> Table:
    columns = ("solved, %", "minus dense, by seed", "all samples, 95%", "first score")
    return Table(
        title=f"Exact retrieval at {study.length} tokens, {study.keys} keys but for dense: {study.steps} steps of "
        f"{tokens:,} tokens after the dense model, {len(SEEDS)} seeds",
        columns=("arm", *columns, "parity at step"),
        rows=tuple(
            (
                name,
                f"{_percent(Spread.of(_exact(arm_rows))):.2f}",
                f"{_percent(paired(_exact(arm_rows), _exact(rows[DENSE]))):+.2f}",
                _interval(arm_rows, rows[DENSE]),
                f"{_percent(Spread.of(h.scores[0] for h in histories[name])):.1f}",
                ", ".join("never" if step is None else str(step) for step in reached[name]),
            )
            for name, arm_rows in rows.items()
        ),
        note="Mean ± half of Student's 95% interval (lowest .. highest seed); first score: before a single step. "
        f"Parity: within {100 * TARGET:g} points of dense after the same step, of each seed; scored every "
        f"{study.every} steps on {study.along} samples.",
    )


def _stability_table(histories) -> Table:
    columns = (
        "largest rise of the loss",
        "trunk: largest norm",
        "median",
        "indexers: largest norm",
    )
    return Table(
        title="Unrest of the training after the dense model",
        columns=("arm", *columns),
        rows=tuple(
            (
                name,
                f"{Spread.of(largest_rise(list(h.losses.values())) for h in arm_histories):.3f}",
                *(_norms(arm_histories, "trunk", how) for how in (max, statistics.median)),
                _norms(arm_histories, "indexer", max),
            )
            for name, arm_histories in histories.items()
        ),
        note="Nats per token above the lowest loss before, the dense model's included; norms of all gradients of "
        "trunk and indexers before clipping, over all steps in which they train.",
    )


def _exact(rows: list[dict]) -> list[float]:
    return [row["exact"] for row in rows]


def _percent(spread: Spread) -> Spread:
    return Spread(tuple(100 * value for value in spread.values))


def _compare_all_samples(ours: list[dict], theirs: list[dict]) -> tuple[float, float, float]:
    """Returns (difference, lower, upper 95% limit) of exact retrieval over the paired samples of all seeds."""
    a, b = ({k: v for row in rows for k, v in _by_sample(row)} for rows in (ours, theirs))
    return compare(a, b)["all"]


def _by_sample(row: dict) -> Iterable[tuple[str, Score]]:
    for name, score in row["scores"].items():
        exact = np.ones(score["of"], bool)
        exact[score["missed"]] = False
        depth = np.full(score["of"], math.nan)  # not stored in rows
        yield (
            f"{name} {row['seed']}",
            Score(exact=exact, share=exact.astype(float), depth=depth, samples=score["samples"]),
        )


def _interval(ours: list[dict], theirs: list[dict]) -> str:
    difference, low, high = (100 * x for x in _compare_all_samples(ours, theirs))
    return f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]"


def _norms(arm_histories: list[History], part: str, reduce) -> str:
    values = [getattr(history, part).values() for history in arm_histories]
    return f"{Spread.of(map(reduce, values)):.3f}" if all(values) else "frozen"


def _parity_target(rows: dict[str, list[dict]]) -> str:
    """Returns the sentence on the full way against dense, on all samples of all seeds."""
    difference, low, _ = _compare_all_samples(rows[FULL], rows[DENSE])
    pairs = sum(score["of"] for row in rows[FULL] for score in row["scores"].values())
    met = "met" if low >= -TARGET else "met on average, within the interval"
    if difference < -TARGET:
        met = "not met"
    return (
        f"{FULL} minus dense at equal tokens, exact retrieval in points: {_interval(rows[FULL], rows[DENSE])} on "
        f"{pairs:,} pairs (dense solves {_percent(Spread.of(_exact(rows[DENSE]))):.2f}%); "
        f"within {100 * TARGET:g}: {met}"
    )


def _stages(rows: dict[str, list[dict]]) -> str:
    """Returns the sentence on the gain of the sparse stage after the warm-up (Table 6)."""
    if WARM_UP not in rows:
        return f"{WARM_UP} against {FULL}: not compared"
    _, _, high = _compare_all_samples(rows[WARM_UP], rows[FULL])
    shows = "shows here" if high < 0 else "does not show at this size"
    return (
        f"{WARM_UP} minus {FULL}, in points: {_interval(rows[WARM_UP], rows[FULL])}; by seed "
        f"{_percent(paired(_exact(rows[WARM_UP]), _exact(rows[FULL]))):+.2f}; that the trunk's own adaptation "
        f"is needed {shows}"
    )


def _tokens_to_parity(name: str, reached: list[int | None], study: DsaStudy, tokens: int) -> str:
    steps = [step for step in reached if step is not None]
    if len(steps) < len(reached):
        return f"{name}: within {100 * TARGET:g} points of dense on {len(steps)} of {len(reached)} seeds"
    warm = {FULL: study.warm_steps, WARM_UP: study.steps}.get(name, 0)
    sparse = Spread.of(max(0, step - warm) * tokens / 1e3 for step in steps)
    return (
        f"{name}: within {100 * TARGET:g} points of dense after "
        f"{Spread.of(step * tokens / 1e3 for step in steps):.0f} thousand tokens, {sparse:.0f} of them sparse"
    )


def _lines(histories: dict[str, list[History]], of) -> dict[str, list]:
    """Returns the curves of all arms, so that an arm has one colour in every chart; arms without values have none."""
    values = {
        name: [sorted(of(h).items()) for h in arm_histories]
        for name, arm_histories in histories.items()
    }
    return {
        name: [tuple(zip(*v)) for v in arm_histories if v] for name, arm_histories in values.items()
    }


def run(study: DsaStudy, workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""

    def find(runs: AblationRuns, study: DsaStudy, command: str) -> Finding:
        score = functools.partial(score_arm, study)
        runs = AblationRuns(runs.workdir, study.evaluator, measure=score, keep=True)
        return compare_stages(runs, study, command)

    return ablate("dsa_stages", study, workdir, command, find)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
