"""Training loop: step, record, evaluate, sample, save; and how it resumes and stops.

State goes in and comes out. A step computes only from the state, the data position and the step's number,
which are saved together. So a run that was killed and started again gives bitwise the same losses as one that
never stopped.
"""

import contextlib
import dataclasses
from collections.abc import Callable

from glm5_jax.checkpoint.store import Store, is_disk_full
from glm5_jax.parallel import multihost
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.training.metrics import Counters, Recorder, TrainingStopped


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of a run and its intervals, in steps. An interval of 0 means never.

    Saves, evaluations and samples also happen at the last step.

    Attributes:
      steps: last step of the run; None: the last one of the learning-rate schedule.
      log_interval: steps between two lines of metrics.
      eval_interval: steps between two evaluations.
      sample_interval: steps between two sets of sample texts.
      save_interval: steps between two checkpoints.
      keep: number of checkpoints that are kept.
      eval_batches: batches of an evaluation.
      baseline_tokens: maximum tokens of training text that the n-gram baselines count.
      max_skipped: maximum number of steps without an update because of NaN or Inf, in total.
      max_consecutive_skipped: maximum number of such steps in a row.
      sinks: further sinks of the metrics: "wandb", or MODULE:NAME of the user (metrics/sinks.py).
    """

    steps: int | None = None
    log_interval: int = 1
    eval_interval: int = 100
    sample_interval: int = 100
    save_interval: int = 100
    keep: int = 2
    eval_batches: int = 8
    baseline_tokens: int = 2**24
    max_skipped: int = 100
    max_consecutive_skipped: int = 10
    sinks: tuple[str, ...] = ()

    def __post_init__(self):
        positive = ("steps", "log_interval", "keep", "eval_batches", "baseline_tokens")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            minimum = 1 if field.name in positive else 0
            if isinstance(value, int) and value < minimum:
                raise ValueError(f"{field.name} is {value}; it must be at least {minimum}")


def resume(
    store: Store, abstract: dict, initialise: Callable[[], dict], loader
) -> tuple[dict, Counters]:
    """Returns the newest checkpoint's state and counters, and restores the loader's position; else a new state.

    abstract: the state as `jax.ShapeDtypeStruct` with this run's shardings.
    """
    if store.latest is None:
        return initialise(), Counters()
    try:
        state, data, meta = store.restore(abstract)
        counters = _read_counters(meta)
    except ValueError as error:
        raise TrainingStopped(str(error)) from error
    loader.restore(data)
    return state, counters


def _read_counters(meta: dict) -> Counters:
    """Returns the counters in a checkpoint's meta. Raises ValueError if there are others, or none."""
    try:
        counters = Counters(**meta["counters"])
        if all(type(value) is int and value >= 0 for value in dataclasses.astuple(counters)):
            return counters
    except (LookupError, TypeError):
        pass
    raise ValueError(
        f"the newest checkpoint is damaged (its meta is {meta!r:.200}, without the counters of a run); move it to another "
        "folder, and the same command resumes from the previous one"
    )


def train(
    config: TrainConfig,
    steps: int,
    *,
    step: Callable[[dict, dict], tuple[dict, dict]],
    state: dict,
    loader,
    place: Callable[[dict], dict],
    batch_size: Callable[[int], int],
    store: Store,
    recorder: Recorder,
    evaluate: Callable[[dict, int], dict[str, float]] | None = None,
    evaluate_first: bool = False,
    sample: Callable[[dict, int], str] | None = None,
    evaluated: Callable[[], None] = lambda: None,
    export: Callable[[dict], None] = lambda state: None,
    stop: PreemptionGuard | bool = False,
) -> dict:
    """Trains up to step `steps`, or until `stop` becomes true. Returns the last state, which is saved.

    Args:
      step: step(state, batch) -> (state, metrics); it may donate its state.
      loader: loader.next(batch_size) returns this host's part of a batch as NumPy arrays; None, on all hosts, if a stop
        was requested before a batch arrived.
      place: puts a batch onto the devices.
      batch_size: batch_size(tokens_seen) -> number of rows.
      evaluate: evaluate(state, n) -> numbers to record after n steps; None: no evaluation.
      evaluate_first: whether to evaluate before the first step too.
      sample: sample(state, n) -> text to print after n steps; None: no samples.
      evaluated: called after the numbers of an evaluation are recorded.
      export: export(state) writes other files of a state, before each checkpoint. So they are there if a checkpoint is.

    Raises, with the last good checkpoint in the message:
      Diverged: too many steps were skipped.
      TrainingStopped: the data cannot be read, or the disk is full.
      SaveError: a checkpoint cannot be written.
    """
    done, seen = int(state["step"]), recorder.counters.tokens
    saved, stopping = done, multihost.any_process(stop)

    def save() -> None:
        recorder.flush()  # a checkpoint's rows are on disk before the checkpoint is
        export(state)
        store.save(state, loader.state(), {"counters": dataclasses.asdict(recorder.counters)})

    def run_evaluation() -> None:
        if evaluate is not None:
            recorder.note(done, evaluate(state, done))
            evaluated()

    try:
        if evaluate_first and not stopping:
            run_evaluation()
            recorder.restart_clock()
            stopping = multihost.any_process(stop)
        while done < steps and not stopping:
            rows = _next(loader, batch_size(seen), done)
            if rows is None:
                recorder.settle()
                if done > saved:
                    save()
                break
            batch = place(rows)
            state, metrics = step(state, batch)
            tokens = batch["token_ids"].size
            done, seen = done + 1, seen + tokens
            recorder.add(done, tokens, metrics)
            stopping = multihost.any_process(stop)  # so that all processes save the same step
            last = done == steps
            evaluating = last or _is_due(done, config.eval_interval)
            sampling = last or _is_due(done, config.sample_interval)
            saving = last or _is_due(done, config.save_interval)
            if not ((evaluate and evaluating) or (sample and sampling) or saving or stopping):
                continue
            recorder.settle()
            if evaluate and evaluating:
                run_evaluation()
                stopping = stopping or multihost.any_process(stop)
            if sample and sampling:
                recorder.print(sample(state, done))
            if saving or stopping:
                save()
                saved = done
            recorder.restart_clock()
        store.wait()
    except TrainingStopped as error:
        # Record the last step. It may raise the same error again.
        with contextlib.suppress(TrainingStopped):
            recorder.settle()
        store.wait()
        raise type(error)(f"{error}; {store.last_good}") from None
    except OSError as error:
        if not is_disk_full(error):
            raise
        store.wait()
        raise TrainingStopped(f"step {done}: the disk is full; {store.last_good}") from error
    return state


def _is_due(done: int, interval: int) -> bool:
    return interval > 0 and done % interval == 0


def _next(loader, batch_size: int, step: int) -> dict | None:
    """Returns this host's part of a batch, as `loader.next`. Raises TrainingStopped on all hosts if one cannot read it."""
    batch: dict | None = {}
    problem = None
    try:
        batch = loader.next(batch_size)
    except ValueError as error:
        problem = error
    try:
        multihost.raise_on_all(problem)
    except ValueError as error:
        raise TrainingStopped(f"step {step}: {error}") from error
    return batch
