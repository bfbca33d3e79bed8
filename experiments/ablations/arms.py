"""Runs the arms of an ablation over learning rates and seeds, and keeps their results.

An `Arm` is a named chain of stages, each a `StageConfig`. A `Trial` is an arm at one rate and one seed.
`AblationRuns` trains trials in a workdir:

    results.jsonl          a row for every finished trial; finished trials are not trained again
    runs/NAME-DIGEST/      the workdir of a stage, with its report; the digest covers its configuration,
                           name included, and the stages before it: trials with the same first stages
                           share them

A trial that was stopped or killed resumes from its newest checkpoint. Rates, schedules and seeds are
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
from typing import TypeVar

import jax

from glm5_jax.checkpoint import store
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.text.tokenizer import BYTES
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.metrics import Diverged, TrainingStopped
from glm5_jax.training.pretraining import ExperimentConfig, Setting
from glm5_jax.training.report import HELD_OUT_REWARD
from glm5_jax.training.stages import Evaluator
from glm5_jax.training.step import Step, make_step

RESULTS = "results.jsonl"
SFT = "sft"  # the lifecycle's stage
Stage = TypeVar("Stage", bound=StageConfig)
TAIL = 0.05  # share of a run's steps that values "at its end" are averaged over
RATIO = 2.0  # between neighbouring learning rates of a grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One training run: stages in order, at a learning rate and a seed.

    A stage's teacher is an earlier stage of the trial, if one has the teacher's name.

    Attributes:
      arm: name of the arm.
      rate: peak learning rate of the last stage; None: that of the stage's schedule.
      seed: seed of weights and data.
      stages: configurations of the stages.
    """

    arm: str
    rate: float | None
    seed: int
    stages: tuple[StageConfig, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """Returns a name for the weights after each stage. Trials with equal digests share one training."""
        configs = [_by_content(dataclasses.asdict(stage)) for stage in self.stages]
        texts = [json.dumps(configs[: i + 1], sort_keys=True) for i in range(len(configs))]
        return tuple(hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts)

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" rate {self.rate:.3g}"
        return f"{self.arm}{rate} seed {self.seed}"


def _by_content(config: dict) -> dict:
    """Returns a config in which the tokenizer's path is replaced by a hash of its content."""
    if config["tokenizer"] in (None, BYTES):
        return config
    path = pathlib.Path(config["tokenizer"])
    file = path / "tokenizer.json" if path.is_dir() else path
    return config | {"tokenizer": hashlib.sha256(file.read_bytes()).hexdigest()}


@dataclasses.dataclass(frozen=True)
class Arm:
    """A named chain of stages; each starts from the weights of the previous one.

    Attributes:
      name: name of the arm.
      stages: configurations of the stages.
      num_fixed: number of leading stages that keep their own seed at every seed of a trial.
    """

    name: str
    stages: tuple[StageConfig, ...]
    num_fixed: int = 0

    def __post_init__(self):
        if not self.stages:
            raise ValueError(f"arm {self.name!r} has no stage; give it at least one")

    def trial(self, *, rate: float | None = None, seed: int = 0, share: float = 1.0) -> Trial:
        """Returns a trial of the arm at a peak learning rate and a seed, which also seeds the data.

        rate and share apply to the last stage. Its schedule keeps the ratio of end to peak. Its steps, warm-up included,
        are multiplied by share.
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
        # Arms differ in what is compared, so that shipped data suffices.
        stages = [dataclasses.replace(stage, requires_data=False) for stage in stages]
        seeded = (_seeded(stage, seed) for stage in stages[self.num_fixed :])
        return Trial(
            arm=self.name, rate=rate, seed=seed, stages=(*stages[: self.num_fixed], *seeded)
        )


def _seeded(stage: StageConfig, seed: int) -> StageConfig:
    """Returns the stage with a seed, for its data too if it has some."""
    if isinstance(stage, ExperimentConfig):
        stage = dataclasses.replace(stage, data=dataclasses.replace(stage.data, seed=seed))
    return dataclasses.replace(stage, seed=seed)


def after_sft(arm: Arm, workdir: pathlib.Path) -> Arm:
    """Returns an arm whose first stage starts from the SFT weights of a lifecycle's workdir.

    Raises ValueError if the workdir has no such weights.
    """
    if not (workdir / SFT).is_dir():
        raise ValueError(
            f"{workdir} has no folder {SFT!r}; give the workdir of a lifecycle: python -m launch.run "
            f"--experiment=experiments/lifecycle.py:tiny --workdir={workdir}"
        )
    first, *more = arm.stages
    first = dataclasses.replace(first, checkpoint=str(workdir / SFT))
    return dataclasses.replace(arm, stages=(first, *more))


def last_stage(stages: Sequence[StageConfig], kind: type[Stage]) -> Stage:
    """Returns the last of an arm's or a trial's stages. Raises TypeError if it is not of this kind."""
    if not isinstance(last := stages[-1], kind):
        raise TypeError(f"stage {last.name!r} is a {type(last).__name__}, not a {kind.__name__}")
    return last


class SharedSteps:
    """Compiles train steps once for all trials that differ only in their schedule.

    Args:
      on_step: called after every step.
    """

    def __init__(self, on_step: Callable[[], None] = lambda: None):
        self._on_step = on_step
        self._compiled_steps: list[tuple[tuple, Step, Callable]] = []

    def __call__(self, cfg, config, optimizer_config, schedule, mesh=None, **options) -> Step:
        """Returns a step, as `make_step` does."""
        key = (cfg, config, optimizer_config, mesh, options)
        entry = next((cached for cached in self._compiled_steps if cached[0] == key), None)
        if entry is None:
            step = make_step(cfg, config, optimizer_config, schedule, mesh, **options)
            out = None
            if mesh is not None:
                out = (jax.tree.map(lambda x: x.sharding, step.abstract), None)
            update = jax.jit(step.update, donate_argnums=0, out_shardings=out)
            entry = (key, step, update)
            self._compiled_steps.append(entry)
        _, step, update = entry
        rate = jax.jit(schedule)

        def train(state, batch):
            out = update(state, batch, rate(state["step"]))
            self._on_step()
            return out

        return step._replace(train=train)

    @property
    def compiled(self) -> int:
        """Number of compiled programs so far, one for each batch shape of an arm."""
        return sum(update._cache_size() for *_, update in self._compiled_steps)


class _SharedEvaluator:
    """An evaluator shared by several trainings: reads its rows and computes its baselines once."""

    def __init__(self, inner: Evaluator):
        self._inner, self._baselines = inner, None

    def __call__(self, params) -> dict[str, float]:
        return self._inner(params)

    def baselines(self) -> dict[str, float]:
        if self._baselines is None:
            self._baselines = self._inner.baselines()
        return self._baselines


class AblationRuns:
    """Trials of a workdir. `runs(trials)` trains those without a result and returns all their rows.

    Needs a single process, with any number of devices.

    Args:
      evaluator: as of `Pretraining`, with the same rows at every seed.
      measure: `measure(trial, folder)` returns further values for the row of a finished trial, from the workdir of its
        last stage.
      keep: whether to keep the last stage's checkpoint for later trials or measurements; otherwise only the rows and the
        report stay.

    Attributes:
      done: number of steps made by the last call.
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
        self._evaluators: list[tuple[tuple, _SharedEvaluator]] = []
        self._steps = SharedSteps(self._count)
        self._bar: ProgressBar | None = None
        self._trial, self.done = "", 0

    @property
    def compiled(self) -> int:
        """Number of train steps compiled so far."""
        return self._steps.compiled

    def rows(self) -> list[dict]:
        """Returns every row of the workdir, in the order of finishing."""
        path = self.workdir / RESULTS
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]  # a row without a newline was cut off
        return [json.loads(line) for line in lines]

    def __call__(self, trials: Iterable[Trial]) -> list[dict]:
        """Returns rows of the trials, in their order: "arm", "rate", "seed", "steps", and the keys of `outcome`.

        Raises TrainingStopped if the run was stopped (SIGTERM, Ctrl-C), or if it cannot continue for any reason except a
        training that diverged.
        """
        trials = list(trials)
        rows = {row["digest"]: row for row in self.rows()}
        pending = {t.digests[-1]: t for t in trials if t.digests[-1] not in rows}
        if pending:
            with ProgressBar(self._left(pending.values())) as bar:
                self._bar, self.done = bar, 0
                for trial in pending.values():
                    self._trial = str(trial)
                    row = rows[trial.digests[-1]] = self._run(trial)
                    self._append(row)
                    result = f"loss {row['loss']:.4f}" if row["loss"] is not None else "diverged"
                    if row["reward"] is not None:
                        result = f"held-out reward {row['reward']:.3f}"
                    bar.print(f"{trial}: {result}, {row['seconds']:.0f} s")
        # Several arms may share one training; each row gets its arm's name.
        return [rows[t.digests[-1]] | {"arm": t.arm} for t in trials]

    def folders(self, trial: Trial) -> list[pathlib.Path]:
        """Returns the workdir of each stage of a trial."""
        names = [re.sub(r"[^\w.-]+", "_", stage.name) for stage in trial.stages]
        runs = self.workdir / "runs"
        return [runs / f"{name}-{digest}" for name, digest in zip(names, trial.digests)]

    def _left(self, trials: Iterable[Trial]) -> int:
        """Returns the number of remaining steps; those of a shared stage count once."""
        steps = {f: s.steps for t in trials for f, s in zip(self.folders(t), t.stages)}
        return sum(total - (store.latest_step(folder) or 0) for folder, total in steps.items())

    def _count(self) -> None:
        self.done += 1
        assert self._bar is not None, "a call that trains has a bar"
        self._bar.update(self.done, self._trial)

    def _run(self, trial: Trial) -> dict:
        began, diverged = time.perf_counter(), False
        done: dict[str, str] = {}
        folder, *_ = folders = self.folders(trial)
        for stage, folder in zip(trial.stages, folders):
            stage = stage.continue_from(done)
            folder.mkdir(parents=True, exist_ok=True)
            with (
                (folder / "log.txt").open("a") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                training = stage.make_stage(
                    folder, self._evaluator and self._shared, step_maker=self._steps
                )
                try:
                    training.run()
                except Diverged:
                    diverged = True
                    break
            if not training.is_finished:
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
        """Returns the evaluator of an equal setting. data.seed and the run's seed do not count."""
        assert self._evaluator is not None, "stages get this function only with an evaluator"
        data = dataclasses.replace(setting.config.data, seed=0)
        key = (setting.evaluate, setting.batch_rows, data, setting.config.train.eval_batches)
        for other, evaluator in self._evaluators:
            if other == key:
                return evaluator
        self._evaluators.append((key, _SharedEvaluator(self._evaluator(setting))))
        return self._evaluators[-1][1]

    def _append(self, row: dict) -> None:
        """Appends a row atomically, so that the file has only complete rows when the next trial starts."""
        path = self.workdir / RESULTS
        lines = [json.dumps(r) + "\n" for r in [*self.rows(), row]]
        new_path = path.with_suffix(".new")
        with new_path.open("w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new_path, path)


def outcome(folder: pathlib.Path, diverged: bool = False) -> dict:
    """Returns the results of a training from its log.

    - loss: held-out nats per token after the last step, or without an evaluator the training loss; None if it diverged;
    - reward: reward of held-out tasks after the last step, for a stage that has some;
    - curve: [steps, values] of that loss over the training;
    - train_loss, max_logit: means over the last `TAIL` of the steps, the logit of the layer that has the largest.
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
    """An arm after tuning.

    Attributes:
      arm: the arm.
      rate: its best peak learning rate.
      losses: {rate: mean loss} of all rates that were tried.
    """

    arm: Arm
    rate: float
    losses: dict[float, float]

    @property
    def loss(self) -> float:
        """Loss of the best rate, on the seeds of tuning."""
        return self.losses[self.rate]

    def trials(self, seeds: Iterable[int], share: float = 1.0) -> list[Trial]:
        """Returns a trial of the arm at its best rate for every seed."""
        return [self.arm.trial(rate=self.rate, seed=seed, share=share) for seed in seeds]


def tune(
    runs: Callable[[list[Trial]], list[dict]],
    arm: Arm,
    rates: Sequence[float],
    *,
    seeds: Sequence[int] = (0,),
    extend: int = 3,
) -> Tuned:
    """Returns the arm at the rate with the lowest mean loss over the seeds.

    While the best rate is at an end of the grid, the grid gets another rate at that end, a factor `RATIO` further, at most
    `extend` times. Raises ValueError if every rate diverged.
    """
    tried = sorted(rates)
    while True:
        rows = runs([arm.trial(rate=rate, seed=seed) for rate in tried for seed in seeds])
        losses = losses_by_rate(rows)
        best = min(losses, key=losses.__getitem__)
        if losses[best] == math.inf:
            raise ValueError(f"{arm.name} diverged at every rate of {tried}; begin with lower ones")
        if best not in (tried[0], tried[-1]) or not extend:
            return Tuned(arm, best, losses)
        extend -= 1
        tried = [best / RATIO, *tried] if best == tried[0] else [*tried, best * RATIO]


def tune_without_divergence(
    runs: Callable[[list[Trial]], list[dict]], tuned: Tuned, seeds: Sequence[int]
) -> tuple[Tuned, list[dict]]:
    """Returns the arm at the best rate at which no seed diverges, and the rows of the seeds.

    In its losses, rates at which a seed diverged have infinity. Raises ValueError if no rate is left.
    """
    while True:
        rows = runs(tuned.trials(seeds))
        if all(row["loss"] is not None for row in rows):
            return tuned, rows
        losses = tuned.losses | {tuned.rate: math.inf}
        best = min(losses, key=losses.__getitem__)
        if losses[best] == math.inf:
            raise ValueError(
                f"{tuned.arm.name} has no rate of {sorted(losses)} at which none of the seeds {seeds} "
                "diverged; begin with lower ones"
            )
        tuned = Tuned(tuned.arm, best, losses)


def grid(centre: float, count: int = 5) -> list[float]:
    """Returns count learning rates around a centre, each `RATIO` times the one before."""
    return [centre * RATIO ** (i - (count - 1) / 2) for i in range(count)]


def losses_by_rate(rows: Iterable[dict]) -> dict[float, float]:
    """Returns {rate: mean loss}; infinity for a rate at which any training diverged."""
    by_rate: dict[float, list[float]] = {}
    for row in rows:
        loss = math.inf if row["loss"] is None else row["loss"]
        by_rate.setdefault(row["rate"], []).append(loss)
    return {rate: statistics.fmean(losses) for rate, losses in sorted(by_rate.items())}


def steps_to(curve: Sequence[Sequence[float]], level: float) -> float | None:
    """Returns the step at which a curve (steps, losses) first falls to a level; None if it never does.

    Interpolates linearly between two points.
    """
    steps, losses = curve
    for i, (step, loss) in enumerate(zip(steps, losses)):
        if loss <= level:
            if i == 0:
                return float(step)
            before, higher = steps[i - 1], losses[i - 1]
            return before + (step - before) * (higher - level) / (higher - loss)
    return None
