"""Cheaper kinds of attention in half of the layers, and DSA in all, before and after continual training
(GLM-5 2.1.2, Tables 4 and 5; Table 6 for DSA).

    python -m experiments.ablations.attention_kinds [tiny|small] [WORKDIR]

One trained model of full attention per seed becomes, with the weights that it has (model/ablations/convert.py),

- full attention still, the control;
- windows in every second layer, the first of them full;
- windows in as many layers, those that the beam search of model/ablations/patterns.py finds: beam 8, two layers a
  step, scored without training by retrieval at one length, on samples of which none is evaluated;
- Gated DeltaNet and SimpleGDN in the layers of the searched windows. (The paper has them in half of the layers
  too and does not print which. Interleaved, they would replace the layer that retrieves here.)
- DSA in all layers: part of the tokens warm up new indexers, the trunk frozen, the rest train sparsely.

All of them go on training for the same tokens at the same rate. Retrieval is scored by length before that and
after it; of DSA "before" is the untouched trunk behind its warmed-up indexers, of Gated DeltaNet a
layer that is silent until its output gate has learnt. Reported, with all seeds and their spread: solved samples, the
difference to full attention by seed, the score of every pattern.

:tiny    four layers, and 96 steps of 2,048 tokens for each arm, 24 of which warm up DSA's indexers, on two CPU
         cores: 23 minutes beside another run, 16 of CPU time
:small   pretrain.py:small and midtrain.py:small, 12 layers, on one accelerator; it has not been run
"""

import dataclasses
import functools
import pathlib
import statistics
import sys
from collections.abc import Callable

import jax

from experiments import midtrain, pretrain
from experiments.ablations import retriever
from experiments.ablations.arms import Arm, Runs, Trial
from experiments.ablations.command import ablate
from experiments.ablations.findings import Finding, Plot, Spread, Table, curves, paired
from experiments.dsa_sparse import sparse
from experiments.dsa_warmup import falling, warm
from glm5_jax.checkpoint import store
from glm5_jax.data.long_context import TaskSourceConfig
from glm5_jax.data.synthetic import TaskConfig
from glm5_jax.evals.ruler import RulerConfig, ruler
from glm5_jax.model import glm5
from glm5_jax.model.ablations.convert import completed, convert, converted
from glm5_jax.model.ablations.patterns import Pattern, search
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import ExperimentConfig, choose
from glm5_jax.training.schedule import ScheduleConfig

SEEDS = (0, 1, 2)
DENSE = "dense"  # the model that all arms begin with
FULL, INTERLEAVED, SEARCHED = "full attention", "windows, interleaved", "windows, searched"
GDN, SIMPLE, DSA = "Gated DeltaNet", "SimpleGDN", "DSA"
ARMS = (FULL, INTERLEAVED, SEARCHED, GDN, SIMPLE, DSA)
LETTERS = {"full": "F", "window": "S", "gdn": "G", "simple_gdn": "D"}  # F and S are the paper's
BEAM, PER_STEP = 8, 2  # GLM-5 2.1.2
CURRICULUM = ((18, 500), (36, 40), (72, 40), (128, 60))  # tokens of a row, steps; of :tiny
COLLAPSE = 0.5  # of what full attention solves; the paper's interleaved windows keep 0.28 at 16K
PARITY = 0.005  # what DSA may lose of exact matches to the model of full attention


@dataclasses.dataclass(frozen=True)
class Study:
    """What is converted, how it goes on training, and how it is judged.

    Attributes:
      name: of the experiment.
      stages: for a workdir, the stages that train the dense model, and last its continual training.
      index_topk: keys that DSA selects.
      warmup_steps: of the continual steps, those that DSA's indexers learn alone.
      judged: what is scored, before and after, with the seed of the training added to its own.
      searched: what the patterns are scored by, likewise, at one length and on samples of its own.
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


def get_config(variant: str = "tiny") -> Study:
    """The variant's study; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small})


