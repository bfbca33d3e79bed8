"""Runs the bigram model, as a function or as a program that tests kill.

    python -m tests.training.bigram_run WORKDIR STEPS [BYTES]

BYTES: limit of the size of files from step 4 on, like a full disk.
"""

import resource
import signal
import sys

import jax

from glm5_jax.checkpoint.store import SaveError, Store
from glm5_jax.metrics import metrics_log
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.training import loop
from glm5_jax.training.metrics import Recorder, TrainingStopped
from tests.training import bigram


def run(
    workdir,
    steps=12,
    *,
    stop_at=0,
    stop=False,
    loader=None,
    sizes=lambda n: 4,
    on_evaluation=lambda step: None,
    **settings,
):
    """Resumes, trains and returns the last state.

    stop_at: step of a stop signal, 0 for none. on_evaluation: called at the begin of each evaluation, with its step.
    """
    config = loop.TrainConfig(save_interval=3, eval_interval=4, sample_interval=0, **settings)
    loader = loader or bigram.Loader()
    with Store(workdir, config.keep) as store:
        state, counters = loop.resume(
            store, jax.eval_shape(bigram.initialise), bigram.initialise, loader
        )
        done = int(state["step"])
        with (
            metrics_log.MetricsLog(workdir, done) as rows,
            ProgressBar(steps, done) as progress,
        ):
            recorder = Recorder(
                rows,
                progress,
                counters,
                log_interval=config.log_interval,
                max_skipped=config.max_skipped,
                max_consecutive_skipped=config.max_consecutive_skipped,
            )
            update = jax.jit(bigram.step, donate_argnums=0)
            if stop_at:
                stop = StopAfter(stop_at - done)

            def step(state, batch):
                if stop_at:
                    stop.left -= 1
                return update(state, batch)

            def evaluate(state, n):
                on_evaluation(n)
                return {"held_out/loss": held_out(state)}

            state = loop.train(
                config,
                steps,
                step=step,
                state=state,
                loader=loader,
                place=lambda batch: batch,
                batch_size=sizes,
                store=store,
                recorder=recorder,
                evaluate=evaluate,
                sample=lambda state, n: f"sample {n}",
                stop=stop,
            )
    return state


class StopAfter:
    """Stop signal that is set once `left`, the number of steps before it, is 0."""

    def __init__(self, left: int):
        self.left = left

    def __bool__(self):
        return self.left <= 0


def held_out(state) -> float:
    return float(bigram.loss_of(state["params"], bigram.Loader(seed=9).next(32)))


class LimitedLoader(bigram.Loader):
    """Loader that limits the size of files before batch 4."""

    def next(self, batch_size: int) -> dict:
        if self.position == 4:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
        return super().next(batch_size)


if __name__ == "__main__":
    make_loader = LimitedLoader if len(sys.argv) > 3 else bigram.Loader
    with PreemptionGuard() as stop:
        try:
            run(sys.argv[1], int(sys.argv[2]), stop=stop, loader=make_loader())
        except (SaveError, TrainingStopped) as error:
            sys.exit(f"error: {error}")
