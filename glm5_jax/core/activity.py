"""What the programs of a run have in hand, moment by moment: the timeline of its report.

Each writes WORKDIR/activity/NAME.jsonl, a line every so many seconds, and whenever it begins or ends to have something:

    {"time": seconds since 1970, "pid": ..., "active": what it has in hand, 0 if it waits, "cpu": seconds of all its threads}
"""

import collections
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

FOLDER = "activity"
SECONDS = 0.5  # between two lines while nothing changes
LOOK = 0.02  # seconds between two looks whether something does: steps of small runs take a tenth of one


class Moment(NamedTuple):
    """A line; see above."""

    time: float
    pid: int
    active: int
    cpu: float


class Activity:
    """Writes a file of this process while it is open, a context manager; the file goes on if it is there.

    active: called in a thread of its own, at every look.
    """

    def __init__(self, path: str | os.PathLike, active: Callable[[], int]):
        self._path, self._active = pathlib.Path(path), active
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="activity", daemon=True)

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._ending.set()
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        busy, due = None, 0.0
        while True:
            active, now = int(self._active()), time.monotonic()
            if bool(active) != busy or now >= due:
                busy, due = bool(active), now + SECONDS
                own = Moment(time.time(), os.getpid(), active, time.process_time())
                self._file.write(json.dumps(own._asdict()) + "\n")
                self._file.flush()
            if self._ending.wait(LOOK):
                return


class Life(NamedTuple):
    """A process of a program. spans: from when to when it had something in hand, in seconds since 1970; busy: their share of
    its time; cpu: cores that it kept busy, on average."""

    name: str
    pid: int
    begin: float
    end: float
    spans: tuple[tuple[float, float], ...]
    busy: float
    cpu: float


def read_activity(workdir: str | os.PathLike, begin: float = 0.0) -> list[Life]:
    """The processes of all programs, by name and in the order of their starts; begin: what came before it is left out."""
    found = []
    for path in sorted((pathlib.Path(workdir) / FOLDER).glob("*.jsonl")):
        lives: dict[int, list[Moment]] = collections.defaultdict(list)
        for line in path.read_text().split("\n")[:-1]:  # not one that is being written
            own = Moment(**json.loads(line))
            if own.time >= begin:
                lives[own.pid].append(own)
        found += [_life(path.stem, own) for own in lives.values() if len(own) > 1]
    return found


def _life(name: str, moments: Sequence[Moment]) -> Life:
    spans: list[tuple[float, float]] = []
    busy = 0.0
    for one, next_one in zip(moments, moments[1:]):
        if not one.active:
            continue
        busy += next_one.time - one.time
        if spans and spans[-1][1] == one.time:
            spans[-1] = (spans[-1][0], next_one.time)
        else:
            spans.append((one.time, next_one.time))
    first, last = moments[0], moments[-1]
    seconds = last.time - first.time
    cpu = (last.cpu - first.cpu) / seconds
    return Life(name, first.pid, first.time, last.time, tuple(spans), busy / seconds, cpu)
