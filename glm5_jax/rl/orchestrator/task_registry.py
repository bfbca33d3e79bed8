"""Which task services there are, how each is doing, and whose group is next. Time is handed in; nothing here waits or
touches a socket (`orchestrator`)."""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from glm5_jax.rl.orchestrator.fair_share import (
    CLOSED,
    Breaker,
    BreakerConfig,
    Shares,
    SharesConfig,
    TokenBucket,
    check_weight,
)
from glm5_jax.rl.trajectory import Trajectory
from glm5_jax.runtime.http_server import ApiError, check_url, truncate_text
from glm5_jax.runtime.json_schema import object_schema, validate

MAX_ERROR = 1000  # characters of a service's error that are kept
SCHEMA = 1  # of what a service and the hub say to each other
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OF_ALL = ("mean", "reward")  # names of numbers over all tasks, in reports


def check_name(name: str) -> None:
    """ValueError unless it can name a task: it is part of ids, of paths and of the names of numbers in reports."""
    if name in _OF_ALL:
        raise ValueError(f"name is {name!r}, which stands for all tasks in reports; use another")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name is {name[:200]!r}; use up to 64 letters, digits, dots, dashes and underscores"
        )


@dataclasses.dataclass(frozen=True)
class RegistryConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      lost_after: seconds without a heartbeat.
      recent: rollouts that means are of.
    """

    lost_after: float = 15.0  # ours: five heartbeats of a `ServiceConfig`
    recent: int = 256
    shares: SharesConfig = SharesConfig()
    breaker: BreakerConfig = BreakerConfig()

    def __post_init__(self):
        for name in ("lost_after", "recent"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a service says of itself; `service.ServiceConfig` describes it.

    Attributes:
      instance: of the process that it is.
      token: key that it requires of the hub; None: none.
    """

    name: str
    url: str
    weight: float
    size: int
    held_out: int
    max_inflight: int
    seconds: float
    rate: float | None = None
    instance: str = ""
    token: str | None = dataclasses.field(default=None, repr=False)


class Service:
    """A service and how it is doing.

    Attributes:
      beat: when it was last heard of. lost: for longer than is allowed. leaving: it takes nothing more.
      in_flight: rollouts, those evaluated included; wanted: that are to be evaluated, before others; groups: that are on
        their way.
      calls: what is asked of it now, each cancelled when it is lost.
    """

    def __init__(self, spec: Spec, config: RegistryConfig, now: float):
        self.breaker = Breaker(config.breaker)
        self.lost = self.leaving = False
        self.in_flight = self.wanted = self.groups = 0
        self.calls: set[Any] = set()
        self.counts = collections.Counter()
        self.error = ""
        self._recent: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=config.recent
        )
        self.set(spec, now)

    def set(self, spec: Spec, now: float) -> None:
        """What it says of itself, now."""
        self.spec, self.beat = spec, now
        self.bucket = TokenBucket(spec.rate)

    def hindrance(self, group: int, now: float) -> str:
        """Why it can take no group of so many rollouts; "" if it can."""
        if self.lost or self.leaving or self.breaker.wait(now):
            return self.state
        if self.in_flight + self.wanted + group > self.spec.max_inflight:
            return "full"
        return "rate" if self.bucket.wait(now) else ""

    @property
    def state(self) -> str:
        """What is wrong with it; "" if nothing is."""
        if self.lost:
            return "lost"
        if self.leaving:
            return "leaving"
        return "" if self.breaker.state == CLOSED else self.breaker.state

    def tried(self, error: str, now: float) -> None:
        """A rollout has come, or failed for this reason."""
        if error:
            self.error = truncate_text(error, MAX_ERROR)
            self.counts["failures"] += 1
            self.breaker.failed(now, self.in_flight)
        else:
            self.breaker.succeeded()

    def broken(self, error: str, now: float) -> None:
        """Records that a whole group of it could not be kept, after which it gets no other for a while."""
        self.error = truncate_text(error, MAX_ERROR)
        self.counts["failures"] += 1
        self.breaker.trip(now)

    def ended(self, trajectory: Trajectory) -> None:
        """What became of a rollout, after all tries."""
        self.counts["rollouts"] += 1
        if trajectory.failed:
            self.counts["failed"] += 1
        else:
            self._recent.append((trajectory.reward.value, trajectory.seconds))

    def told(self, group: int, now: float) -> dict[str, Any]:
        """For people and reports."""
        rewards = [reward for reward, _ in self._recent]
        seconds = [taken for _, taken in self._recent]
        spec = self.spec
        return {
            "state": self.state or self.hindrance(group, now) or "ok",
            "url": spec.url,
            "weight": spec.weight,
            "rate": spec.rate,
            "size": spec.size,
            "held_out": spec.held_out,
            "in_flight": self.in_flight,
            "max_inflight": spec.max_inflight,
            "groups": self.groups,
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "seconds": sum(seconds) / len(seconds) if seconds else None,
            "heartbeat": now - self.beat,
            "breaker": self.breaker.state,
            "error": self.error,
            **{name: self.counts[name] for name in COUNTS},
        }


# Of a service: rollouts that ended, of which some failed after all tries; failures, of single tries; groups.
COUNTS = ("rollouts", "failed", "failures", "accepted_groups", "dropped_groups", "cancelled_groups")


