"""A stage of training, assembled from its parts: checked before it changes anything, then run."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Float, PyTree

from glm5_jax.checkpoint import models, store
from glm5_jax.checkpoint.peft_adapters import check_targets, save_adapter
from glm5_jax.data.loader import Batch, take_rows
from glm5_jax.metrics.metrics_log import MetricsLog, column, read
from glm5_jax.metrics.sinks import RunInfo, check_sinks, open_sinks
from glm5_jax.model import glm5, lora
from glm5_jax.model.ablations.convert import add_missing_weights
from glm5_jax.parallel import multihost
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region, make_mesh, row_group
from glm5_jax.parallel.program_hash import program_hash
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.text.layouts import template
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import flops, loop, report
from glm5_jax.training.experiment import CONFIG, StageConfig, check_resume, write_config
from glm5_jax.training.metrics import Recorder, TrainingStopped
from glm5_jax.training.provenance import record_start
from glm5_jax.training.schedule import make_schedule
from glm5_jax.training.step import Step, make_step
from glm5_jax.training.step_flops import model_flops

SAMPLES, ADAPTER = "samples", "adapter"
_REPORT_SHARE = 0.02  # of a run's time, at most, that its reports before the last one take
_log = logging.getLogger(__name__)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)

Config = TypeVar("Config", bound=StageConfig)


class Evaluator(Protocol):
    """Evaluator of parameters during training.

    baselines() returns numbers for comparison. The first process of a pod computes them once, because its log
    is the one that is shown.
    """

    def __call__(self, params: PyTree) -> dict[str, float]: ...

    def baselines(self) -> dict[str, float]: ...


class BatchSource(Protocol):
    """Source of batches; `data.loader.Loader` documents its methods.

    next() may return None, in all processes, if a stop was requested before a batch arrived.
    """

    def next(self, batch_size: int) -> Batch | None: ...

    def state(self) -> dict: ...

    def check(self, state: dict) -> None: ...

    def restore(self, state: dict) -> None: ...

    def close(self) -> None: ...


class Stage(Generic[Config]):
    """Training of a model. Subclasses define the data, and further actions between steps.

    Construction checks everything that a user can get wrong and raises ValueError; until then nothing is trained
    or overwritten. `run` trains.

    Args:
      step_maker: called as `make_step`; runs that share compiled steps pass another one.
      previous_stage: stage whose workdir is the checkpoint. Until it has run, only the shapes of its weights are
        known: this stage can be checked, not run.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | os.PathLike,
        step_maker: Callable[..., Step] = make_step,
        previous_stage: "Stage | None" = None,
    ):
        self.workdir = pathlib.Path(workdir)
        self._next_report_at = 0.0  # seconds of time.monotonic
        if self.workdir.exists() and not self.workdir.is_dir():
            raise ValueError(f"workdir {workdir} is a file; give a folder, or a new path")
        config = _with_checkpoint_model(config, self.workdir, previous_stage)
        self.tokenizer = _load_tokenizer(config, self.workdir, previous_stage)
        self.config = config = _with_tokenizer_ids(self.tokenizer, config)
        if config.chat_variant:
            self.tokenizer = self.tokenizer.with_chat_template(template(config.chat_variant))
        if store.latest_step(workdir) is not None:
            if not (self.workdir / CONFIG).exists():
                raise ValueError(
                    f"{workdir} has checkpoints and no {CONFIG}, so that their configuration is unknown; copy it too, or use "
                    "another --workdir"
                )
            check_resume(workdir, config)
        mesh = make_mesh(dataclasses.asdict(config.mesh), expert_slices=config.step.expert_slices)
        self._mesh = mesh if mesh.size > 1 else None
        self._region = Region.of(mesh)
        self._group, self._num_groups = row_group(mesh)
        if self.is_finished:
            return
        saved = store.latest_step(workdir)
        if saved is None and config.checkpoint is None and config.requires_checkpoint:
            raise ValueError(
                f"{config.name} starts from trained weights; give --experiment.checkpoint=PATH, "
                "a workdir, one of its checkpoints/STEP or an HF folder (or --experiment.requires_checkpoint=false for random ones)"
            )
        config.check_data()
        check_sinks(config.train.sinks)
        config.check_length()
        config.check_rows(self._region)
        if config.model.lora.rank:
            check_targets(config.model)
        self._check()
        if self.tokenizer.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} ids, model.vocab_size is "
                f"{config.model.vocab_size}; use another tokenizer or a larger vocabulary"
            )
        self._step = self._make_step(step_maker)
        store.check_space(workdir, self._step.abstract, config.train.keep)
        self._initial_weights = None
        if saved is None and config.checkpoint is not None:
            self._initial_weights = self._open_checkpoint(
                pathlib.Path(config.checkpoint), previous_stage
            )
        self._evaluator: Evaluator | None = None
        self._source: BatchSource = self._open()
        if saved is not None:
            self._source.check(store.load_data(workdir, saved))

    def close(self) -> None:
        """Closes the batch source of a stage that is not run."""
        if not self.is_finished:
            self._source.close()

    @property
    def saved_step(self) -> int:
        """Returns the step of the workdir's newest checkpoint; 0 without one."""
        return store.latest_step(self.workdir) or 0

    @property
    def is_finished(self) -> bool:
        """Returns True if the workdir's newest checkpoint is that of the last step."""
        return self.saved_step >= self.config.steps

    def score(self, params: PyTree, batch: Batch) -> Float[np.ndarray, "b t"]:
        """Returns the scores of a batch's tokens by `Step.score`.

        In a pod every process gives the same batch, and gets all scores.
        """
        rows = self._place(take_rows(batch, self._group, self._num_groups))
        return multihost.fetch_array(self._step.score(params, rows))

    def run(self) -> report.Summary:
        """Trains to the end, or until a signal (`PreemptionGuard`), and writes the report.

        A finished run only returns its summary. Raises TrainingStopped and SaveError as `loop.train` does.
        """
        finished = self.is_finished
        try:
            if not finished:
                with PreemptionGuard() as stop:
                    before = stop.unsaved
                    try:
                        self._train(stop)
                    finally:
                        stop.unsaved = before
            is_current = finished and (self.workdir / report.PAGE).exists()
            if jax.process_index() == 0 and not is_current:
                self._write_report()
        except OSError as error:
            if not (store.is_disk_full(error) or error.errno in _NOT_WRITABLE):
                raise
            raise TrainingStopped(
                f"{error.filename or 'a file of the run, or its output,'} cannot be written ({error.strerror or error}); "
                f"{store.last_good(self.workdir)}; free some space, or give the rights, and run the same command to resume"
            ) from error
        return report.summarise(self.workdir)

    def _check(self) -> None:
        """Raises ValueError if options contradict each other."""

    def _make_step(self, step_maker: Callable[..., Step], **options) -> Step:
        config = self.config
        schedule = make_schedule(config.schedule)
        return step_maker(
            config.model, config.step, config.optimizer, schedule, self._mesh, **options
        )

    def _open(self) -> BatchSource:
        """Returns the source of batches; may also set the evaluator."""
        raise NotImplementedError

    def _rows(self, tokens_seen: int) -> int:
        """Returns the rows of this process's batch after tokens_seen."""
        raise NotImplementedError

    def _begin(self, state: dict) -> None:
        """Prepares a run: receives the initial state before the first step."""

    def _update(self, state: dict, batch: Batch) -> tuple[dict, dict]:
        """Runs one step and returns (state, metrics)."""
        return self._step.train(state, batch)

    def _evaluate(self) -> Callable[[dict, int], dict[str, float]] | None:
        """Returns the evaluation of a state after a number of steps; None: no evaluation."""
        evaluator = self._evaluator
        return None if evaluator is None else lambda state, _: evaluator(state["params"])

    def _sampler(self) -> Callable[[dict, int], str] | None:
        """Returns a function that writes sample texts; None: no samples."""
        return None

    def _describe_step(self) -> str:
        """Returns the data of one step in words, for the first line on the terminal."""
        raise NotImplementedError

    def _train(self, stop: PreemptionGuard) -> None:
        config, first = self.config, jax.process_index() == 0
        log_dir = self.workdir if first else self.workdir / "hosts" / str(jax.process_index())
        with contextlib.ExitStack() as stack:
            # Restore or initialise.
            stack.callback(self._source.close)
            screen = None if first else stack.enter_context(open(os.devnull, "w"))
            _lock(self.workdir, stack)
            checkpoints = stack.enter_context(store.Store(self.workdir, config.train.keep))
            state, counters = loop.resume(
                checkpoints, self._step.abstract, self._initialise, self._source
            )
            done = int(state["step"])
            multihost.run_on_first(lambda: self._write_inputs(done))
            sinks = open_sinks(config.train.sinks, self._describe_run(done)) if first else ()
            log = stack.enter_context(MetricsLog(log_dir, done, sinks))
            progress = stack.enter_context(ProgressBar(config.steps, done, stream=screen))
            progress.print(self._headline(done))
            self._begin(state)

            if self._evaluator is not None:
                try:
                    _log_baselines(self._evaluator, log, log_dir, progress)
                except ValueError as error:
                    raise TrainingStopped(f"baselines: {error}; {checkpoints.last_good}") from error
            if config.step.remat == "offload" and jax.default_backend() == "cpu":
                progress.print("remat offload: a CPU has one memory, layers' inputs stay in it")
            # Train.
            progress.print("compiling the train step ...")
            programs = _ProgramLog(self._step, log, log_dir, progress)

            def update(state, batch):
                programs.note(state, batch)
                state, metrics = self._update(state, batch)
                stop.unsaved = True
                return state, metrics

            recorder = Recorder(
                log,
                progress,
                counters,
                log_interval=config.train.log_interval,
                max_skipped=config.train.max_skipped,
                max_consecutive_skipped=config.train.max_consecutive_skipped,
                flops_per_token=model_flops(config, self._step),
                peak_flops=_peak_flops(),
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
                # The report compares a stage's result with its initial weights. Rollouts of random weights say nothing.
                evaluate_first=not done
                and (self._initial_weights is not None or self._evaluator is not None),
                sample=self._sampler(),
                evaluated=self._refresh_report,
                export=self._write_outputs,
                stop=stop,
            )

    def _describe_run(self, done: int) -> RunInfo:
        """Returns the description of this run, which resumes after `done` steps, for sinks of metrics."""
        fields = json.loads(json.dumps(dataclasses.asdict(self.config)))
        return RunInfo(name=self.config.name, workdir=self.workdir, config=fields, step=done)

    def _write_outputs(self, state: dict) -> None:
        """Writes what a checkpoint comes with: adapters of the state, and the report of the steps so far."""
        self._export(state)
        self._refresh_report()

    def _refresh_report(self) -> None:
        multihost.run_on_first(self._write_live_report)

    def _write_live_report(self) -> None:
        """Writes the report, unless the devices would wait too often for it."""
        began = time.monotonic()
        if began >= self._next_report_at:
            self._write_report()
            ended = time.monotonic()
            self._next_report_at = ended + (ended - began) / _REPORT_SHARE

    def _write_report(self) -> None:
        """Writes the report. An error other than one of the disk ends no run, because files hold all that the report shows."""
        try:
            report.write_page(self.workdir)
        except OSError:
            raise
        except Exception:
            _log.warning("the report of %s could not be written", self.workdir, exc_info=True)

    def _export(self, state: dict) -> None:
        """Writes the adapters of a state into the workdir's `ADAPTER`, in PEFT's form, in place of older ones."""
        if not self.config.model.lora.rank:
            return
        folder, new = self.workdir / ADAPTER, self.workdir / f"{ADAPTER}.new"

        def clean():
            for old in (new, *self.workdir.glob(f".{new.name}.*.partial")):  # of a killed process
                shutil.rmtree(old, ignore_errors=True)

        def replace():
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(new, folder)

        # The old adapter stays until the new one is complete, because the disk may be full.
        multihost.run_on_first(clean)
        save_adapter(state["params"], self.config.model, new, base=self.config.checkpoint)
        multihost.run_on_first(replace)

    def _write_inputs(self, done: int) -> None:
        """Writes config, tokenizer and the facts of this start, after `done` steps, into the workdir."""
        write_config(self.workdir, self.config)
        self.tokenizer.save(self.workdir / "tokenizer")
        if not done:
            shutil.rmtree(self.workdir / SAMPLES, ignore_errors=True)
        record_start(self.workdir, self.config.model, done)

    def _place(self, batch: Batch) -> Batch:
        """Puts a batch, of which this process holds some rows, onto the devices."""
        if self._mesh is None:
            return jax.device_put(batch)
        sharding = NamedSharding(self._mesh, P(BATCH_AXES, SEQUENCE_AXES))
        rows = len(batch["token_ids"]) * self._num_groups
        return {
            k: jax.make_array_from_process_local_data(sharding, v, (rows, *v.shape[1:]))
            for k, v in batch.items()
        }

    def _initialise(self) -> dict:
        key, params = (
            jax.random.key(self.config.seed),
            self._initial_weights and self._initial_weights(),
        )
        if params is not None:
            params = add_missing_weights(params, self.config.model, key, mesh=self._mesh)
        return self._step.initialise(key, params)

    def _open_checkpoint(
        self, path: pathlib.Path, previous_stage: "Stage | None"
    ) -> Callable[[], dict] | None:
        """Returns a loader of the initial weights from a workdir, one of its checkpoints or an HF folder.

        Returns None if the previous stage has yet to train them.

        Raises ValueError if they are missing, broken, or of another model.
        """
        model, may_differ = self.config.model, self.config.may_differ
        if previous_stage is not None and not previous_stage.is_finished:
            wanted, trained = (
                {"model": glm5.abstract_params(lora.without_adapters(c))}
                for c in (model, previous_stage.config.model)
            )
            name = f"the checkpoint of {previous_stage.config.name}"
            store.check_shapes(wanted, trained, name, may_differ)
            models.check_arithmetic(name, previous_stage.config.model, model, may_differ)
            return None
        return models.open_weights(path, model, mesh=self._mesh, may_differ=may_differ)

    def _headline(self, done: int) -> str:
        model, device = self.config.model, jax.devices()[0]
        start = f"resuming at step {done}" if done else "starting"
        return (
            f"{self.config.name}: {_short(model.num_stored_parameters)} parameters, "
            f"{_short(model.num_active_parameters)} active, on {jax.device_count()} "
            f"{device.device_kind} device(s), {self._describe_step()}; {start} in {self.workdir}"
        )


