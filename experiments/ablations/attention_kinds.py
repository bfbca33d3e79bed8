"""Compares cheaper kinds of attention in half of the layers, and DSA in all, before and after continual training.

    glm5 run attention_kinds:tiny --workdir=DIR     # or :small

Source: GLM-5 2.1.2, Tables 4 and 5; Table 6 for DSA. One trained model of full attention per seed is converted, with
the weights that it has (model/ablations/convert.py), to

- full attention, the control;
- windows in every second layer, the first of them full;
- windows in as many layers, chosen by the beam search of model/ablations/patterns.py: beam 8, two layers a step,
  scored without training by retrieval at one length, on samples that are not evaluated;
- Gated DeltaNet and SimpleGDN in the layers of the searched windows. (The paper has them in half of the layers too
  and does not print which. Interleaved, they would replace the layer that retrieves here.)
- DSA in all layers: part of the tokens warm up new indexers with the trunk frozen, the rest train sparsely.

All of them train on for the same tokens at the same rate. Retrieval is scored by length before and after. "Before" for
DSA is the unchanged trunk with warmed-up indexers, and for Gated DeltaNet a layer that outputs nothing until its
output gate is trained. Reported, with all seeds and their spread: solved samples, the difference to full attention by
seed, and the score of every pattern.

:tiny    four layers, and 96 steps of 2,048 tokens for each arm, 24 of which warm up DSA's indexers, on two CPU
         cores: 23 minutes next to another run, 16 of CPU time
:small   pretrain.py:small and midtrain.py:small, 12 layers, on one accelerator; it has not been run
"""

import dataclasses
import functools
import os
import pathlib
import statistics
from collections.abc import Callable

import jax
from jaxtyping import PyTree

from experiments import midtrain, pretrain
from experiments.ablations import retriever
from experiments.ablations.arms import AblationRuns, Arm, Trial
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.dsa_sparse import sparsify_stage
from experiments.dsa_warmup import freeze_trunk, make_warmup_schedule
from glm5_jax.checkpoint import store
from glm5_jax.config import ModelConfig
from glm5_jax.data.long_context import TaskSourceConfig
from glm5_jax.data.synthetic import LongContextTaskConfig
from glm5_jax.evals.ruler import RulerConfig, ruler
from glm5_jax.model import glm5
from glm5_jax.model.ablations.convert import add_missing_weights, convert, convert_config
from glm5_jax.model.ablations.patterns import Pattern, search
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import ScheduleConfig

SEEDS = (0, 1, 2)
DENSE = "dense"  # the model that all arms start from
FULL, INTERLEAVED, SEARCHED = "full attention", "windows, interleaved", "windows, searched"
GDN, SIMPLE, DSA = "Gated DeltaNet", "SimpleGDN", "DSA"
ARMS = (FULL, INTERLEAVED, SEARCHED, GDN, SIMPLE, DSA)
LETTERS = {"full": "F", "window": "S", "gdn": "G", "simple_gdn": "D"}  # F and S are the paper's
BEAM, PER_STEP = 8, 2  # GLM-5 2.1.2
CURRICULUM = ((18, 500), (36, 40), (72, 40), (128, 60))  # of :tiny: tokens of a row, steps
COLLAPSE = (
    0.5  # of the share that full attention solves; the paper's interleaved windows have 0.28 at 16K
)
PARITY = 0.005  # maximum loss of exact matches of DSA against full attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKindsStudy:
    """Model, continual training and evaluation of the study.

    Attributes:
      name: name of the experiment.
      stages: for a workdir, the stages that train the dense model, and last its continual training.
      index_topk: keys that DSA selects.
      warmup_steps: number of the continual steps that train only DSA's indexers.
      judged: evaluation before and after training; the training's seed is added to its seed.
      searched: evaluation that scores the patterns, likewise, at one length and on other samples.
    """

    name: str
    stages: Callable[[pathlib.Path], tuple[ExperimentConfig, ...]]
    index_topk: int
    warmup_steps: int
    judged: RulerConfig
    searched: RulerConfig

    def __post_init__(self):
        apart = abs(self.judged.seed - self.searched.seed)
        if apart < len(SEEDS):
            raise ValueError(
                f"judged.seed is {self.judged.seed} and searched.seed {self.searched.seed}: patterns would be "
                f"judged on samples that they were searched by; put them {len(SEEDS)} apart or more"
            )
        if len(self.searched.lengths) > 1:
            raise ValueError(
                f"searched.lengths is {self.searched.lengths}; patterns are scored at one length"
            )


