"""Registry of task services: which exist, whether they work, and which task's group is next.

`TaskRegistry` does no I/O and never waits. The orchestrator passes the time, in seconds from any origin.
"""

import asyncio
import collections
import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from msgspec import Meta

from glm5_jax.rl.orchestrator.fair_share import (
    CLOSED,
    CircuitBreaker,
    CircuitBreakerConfig,
    FairShare,
    FairShareConfig,
    TokenBucket,
    check_weight,
)
from glm5_jax.rl.trajectory import Trajectory
from glm5_jax.runtime.addresses import check_url
from glm5_jax.runtime.http_server import ApiError, truncate_text
from glm5_jax.runtime.json_structs import (
    Count,
    Integer,
    JsonStruct,
    Number,
    PositiveInteger,
    decode,
)

MAX_ERROR_LENGTH = 1000  # characters of a stored error message
SCHEMA = 2  # version of the protocol between task services and the orchestrator
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_AGGREGATES = ("mean", "reward")  # names of metrics over all tasks, in reports


def check_name(name: str) -> None:
    """Raises ValueError unless the name can be that of a task: it becomes part of ids, paths and metric names."""
    if name in _AGGREGATES:
        raise ValueError(f"name is {name!r}, which stands for all tasks in reports; use another")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name is {name[:200]!r}; use up to 64 letters, digits, dots, dashes and underscores"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """Options of the registry. Raises ValueError for values out of range.

    Attributes:
      heartbeat_timeout_s: time without a heartbeat after which a service is lost, in seconds.
      recent: number of rollouts in moving averages.
      fair_share: see `FairShareConfig`.
      breaker: circuit breaker of each service.
    """

    heartbeat_timeout_s: float = 15.0  # ours: five heartbeats of a `ServiceConfig`
    recent: int = 256
    fair_share: FairShareConfig = FairShareConfig()
    breaker: CircuitBreakerConfig = CircuitBreakerConfig()

    def __post_init__(self):
        for name in ("heartbeat_timeout_s", "recent"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class ServiceSpec(JsonStruct, kw_only=True, frozen=True):
    """Description that a service sends when it registers.

    Attributes:
      schema: version of the protocol, `SCHEMA`.
      name, url, weight, max_inflight, rollout_timeout_s, rate: see `task_service.ServiceConfig`.
      size, held_out: number of training tasks and of held-out tasks.
      instance: random id of the service's process.
      token: key that the service requires of the orchestrator; None: no key.
    """

    schema: Integer
    name: str
    url: str
    weight: Number
    size: PositiveInteger
    held_out: Count
    max_inflight: Integer
    rollout_timeout_s: Number
    rate: Number | None = None
    instance: Annotated[str, Meta(max_length=200)] = ""
    token: Annotated[str, Meta(max_length=200, pattern=r"^[!-~]+\Z")] | None = None

    def __repr__(self) -> str:
        """Returns a text without the token, for logs."""
        return f"ServiceSpec(name={self.name!r}, url={self.url!r})"


class RegisteredService:
    """State of a task service.

    Attributes:
      spec: description that the service sent last.
      bucket, breaker: rate limiter and circuit breaker of the service.
      last_heartbeat: time of the last heartbeat.
      is_lost: whether heartbeats have stopped for longer than the timeout.
      is_leaving: whether the service takes no more groups, because it shuts down.
      in_flight: running rollouts, evaluations included.
      num_evaluations: evaluations that wait for a place; they go before groups.
      groups: running groups.
      calls: running requests to the service; they are cancelled when the service is lost.
      counts: counts by the names in `COUNTS`.
      error: last error; "" if there was none.
    """

    def __init__(self, spec: ServiceSpec, config: RegistryConfig, now: float):
        self.breaker = CircuitBreaker(config.breaker)
        self.is_lost = self.is_leaving = False
        self.in_flight = self.num_evaluations = self.groups = 0
        self.calls: set[asyncio.Task] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.error = ""
        # Rewards and durations of the last rollouts.
        self._recent: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=config.recent
        )
        self.update(spec, now)

    def update(self, spec: ServiceSpec, now: float) -> None:
        """Replaces the description by the one that the service has just sent."""
        self.spec, self.last_heartbeat = spec, now
        self.bucket = TokenBucket(spec.rate)

    def blocked_reason(self, group: int, now: float) -> str:
        """Returns why the service can take no group of `group` rollouts; "" if it can."""
        if self.is_lost or self.is_leaving or self.breaker.wait(now):
            return self.state
        if self.in_flight + self.num_evaluations + group > self.spec.max_inflight:
            return "full"
        return "rate" if self.bucket.wait(now) else ""

    @property
    def state(self) -> str:
        """Returns the name of what is wrong: "lost", "leaving" or a state of the breaker; "" if nothing is."""
        if self.is_lost:
            return "lost"
        if self.is_leaving:
            return "leaving"
        return "" if self.breaker.state == CLOSED else self.breaker.state

    def record_try(self, error: str, now: float) -> None:
        """Records the end of one attempt at a rollout. error: "" after a success."""
        if error:
            self.error = truncate_text(error, MAX_ERROR_LENGTH)
            self.counts["failures"] += 1
            self.breaker.record_failure(now, self.in_flight)
        else:
            self.breaker.record_success()

    def trip_breaker(self, error: str, now: float) -> None:
        """Records that a full group could not be stored, and opens the breaker."""
        self.error = truncate_text(error, MAX_ERROR_LENGTH)
        self.counts["failures"] += 1
        self.breaker.trip(now)

    def record_rollout(self, trajectory: Trajectory) -> None:
        """Records the end of a rollout after all its attempts."""
        self.counts["rollouts"] += 1
        if trajectory.has_failed or trajectory.reward.value is None:
            self.counts["failed"] += 1
        else:
            self._recent.append((trajectory.reward.value, trajectory.duration_s))

    def status(self, group: int, now: float) -> dict[str, Any]:
        """Returns the state of the service as JSON, for people and reports. group: rollouts of a group."""
        rewards = [reward for reward, _ in self._recent]
        durations = [duration_s for _, duration_s in self._recent]
        spec = self.spec
        return {
            "state": self.state or self.blocked_reason(group, now) or "ok",
            "url": spec.url,
            "weight": spec.weight,
            "rate": spec.rate,
            "size": spec.size,
            "held_out": spec.held_out,
            "in_flight": self.in_flight,
            "max_inflight": spec.max_inflight,
            "groups": self.groups,
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "mean_duration_s": sum(durations) / len(durations) if durations else None,
            "heartbeat_age_s": now - self.last_heartbeat,
            "breaker": self.breaker.state,
            "error": self.error,
            **{name: self.counts[name] for name in COUNTS},
        }


# Counts of a service: rollouts that ended, those that failed in all attempts, failed attempts, groups by result.
COUNTS = ("rollouts", "failed", "failures", "accepted_groups", "dropped_groups", "cancelled_groups")


class TaskRegistry:
    """All task services by name, and the queue of their tasks.

    group: rollouts of a group.

    Attributes:
      services: services by name.
      num_drawn: number of task numbers drawn so far, by task. It includes tasks whose service is not registered.
    """

    def __init__(self, group: int, config: RegistryConfig = RegistryConfig()):
        self._group, self._config = group, config
        self._fair_share = FairShare(config.fair_share)
        self.services: dict[str, RegisteredService] = {}
        self.num_drawn: dict[str, int] = {}
        self._to_resample: dict[str, collections.deque[int]] = collections.defaultdict(
            collections.deque
        )

    def register(self, body: Mapping[str, Any], now: float) -> tuple[RegisteredService, bool]:
        """Registers or refreshes a task service.

        Returns the service, and whether its process has changed, so that its rollouts are lost. Raises ApiError for an
        invalid body, and if another service has the same name.
        """
        spec = self._parse_spec(body)
        service = self.services.get(spec.name)
        if service is None:
            service = self.services[spec.name] = RegisteredService(spec, self._config, now)
            self._fair_share.set(spec.name, spec.weight)
            return service, False
        if service.spec.url.rstrip("/") != spec.url.rstrip("/") and not service.is_lost:
            raise ApiError(
                f"the task {spec.name!r} is already served at {service.spec.url}, and {spec.url} cannot serve it too; "
                "give this service another name, or end the other",
                409,
                "registered",
                "url",
            )
        is_new_process = service.spec.instance != spec.instance
        service.update(spec, now)
        service.is_lost = service.is_leaving = False
        if is_new_process:
            service.breaker = CircuitBreaker(self._config.breaker)
        self._fair_share.set(spec.name, spec.weight)
        return service, is_new_process

    def heartbeat(self, name: str, instance: str, now: float) -> RegisteredService:
        """Records a heartbeat of a service. Raises ApiError (404) if the service must register first."""
        service = self.services.get(name)
        if service is None or service.is_lost or service.spec.instance != instance:
            raise ApiError(
                f"no service {name!r} of this instance is registered; register it",
                404,
                param="name",
            )
        service.last_heartbeat = now
        return service

    def leave(self, name: str) -> RegisteredService:
        """Stops new groups for a service, which is removed when its rollouts have ended. Raises ApiError (404)."""
        service = self.services.get(name)
        if service is None:
            names = ", ".join(sorted(self.services)) or "none"
            raise ApiError(f"no service {name!r} is registered; there are {names}", 404)
        service.is_leaving = True
        return service

    def expire(self, now: float) -> list[RegisteredService]:
        """Removes services that left and have no rollouts, and returns the services that are lost from now on."""
        for name in [
            name
            for name, service in self.services.items()
            if service.is_leaving and not (service.groups or service.in_flight)
        ]:
            del self.services[name]
            self._fair_share.remove(name)
        lost = []
        for service in self.services.values():
            age_s = now - service.last_heartbeat
            if not service.is_lost and age_s > self._config.heartbeat_timeout_s:
                service.is_lost = True
                service.error = f"no heartbeat for {age_s:.1f} s"
                lost.append(service)
        return lost

    def ready_tasks(self, now: float) -> list[str]:
        """Returns the names of the services that can take a group."""
        return [
            name
            for name, service in self.services.items()
            if not service.blocked_reason(self._group, now)
        ]

    def next_group(
        self, accepted: Mapping[str, int], ready: Collection[str]
    ) -> tuple[RegisteredService, int]:
        """Returns the service of the next group, one of the ready ones, and the number of its task.

        The caller reports the start with `start_group`. Raises ValueError if no ready service is registered.
        """
        name = self._fair_share.next_task(accepted, ready)
        if name is None:
            raise ValueError(
                f"none of the services {sorted(ready)} is registered; pass ready_tasks()"
            )
        service = self.services[name]
        if self._to_resample[name]:
            return service, self._to_resample[name].popleft()
        number = self.num_drawn.get(name, 0)
        self.num_drawn[name] = number + 1
        return service, number

    def resample(self, task: str, number: int) -> None:
        """Queues a task number that must be sampled again, before new ones."""
        self._to_resample[task].append(number)
        self.num_drawn[task] = max(self.num_drawn.get(task, 0), number + 1)

    def start_group(self, service: RegisteredService, now: float) -> None:
        """Records the start of a group at a service."""
        service.groups += 1
        service.in_flight += self._group
        service.bucket.take(now)
        service.breaker.start_trial(now)
        self._fair_share.start(service.spec.name, self._group)

    def finish_group(self, service: RegisteredService, is_accepted: bool | None) -> None:
        """Records the end of a group at a service. is_accepted: False if it was dropped; None if it was cancelled."""
        service.groups -= 1
        result = {True: "accepted", False: "dropped", None: "cancelled"}[is_accepted]
        service.counts[f"{result}_groups"] += 1
        self._fair_share.finish(service.spec.name, self._group, is_accepted)

    def blockers(self) -> list[str]:
        """Returns one line per task service that cannot take work. Services that leave are not among them."""
        return [
            f"the service of {name} is {service.state.replace('_', ' ')}: {service.error}"
            for name, service in self.services.items()
            if service.state and not service.is_leaving
        ]

    def status(self, accepted: Mapping[str, int], now: float) -> dict[str, dict[str, Any]]:
        """Returns the state of all services as JSON, for people and reports. accepted: trajectories by task."""
        shares = self._fair_share.status(accepted)
        return {
            name: {
                **service.status(self._group, now),
                **shares[name],
                "accepted": accepted.get(name, 0),
                "num_drawn": self.num_drawn.get(name, 0),
                "to_resample": len(self._to_resample[name]),
            }
            for name, service in self.services.items()
        }

    def _parse_spec(self, body: Mapping[str, Any]) -> ServiceSpec:
        """Returns the description in a request. Raises ApiError if a value is invalid."""
        spec = decode(body, ServiceSpec)
        if spec.schema != SCHEMA:
            raise ApiError(
                f"schema is {spec.schema} and this orchestrator speaks {SCHEMA}; use a service and an orchestrator of one "
                "release",
                param="schema",
            )
        try:
            check_name(spec.name)
            check_url("url", spec.url)
        except ValueError as error:
            raise ApiError(str(error), param=str(error).split()[0]) from None
        for name in ("weight", "rate", "rollout_timeout_s"):
            value = getattr(spec, name)
            if value is not None and not 0 < value < math.inf:
                raise ApiError(f"{name} is {value:g}; it must be positive and finite", param=name)
        try:
            check_weight(spec.weight)
        except ValueError as error:
            raise ApiError(str(error), param="weight") from None
        if spec.max_inflight < self._group:
            raise ApiError(
                f"max_inflight is {spec.max_inflight} and a group has {self._group} rollouts; raise it",
                param="max_inflight",
            )
        return spec
