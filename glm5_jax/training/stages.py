"""A stage of training, assembled from its parts: checked before it touches anything, then run."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Protocol

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.checkpoint import models, store
from glm5_jax.core import hosts
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.mesh import BATCH_AXES, SEQUENCE_AXES, Region, make_mesh, row_group
from glm5_jax.core.metrics_log import MetricsLog, column, read
from glm5_jax.core.program_hash import program_hash
from glm5_jax.core.stopping import StopSignal
from glm5_jax.data.loader import Batch
from glm5_jax.model import glm5
from glm5_jax.model.ablations.convert import completed
from glm5_jax.text.layouts import template
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import flops, loop, report
from glm5_jax.training.experiment import StageConfig, check_resume, write_config
from glm5_jax.training.metrics import Recorder, TrainingStopped
from glm5_jax.training.schedule import make_schedule
from glm5_jax.training.step import Step, make_step
from glm5_jax.training.step_flops import model_flops

SAMPLES = "samples"


class Evaluator(Protocol):
    """Judges parameters while they train; `baselines` are computed once, for comparison, by the first
    process of a pod, whose log is the one that is shown."""

    def __call__(self, params) -> dict[str, float]: ...

    def baselines(self) -> dict[str, float]: ...


class Source(Protocol):
    """Where batches come from; `data.loader.Loader` says what its methods do."""

    def next(self, batch_size: int) -> Batch: ...

    def state(self) -> dict: ...

    def check(self, state: dict) -> None: ...

    def restore(self, state: dict) -> None: ...

    def close(self) -> None: ...


class Stage:
    """Training of a model. What it learns from, and what else it does, its subclasses say.

    Construction checks everything a user can get wrong and raises ValueError, with nothing trained
    or overwritten yet; `run` trains. step_maker is called as `make_step`, for runs that share what they
    compile. before: the stage whose workdir is the checkpoint; until it has run, its shapes stand for its
    weights, and this stage can be checked but not run.
    """

    def __init__(
        self,
        config: StageConfig,
        workdir,
        step_maker: Callable[..., Step] = make_step,
        before: "Stage | None" = None,
    ):
        self.workdir = pathlib.Path(workdir)
        if self.workdir.exists() and not self.workdir.is_dir():
            raise ValueError(f"workdir {workdir} is a file; give a folder, or a path that is free")
        self.tokenizer = (
            Tokenizer.load(config.tokenizer) if config.tokenizer else Tokenizer.default()
        )
        self.config = config = _ending_like(self.tokenizer, config)
        if config.chat_variant:
            self.tokenizer = self.tokenizer.with_chat_template(template(config.chat_variant))
        if store.latest_step(workdir) is not None:
            check_resume(workdir, config)
        mesh = make_mesh(dataclasses.asdict(config.mesh), expert_slices=config.step.expert_slices)
        self._mesh = mesh if mesh.size > 1 else None
        self._region = Region.of(mesh)
        self._group, self._num_groups = row_group(mesh)
        if self.finished:
            return
        saved = store.latest_step(workdir)
        if saved is None and config.checkpoint is None and config.goes_on:
            raise ValueError(
                f"{config.name} goes on from trained weights; give --experiment.checkpoint=PATH, "
                "a workdir, one of its checkpoints/STEP or an HF folder (or --experiment.goes_on=false for random ones)"
            )
        config.model.check_length(config.row_length)
        config.check_rows(self._region)
        self._check()
        if self.tokenizer.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, model.vocab_size is "
                f"{config.model.vocab_size}; use another tokenizer or a larger vocabulary"
            )
        self._step = self._make_step(step_maker)
        store.check_space(workdir, self._step.abstract, config.train.keep)
        self._given = None
        if saved is None and config.checkpoint is not None:
            self._given = self._open_checkpoint(pathlib.Path(config.checkpoint), before)
        self._evaluator: Evaluator | None = None
        self._source: Source = self._open()
        if saved is not None:
            self._source.check(store.load_data(workdir, saved))

    def close(self) -> None:
        """Stops what reads data, of a stage that is not run."""
        if not self.finished:
            self._source.close()

    @property
    def saved_step(self) -> int:
        """Of the workdir's newest checkpoint; 0: there is none."""
        return store.latest_step(self.workdir) or 0

    @property
    def finished(self) -> bool:
        """Whether the workdir's newest checkpoint is the last step."""
        return self.saved_step >= self.config.steps

    def run(self) -> report.Summary:
        """Trains to the end, or to a signal (`StopSignal`), and writes the report.

        A finished run only returns its summary. TrainingStopped and SaveError as `loop.train`.
        """
        finished = self.finished
        if not finished:
            with StopSignal() as stop:
                before = stop.unsaved
                try:
                    self._train(stop)
                finally:
                    stop.unsaved = before
        if jax.process_index() == 0 and not (finished and (self.workdir / report.PAGE).exists()):
            report.write_page(self.workdir)
        return report.summarise(self.workdir)

    def _check(self) -> None:
        """ValueError for what of the config cannot be."""

    def _make_step(self, step_maker: Callable[..., Step], **options) -> Step:
        config = self.config
        schedule = make_schedule(config.schedule)
        return step_maker(
            config.model, config.step, config.optimizer, schedule, self._mesh, **options
        )

    def _open(self) -> Source:
        """Where batches come from; it may set the evaluator."""
        raise NotImplementedError

    def _rows(self, tokens_seen: int) -> int:
        """Rows of this process's batch after so many tokens."""
        raise NotImplementedError

    def _begin(self, state: dict) -> None:
        """The state is there, nothing is trained yet."""

    def _update(self, state: dict, batch: Batch) -> tuple[dict, dict]:
        """(state, metrics) after a step."""
        return self._step.train(state, batch)

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]] | None:
        """What judges a state after so many steps."""
        return self._evaluator and (lambda state, _: self._evaluator(state["params"]))

    def _sampler(self) -> Callable[[dict, int], str] | None:
        """What writes a text to be looked at."""
        return None

    def _intends(self) -> str:
        """What a step consists of, for the first line on the terminal."""
        raise NotImplementedError

    def _train(self, stop: StopSignal) -> None:
        config, first = self.config, jax.process_index() == 0
        own = self.workdir if first else self.workdir / "hosts" / str(jax.process_index())
        with contextlib.ExitStack() as stack:
            stack.callback(self._source.close)
            screen = None if first else stack.enter_context(open(os.devnull, "w"))
            checkpoints = stack.enter_context(store.Store(self.workdir, config.train.keep))
            state, counters = loop.resume(
                checkpoints, self._step.abstract, self._initialise, self._source
            )
            done = int(state["step"])

            def describe():
                write_config(self.workdir, config)
                self.tokenizer.save(self.workdir / "tokenizer")
                if not done:
                    shutil.rmtree(self.workdir / SAMPLES, ignore_errors=True)

            hosts.first_does(describe)
            log = stack.enter_context(MetricsLog(own, done))
            progress = stack.enter_context(ProgressBar(config.steps, done, stream=screen))
            progress.print(self._headline(done))
            self._begin(state)

            def count():
                if not column(read(own), "baseline/unigram")[0]:
                    progress.print("counting the training text for the baselines ...")
                    found = self._evaluator.baselines()
                    log.write({"step": 0, **{f"baseline/{name}": x for name, x in found.items()}})

            if self._evaluator is not None:
                try:
                    hosts.first_does(count)
                except ValueError as error:
                    raise TrainingStopped(f"baselines: {error}; {checkpoints.last_good}") from error
            if config.step.remat == "offload" and jax.default_backend() == "cpu":
                progress.print("remat offload: a CPU has one memory, layers' inputs stay in it")
            progress.print("compiling the train step ...")
            known = set()
            told = set(column(read(own), "program")[1])  # by the run that this one goes on from

            def update(state, batch):
                shape = batch["token_ids"].shape
                # What an ablation shares among its runs is no program of its own.
                if shape not in known and hasattr(self._step.train, "lower"):
                    known.add(shape)
                    name = program_hash(self._step.train.lower(state, batch))
                    if name not in told:
                        log.write({"step": int(state["step"]), "program": name})
                    progress.print(f"a batch of {shape[0]} x {shape[1]}: program {name}")
                state, metrics = self._update(state, batch)
                stop.unsaved = True
                return state, metrics

            recorder = Recorder(
                log,
                progress,
                counters,
                log_interval=config.train.log_interval,
                max_skipped=config.train.max_skipped,
                max_skipped_in_a_row=config.train.max_skipped_in_a_row,
                flops_per_token=model_flops(config, self._step),
                peak=_peak(),
            )
            loop.train(
                config.train,
                config.steps,
                step=update,
                state=state,
                loader=self._source,
                place=self._place,
                batch_size=self._rows,
                store=checkpoints,
                recorder=recorder,
                evaluate=self._evaluate(),
                # What a stage makes of its weights shows beside what it was given.
                evaluate_first=not done and self._given is not None,
                sample=self._sampler(),
                stop=stop,
            )

    def _place(self, batch: Batch) -> Batch:
        """Places a batch of which this process holds its own rows."""
        if self._mesh is None:
            return jax.device_put(batch)
        where = NamedSharding(self._mesh, P(BATCH_AXES, SEQUENCE_AXES))
        rows = len(batch["token_ids"]) * self._num_groups
        return {
            k: jax.make_array_from_process_local_data(where, v, (rows, *v.shape[1:]))
            for k, v in batch.items()
        }

    def _initialise(self) -> dict:
        key, params = jax.random.key(self.config.seed), self._given and self._given()
        if params is not None:
            params = completed(params, self.config.model, key, mesh=self._mesh)
        return self._step.initialise(key, params)

    def _open_checkpoint(self, path: pathlib.Path, before) -> Callable[[], dict] | None:
        """What loads the initial weights from a workdir, one of its checkpoints or an HF folder; nothing
        if the stage before has still to make them. ValueError if they are not there, broken, or of
        another model."""
        model, unshared = self.config.model, self.config.unshared
        if before is not None and not before.finished:
            wanted, found = ({"model": glm5.abstract(c)} for c in (model, before.config.model))
            name = f"what {before.config.name} trains"
            store.check_shapes(wanted, found, name, unshared)
            models.check_arithmetic(name, before.config.model, model, unshared)
            return None
        return models.open_weights(path, model, mesh=self._mesh, unshared=unshared)

    def _headline(self, done: int) -> str:
        model, device = self.config.model, jax.devices()[0]
        start = f"going on from step {done}" if done else "starting"
        return (
            f"{self.config.name}: {_short(model.num_stored_parameters)} parameters, "
            f"{_short(model.num_active_parameters)} active, on {jax.device_count()} "
            f"{device.device_kind} device(s), {self._intends()}; {start} in {self.workdir}"
        )


def _ending_like(tokenizer: Tokenizer, config: StageConfig) -> StageConfig:
    """The config with the ids that end and pad a text in this tokenizer."""
    ids = {"eos_token_id": tokenizer.eos_ids, "pad_token_id": tokenizer.pad_id}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **ids))


def _peak() -> float | None:
    """bfloat16 FLOP/s of all devices together."""
    one = flops.peak_flops(jax.devices()[0].device_kind)
    return one and one * jax.device_count()


def _short(count: int) -> str:
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            return f"{count / limit:.3g}{suffix}"
    return str(count)
