"""From a step's device arrays to rows: counting, throughput, MFU, and the line on the terminal.

A step returns a nested dict of scalars, or of vectors with one entry per layer. Its paths become the
names in `metrics.jsonl` ("loss/ce", "grad_norm/muon"). Two of them are read here: "loss/total", and
"skipped", which is 1 where the step refused an update because its loss or a gradient was not finite.
"""

import dataclasses
import time

import jax
import numpy as np

from glm5_jax.core import tree
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.metrics_log import MetricsLog


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what is kept."""


class Diverged(TrainingStopped):
    """Too many steps were skipped, since their loss or a gradient was not finite."""


@dataclasses.dataclass
class Counters:
    """What a run has consumed so far; a checkpoint's meta holds it."""

    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


class Recorder:
    """Turns steps into rows. Waits for a step's arrays only when the next one is under way.

    flops_per_token: model FLOPs of a training step (`training.flops`); peak: FLOP/s of all devices
    together, or None.
    """

    def __init__(
        self,
        log: MetricsLog,
        progress: ProgressBar,
        counters: Counters,
        *,
        log_interval: int = 1,
        max_skipped: int = 100,
        max_skipped_in_a_row: int = 10,
        flops_per_token: float = 0.0,
        peak: float | None = None,
    ):
        self.counters = counters
        self._log, self._progress = log, progress
        self._log_interval = log_interval
        self._limits = (max_skipped, max_skipped_in_a_row)
        self._flops, self._peak = flops_per_token, peak
        self._pending = None
        self._rate = ""
        self._size = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves what happened since the last row (compiling, evaluating, saving) out of tokens/s."""
        self._since, self._tokens = time.perf_counter(), 0

    def add(self, step: int, tokens: int, metrics: dict) -> None:
        """`step` has been dispatched with this many tokens. Settles the step before it, and this one too if it has ended
        already: its time must not count as none."""
        before, self._pending = self._pending, (step, tokens, metrics)
        if before:
            self._settle(*before)
        # Processes of a pod must end after the same step, whichever of them is the first to see one.
        if jax.process_count() == 1 and all(map(is_ready, jax.tree.leaves(metrics))):
            self.settle()

    def settle(self) -> None:
        """Waits for the last step and records it. Diverged if too many were skipped."""
        if self._pending:
            before, self._pending = self._pending, None
            self._settle(*before)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Records and prints a row of an evaluation."""
        self._log.write({"step": step, **values})
        self.print(f"step {step}  " + "  ".join(f"{k} {v:.4f}" for k, v in values.items()))

    def flush(self) -> None:
        self._log.flush()

    def print(self, text: str) -> None:
        self._progress.print(text)

    def _settle(self, step: int, tokens: int, metrics: dict) -> None:
        count = self.counters
        skipped = bool(metrics["skipped"])
        count.tokens += tokens
        count.skipped += skipped
        count.skipped_in_a_row = count.skipped_in_a_row + 1 if skipped else 0
        if tokens != self._size:  # a new batch size was compiled
            self._size = tokens
            self.restart_clock()
        else:
            self._tokens += tokens
        if step % self._log_interval == 0 or skipped:
            self._write(step, metrics)
        self._check(step)

    def _write(self, step: int, metrics: dict) -> None:
        values = {k: _host(v) for k, v in tree.flatten(metrics).items()}
        values["tokens"] = self.counters.tokens
        values["skipped"] = self.counters.skipped
        if self._tokens:
            rate = self._tokens / (time.perf_counter() - self._since)
            values["speed/tokens_per_second"] = rate
            values["speed/model_tflops_per_second"] = rate * self._flops / 1e12
            if self._peak:
                values["speed/mfu"] = rate * self._flops / self._peak
            self._rate = f"  {rate:,.0f} tok/s"
            self.restart_clock()
        self._log.write({"step": step, **values})
        note = f"  {self.counters.skipped} skipped" if self.counters.skipped else ""
        shown = f"loss {values['loss/total']:.4f}"
        if "reward/mean" in values:
            shown = f"reward {values['reward/mean']:.3f}"
        self._progress.update(step, f"{shown}{self._rate}{note}")

    def _check(self, step: int) -> None:
        most, most_in_a_row = self._limits
        count = self.counters
        if count.skipped > most or count.skipped_in_a_row > most_in_a_row:
            raise Diverged(
                f"step {step}: loss or gradients were not finite {count.skipped_in_a_row} times in a "
                f"row and {count.skipped} times in all (limits {most_in_a_row} and {most})"
            )


def is_ready(value) -> bool:
    """Whether nothing has to be waited for: the value is no array, or its computation has ended."""
    return not isinstance(value, jax.Array) or value.is_ready()


def _host(value):
    """A Python number, or a list of them, from an array."""
    value = np.asarray(jax.device_get(value))
    return value.item() if value.ndim == 0 else value.astype(float).tolist()
