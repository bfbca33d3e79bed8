"""Metrics of steps: device arrays become rows of the log, with counters, throughput, MFU and the progress line.

A step returns a nested dict of scalars, or of vectors with one entry per layer. Its paths become the names in
`metrics.jsonl` ("loss/ce", "grad_norm/muon"). This module reads two of them: "loss/total", and "skipped",
which is 1 if the step made no update because its loss or a gradient was not finite.
"""

import dataclasses
import resource
import time

import jax
import numpy as np

from glm5_jax.metrics.metrics_log import MetricsLog
from glm5_jax.parallel import tree
from glm5_jax.runtime.console import ProgressBar


class TrainingStopped(RuntimeError):
    """Training cannot continue. The message says why, and what is saved."""


class Diverged(TrainingStopped):
    """Too many steps were skipped because their loss or a gradient was not finite."""


@dataclasses.dataclass
class Counters:
    """Totals of a run, which are saved in a checkpoint's meta."""

    tokens: int = 0
    skipped: int = 0
    consecutive_skipped: int = 0


class Recorder:
    """Turns steps into rows of the log. It waits for a step's arrays only after the next step is dispatched.

    flops_per_token: model FLOPs of a training step (`training.flops`).
    peak_flops: FLOP/s of all devices together; None if unknown.
    """

    def __init__(
        self,
        log: MetricsLog,
        progress: ProgressBar,
        counters: Counters,
        *,
        log_interval: int = 1,
        max_skipped: int = 100,
        max_consecutive_skipped: int = 10,
        flops_per_token: float = 0.0,
        peak_flops: float | None = None,
    ):
        self.counters = counters
        self._log, self._progress = log, progress
        self._log_interval = log_interval
        self._limits = (max_skipped, max_consecutive_skipped)
        self._flops, self._peak_flops = flops_per_token, peak_flops
        self._pending = None
        self._rate = ""
        self._size = 0
        self._started = time.perf_counter()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the time since the last row (compiling, evaluating, saving) from tokens/s."""
        self._since, self._tokens = time.perf_counter(), 0

    def add(self, step: int, tokens: int, metrics: dict) -> None:
        """Registers a dispatched step with its number of tokens, and records the previous one.

        A step that has ended already is recorded at once, because its time must not count as zero.
        """
        before, self._pending = self._pending, (step, tokens, metrics)
        if before:
            self._settle(*before)
        # With several processes a step is never recorded early: all of them must stop after the same step.
        if jax.process_count() == 1 and all(map(is_ready, jax.tree.leaves(metrics))):
            self.settle()

    def settle(self) -> None:
        """Waits for the last step and records it. Raises Diverged if too many were skipped."""
        if self._pending:
            before, self._pending = self._pending, None
            self._settle(*before)

    def note(self, step: int, values: dict[str, float]) -> None:
        """Records and prints a row of an evaluation."""
        self._log.write({"step": step, **values})
        self.print(f"step {step}  " + "  ".join(f"{k} {v:.4f}" for k, v in values.items()))

    def flush(self) -> None:
        """Writes buffered rows to disk."""
        self._log.flush()

    def print(self, text: str) -> None:
        """Prints text above the progress line."""
        self._progress.print(text)

    def _settle(self, step: int, tokens: int, metrics: dict) -> None:
        count = self.counters
        skipped = bool(metrics["skipped"])
        count.tokens += tokens
        count.skipped += skipped
        count.consecutive_skipped = count.consecutive_skipped + 1 if skipped else 0
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
        values["system/elapsed_s"] = time.perf_counter() - self._started
        values |= peak_memory()
        if self._tokens:
            rate = self._tokens / (time.perf_counter() - self._since)
            values["speed/tokens_per_second"] = rate
            values["speed/model_tflops_per_second"] = rate * self._flops / 1e12
            if self._peak_flops:
                values["speed/mfu"] = rate * self._flops / self._peak_flops
            self._rate = f"  {rate:,.0f} tok/s"
            self.restart_clock()
        self._log.write({"step": step, **values})
        note = f"  {self.counters.skipped} skipped" if self.counters.skipped else ""
        shown = f"loss {values['loss/total']:.4f}"
        if "reward/mean" in values:
            shown = f"reward {values['reward/mean']:.3f}"
        self._progress.update(step, f"{shown}{self._rate}{note}")

    def _check(self, step: int) -> None:
        max_skipped, max_consecutive = self._limits
        count = self.counters
        if count.skipped > max_skipped or count.consecutive_skipped > max_consecutive:
            raise Diverged(
                f"step {step}: loss or gradients were not finite {count.consecutive_skipped} times in a "
                f"row and {count.skipped} times in all (limits {max_consecutive} and {max_skipped})"
            )


def peak_memory() -> dict[str, int]:
    """Returns the peak memory of this process, and that of its fullest device if the backend counts it, in bytes."""
    peaks = {"system/peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    devices = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return peaks | ({"system/peak_device_bytes": max(devices)} if devices else {})


def is_ready(value) -> bool:
    """Returns True if the value can be read without waiting: its computation has ended, or it is no array."""
    if not isinstance(value, jax.Array):
        return True
    return value.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # missing in jax's stub


def _host(value):
    """Returns an array as a Python number, or as a list of numbers."""
    value = np.asarray(jax.device_get(value))
    return value.item() if value.ndim == 0 else value.astype(float).tolist()
