"""Shares rollout capacity among tasks: weighted fair queueing, rate limits and circuit breakers.

The next group is of the task with the largest deficit: the one with the fewest accepted and running trajectories for
its weight (deficit round-robin; GLM-5 4.1.1 says that ratios are controlled, but not how). Callers pass the time, in
seconds from any origin, so that tests and runs compute the same.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Collection, Mapping

import numpy as np

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6  # ours


@dataclasses.dataclass(frozen=True, kw_only=True)
class FairShareConfig:
    """Limits on how much a task may catch up. Raises ValueError for values out of range.

    Attributes:
      max_deficit: maximum deficit of a task, in trajectories. The rest is forfeited, so that a task that was away for
        hours, or is new, does not take the engines from all others.
      max_drops: consecutive dropped groups of a task that it may sample again. Further ones count as accepted, so that
        a task whose groups are never accepted uses its share of attempts, and does not reduce the other shares.
    """

    max_deficit: int = 256  # ours
    max_drops: int = 8  # ours

    def __post_init__(self):
        for name in ("max_deficit", "max_drops"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def check_weight(weight: float) -> None:
    """Raises ValueError for a weight that would overflow quotients of shares, or leave nothing to other tasks."""
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight is {weight}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")


@dataclasses.dataclass(kw_only=True)
class _TaskShare:
    """Share of one task.

    Attributes:
      weight: weight of the task, relative to the other weights.
      in_flight: running trajectories.
      forfeit: trajectories that count as accepted although they were not.
      drops: consecutive dropped groups.
    """

    weight: float
    in_flight: int = 0
    forfeit: float = 0.0
    drops: int = 0


class FairShare:
    """Weighted fair queue of tasks. The caller passes the accepted trajectories, which the group buffer counts."""

    def __init__(self, config: FairShareConfig = FairShareConfig()):
        self._config = config
        self._tasks: dict[str, _TaskShare] = {}

    def set(self, task: str, weight: float) -> None:
        """Adds a task, or changes its weight. Raises ValueError unless it is within `MIN_WEIGHT` and `MAX_WEIGHT`."""
        check_weight(weight)
        self._tasks.setdefault(task, _TaskShare(weight=weight)).weight = weight

    def remove(self, task: str) -> None:
        """Removes a task. Raises KeyError if there is no such task."""
        del self._tasks[task]

    def start(self, task: str, count: int) -> None:
        """Records the start of a group with `count` trajectories."""
        self._tasks[task].in_flight += count

    def finish(self, task: str, count: int, is_accepted: bool | None) -> None:
        """Records the end of a group. is_accepted: False if it was dropped; None if it was cancelled."""
        share = self._tasks.get(task)
        if share is None:
            return
        share.in_flight -= count
        if is_accepted is None:
            return  # a cancellation says nothing about the task
        share.drops = 0 if is_accepted else share.drops + 1
        if share.drops > self._config.max_drops:
            share.forfeit += count

    def next_task(self, accepted: Mapping[str, int], ready: Collection[str]) -> str | None:
        """Returns the ready task with the largest deficit, or None if no task is ready.

        Equal tasks are ordered by name, because their order of arrival is random.
        """
        if not self._tasks:
            return None
        counts = {name: self._count(name, accepted) for name in self._tasks}
        total_weight = sum(share.weight for share in self._tasks.values())
        level = sum(counts.values()) / total_weight
        for name, share in self._tasks.items():
            excess = share.weight * level - counts[name] - self._config.max_deficit
            if excess > 0:
                share.forfeit += excess
                counts[name] += excess
        candidates = sorted(name for name in self._tasks if name in ready)
        return min(
            candidates, key=lambda name: counts[name] / self._tasks[name].weight, default=None
        )

    def status(self, accepted: Mapping[str, int]) -> dict[str, dict[str, float]]:
        """Returns for each task its target share, its share of accepted trajectories, and its forfeit."""
        total_weight = sum(share.weight for share in self._tasks.values())
        count = sum(accepted.get(name, 0) for name in self._tasks)
        return {
            name: {
                "share": share.weight / total_weight,
                "accepted_share": accepted.get(name, 0) / max(count, 1),
                "forfeit": share.forfeit,
            }
            for name, share in self._tasks.items()
        }

    def _count(self, task: str, accepted: Mapping[str, int]) -> float:
        share = self._tasks[task]
        return accepted.get(task, 0) + share.in_flight + share.forfeit


class TokenBucket:
    """Rate limiter: `rate` operations per second on average, and up to `burst` at once after a pause.

    A rate of None does not limit.
    """

    def __init__(self, rate: float | None, burst: float = 1.0):
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"rate is {rate}; it must be positive and finite, or None for any")
        if not burst >= 1:
            raise ValueError(f"burst is {burst}; below 1 nothing would ever pass")
        self._rate, self._burst = rate, burst
        self._tokens, self._updated_at = burst, -math.inf

    def wait(self, now: float) -> float:
        """Returns the seconds until the next operation may start; 0: now."""
        if self._rate is None:
            return 0.0
        return max(0.0, (1 - self._refill(self._rate, now)) / self._rate)

    def take(self, now: float) -> None:
        """Records an operation, which `wait` has allowed."""
        if self._rate is not None:
            self._tokens, self._updated_at = self._refill(self._rate, now) - 1, now

    def _refill(self, rate: float, now: float) -> float:
        """Returns the tokens of this time."""
        if self._updated_at == -math.inf:
            return self._tokens
        return min(self._burst, self._tokens + rate * max(0.0, now - self._updated_at))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CircuitBreakerConfig:
    """Options of a circuit breaker. Raises ValueError for values out of range.

    Attributes:
      failure_threshold: consecutive failures that open the breaker, unless more requests than that are running, since
        failures return sooner than successes.
      reset_timeout_s: time until a trial request, in seconds.
    """

    failure_threshold: int = 8  # ours
    reset_timeout_s: float = 10.0  # ours

    def __post_init__(self):
        for name in ("failure_threshold", "reset_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class CircuitBreaker:
    """Stops requests to a server that fails.

    - CLOSED: requests pass.
    - OPEN, after consecutive failures: no request passes until the reset timeout.
    - HALF_OPEN: one trial request is running. Its success closes the breaker, its failure opens it again.

    Attributes:
      state: CLOSED, OPEN or HALF_OPEN.
    """

    def __init__(self, config: CircuitBreakerConfig = CircuitBreakerConfig()):
        self._config = config
        self._failures, self._until = 0, 0.0
        self.state = CLOSED

    def wait(self, now: float) -> float:
        """Returns the seconds until a request may start; 0: now."""
        return 0.0 if self.state == CLOSED else max(0.0, self._until - now)

    def start_trial(self, now: float) -> None:
        """Starts the trial request that `wait` allowed. No other one passes until it ends or times out."""
        if self.state != CLOSED:
            self.state, self._until = HALF_OPEN, now + self._config.reset_timeout_s

    def record_success(self) -> None:
        """Closes the breaker after a success, also of a request from before it opened."""
        self.state, self._failures = CLOSED, 0

    def record_failure(self, now: float, num_running: int = 0) -> None:
        """Records a failure, which may open the breaker. num_running: requests that may still succeed.

        Failures of requests from before it opened do not extend the reset timeout.
        """
        self._failures += 1
        is_enough = self._failures >= max(self._config.failure_threshold, num_running)
        if self.state == HALF_OPEN or (self.state == CLOSED and is_enough):
            self.trip(now)

    def trip(self, now: float) -> None:
        """Opens the breaker at once, whatever succeeded before."""
        self.state, self._until = OPEN, now + self._config.reset_timeout_s


@functools.lru_cache(16)  # a long permutation takes milliseconds, and several tasks alternate
def shuffled_indices(seed: int, name: str, epoch: int, length: int) -> np.ndarray:
    """Returns int[length]: the order of an epoch, different for each seed, name and epoch."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), epoch]).permutation(length)