def get_config(variant: str = "tiny") -> AttentionKindsStudy:
    """Returns the variant's study. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> AttentionKindsStudy:
    """Uses the retriever with four layers, a window of an eighth of the context and as many keys for DSA."""
    name, length = "attention_kinds:tiny", 128
    # With the retriever's 0.1, four layers did not retrieve after 500 steps; with 0.06 they did after 220 to 320.
    model = retriever.model(4, sliding_window=16, initializer_range=0.06)

    def stages(workdir):
        dense = retriever.stages(f"{name} {DENSE}", workdir, model, CURRICULUM)
        last = retriever.stage(name, workdir, length, 96, model, peak=1e-3, **retriever.LAST)
        # Other items than those of the dense model's last stage.
        fresh = dataclasses.replace(retriever.tasks_of(last), seed=1)
        data = dataclasses.replace(last.data, sources=(TaskSourceConfig(tasks=fresh),))
        # No warm-up of the rate, as in DSA's sparse stage, so that all arms have the same.
        schedule = dataclasses.replace(last.schedule, warmup_steps=0)
        return *dense, dataclasses.replace(last, data=data, schedule=schedule)

    judged = RulerConfig(
        kinds=("multi_key",),
        lengths=(18, 36, 72, length),
        samples=500,
        batch_size=100,
        task=retriever.TASK,
    )
    searched = dataclasses.replace(judged, lengths=(72,), samples=300, seed=100)
    return AttentionKindsStudy(
        name=name, stages=stages, index_topk=16, warmup_steps=24, judged=judged, searched=searched
    )


def small() -> AttentionKindsStudy:
    """Uses pretrain.py:small and midtrain.py:small without indexers, on the data that they name.

    Windows are a 32nd of 32K tokens, as the paper's are of 128K.
    """
    name, length = "attention_kinds:small", 32_768
    bases = (pretrain.small(), *(midtrain.small(stage) for stage in midtrain.STAGES))

    def without(stage: ExperimentConfig) -> ExperimentConfig:
        model = dataclasses.replace(stage.model, index_topk=None, sliding_window=length // 32)
        optimizer = dataclasses.replace(stage.optimizer, frozen=())
        name_ = f"{name} {DENSE}, {stage.name}"
        return dataclasses.replace(stage, name=name_, model=model, optimizer=optimizer)

    def stages(workdir):
        dense = tuple(map(without, bases))
        rate = dense[-1].schedule.end
        schedule = ScheduleConfig(kind="constant", peak=rate, warmup_steps=0, total_steps=1000)
        return *dense, dataclasses.replace(dense[-1], name=name, schedule=schedule)

    judged = RulerConfig(
        kinds=("needle", "multi_key", "multi_query"),
        lengths=(4096, 8192, 16_384, length),
        samples=200,
        task=LongContextTaskConfig(),
    )
    searched = dataclasses.replace(judged, lengths=(16_384,), samples=50, seed=100)
    index_topk = bases[0].model.index_topk
    assert index_topk is not None, "the pre-trained model has indexers"
    return AttentionKindsStudy(
        name=name,
        stages=stages,
        index_topk=index_topk,
        warmup_steps=120,
        judged=judged,
        searched=searched,
    )


def interleaved(num_layers: int, kind: str) -> Pattern:
    """Returns a pattern with `kind` in every second layer and the first one full."""
    return tuple(kind if i % 2 else "full" for i in range(num_layers))


def letters(pattern: Pattern) -> str:
    """Returns a pattern as text, with a letter of `LETTERS` per layer."""
    return "".join(LETTERS[kind] for kind in pattern)


def kinds_of(text: str) -> Pattern:
    """Returns the pattern of a text of `letters`."""
    names = {letter: kind for kind, letter in LETTERS.items()}
    return tuple(names[letter] for letter in text)


def arms(
    study: AttentionKindsStudy, workdir: str | os.PathLike, searched: Pattern
) -> dict[str, Arm]:
    """Returns every arm by name.

    Args:
      study: the study.
      workdir: workdir of its runs.
      searched: pattern of the searched windows.
    """
    *dense, last = study.stages(pathlib.Path(workdir))
    layers = last.model.num_hidden_layers
    patterns = {
        FULL: ("full",) * layers,
        INTERLEAVED: interleaved(layers, "window"),
        SEARCHED: searched,
        GDN: _replace_windows(searched, "gdn"),
        SIMPLE: _replace_windows(searched, "simple_gdn"),
    }
    tails: dict[str, tuple[ExperimentConfig, ...]] = {
        name: (_with_kinds(last, pattern),) for name, pattern in patterns.items()
    }
    tails[DSA] = _with_indexers(last, study)
    return {name: Arm(name, (*dense, *tail)) for name, tail in tails.items()}


def _replace_windows(pattern: Pattern, kind: str) -> Pattern:
    """Returns the pattern with its windows replaced by another kind."""
    return tuple(kind if layer_kind == "window" else layer_kind for layer_kind in pattern)


def _with_kinds(last: ExperimentConfig, pattern: Pattern) -> ExperimentConfig:
    """Returns the stage with a pattern. Its name depends only on the pattern, so that equal arms are trained once."""
    may_differ = ("layer_attention",) * (set(pattern) != {"full"}) + ("/gdn/",) * ("gdn" in pattern)
    return dataclasses.replace(
        last,
        name=f"{last.name} {letters(pattern)}",
        model=convert_config(last.model, pattern),
        may_differ=may_differ,
    )


def _with_indexers(
    last: ExperimentConfig, study: AttentionKindsStudy
) -> tuple[ExperimentConfig, ExperimentConfig]:
    """Returns both stages of DSA, which together have the steps of the other arms' single stage."""
    base = dataclasses.replace(
        last, model=dataclasses.replace(last.model, index_topk=study.index_topk)
    )
    warmed = freeze_trunk(
        base, f"{last.name} {DSA} warm-up", schedule=make_warmup_schedule(study.warmup_steps)
    )
    rate, steps = last.schedule.peak, last.schedule.total_steps - study.warmup_steps
    return warmed, dataclasses.replace(
        sparsify_stage(warmed, f"{last.name} {DSA}", rate, steps), may_differ=()
    )


