"""The training loop: step, record, evaluate, sample, save; and how it resumes and stops.

State goes in and comes out. Everything that a step computes from is in the state, the data position
and the step's number, and these are saved together, so a run that was killed and started again gives
bitwise the same losses as one that never stopped.
"""

import contextlib
import dataclasses
from collections.abc import Callable

from glm5_jax.checkpoint.store import Store, disk_full
from glm5_jax.core import hosts
from glm5_jax.core.stopping import StopSignal
from glm5_jax.training.metrics import Counters, Recorder, TrainingStopped


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length and rhythm of a run, in steps. An interval of 0 means never; saves, evaluations and
    samples happen at the last step in any case."""

    steps: int | None = None  # None: as many as the learning-rate schedule
    log_interval: int = 1
    eval_interval: int = 100
    sample_interval: int = 100
    save_interval: int = 100
    keep: int = 2  # checkpoints
    eval_batches: int = 8
    baseline_tokens: int = 2**24  # of the training text, that the n-gram baselines count at most
    max_skipped: int = 100  # steps without an update because of NaN or Inf, in all ...
    max_skipped_in_a_row: int = 10  # ... and one after another

    def __post_init__(self):
        positive = ("steps", "log_interval", "keep", "eval_batches", "baseline_tokens")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in positive else 0
            if value is not None and value < least:
                raise ValueError(f"{field.name} is {value}; it must be at least {least}")


def resume(
    store: Store, abstract: dict, initialise: Callable[[], dict], loader
) -> tuple[dict, Counters]:
    """The newest checkpoint's state, with the loader set to its position; else a fresh state.

    abstract: the state as `jax.ShapeDtypeStruct` with this run's shardings.
    """
    if store.latest is None:
        return initialise(), Counters()
    state, data, meta = store.restore(abstract)
    loader.restore(data)
    return state, Counters(**meta["counters"])


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
    stop: StopSignal | bool = False,
) -> dict:
    """Trains up to step `steps`, or until `stop` becomes true; returns the last state, saved.

    step(state, batch) -> (state, metrics) may donate its state. loader.next(batch_size) gives this
    host's part of a batch as NumPy arrays, place puts it onto the devices; batch_size(tokens_seen)
    is its number of rows. evaluate(state, n) returns numbers to record and sample(state, n) text to
    print, after n steps; evaluate_first: before the first one too. Diverged if too many steps were
    skipped, TrainingStopped if the data cannot be read or the disk is full, SaveError if a checkpoint
    cannot be written; all name the last good checkpoint.
    """
    done, seen, stopping = int(state["step"]), recorder.counters.tokens, False
    try:
        if evaluate and evaluate_first:
            recorder.note(done, evaluate(state, done))
            recorder.restart_clock()
        while done < steps and not stopping:
            placed = place(_next(loader, batch_size(seen), done))
            state, metrics = step(state, placed)
            tokens = placed["token_ids"].size
            done, seen = done + 1, seen + tokens
            recorder.add(done, tokens, metrics)
            stopping = hosts.anyone(stop)  # so that all of them save the same step
            last = done == steps
            evaluating = evaluate and (last or _is_due(done, config.eval_interval))
            sampling = sample and (last or _is_due(done, config.sample_interval))
            saving = last or stopping or _is_due(done, config.save_interval)
            if not (evaluating or sampling or saving):
                continue
            recorder.settle()
            if evaluating:
                recorder.note(done, evaluate(state, done))
            if sampling:
                recorder.print(sample(state, done))
            if saving:
                recorder.flush()  # a checkpoint's rows are on disk before the checkpoint is
                store.save(
                    state, loader.state(), {"counters": dataclasses.asdict(recorder.counters)}
                )
            recorder.restart_clock()
        store.wait()
    except TrainingStopped as error:
        with contextlib.suppress(
            TrainingStopped
        ):  # of the steps that were made, maybe the same again
            recorder.settle()
        store.wait()
        raise type(error)(f"{error}; {store.last_good}") from None
    except OSError as error:
        if not disk_full(error):
            raise
        raise TrainingStopped(f"step {done}: the disk is full; {store.last_good}") from error
    return state


def _is_due(done: int, interval: int) -> bool:
    return interval > 0 and done % interval == 0


def _next(loader, batch_size: int, step: int) -> dict:
    """This host's part of a batch; TrainingStopped on all of them if one cannot read its own."""
    batch = problem = None
    try:
        batch = loader.next(batch_size)
    except ValueError as error:
        problem = error
    try:
        hosts.agree(problem)
    except ValueError as error:
        raise TrainingStopped(f"step {step}: {error}") from error
    return batch