def tiny() -> Study:
    """Four layers of the retriever, a window of an eighth of the context and as many keys for DSA."""
    name, length = "attention_kinds:tiny", 128
    # At the retriever's 0.1 four layers had not begun to retrieve after 500 steps, at 0.06 after 220 to 320.
    model = retriever.model(4, sliding_window=16, initializer_range=0.06)

    def stages(workdir):
        dense = retriever.stages(f"{name} {DENSE}", workdir, model, CURRICULUM)
        last = retriever.stage(name, workdir, length, 96, model, peak=1e-3, **retriever.LAST)
        # Other items than those of the dense model's last stage.
        fresh = dataclasses.replace(last.data.sources[0].tasks, seed=1)
        data = dataclasses.replace(last.data, sources=(TaskSourceConfig(fresh),))
        # As DSA's sparse stage, which has none: all arms warm up their rate alike.
        schedule = dataclasses.replace(last.schedule, warmup_steps=0)
        return *dense, dataclasses.replace(last, data=data, schedule=schedule)

    judged = RulerConfig(
        ("multi_key",), (18, 36, 72, length), 500, batch_size=100, task=retriever.TASK
    )
    searched = dataclasses.replace(judged, lengths=(72,), samples=300, seed=100)
    return Study(name, stages, 16, 24, judged, searched)


def small() -> Study:
    """pretrain.py:small and midtrain.py:small without indexers, on the data that they name; windows of a
    32nd of 32K tokens, as the paper's are of 128K."""
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
        schedule = ScheduleConfig("constant", peak=rate, warmup_steps=0, total_steps=1000)
        return *dense, dataclasses.replace(dense[-1], name=name, schedule=schedule)

    judged = RulerConfig(
        ("needle", "multi_key", "multi_query"), (4096, 8192, 16_384, length), 200, task=TaskConfig()
    )
    searched = dataclasses.replace(judged, lengths=(16_384,), samples=50, seed=100)
    return Study(name, stages, bases[0].model.index_topk, 120, judged, searched)


def interleaved(num_layers: int, kind: str) -> Pattern:
    """Every second layer of a kind, the first full."""
    return tuple(kind if i % 2 else "full" for i in range(num_layers))


def letters(pattern: Pattern) -> str:
    """A letter of `LETTERS` per layer."""
    return "".join(LETTERS[kind] for kind in pattern)


def kinds_of(text: str) -> Pattern:
    """The pattern that `letters` writes so."""
    names = {letter: kind for kind, letter in LETTERS.items()}
    return tuple(names[letter] for letter in text)


def arms(study: Study, workdir, found: Pattern) -> dict[str, Arm]:
    """Every arm, by name; found: the pattern of the searched windows."""
    *dense, last = study.stages(pathlib.Path(workdir))
    layers = last.model.num_hidden_layers
    patterns = {
        FULL: ("full",) * layers,
        INTERLEAVED: interleaved(layers, "window"),
        SEARCHED: found,
        GDN: _instead(found, "gdn"),
        SIMPLE: _instead(found, "simple_gdn"),
    }
    made = {name: (_with_kinds(last, pattern),) for name, pattern in patterns.items()}
    made[DSA] = _with_indexers(last, study)
    return {name: Arm(name, (*dense, *own)) for name, own in made.items()}


def _instead(pattern: Pattern, kind: str) -> Pattern:
    """The pattern with another kind in the place of its windows."""
    return tuple(kind if own == "window" else own for own in pattern)


def _with_kinds(last: ExperimentConfig, pattern: Pattern) -> ExperimentConfig:
    """Named by its pattern alone, so that arms which come to the same are trained once."""
    unshared = ("layer_attention",) * (set(pattern) != {"full"}) + ("/gdn/",) * ("gdn" in pattern)
    return dataclasses.replace(
        last,
        name=f"{last.name} {letters(pattern)}",
        model=converted(last.model, pattern),
        unshared=unshared,
    )