def measure(study: AttentionKindsStudy, trial: Trial, folder: pathlib.Path) -> dict:
    """Returns values for the row of a trained arm.

    For an arm: {length: share solved} of the weights that its last stage started from and of those it ended with. For the
    dense model: the score of every pattern and the best of them.
    """
    stage, tokenizer = trial.stages[-1], Tokenizer.load(folder / "tokenizer")
    model = dataclasses.replace(
        stage.model, eos_token_id=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id
    )
    params = store.load_params(folder, glm5.abstract_params(model))
    judged, searched = (
        dataclasses.replace(config, seed=config.seed + trial.seed)
        for config in (study.judged, study.searched)
    )
    if trial.arm == DENSE:

        def score(params, pattern):
            [share] = solve_rates(*convert(params, model, pattern), tokenizer, searched).values()
            return share

        result = search(params, model.num_hidden_layers, score, beam=BEAM, per_step=PER_STEP)
        scores = {letters(pattern): value for pattern, value in result.scores.items()}
        return {"pattern": letters(result.pattern), "scores": scores}
    initial_params = store.load_params(
        AblationRuns(folder.parent.parent).folders(trial)[-2],
        glm5.abstract_params(model),
        stage.may_differ,
    )
    before = add_missing_weights(initial_params, model, jax.random.key(stage.seed))
    return {
        "before": solve_rates(before, model, tokenizer, judged),
        "after": solve_rates(params, model, tokenizer, judged),
    }


