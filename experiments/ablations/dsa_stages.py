"""What each stage of the DSA adaptation is good for, and how far from dense attention it ends (GLM-5 2.1.1).

    python -m experiments.ablations.dsa_stages [tiny|small] [WORKDIR]

From one trained dense model per seed, all arms train on the same number of tokens:

- dense: goes on as it was;
- warm-up only: the indexers learn what dense attention looks at, and the trunk is then used sparse as it is;
- full: the paper's way, a warm-up and then the sparse stage;
- sparse at once: the sparse stage with indexers that know nothing;
- keys annealed: likewise, but from all keys down to the k that stay, by halves.

All are scored with k keys, whatever they train with, but dense. Reported, with all seeds and their spread:
exact retrieval along the way and at the end, its difference to dense (and between full and warm-up only:
90% of dense against 99.6% in the paper's Table 6 at 128K) on paired samples; tokens until an arm is within half
a percent of dense at equal tokens; the largest rise of the training loss over its lowest value before (the
dense model's included); gradient norms.

Tuned, on the first seed of :tiny, as the paper leaves it open: four questions for each context, so that all
arms train what is scored; a rate of 1e-3, a fifth of the dense model's. Indexers warm up at the paper's rates.

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
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.ablations.arms import Runs, outcome
from experiments.ablations.command import ablate
from experiments.ablations.dsa_adaptation import (
    DENSE,
    FULL,
    WARM_UP,
    Study,
    arms,
    scored,
    small,
    tiny,
)
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from glm5_jax.core.metrics_log import read
from glm5_jax.evals.ruler import Score, compare
from glm5_jax.training.experiment import choose

SEEDS = (0, 1, 2)
TARGET = 0.005  # of exact retrieval


def get_config(variant: str = "tiny") -> Study:
    """The variant's study; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small})


class History(NamedTuple):
    """Of a training after the dense model, by steps over all stages: exact retrieval; the training loss (nats
    per token; step 0: the dense model's at its end); norms of the gradients of trunk and indexers, where
    they train."""

    scores: dict[int, float]
    losses: dict[int, float]
    trunk: dict[int, float]
    indexer: dict[int, float]


def history(dense: pathlib.Path, folders: Iterable[pathlib.Path]) -> History:
    """From the workdirs of the last dense stage and of those after it."""
    found, first = History({}, {0: outcome(dense)["train_loss"]}, {}, {}), 0
    for folder in folders:
        rows = read(folder)
        for row in rows:
            step = first + row["step"]
            exact = [x for name, x in row.items() if re.fullmatch(r"ruler/.*/exact", name)]
            if exact:
                found.scores[step] = statistics.fmean(exact)
            trunk = [row[f"grad_norm/{g}"] for g in ("adamw", "muon") if f"grad_norm/{g}" in row]
            if trunk:
                found.trunk[step] = math.hypot(*trunk)
            if "grad_norm/indexer" in row:
                found.indexer[step] = row["grad_norm/indexer"]
            if "loss/ce" in row:
                found.losses[step] = row["loss/ce"]
        first += rows[-1]["step"]
    return found


def spike(losses: Sequence[float]) -> float:
    """The largest rise of a loss over its lowest value before."""
    lowest = np.minimum.accumulate(losses)
    return float(np.max(np.asarray(losses[1:]) - lowest[:-1]))


def parity(scores: dict[int, float], dense: dict[int, float]) -> int | None:
    """The first step at which an arm is within `TARGET` of dense at that step; None if it never is."""
    return next((s for s in sorted(scores) if s and scores[s] >= dense[s] - TARGET), None)


def run(runs: Runs, study: Study, command: str) -> Finding:
    """Trains and compares all arms."""
    found = arms(study, runs.workdir)
    rows, histories = {}, {}
    before = len(study.dense(runs.workdir))
    for name, arm in found.items():
        trials = [arm.trial(seed=seed) for seed in SEEDS]
        rows[name] = runs(trials)
        folders = [runs.folders(trial) for trial in trials]
        histories[name] = [history(own[before - 1], own[before:]) for own in folders]
    tokens = found[DENSE].stages[-1].batch.end
    return finding(study, command, rows, histories, tokens)


def finding(
    study: Study,
    command: str,
    rows: dict[str, list[dict]],
    histories: dict[str, list[History]],
    tokens: int,
) -> Finding:
    """Tables, plots and verdicts from the rows and histories of the arms {name: by seed}; tokens of a step.

    Arms of which a training diverged are named and left out; ValueError if dense or full is one of them.
    """
    diverged = [name for name, found in rows.items() if any(r["loss"] is None for r in found)]
    rows = {name: found for name, found in rows.items() if name not in diverged}
    if lacking := {DENSE, FULL} & set(diverged):
        raise ValueError(
            f"{', '.join(sorted(lacking))} diverged; nothing to compare with. Lower rate"
        )
    histories = {name: histories[name] for name in rows}
    reached = {
        name: [parity(h.scores, dense.scores) for h, dense in zip(found, histories[DENSE])]
        for name, found in histories.items()
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
        "The stages of the DSA adaptation",
        command,
        tuple(verdicts),
        (_retrieval(study, tokens, rows, histories, reached), _unrest(histories)),
        (
            Plot(scores, f"By steps after the dense model, with {study.keys} keys but for dense."),
            Plot(losses, "With the keys of the stage; a warm-up's is that of the dense model."),
            Plot(norms, "Of the trunk, where it trains."),
        ),
    )


