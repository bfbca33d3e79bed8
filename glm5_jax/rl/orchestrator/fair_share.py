"""Whose turn it is among tasks that are learnt together: shares of what is accepted, speeds, and who is left alone.

Of the tasks that can take a group the next is the one that is farthest behind its weight, in trajectories that were
accepted or are on their way (deficit round-robin; GLM-5 4.1.1 says that ratios are controlled, not how). Time is handed
in, in seconds from any beginning, so that all of it is the same in a test as in a run.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Collection, Mapping

import numpy as np

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6  # ours


@dataclasses.dataclass(frozen=True)
class SharesConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      most_behind: trajectories that a task may be behind its share and have made up for. One that was away for hours, or
        has just come, does not have the engines to itself.
      most_drops: groups of a task in a row that may be dropped and are made up for; further ones count as if they were
        accepted. A task of which nothing is ever accepted gets its share of the tries, and leaves the others theirs.
    """

    most_behind: int = 256  # ours
    most_drops: int = 8  # ours

    def __post_init__(self):
        for name in ("most_behind", "most_drops"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def check_weight(weight: float) -> None:
    """Raises ValueError for a weight with which quotients of shares would overflow, or leave all others nothing."""
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight is {weight}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")


@dataclasses.dataclass
class _Share:
    """weight: as it was given; in_flight: trajectories on their way; forfeited: that count as accepted, though they were
    not; drops: groups in a row."""

    weight: float
    in_flight: int = 0
    forfeited: float = 0.0
    drops: int = 0


class Shares:
    """Which task's group is next. What was accepted of each is handed in: the buffer knows."""

    def __init__(self, config: SharesConfig = SharesConfig()):
        self._config = config
        self._tasks: dict[str, _Share] = {}

    def set(self, task: str, weight: float) -> None:
        """A task is there, or has another weight. ValueError unless it is within `MIN_WEIGHT` and `MAX_WEIGHT`."""
        check_weight(weight)
        self._tasks.setdefault(task, _Share(weight)).weight = weight

    def remove(self, task: str) -> None:
        """A task is gone; KeyError if it was not there."""
        del self._tasks[task]

    def begun(self, task: str, count: int) -> None:
        """A group of so many trajectories is on its way."""
        self._tasks[task].in_flight += count

    def ended(self, task: str, count: int, accepted: bool | None) -> None:
        """The group has come, and was accepted or dropped; None: it was called off, which says nothing of the task."""
        own = self._tasks.get(task)
        if own is None:
            return
        own.in_flight -= count
        if accepted is None:
            return
        own.drops = 0 if accepted else own.drops + 1
        if own.drops > self._config.most_drops:
            own.forfeited += count

    def next(self, accepted: Mapping[str, int], ready: Collection[str]) -> str | None:
        """Of the tasks that are ready, the one that is next; None if none is. Of those equally far behind, the first by
        name: which came first is chance."""
        if not self._tasks:
            return None
        known = {name: self._counted(name, accepted) for name in self._tasks}
        whole = sum(own.weight for own in self._tasks.values())
        level = sum(known.values()) / whole
        for name, own in self._tasks.items():
            forfeit = own.weight * level - known[name] - self._config.most_behind
            if forfeit > 0:
                own.forfeited += forfeit
                known[name] += forfeit
        able = sorted(name for name in self._tasks if name in ready)
        return min(able, key=lambda name: known[name] / self._tasks[name].weight, default=None)

    def told(self, accepted: Mapping[str, int]) -> dict[str, dict[str, float]]:
        """Of each task, what its share should be and is, of what was accepted."""
        whole = sum(own.weight for own in self._tasks.values())
        count = sum(accepted.get(name, 0) for name in self._tasks)
        return {
            name: {
                "share": own.weight / whole,
                "accepted_share": accepted.get(name, 0) / max(count, 1),
                "forfeited": own.forfeited,
            }
            for name, own in self._tasks.items()
        }

    def _counted(self, task: str, accepted: Mapping[str, int]) -> float:
        own = self._tasks[task]
        return accepted.get(task, 0) + own.in_flight + own.forfeited


class TokenBucket:
    """So many per second on average; after a pause up to `burst` at once. rate None: any number."""

    def __init__(self, rate: float | None, burst: float = 1.0):
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise ValueError(f"rate is {rate}; it must be positive and finite, or None for any")
        if not burst >= 1:
            raise ValueError(f"burst is {burst}; below 1 nothing would ever pass")
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, -math.inf

    def wait(self, now: float) -> float:
        """Seconds until the next may pass; 0: it may."""
        if self._rate is None:
            return 0.0
        return max(0.0, (1 - self._filled(now)) / self._rate)

    def take(self, now: float) -> None:
        """One passes, which `wait` has allowed."""
        if self._rate is not None:
            self._left, self._at = self._filled(now) - 1, now

    def _filled(self, now: float) -> float:
        if self._at == -math.inf:
            return self._left
        return min(self._burst, self._left + self._rate * max(0.0, now - self._at))


@dataclasses.dataclass(frozen=True)
class BreakerConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      failures: in a row, after which nothing more is asked, if no more than so many are under way: what fails does so
        sooner than what works.
      seconds: until one is tried again.
    """

    failures: int = 8  # ours
    seconds: float = 10.0  # ours

    def __post_init__(self):
        for name in ("failures", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class Breaker:
    """Leaves alone what fails: closed while it works; open after so many failures in a row; then half open, for one try
    whose success closes it and whose failure opens it again.

    Attributes:
      state: CLOSED, OPEN or HALF_OPEN.
    """

    def __init__(self, config: BreakerConfig = BreakerConfig()):
        self._config = config
        self._failures, self._until = 0, 0.0
        self.state = CLOSED

    def wait(self, now: float) -> float:
        """Seconds until the next may be tried; 0: it may."""
        return 0.0 if self.state == CLOSED else max(0.0, self._until - now)

    def begun(self, now: float) -> None:
        """One is tried, which `wait` has allowed. While it is, no other: of one that is never heard of again, until as
        much time has gone by."""
        if self.state != CLOSED:
            self.state, self._until = HALF_OPEN, now + self._config.seconds

    def succeeded(self) -> None:
        """Something worked, whenever it began."""
        self.state, self._failures = CLOSED, 0

    def failed(self, now: float, under_way: int = 0) -> None:
        """Something did not, while so many others may. What began before it was opened keeps it open no longer."""
        self._failures += 1
        enough = self._failures >= max(self._config.failures, under_way)
        if self.state == HALF_OPEN or (self.state == CLOSED and enough):
            self.state, self._until = OPEN, now + self._config.seconds

    def trip(self, now: float) -> None:
        """Opens it at once, whatever worked before."""
        self.state, self._until = OPEN, now + self._config.seconds


@functools.lru_cache(16)  # a long one takes milliseconds, and tasks take turns
def shuffled(seed: int, name: str, epoch: int, length: int) -> np.ndarray:
    """int[length]: the order of an epoch, another for each seed, name and epoch."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), epoch]).permutation(length)