def solve_rates(
    params: PyTree, model: ModelConfig, tokenizer: Tokenizer, config: RulerConfig
) -> dict[str, float]:
    """Returns {length: share of the samples that are solved, mean over the kinds of task}."""
    scores = ruler(params, model, tokenizer, config, progress=False)
    return {
        str(length): statistics.fmean(
            float(scores[f"{kind}/{length}"].exact.mean()) for kind in config.kinds
        )
        for length in config.lengths
    }


def compare(runs: AblationRuns, study: AttentionKindsStudy, command: str) -> Finding:
    """Trains the dense models, searches, converts, trains on and compares."""
    # Weights are kept, because every arm starts from the dense model's.
    runs = AblationRuns(runs.workdir, measure=functools.partial(measure, study), keep=True)
    *dense, _ = study.stages(runs.workdir)
    bases = runs([Arm(DENSE, tuple(dense)).trial(seed=seed) for seed in SEEDS])
    if diverged_seeds := [base["seed"] for base in bases if base["loss"] is None]:
        raise ValueError(f"the dense model diverged at seeds {diverged_seeds}; lower its rate")
    rows: dict[str, list[dict]] = {name: [] for name in ARMS}
    for seed, base in zip(SEEDS, bases, strict=True):
        for name, arm in arms(study, runs.workdir, kinds_of(base["pattern"])).items():
            rows[name] += runs([arm.trial(seed=seed)])
    return finding(study, command, bases, rows)


def finding(
    study: AttentionKindsStudy, command: str, bases: list[dict], rows: dict[str, list[dict]]
) -> Finding:
    """Returns tables, charts and verdicts from the rows of the dense models and of every arm, by seed.

    Arms with a diverged training are named and left out. Raises ValueError if full attention is one of them.
    """
    # Leave out diverged arms.
    diverged = [name for name, arm_rows in rows.items() if any(r["loss"] is None for r in arm_rows)]
    rows = {name: arm_rows for name, arm_rows in rows.items() if name not in diverged}
    if FULL in diverged:
        raise ValueError(f"{FULL} diverged; nothing to compare with. Lower the rate")
    # Tables, charts and verdicts of the others.
    table = _table(
        f"{study.name}: solved samples, %",
        rows,
        study,
        lambda name, when, length: f"{Spread.of(_percent(rows[name], when, length)):.1f}",
        "mean ± half of Student's 95% interval (lowest .. highest seed); "
        f"{study.judged.samples} samples of each kind at each length",
    )
    differences = _table(
        "Minus full attention at the same time, points, by seed",
        {name: rows[name] for name in rows if name != FULL},
        study,
        lambda name, when, length: f"{_more(rows, name, FULL, when, length):+.1f}",
    )
    plots = tuple(
        Plot(
            curves(
                {
                    name: [_by_length(row[when]) for row in arm_rows]
                    for name, arm_rows in rows.items()
                },
                x_label="tokens",
                y_label=f"Solved {when} continual training, %",
            ),
            "Mean over the seeds; shadow: lowest to highest seed.",
        )
        for when in ("before", "after")
    )
    verdicts = [
        *_verdicts(study, rows),
        *(f"{name}: a training diverged; left out" for name in diverged),
    ]
    return Finding(
        title="Kinds of attention before and after continual training",
        command=command,
        verdicts=tuple(verdicts),
        tables=(table, differences, _patterns(study, bases)),
        plots=plots,
    )


def _table(
    title: str, rows, study: AttentionKindsStudy, cell: Callable[[str, str, int], str], note=""
) -> Table:
    """Returns a table with a row for each arm and moment, and a column for each length."""
    lengths = study.judged.lengths
    return Table(
        title=title,
        columns=("arm", "training", *(f"{length:,} tokens" for length in lengths)),
        rows=tuple(
            (name, when, *(cell(name, when, length) for length in lengths))
            for name in rows
            for when in ("before", "after")
        ),
        note=note,
    )


