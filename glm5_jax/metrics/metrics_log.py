"""Writes and reads the metrics of a run: `metrics.jsonl` and TensorBoard events of one workdir.

A row is a flat dict with a "step". Its other values are numbers, lists of numbers (one per layer) or text, which is not
written to TensorBoard. A step may have several rows. Resuming from a checkpoint drops the rows after its step, so
that no step is in the file twice.
"""

import contextlib
import errno
import json
import math
import os
import pathlib
import time
from typing import Self

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]: protobuf makes the class on import
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]: protobuf makes the class on import
)

_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends rows of metrics; a context manager.

    after: step of the checkpoint that the run resumes from. 0: the run starts from scratch, and all rows of an earlier run
    that saved nothing are dropped, its step 0 included.
    """

    def __init__(self, workdir: str | os.PathLike, after: int = 0):
        workdir = pathlib.Path(workdir)
        (workdir / "tensorboard").mkdir(parents=True, exist_ok=True)
        rows = [row for row in read(workdir) if after and row["step"] <= after]
        rewritten = workdir / f"{_FILE}.new"
        rewritten.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(rewritten, workdir / _FILE)
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
        for name, value in row.items():
            for tag, number in _tags(name, value):
                event = Event(summary=summary.scalar(tag, number), step=row["step"])
                event.wall_time = time.time()
                self._events.write_event(event)

    def flush(self) -> None:
        """Blocks until every row is on disk; call it before the checkpoint of their step."""
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        """Closes both files."""
        self._file.close()
        with contextlib.suppress(
            OSError
        ):  # the rows are on disk; only TensorBoard's copy may be incomplete
            self._events.close()


def read(workdir: str | os.PathLike) -> list[dict]:
    """Returns all rows of a workdir in the order of writing, without a last line that a kill cut off."""
    file = pathlib.Path(workdir) / _FILE
    if not file.exists():
        return []
    lines = file.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # text after the last newline is incomplete


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


def _tags(name: str, value):
    if name == "step" or isinstance(value, str):
        return
    if not isinstance(value, (list, tuple)):
        yield name, value
        return
    for i, number in enumerate(value):
        yield f"{name}/{i:02d}", number