def _with_indexers(
    last: ExperimentConfig, study: Study
) -> tuple[ExperimentConfig, ExperimentConfig]:
    """Both stages of DSA, in the steps that the other arms have in one."""
    base = dataclasses.replace(
        last, model=dataclasses.replace(last.model, index_topk=study.index_topk)
    )
    warmed = warm(base, f"{last.name} {DSA} warm-up", schedule=falling(study.warmup_steps))
    rate, steps = last.schedule.peak, last.schedule.total_steps - study.warmup_steps
    return warmed, dataclasses.replace(
        sparse(warmed, f"{last.name} {DSA}", rate, steps), unshared=()
    )


def measured(study: Study, trial: Trial, folder: pathlib.Path) -> dict:
    """For the row of a trained arm, {length: share solved} of the weights that its last stage began with and
    of those it ended with; for that of the dense model, the score of every pattern and the best of them."""
    stage, tokenizer = trial.stages[-1], Tokenizer.load(folder / "tokenizer")
    model = dataclasses.replace(
        stage.model, eos_token_id=tokenizer.eos_ids, pad_token_id=tokenizer.pad_id
    )
    params = store.load_params(folder, glm5.abstract(model))
    judged, searched = (
        dataclasses.replace(config, seed=config.seed + trial.seed)
        for config in (study.judged, study.searched)
    )
    if trial.arm == DENSE:

        def score(params, pattern):
            [found] = solved(*convert(params, model, pattern), tokenizer, searched).values()
            return found

        found = search(params, model.num_hidden_layers, score, beam=BEAM, per_step=PER_STEP)
        scores = {letters(pattern): value for pattern, value in found.scores.items()}
        return {"pattern": letters(found.pattern), "scores": scores}
    given = store.load_params(
        Runs(folder.parent.parent).folders(trial)[-2], glm5.abstract(model), stage.unshared
    )
    before = completed(given, model, jax.random.key(stage.seed))
    return {
        "before": solved(before, model, tokenizer, judged),
        "after": solved(params, model, tokenizer, judged),
    }


def solved(params, model, tokenizer, config: RulerConfig) -> dict[str, float]:
    """{length: share of the samples that are solved, mean over the kinds of task}."""
    scores = ruler(params, model, tokenizer, config, progress=False)
    return {
        str(length): statistics.fmean(
            float(scores[f"{kind}/{length}"].exact.mean()) for kind in config.kinds
        )
        for length in config.lengths
    }


def run(runs: Runs, study: Study, command: str) -> Finding:
    """Trains the dense models, searches, converts, trains on and compares."""
    # Weights stay: every arm begins with the dense model's.
    runs = Runs(runs.workdir, measure=functools.partial(measured, study), keep=True)
    *dense, _ = study.stages(runs.workdir)
    bases = runs([Arm(DENSE, tuple(dense)).trial(seed=seed) for seed in SEEDS])
    if lost := [base["seed"] for base in bases if base["loss"] is None]:
        raise ValueError(f"the dense model diverged at seeds {lost}; lower its rate")
    rows: dict[str, list[dict]] = {name: [] for name in ARMS}
    for seed, base in zip(SEEDS, bases, strict=True):
        for name, arm in arms(study, runs.workdir, kinds_of(base["pattern"])).items():
            rows[name] += runs([arm.trial(seed=seed)])
    return finding(study, command, bases, rows)


def finding(study: Study, command: str, bases: list[dict], rows: dict[str, list[dict]]) -> Finding:
    """Tables, charts and verdicts of the dense models' rows and of every arm's, by seed.

    Arms of which a training diverged are named and left out; ValueError if full attention is one of them.
    """
    diverged = [name for name, found in rows.items() if any(r["loss"] is None for r in found)]
    rows = {name: found for name, found in rows.items() if name not in diverged}
    if FULL in diverged:
        raise ValueError(f"{FULL} diverged; nothing to compare with. Lower the rate")
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
                {name: [_by_length(row[when]) for row in found] for name, found in rows.items()},
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
        "Kinds of attention before and after continual training",
        command,
        tuple(verdicts),
        (table, differences, _patterns(study, bases)),
        plots,
    )


