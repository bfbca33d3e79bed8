"""Writes and reads the metrics of a run: `metrics.jsonl` and TensorBoard events of one workdir, and other sinks.

A row is a flat dict with a "step". Its other values are numbers, lists of numbers (one per layer) or text, which is only
in `metrics.jsonl`. A step may have several rows. Resuming from a checkpoint drops the rows after its step, so
that no step is in the file twice.
"""

import contextlib
import errno
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Self

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]: protobuf makes the class on import
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]: protobuf makes the class on import
)

from glm5_jax.metrics.jsonl import read_objects
from glm5_jax.metrics.sinks import MetricsSink
from glm5_jax.runtime.files import replace_text

_FILE = "metrics.jsonl"
_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows of metrics; a context manager.

    after: step of the checkpoint that the run resumes from. 0: the run starts from scratch, and all rows of an earlier run
    that saved nothing are dropped, its step 0 included. sinks: further sinks, which the log closes. One that raises an
    error is dropped with a warning, because its rows are on disk.
    """

    def __init__(
        self, workdir: str | os.PathLike, after: int = 0, sinks: Sequence[MetricsSink] = ()
    ):
        workdir, self._sinks = pathlib.Path(workdir), list(sinks)
        (workdir / "tensorboard").mkdir(parents=True, exist_ok=True)
        rows = [row for row in read(workdir) if after and row["step"] <= after]
        replace_text(workdir / _FILE, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = (workdir / _FILE).open("ab", buffering=0)
        # The library's SummaryWriter has a thread. A full disk kills it, and `close` then blocks forever.
        # This writer has no thread.
        self._events = EventsWriter(str(workdir / "tensorboard" / "events"), f".{after:09d}")
        restart = Event(step=after + 1, session_log=SessionLog(status=SessionLog.START))
        self._events.write_event(restart)  # TensorBoard hides older events from this step on

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    def write(self, row: dict) -> None:
        """Appends one row; numbers that are not finite become null. Raises OSError if the disk is full."""
        line = json.dumps({k: _jsonable(v) for k, v in row.items()}) + "\n"
        if self._file.write(line.encode()) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), _FILE)
        scalars = dict(_scalars(row))
        for tag, number in scalars.items():
            event = Event(summary=summary.scalar(tag, number), step=row["step"])
            event.wall_time = time.time()
            self._events.write_event(event)
        if scalars:
            self._send(row["step"], scalars)

    def _send(self, step: int, scalars: dict[str, float]) -> None:
        """Writes the numbers of a row to the sinks."""
        for sink in list(self._sinks):
            try:
                sink.write(step, scalars)
            except Exception:
                _log.warning("step %d: %s failed and gets no more rows", step, sink, exc_info=True)
                self._sinks.remove(sink)

    def flush(self) -> None:
        """Blocks until every row is on disk; call it before the checkpoint of their step."""
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        """Closes both files and the sinks."""
        self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                _log.warning("%s could not be closed", sink, exc_info=True)
        with contextlib.suppress(
            OSError
        ):  # the rows are on disk; only TensorBoard's copy may be incomplete
            self._events.close()


def read(workdir: str | os.PathLike) -> list[dict]:
    """Returns all rows of a workdir in the order of writing, without a last line that a kill cut off.

    Other lines that hold no row are left out; see `read_objects`.
    """
    file = pathlib.Path(workdir) / _FILE
    if not file.exists():
        return []
    return [row for row in read_objects(file) if isinstance(row.get("step"), int)]


def column(rows: list[dict], name: str) -> tuple[list[int], list]:
    """Returns (steps, values) of the rows that have a value of that name."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [s for s, _ in pairs], [v for _, v in pairs]


def last_value(rows: list[dict], name: str):
    """Returns the value of that name in the last row that has one; None: no row has."""
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


def _jsonable(value):
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _scalars(row: dict) -> Iterator[tuple[str, float]]:
    """Yields (tag, number) of a row's values except the step and texts; a list has a tag for each number."""
    for name, value in row.items():
        if name == "step" or isinstance(value, str):
            continue
        if not isinstance(value, (list, tuple)):
            yield name, value
            continue
        for i, number in enumerate(value):
            yield f"{name}/{i:02d}", number