def _percent(rows: list[dict], when: str, length: int) -> list[float]:
    return [100 * row[when][str(length)] for row in rows]


def _more(rows, name: str, other: str, when: str, length: int) -> Spread:
    """Returns by how many points an arm's share of solved samples exceeds another's, by seed."""
    return paired(*(_percent(rows[arm], when, length) for arm in (name, other)))


def _by_length(shares: dict[str, float]) -> tuple[list[int], list[float]]:
    return [int(length) for length in shares], [100 * share for share in shares.values()]


def _patterns(study: AttentionKindsStudy, bases: list[dict]) -> Table:
    """Returns the patterns with windows in half of the layers that any seed scored, best mean first."""
    half = len(bases[0]["pattern"]) // 2
    scores: dict[str, list[float]] = {}
    for base in bases:
        for pattern, score in base["scores"].items():
            if pattern.count("S") == half:
                scores.setdefault(pattern, []).append(score)
    # In deeper models few patterns are scored by every seed's beam search.
    ranked = sorted(scores, key=lambda p: (-len(scores[p]), -statistics.fmean(scores[p]), p))
    regular = letters(interleaved(len(bases[0]["pattern"]), "window"))

    def cell(base, pattern):
        if pattern not in base["scores"]:
            return "-"
        chosen = " (chosen)" if pattern == base["pattern"] else ""
        return f"{100 * base['scores'][pattern]:.1f}{chosen}"

    [length] = study.searched.lengths
    return Table(
        title=f"Layers with windows (S) and without (F): solved at {length:,} tokens before training, %",
        columns=("pattern", *(f"seed {base['seed']}" for base in bases)),
        rows=tuple(
            (
                pattern + (" (interleaved)" if pattern == regular else ""),
                *(cell(base, pattern) for base in bases),
            )
            for pattern in ranked[:12]
        ),
        note=f"{study.searched.samples} samples that are not evaluated; beam {BEAM}, {PER_STEP} layers a step",
    )


def _verdicts(study: AttentionKindsStudy, rows) -> list[str]:
    length, sentences = study.judged.lengths[-1], []
    if INTERLEAVED in rows:
        full, windows = (
            Spread.of(_percent(rows[x], "before", length)) for x in (FULL, INTERLEAVED)
        )
        share = windows.mean / full.mean if full.mean else 1.0
        sentences.append(
            f"{length:,} tokens, before training: {INTERLEAVED}, solve {windows:.1f}%, {FULL} {full:.1f}%; they "
            f"collapse, to less than {COLLAPSE:g} of it: {'met' if share < COLLAPSE else 'not met'} "
            f"({share:.2f})"
        )
    remains = [
        (FULL, name, "after", "a gap remains", 0.0) for name in (INTERLEAVED, SEARCHED, GDN, SIMPLE)
    ]
    parity = -100 * PARITY
    claims = [
        (SEARCHED, INTERLEAVED, "before", "the search loses less", 0.0),
        *remains,
        (DSA, FULL, "after", f"{DSA} loses less than {-parity:g}", parity),
    ]
    for name, other, when, claim, minimum in claims:
        if name in rows and other in rows:
            more = _more(rows, name, other, when, length)
            sentences.append(
                f"{length:,} tokens, {when} training: {name} minus {other} is {more:+.2f} points, by seed; "
                f"{claim}: {_verdict(more, minimum)}"
            )
    return sentences


def _verdict(value: Spread, minimum: float) -> str:
    """Returns whether a value exceeds its minimum on average, and with its full interval."""
    if value.mean <= minimum:
        return "not met"
    if value.half is None or value.mean - value.half <= minimum:
        return "met on average, within the spread"
    return "met"


def run(study: AttentionKindsStudy, workdir: pathlib.Path, command: str) -> int:
    """Runs the ablation and writes its page; see `ablate`. Returns the exit code."""
    return ablate("attention_kinds", study, workdir, command, compare)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