class Registry:
    """All services, by name. group: rollouts of one."""

    def __init__(self, group: int, config: RegistryConfig = RegistryConfig()):
        self._group, self._config = group, config
        self._shares = Shares(config.shares)
        self.services: dict[str, Service] = {}
        # Of all tasks, also those whose service is not there: numbers so far, and those to be admitted again.
        self.drawn: dict[str, int] = {}
        self._again: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)

    def register(self, said: Mapping[str, Any], now: float) -> tuple[Service, bool]:
        """The service that says this of itself, and whether it is another process than before, whose rollouts are lost.
        ApiError."""
        spec = self._spec(said)
        own = self.services.get(spec.name)
        if own is None:
            own = self.services[spec.name] = Service(spec, self._config, now)
            self._shares.set(spec.name, spec.weight)
            return own, False
        if own.spec.url.rstrip("/") != spec.url.rstrip("/") and not own.lost:
            raise ApiError(
                f"the task {spec.name!r} is already served at {own.spec.url}, and {spec.url} cannot be it too; give this "
                "service another name, or end the other",
                409,
                "registered",
                "url",
            )
        other = own.spec.instance != spec.instance
        own.set(spec, now)
        own.lost = own.leaving = False
        if other:
            own.breaker = Breaker(self._config.breaker)
        self._shares.set(spec.name, spec.weight)
        return own, other

    def heartbeat(self, name: str, instance: str, now: float) -> Service:
        """A service is there. ApiError of 404 if it has to register (again)."""
        own = self.services.get(name)
        if own is None or own.lost or own.spec.instance != instance:
            raise ApiError(
                f"no service {name!r} of this instance is registered; register it",
                404,
                param="name",
            )
        own.beat = now
        return own

    def leave(self, name: str) -> Service:
        """A service takes nothing more; it is forgotten once its rollouts have ended. ApiError of 404."""
        own = self.services.get(name)
        if own is None:
            there = ", ".join(sorted(self.services)) or "none"
            raise ApiError(f"no service {name!r} is registered; there are {there}", 404)
        own.leaving = True
        return own

    def expire(self, now: float) -> list[Service]:
        """Those that are lost from now on; who has left, and has no rollout, is forgotten."""
        gone = [
            name
            for name, own in self.services.items()
            if own.leaving and not (own.groups or own.in_flight)
        ]
        for name in gone:
            del self.services[name]
            self._shares.remove(name)
        found = []
        for own in self.services.values():
            if not own.lost and now - own.beat > self._config.lost_after:
                own.lost = True
                own.error = f"no heartbeat for {now - own.beat:.1f} s"
                found.append(own)
        return found

    def ready(self, now: float) -> list[str]:
        """Who can take a group."""
        return [name for name, own in self.services.items() if not own.hindrance(self._group, now)]

    def next(self, accepted: Mapping[str, int], ready: Collection[str]) -> tuple[Service, int]:
        """Whose group is next of those that are ready, and the number of its task; `begun` says that it begins."""
        name = self._shares.next(accepted, ready)
        own = self.services[name]
        if self._again[name]:
            return own, self._again[name].popleft()
        number = self.drawn.get(name, 0)
        self.drawn[name] = number + 1
        return own, number

    def repeat(self, task: str, number: int) -> None:
        """A number is to be admitted again, before new ones."""
        self._again[task].append(number)
        self.drawn[task] = max(self.drawn.get(task, 0), number + 1)

    def begun(self, own: Service, now: float) -> None:
        """A group of it is on its way."""
        own.groups += 1
        own.in_flight += self._group
        own.bucket.take(now)
        own.breaker.begun(now)
        self._shares.begun(own.spec.name, self._group)

    def ended(self, own: Service, accepted: bool | None) -> None:
        """A group of it has come, and was accepted or dropped; None: it was cancelled."""
        own.groups -= 1
        kind = {True: "accepted", False: "dropped", None: "cancelled"}[accepted]
        own.counts[f"{kind}_groups"] += 1
        self._shares.ended(own.spec.name, self._group, accepted)

    def hindered(self) -> list[str]:
        """What is wrong with whom, in words."""
        return [
            f"the service of {name} is {own.state.replace('_', ' ')}: {own.error}"
            for name, own in self.services.items()
            if own.state and not own.leaving
        ]

    def told(self, accepted: Mapping[str, int], now: float) -> dict[str, dict[str, Any]]:
        """All of them, for people and reports."""
        shares = self._shares.told(accepted)
        return {
            name: {
                **own.told(self._group, now),
                **shares[name],
                "accepted": accepted.get(name, 0),
                "drawn": self.drawn.get(name, 0),
                "again": len(self._again[name]),
            }
            for name, own in self.services.items()
        }

    def _spec(self, said: Mapping[str, Any]) -> Spec:
        said = dict(validate(said, _SPEC))
        schema = said.pop("schema")
        if schema != SCHEMA:
            raise ApiError(
                f"schema is {schema} and this hub speaks {SCHEMA}; use a service and a hub of one release",
                param="schema",
            )
        spec = Spec(**said)
        try:
            check_name(spec.name)
            check_url("url", spec.url)
        except ValueError as error:
            raise ApiError(str(error), param=str(error).split()[0]) from None
        for name in ("weight", "rate", "seconds"):
            value = getattr(spec, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ApiError(f"{name} is {value}; it must be positive and finite", param=name)
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


_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_SPEC = object_schema(
    ("schema", "name", "url", "weight", "size", "held_out", "max_inflight", "seconds"),
    schema={},
    name=_TEXT,
    url=_TEXT,
    weight=_NUMBER,
    size={"type": "integer", "minimum": 1},
    held_out={"type": "integer", "minimum": 0},
    max_inflight={"type": "integer"},
    rate=_NUMBER,
    seconds=_NUMBER,
    instance=_TEXT | {"maxLength": 200},
    token=_TEXT | {"maxLength": 200, "pattern": "^[!-~]+$"},
)
