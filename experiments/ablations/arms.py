"""Arms of an ablation, run over learning rates and seeds: what is shared, and what is kept.

An `Arm` is a named chain of stages, each a `StageConfig`; a `Trial` is an arm at one rate and
one seed; `Runs` trains trials in a workdir:

    results.jsonl          a row for every finished trial; these are not trained again
    runs/NAME-DIGEST/      the workdir of a stage, with its report; the digest is of its configuration,
                           name included, and of the stages before it: trials that begin alike share
                           their beginning

A trial that was stopped or killed goes on from its newest checkpoint. Rates, schedules and seeds are
arguments of the compiled step, so one compilation serves all trials of an arm.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import jax

from glm5_jax.checkpoint import store
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.metrics_log import column, read
from glm5_jax.text.tokenizer import BYTES
from glm5_jax.training.experiment import ExperimentConfig, StageConfig
from glm5_jax.training.metrics import Diverged, TrainingStopped
from glm5_jax.training.pretraining import Setting
from glm5_jax.training.report import HELD_OUT_REWARD
from glm5_jax.training.stages import Evaluator
from glm5_jax.training.step import Step, make_step

RESULTS = "results.jsonl"
SFT = "sft"  # the lifecycle's stage
TAIL = 0.05  # of a run's steps: what "at its end" averages over
RATIO = 2.0  # between neighbouring learning rates of a grid


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training: the stages in order, at a rate and a seed. rate None: as the stages say. What a stage is taught by
    is an earlier one of the trial, if that has its name."""

    arm: str
    rate: float | None
    seed: int
    stages: tuple[StageConfig, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """A name for the weights after each stage: of equal digests, one training is enough."""
        configs = [_by_content(dataclasses.asdict(stage)) for stage in self.stages]
        texts = [json.dumps(configs[: i + 1], sort_keys=True) for i in range(len(configs))]
        return tuple(hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts)

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" rate {self.rate:.3g}"
        return f"{self.arm}{rate} seed {self.seed}"


def _by_content(config: dict) -> dict:
    """A config with what its tokenizer is in place of where it lies."""
    if config["tokenizer"] in (None, BYTES):
        return config
    path = pathlib.Path(config["tokenizer"])
    file = path / "tokenizer.json" if path.is_dir() else path
    return config | {"tokenizer": hashlib.sha256(file.read_bytes()).hexdigest()}


@dataclasses.dataclass(frozen=True)
class Arm:
    """A named chain of stages; each starts from the weights of the one before. given: how many of the first are
    as they are, whatever the seed."""

    name: str
    stages: tuple[StageConfig, ...]
    given: int = 0

    def __post_init__(self):
        if not self.stages:
            raise ValueError(f"arm {self.name!r} has no stage; give it at least one")

    def trial(self, *, rate: float | None = None, seed: int = 0, share: float = 1.0) -> Trial:
        """The arm at a peak learning rate and a seed, which is also that of its data.

        rate and share belong to the last stage: its schedule keeps the proportion of end to peak, and
        is shortened, warm-up included, to that share of its steps.
        """
        *before, last = self.stages
        schedule, steps = last.schedule, max(2, round(share * last.schedule.total_steps))
        schedule = dataclasses.replace(
            schedule, total_steps=steps, warmup_steps=round(share * schedule.warmup_steps)
        )
        if rate is not None:
            end = schedule.end * rate / schedule.peak
            schedule = dataclasses.replace(schedule, peak=rate, end=end)
        stages = [*before, dataclasses.replace(last, schedule=schedule)]
        seeded = (_seeded(stage, seed) for stage in stages[self.given :])
        return Trial(self.name, rate, seed, (*stages[: self.given], *seeded))


def _seeded(stage: StageConfig, seed: int) -> StageConfig:
    """Also its data, if it learns from some."""
    if isinstance(stage, ExperimentConfig):
        stage = dataclasses.replace(stage, data=dataclasses.replace(stage.data, seed=seed))
    return dataclasses.replace(stage, seed=seed)


def after_sft(arm: Arm, workdir: pathlib.Path) -> Arm:
    """An arm whose first stage begins with the weights that a life in a workdir had after SFT. ValueError if they are not
    there."""
    if not (workdir / SFT).is_dir():
        raise ValueError(
            f"{workdir} has no folder {SFT!r}; give the workdir of a life: python -m launch.run "
            f"--experiment=experiments/lifecycle.py:tiny --workdir={workdir}"
        )
    first, *more = arm.stages
    first = dataclasses.replace(first, checkpoint=str(workdir / SFT))
    return dataclasses.replace(arm, stages=(first, *more))


class SharedSteps:
    """`make_step` for many trainings: those that differ in their schedule alone share a compilation.

    on_step() is called after every step.
    """

    def __init__(self, on_step: Callable[[], None] = lambda: None):
        self._on_step = on_step
        self._made: list[tuple[tuple, Step, Callable]] = []

    def __call__(self, cfg, config, optimizer_config, schedule, mesh=None, **options) -> Step:
        """As `make_step`."""
        key = (cfg, config, optimizer_config, mesh, options)
        found = next((made for made in self._made if made[0] == key), None)
        if found is None:
            step = make_step(cfg, config, optimizer_config, schedule, mesh, **options)
            out = None
            if mesh is not None:
                out = (jax.tree.map(lambda x: x.sharding, step.abstract), None)
            update = jax.jit(step.update, donate_argnums=0, out_shardings=out)
            found = (key, step, update)
            self._made.append(found)
        _, step, update = found
        rate = jax.jit(schedule)

        def train(state, batch):
            out = update(state, batch, rate(state["step"]))
            self._on_step()
            return out

        return step._replace(train=train)

    @property
    def compiled(self) -> int:
        """How many programs the trainings so far have compiled, one for each batch shape of an arm."""
        return sum(update._cache_size() for *_, update in self._made)


class _Shared:
    """An evaluator that several trainings use: its rows are read, its baselines counted, once."""

    def __init__(self, inner: Evaluator):
        self._inner, self._baselines = inner, None

    def __call__(self, params) -> dict[str, float]:
        return self._inner(params)

    def baselines(self) -> dict[str, float]:
        if self._baselines is None:
            self._baselines = self._inner.baselines()
        return self._baselines


class Runs:
    """The trials of a workdir. `runs(trials)` trains those without a result and returns all their rows.
    For one process, on any number of its devices.

    evaluator: as of `Pretraining`, and the same rows at every seed. measure(trial, folder) adds its
    values to the row of a finished trial, from the workdir of its last stage. keep: the last stage's
    checkpoint stays, for trials or measures to come; without, only the rows and the report do.

    Attributes:
      done: steps made by the last call.
    """

    def __init__(
        self,
        workdir,
        evaluator: Callable[[Setting], Evaluator] | None = None,
        *,
        measure: Callable[[Trial, pathlib.Path], dict] | None = None,
        keep: bool = False,
    ):
        self.workdir = pathlib.Path(workdir)
        if self.workdir.exists() and not self.workdir.is_dir():
            raise ValueError(f"workdir {workdir} is a file; give a folder, or a path that is free")
        self._evaluator, self._measure, self._keep = evaluator, measure, keep
        self._evaluators: list[tuple[tuple, _Shared]] = []
        self._steps = SharedSteps(self._count)
        self._bar, self.done, self._trial = None, 0, None

    @property
    def compiled(self) -> int:
        """Train steps compiled so far."""
        return self._steps.compiled

    def rows(self) -> list[dict]:
        """Every row of the workdir, in the order of finishing."""
        path = self.workdir / RESULTS
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]  # what follows the last newline was cut off
        return [json.loads(line) for line in lines]

    def __call__(self, trials: Iterable[Trial]) -> list[dict]:
        """Rows of the trials, in their order: "arm", "rate", "seed", "steps", and of `outcome`.

        TrainingStopped if the run was told to stop (SIGTERM, Ctrl-C), or cannot go on for any reason
        but a training that diverged.
        """
        trials = list(trials)
        found = {row["digest"]: row for row in self.rows()}
        waiting = {t.digests[-1]: t for t in trials if t.digests[-1] not in found}
        if waiting:
            with ProgressBar(self._left(waiting.values())) as self._bar:
                self.done = 0
                for trial in waiting.values():
                    self._trial = str(trial)
                    row = found[trial.digests[-1]] = self._run(trial)
                    self._append(row)
                    end = f"loss {row['loss']:.4f}" if row["loss"] is not None else "diverged"
                    if row["reward"] is not None:
                        end = f"held-out reward {row['reward']:.3f}"
                    self._bar.print(f"{trial}: {end}, {row['seconds']:.0f} s")
        # One training may stand for several arms: each has its own name in its row.
        return [found[t.digests[-1]] | {"arm": t.arm} for t in trials]

    def folders(self, trial: Trial) -> list[pathlib.Path]:
        """The workdir of each stage of a trial."""
        names = [re.sub(r"[^\w.-]+", "_", stage.name) for stage in trial.stages]
        runs = self.workdir / "runs"
        return [runs / f"{name}-{digest}" for name, digest in zip(names, trial.digests)]

    def _left(self, trials: Iterable[Trial]) -> int:
        """Steps still to be made, those of a shared stage once."""
        steps = {f: s.steps for t in trials for f, s in zip(self.folders(t), t.stages)}
        return sum(total - (store.latest_step(folder) or 0) for folder, total in steps.items())

    def _count(self) -> None:
        self.done += 1
        self._bar.update(self.done, self._trial)

    def _run(self, trial: Trial) -> dict:
        began, diverged = time.perf_counter(), False
        done: dict[str, str] = {}
        for stage, folder in zip(trial.stages, self.folders(trial)):
            stage = stage.after(done)
            folder.mkdir(parents=True, exist_ok=True)
            with (
                (folder / "log.txt").open("a") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                training = stage.stage(
                    folder, self._evaluator and self._shared, step_maker=self._steps
                )
                try:
                    training.run()
                except Diverged:
                    diverged = True
                    break
            if not training.finished:
                raise TrainingStopped(f"{trial} was stopped; the same command goes on from there")
            done[stage.name] = str(folder)
        row = {
            "digest": trial.digests[-1],
            "arm": trial.arm,
            "rate": trial.rate,
            "seed": trial.seed,
            "steps": trial.stages[-1].steps,
            **outcome(folder, diverged),
            "seconds": time.perf_counter() - began,
        }
        if self._measure is not None and not diverged:
            row |= self._measure(trial, folder)
        if not self._keep:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return row

    def _shared(self, setting: Setting) -> Evaluator:
        """The evaluator of an equal setting, of which data.seed and the run's own seed are no part."""
        data = dataclasses.replace(setting.config.data, seed=0)
        key = (setting.evaluate, setting.batch_rows, data, setting.config.train.eval_batches)
        for other, evaluator in self._evaluators:
            if other == key:
                return evaluator
        self._evaluators.append((key, _Shared(self._evaluator(setting))))
        return self._evaluators[-1][1]

    def _append(self, row: dict) -> None:
        """A row is whole on disk, behind whole rows, before the next trial begins."""
        path = self.workdir / RESULTS
        lines = [json.dumps(r) + "\n" for r in [*self.rows(), row]]
        whole = path.with_suffix(".new")
        with whole.open("w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, path)


def outcome(folder: pathlib.Path, diverged: bool = False) -> dict:
    """What the log of a training says of it.

    loss: held-out nats per token after the last step, or without an evaluator the training loss;
    reward: of held-out tasks after the last step, of a stage that has some;
    curve: [steps, values] of that loss along the way; train_loss and max_logit: means over the last
    `TAIL` of the steps, the logit of the layer that has the largest. A training that diverged has loss
    None.
    """
    rows = read(folder)
    steps, losses = column(rows, "loss/ce")
    layers = ([x for x in values if x is not None] for values in column(rows, "max_logit")[1])
    logits = [max(values) for values in layers if values]  # None: not finite
    tail = max(1, math.ceil(TAIL * len(losses)))
    train_loss = statistics.fmean(losses[-tail:]) if losses else None
    curve = column(rows, "held_out/loss")
    if curve[0]:
        loss = curve[1][-1]
    else:
        curve, loss = (steps, losses), train_loss
    return {
        "loss": None if diverged else loss,
        "reward": (column(rows, HELD_OUT_REWARD)[1] or [None])[-1],
        "train_loss": train_loss,
        "max_logit": statistics.fmean(logits[-tail:]) if logits else None,
        "curve": [list(curve[0]), list(curve[1])],
    }


@dataclasses.dataclass(frozen=True)
class Tuned:
    """An arm, its best peak learning rate, and {rate: mean loss} of all that were tried."""

    arm: Arm
    rate: float
    losses: dict[float, float]

    @property
    def loss(self) -> float:
        """Of the best rate, on the seeds of tuning."""
        return self.losses[self.rate]

    def trials(self, seeds: Iterable[int], share: float = 1.0) -> list[Trial]:
        """The arm at its best rate, once for every seed."""
        return [self.arm.trial(rate=self.rate, seed=seed, share=share) for seed in seeds]


def tune(
    runs: Callable[[list[Trial]], list[dict]],
    arm: Arm,
    rates: Sequence[float],
    *,
    seeds: Sequence[int] = (0,),
    extend: int = 3,
) -> Tuned:
    """Finds the rate with the lowest mean loss over the seeds.

    While the best is the lowest or the highest of those tried, the grid grows by another at that end,
    `RATIO` further on, at most `extend` times; ValueError if every rate diverged.
    """
    tried = sorted(rates)
    while True:
        rows = runs([arm.trial(rate=rate, seed=seed) for rate in tried for seed in seeds])
        losses = losses_by_rate(rows)
        best = min(losses, key=losses.get)
        if losses[best] == math.inf:
            raise ValueError(f"{arm.name} diverged at every rate of {tried}; begin with lower ones")
        if best not in (tried[0], tried[-1]) or not extend:
            return Tuned(arm, best, losses)
        extend -= 1
        tried = [best / RATIO, *tried] if best == tried[0] else [*tried, best * RATIO]


def steady(
    runs: Callable[[list[Trial]], list[dict]], tuned: Tuned, seeds: Sequence[int]
) -> tuple[Tuned, list[dict]]:
    """The arm at the best of its rates at which no seed diverges, and the rows of the seeds there; in
    its losses, rates at which one did have infinity. ValueError if no rate is left."""
    while True:
        rows = runs(tuned.trials(seeds))
        if all(row["loss"] is not None for row in rows):
            return tuned, rows
        losses = tuned.losses | {tuned.rate: math.inf}
        best = min(losses, key=losses.get)
        if losses[best] == math.inf:
            raise ValueError(
                f"{tuned.arm.name} has no rate of {sorted(losses)} at which none of the seeds {seeds} "
                "diverged; begin with lower ones"
            )
        tuned = Tuned(tuned.arm, best, losses)


def grid(centre: float, count: int = 5) -> list[float]:
    """count learning rates around a centre, each `RATIO` times the one before."""
    return [centre * RATIO ** (i - (count - 1) / 2) for i in range(count)]


def losses_by_rate(rows: Iterable[dict]) -> dict[float, float]:
    """{rate: mean loss}; a rate at which any training diverged has infinity."""
    found: dict[float, list[float]] = {}
    for row in rows:
        loss = math.inf if row["loss"] is None else row["loss"]
        found.setdefault(row["rate"], []).append(loss)
    return {rate: statistics.fmean(losses) for rate, losses in sorted(found.items())}


def steps_to(curve: Sequence[Sequence[float]], level: float) -> float | None:
    """The step at which a curve (steps, losses) first falls to a level, between two of its points by
    their straight line; None if it never does."""
    steps, losses = curve
    for i, (step, loss) in enumerate(zip(steps, losses)):
        if loss <= level:
            if i == 0:
                return float(step)
            before, higher = steps[i - 1], losses[i - 1]
            return before + (step - before) * (higher - level) / (higher - loss)
    return None