def _retrieval(study, tokens, rows, histories, reached) -> Table:
    columns = ("solved, %", "minus dense, by seed", "all samples, 95%", "first score")
    return Table(
        f"Exact retrieval at {study.length} tokens, {study.keys} keys but for dense: {study.steps} steps of "
        f"{tokens:,} tokens after the dense model, {len(SEEDS)} seeds",
        ("arm", *columns, "parity at step"),
        tuple(
            (
                name,
                f"{_percent(Spread.of(_exact(found))):.2f}",
                f"{_percent(paired(_exact(found), _exact(rows[DENSE]))):+.2f}",
                _interval(found, rows[DENSE]),
                f"{_percent(Spread.of(h.scores[0] for h in histories[name])):.1f}",
                ", ".join("never" if step is None else str(step) for step in reached[name]),
            )
            for name, found in rows.items()
        ),
        "Mean ± half of Student's 95% interval (lowest .. highest seed); first score: before a single step. "
        f"Parity: within {100 * TARGET:g} points of dense after the same step, of each seed; scored every "
        f"{study.every} steps on {study.along} samples.",
    )


def _unrest(histories) -> Table:
    columns = (
        "largest rise of the loss",
        "trunk: largest norm",
        "median",
        "indexers: largest norm",
    )
    return Table(
        "Unrest of the training after the dense model",
        ("arm", *columns),
        tuple(
            (
                name,
                f"{Spread.of(spike(list(h.losses.values())) for h in found):.3f}",
                *(_norms(found, "trunk", how) for how in (max, statistics.median)),
                _norms(found, "indexer", max),
            )
            for name, found in histories.items()
        ),
        "Nats per token above the lowest loss before, the dense model's included; norms of all gradients of "
        "trunk and indexers before clipping, over all steps in which they train.",
    )


def _exact(rows: list[dict]) -> list[float]:
    return [row["exact"] for row in rows]


def _percent(spread: Spread) -> Spread:
    return Spread(tuple(100 * value for value in spread.values))


def _of_all(ours: list[dict], theirs: list[dict]) -> tuple[float, float, float]:
    """(difference, lower, upper 95% limit) of exact retrieval over the samples of all seeds, paired."""
    ours, theirs = ({k: v for row in rows for k, v in _by_sample(row)} for rows in (ours, theirs))
    return compare(ours, theirs)["all"]


def _by_sample(row: dict) -> Iterable[tuple[str, Score]]:
    for name, found in row["scores"].items():
        exact = np.ones(found["of"], bool)
        exact[found["missed"]] = False
        depth = np.full(found["of"], math.nan)  # not kept
        yield f"{name} {row['seed']}", Score(exact, exact.astype(float), depth, found["samples"])


def _interval(ours: list[dict], theirs: list[dict]) -> str:
    difference, low, high = (100 * x for x in _of_all(ours, theirs))
    return f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]"


def _norms(found: list[History], of: str, how) -> str:
    values = [getattr(own, of).values() for own in found]
    return f"{Spread.of(map(how, values)):.3f}" if all(values) else "frozen"


def _parity_target(rows: dict[str, list[dict]]) -> str:
    """The whole way against dense, on all samples of all seeds."""
    difference, low, _ = _of_all(rows[FULL], rows[DENSE])
    pairs = sum(found["of"] for row in rows[FULL] for found in row["scores"].values())
    met = "met" if low >= -TARGET else "met on average, within the interval"
    if difference < -TARGET:
        met = "not met"
    return (
        f"{FULL} minus dense at equal tokens, exact retrieval in points: {_interval(rows[FULL], rows[DENSE])} on "
        f"{pairs:,} pairs (dense solves {_percent(Spread.of(_exact(rows[DENSE]))):.2f}%); "
        f"within {100 * TARGET:g}: {met}"
    )


def _stages(rows: dict[str, list[dict]]) -> str:
    """What the sparse stage adds to the warm-up (Table 6)."""
    if WARM_UP not in rows:
        return f"{WARM_UP} against {FULL}: not compared"
    _, _, high = _of_all(rows[WARM_UP], rows[FULL])
    shows = "shows here" if high < 0 else "does not show at this size"
    return (
        f"{WARM_UP} minus {FULL}, in points: {_interval(rows[WARM_UP], rows[FULL])}; by seed "
        f"{_percent(paired(_exact(rows[WARM_UP]), _exact(rows[FULL]))):+.2f}; that the trunk's own adaptation "
        f"is needed {shows}"
    )


def _tokens_to_parity(name: str, reached: list[int | None], study: Study, tokens: int) -> str:
    if None in reached:
        return f"{name}: within {100 * TARGET:g} points of dense on {len(reached) - reached.count(None)} of {len(reached)} seeds"
    warm = {FULL: study.warm_steps, WARM_UP: study.steps}.get(name, 0)
    sparse = Spread.of(max(0, step - warm) * tokens / 1e3 for step in reached)
    return (
        f"{name}: within {100 * TARGET:g} points of dense after "
        f"{Spread.of(step * tokens / 1e3 for step in reached):.0f} thousand tokens, {sparse:.0f} of them sparse"
    )


def _lines(histories: dict[str, list[History]], of) -> dict[str, list]:
    """Curves of all arms, which have the same colours in every chart; none of those that have no values."""
    values = {name: [sorted(of(h).items()) for h in found] for name, found in histories.items()}
    return {name: [tuple(zip(*v)) for v in found if v] for name, found in values.items()}


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments, [VARIANT [WORKDIR]]."""

    def find(runs: Runs, study: Study, command: str) -> Finding:
        score = functools.partial(scored, study)
        return run(Runs(runs.workdir, study.evaluator, measure=score, keep=True), study, command)

    return ablate("dsa_stages", arguments, get_config, find)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