def _table(title: str, rows, study: Study, cell: Callable[[str, str, int], str], note="") -> Table:
    """A row for each arm and moment, a column for each length."""
    lengths = study.judged.lengths
    return Table(
        title,
        ("arm", "training", *(f"{length:,} tokens" for length in lengths)),
        tuple(
            (name, when, *(cell(name, when, length) for length in lengths))
            for name in rows
            for when in ("before", "after")
        ),
        note,
    )


def _percent(rows: list[dict], when: str, length: int) -> list[float]:
    return [100 * row[when][str(length)] for row in rows]


def _more(rows, name: str, other: str, when: str, length: int) -> Spread:
    """Points that an arm solves more than another, by seed."""
    return paired(*(_percent(rows[arm], when, length) for arm in (name, other)))


def _by_length(shares: dict[str, float]) -> tuple[list[int], list[float]]:
    return [int(length) for length in shares], [100 * share for share in shares.values()]


def _patterns(study: Study, bases: list[dict]) -> Table:
    """The patterns with windows in half of the layers that any seed scored, best mean first."""
    half = len(bases[0]["pattern"]) // 2
    scores: dict[str, list[float]] = {}
    for base in bases:
        for pattern, score in base["scores"].items():
            if pattern.count("S") == half:
                scores.setdefault(pattern, []).append(score)
    # Of deeper models few patterns are met by every seed's beam.
    ranked = sorted(scores, key=lambda p: (-len(scores[p]), -statistics.fmean(scores[p]), p))
    regular = letters(interleaved(len(bases[0]["pattern"]), "window"))

    def cell(base, pattern):
        if pattern not in base["scores"]:
            return "-"
        chosen = " (chosen)" if pattern == base["pattern"] else ""
        return f"{100 * base['scores'][pattern]:.1f}{chosen}"

    [length] = study.searched.lengths
    return Table(
        f"Layers with windows (S) and without (F): solved at {length:,} tokens before training, %",
        ("pattern", *(f"seed {base['seed']}" for base in bases)),
        tuple(
            (
                pattern + (" (interleaved)" if pattern == regular else ""),
                *(cell(base, pattern) for base in bases),
            )
            for pattern in ranked[:12]
        ),
        f"{study.searched.samples} samples that are not evaluated; beam {BEAM}, {PER_STEP} layers a step",
    )


def _verdicts(study: Study, rows) -> list[str]:
    length, found = study.judged.lengths[-1], []
    if INTERLEAVED in rows:
        full, kept = (Spread.of(_percent(rows[x], "before", length)) for x in (FULL, INTERLEAVED))
        share = kept.mean / full.mean if full.mean else 1.0
        found.append(
            f"{length:,} tokens, before training: {INTERLEAVED}, solve {kept:.1f}%, {FULL} {full:.1f}%; they "
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
    for name, other, when, claim, least in claims:
        if name in rows and other in rows:
            more = _more(rows, name, other, when, length)
            found.append(
                f"{length:,} tokens, {when} training: {name} minus {other} is {more:+.2f} points, by seed; "
                f"{claim}: {_verdict(more, least)}"
            )
    return found


def _verdict(value: Spread, least: float) -> str:
    """Whether a value exceeds what it should on average, and with its whole interval."""
    if value.mean <= least:
        return "not met"
    if value.half is None or value.mean - value.half <= least:
        return "met on average, within the spread"
    return "met"


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments, [VARIANT [WORKDIR]]."""
    return ablate("attention_kinds", arguments, get_config, run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