class _ProgramLog:
    """Logs the hash of the step's program for each batch shape."""

    def __init__(self, step: Step, log: MetricsLog, log_dir: pathlib.Path, progress: ProgressBar):
        self._step, self._log, self._progress = step, log, progress
        self._logged = set(column(read(log_dir), "program")[1])  # before this resume
        self._seen_shapes = set()

    def note(self, state: dict, batch: Batch) -> None:
        """Logs and prints the program's hash if the batch has a new shape."""
        shape, lower = batch["token_ids"].shape, getattr(self._step.train, "lower", None)
        # A step that an ablation shares among its runs cannot be lowered.
        if shape in self._seen_shapes or lower is None:
            return
        self._seen_shapes.add(shape)
        name = program_hash(lower(state, batch))
        if name not in self._logged:
            self._log.write({"step": int(state["step"]), "program": name})
        self._progress.print(f"a batch of {shape[0]} x {shape[1]}: program {name}")


def _log_baselines(
    evaluator: Evaluator, log: MetricsLog, log_dir: pathlib.Path, progress: ProgressBar
) -> None:
    """Logs the evaluator's baselines on the first process, once in the life of a workdir."""

    def count():
        if not column(read(log_dir), "baseline/unigram")[0]:
            progress.print("counting the training text for the baselines ...")
            baselines = evaluator.baselines()
            log.write({"step": 0} | {f"baseline/{k}": x for k, x in baselines.items()})

    multihost.run_on_first(count)


