"""Records how busy the programs of a run are, for the timeline of its report.

Each program writes WORKDIR/utilization/NAME.jsonl: a line every `SAMPLE_INTERVAL_S`, and whenever it becomes busy or idle:

    {"time": seconds since 1970, "pid": ..., "active": number of items in progress, "cpu": CPU seconds of all its threads}
"""

import collections
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from glm5_jax.metrics.jsonl import append_lines, read_objects

_log = logging.getLogger(__name__)
_MIN_SECONDS = 1e-3  # of a process's samples
FOLDER = "utilization"
SAMPLE_INTERVAL_S = 0.5  # between two lines while nothing changes
POLL_INTERVAL_S = (
    0.02  # between two polls of `active`: a step of a small run takes a tenth of a second
)


class UtilizationSample(NamedTuple):
    """One line of a file; see the module's docstring."""

    time: float
    pid: int
    active: int
    cpu: float


class UtilizationRecorder:
    """Appends the samples of this process to a file while entered.

    active: returns the number of items in progress; called in another thread at every poll.
    """

    def __init__(self, path: str | os.PathLike, active: Callable[[], int]):
        self._path, self._active = pathlib.Path(path), active
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="utilization", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        is_busy, due = None, 0.0
        while True:
            active, now = int(self._active()), time.monotonic()
            if bool(active) != is_busy or now >= due:
                is_busy, due = bool(active), now + SAMPLE_INTERVAL_S
                sample = UtilizationSample(time.time(), os.getpid(), active, time.process_time())
                self._write(sample)
            if self._ending.wait(POLL_INTERVAL_S):
                return

    def _write(self, sample: UtilizationSample) -> None:
        """Appends a line. On an error such as a full disk the sample is lost, and the program goes on."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, json.dumps(sample._asdict()).encode() + b"\n")
        except OSError as error:
            _log.debug("%s: %s", self._path, error)


class ProcessRun(NamedTuple):
    """Utilization of one process of a program.

    Attributes:
      name: name of the program.
      pid: process id.
      begin, end: times of the first and last sample, in seconds since 1970.
      spans: (begin, end) of the periods in which it was busy, in seconds since 1970.
      busy: share of its time in these periods.
      cpu: mean number of CPU cores that it used.
    """

    name: str
    pid: int
    begin: float
    end: float
    spans: tuple[tuple[float, float], ...]
    busy: float
    cpu: float


def read_utilization(workdir: str | os.PathLike, begin: float = 0.0) -> list[ProcessRun]:
    """Returns the processes of all programs of a run, sorted by name, then by start.

    begin: time in seconds since 1970; earlier samples are left out.
    """
    runs = []
    for path in sorted((pathlib.Path(workdir) / FOLDER).glob("*.jsonl")):
        samples: dict[int, list[UtilizationSample]] = collections.defaultdict(list)
        for line in read_objects(path):
            sample = _read_sample(line)
            if sample is not None and sample.time >= begin:
                samples[sample.pid].append(sample)
        runs += [_process_run(path.stem, group) for group in samples.values() if len(group) > 1]
    return runs


def _read_sample(line: Mapping[str, Any]) -> UtilizationSample | None:
    """Returns the sample of a line; None if it holds none, such as a line of another release."""
    values = [line.get(name) for name in UtilizationSample._fields]
    numbers = [value for value in values if isinstance(value, int | float)]
    return UtilizationSample(*numbers) if len(numbers) == len(values) else None  # pyright: ignore[reportArgumentType]


def _process_run(name: str, samples: Sequence[UtilizationSample]) -> ProcessRun:
    spans: list[tuple[float, float]] = []
    busy = 0.0
    for sample, next_sample in zip(samples, samples[1:]):
        if not sample.active:
            continue
        busy += next_sample.time - sample.time
        if spans and spans[-1][1] == sample.time:
            spans[-1] = (spans[-1][0], next_sample.time)
        else:
            spans.append((sample.time, next_sample.time))
    first, last = samples[0], samples[-1]
    seconds = max(last.time - first.time, _MIN_SECONDS)  # somebody may have set the clock back
    cpu = (last.cpu - first.cpu) / seconds
    return ProcessRun(
        name=name,
        pid=first.pid,
        begin=first.time,
        end=last.time,
        spans=tuple(spans),
        busy=busy / seconds,
        cpu=cpu,
    )