def _model_source(
    config: StageConfig, workdir: pathlib.Path, previous_stage: Stage | None
) -> pathlib.Path | None:
    """Returns the path of the model that a stage with `model_of_checkpoint` continues.

    It is the workdir of a run that resumes. None: the previous stage has yet to train it.
    """
    if store.latest_step(workdir) is not None:
        return workdir
    if config.checkpoint is None:
        raise ValueError(
            "model_of_checkpoint is True and there is no checkpoint; give --experiment.checkpoint=PATH, or "
            "--experiment.model_of_checkpoint=False"
        )
    if previous_stage is not None and not previous_stage.is_finished:
        return None
    return pathlib.Path(config.checkpoint)


def _with_checkpoint_model(
    config: Config, workdir: pathlib.Path, previous_stage: Stage | None
) -> Config:
    """Returns the config with the checkpoint's model, if `model_of_checkpoint` is set."""
    if not config.model_of_checkpoint:
        return config
    if (source := _model_source(config, workdir, previous_stage)) is None:
        assert previous_stage is not None, "only a previous stage has yet to train"
        model = previous_stage.config.model
    else:
        model, _ = models.read_config(source)
    return dataclasses.replace(config, model=config.change_model(model))


def _load_tokenizer(
    config: StageConfig, workdir: pathlib.Path, previous_stage: Stage | None
) -> Tokenizer:
    """Returns the tokenizer of a config: a named one, the checkpoint's, or the project's."""
    if config.tokenizer:
        return Tokenizer.load(config.tokenizer)
    if not config.model_of_checkpoint:
        return Tokenizer.default()
    if (source := _model_source(config, workdir, previous_stage)) is None:
        assert previous_stage is not None, "only a previous stage has yet to train"
        return previous_stage.tokenizer
    return models.load_tokenizer(source)


def _with_tokenizer_ids(tokenizer: Tokenizer, config: Config) -> Config:
    """Returns the config with the tokenizer's end and padding ids in its model."""
    ids = {"eos_token_id": tokenizer.eos_ids, "pad_token_id": tokenizer.pad_id}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **ids))


def _lock(workdir: pathlib.Path, stack: contextlib.ExitStack) -> None:
    """Has the first process hold the workdir until the stack ends. Raises TrainingStopped if another run uses it."""
    try:
        multihost.run_on_first(lambda: stack.enter_context(FolderLock(workdir)))
    except OSError as error:
        raise TrainingStopped(str(error)) from error


def _peak_flops() -> float | None:
    """Returns the bfloat16 FLOP/s of all devices together; None if unknown."""
    device_flops = flops.peak_flops(jax.devices()[0].device_kind)
    return device_flops and device_flops * jax.device_count()


def _short(count: int) -> str:
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            return f"{count / limit:.3g}{suffix}"
    return str(count)
