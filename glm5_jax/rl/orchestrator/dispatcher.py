"""A rollout at a task service, from its session at the gateway to its trajectory, and again if the environment fails."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.orchestrator.fair_share import CLOSED, OPEN, Breaker, BreakerConfig
from glm5_jax.rl.orchestrator.staleness import Admitted
from glm5_jax.rl.orchestrator.task_registry import Service
from glm5_jax.rl.orchestrator.task_service import Outcome, outcome
from glm5_jax.rl.rollouts.sessions import seed_of
from glm5_jax.rl.trajectory import Trajectory, heard
from glm5_jax.rl.types import Reward, Weights
from glm5_jax.runtime.json_body import JsonLimits

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      tries: of a rollout whose environment fails, before it counts as failed; the seed is the same.
      again_after: seconds before another try.
      call_seconds: that the gateway may take for a session or its samples.
      cancel_seconds: that a service may take to see that it is called off.
      look_seconds: that the gateway may take to see which engines have new weights.
      look: seconds between two looks whether a service has room for an evaluation.
      sweep_seconds: between two looks for sessions that were left behind.
      slack: seconds beyond its own deadline that a service may take to answer.
      max_answer_bytes: size of a service's answer, in bytes.
      max_answer_values: values of JSON in a service's answer.
      breaker: of the gateway.
    """

    tries: int = 2  # ours
    again_after: float = 1.0  # ours
    call_seconds: float = 60.0  # ours: samples of long rollouts are megabytes
    cancel_seconds: float = 5.0  # ours
    look_seconds: float = 20.0  # ours: a gateway looks at all at once, for 5 s each time
    look: float = 0.1  # ours
    sweep_seconds: float = 2.0  # ours
    slack: float = 15.0  # ours
    max_answer_bytes: int = 2**23  # ours: 200,000 tokens are about a megabyte of text
    max_answer_values: int = 20_000  # ours: a chat of 256 turns has some thousands
    breaker: BreakerConfig = BreakerConfig()

    def __post_init__(self):
        own = "tries", "call_seconds", "cancel_seconds", "look_seconds", "look", "sweep_seconds"
        for name in (*own, "max_answer_bytes", "max_answer_values"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("again_after", "slack"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


class GatewayError(ServerError):
    """The gateway failed, not the service."""


class Remote:
    """Has services attempt their tasks over the gateway at `url`.

    Attributes:
      gateway: whether that works.
      error: what was last wrong with it.
      weights: that the gateway's engines must have; None: any.
    """

    weights: Weights | None = None

    def __init__(
        self,
        client: JsonClient,
        services: JsonClient,
        url: str,
        seed: int,
        config: RemoteConfig,
        clock: Callable[[], float],
        life: str,
    ):
        """client: of the gateway. services: client of the task services, which has no key. life: with which the names
        of all sessions begin that are this hub's."""
        self._life, self._under_way = life, set[str]()
        self._client, self._services = client, services
        self._url, self._seed = url.rstrip("/"), seed
        self._config, self._clock = config, clock
        self.gateway, self.error = Breaker(config.breaker), ""
        self._examinations = 0

    async def rollout(
        self, service: Service, group: Admitted, place: int, *, held_out: bool = False
    ) -> Trajectory:
        """The attempt at a place in its group; of one whose environment failed in all tries, only why. Nothing but its
        cancellation raises."""
        began = self._clock()
        own = {"group_id": group.group_id, "task": group.task, "number": group.number}
        for name in (names := _names(group.group_id, place, self._config.tries)):
            asked = {
                "rollout_id": name,
                "group_id": group.group_id,
                "number": group.number,
                "held_out": held_out,
                "base_url": f"{self._url}/sessions/{name}",
                "seed": seed_of(self._seed, group.order, group.tries, place),
            }
            error = ""
            try:
                found = await self._tried(service, asked)
            except ServerError as failure:
                error = str(failure)
                found = {"messages": (), "reward": Reward(None, error=error)}
                _log.info("rollout %s: %s", name, error)
                # Without a gateway no service works.
                if not isinstance(failure, GatewayError) and self.gateway.state == CLOSED:
                    service.tried(error, self._clock())
            except Exception as failure:
                # What nobody foresaw came from this service too, and must not end the rollouts of others.
                error = f"{type(failure).__name__}: {failure}"
                found = {"messages": (), "reward": Reward(None, error=error)}
                _log.warning("rollout %s", name, exc_info=failure)
                service.tried(error, self._clock())
            else:
                service.tried("", self._clock())
            if not error or name == names[-1]:
                break
            await asyncio.sleep(self._config.again_after)
            if service.lost or OPEN in (service.breaker.state, self.gateway.state):
                break
        seconds = self._clock() - began
        ended = Trajectory(**own, rollout_id=name, seconds=seconds, **found)
        service.ended(ended)
        return ended

    async def examine(self, service: Service, count: int, seconds: float) -> dict[str, Any]:
        """What becomes of attempts at a service's first held-out tasks, which go before others: the mean reward, None if
        there is none; the count of attempts that have one, and of those that failed or have not ended in time."""
        name, self._examinations = service.spec.name, self._examinations + 1
        mark = self._examinations
        count = wanted = min(count, service.spec.held_out)
        found: list[Trajectory] = []

        async def one(number: int) -> None:
            # Of what is held out always the same seed, and never the same session.
            group_id = f"{self._life}held-out-{name}-{number}-{mark}"
            group = Admitted(-1 - number, group_id, name, number, 0)
            found.append(await self.rollout(service, group, 0, held_out=True))

        def ended(_: asyncio.Task) -> None:
            service.in_flight -= 1

        service.wanted += wanted
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as attempts:
                while wanted and not service.lost:
                    if service.in_flight < service.spec.max_inflight:
                        attempts.create_task(one(count - wanted)).add_done_callback(ended)
                        service.in_flight += 1
                        service.wanted, wanted = service.wanted - 1, wanted - 1
                    else:
                        await asyncio.sleep(self._config.look)
        except TimeoutError:
            _log.warning("%d attempts at held-out tasks of %s are late", count - len(found), name)
        finally:
            service.wanted -= wanted
        rewards = [own.reward.value for own in found if not own.failed]
        mean = sum(rewards) / len(rewards) if rewards else None
        return {"reward": mean, "count": len(rewards), "failed": count - len(rewards)}

    async def want(self, weights: Weights) -> None:
        """From now on engines must have these. A gateway that is down is told with the next session."""
        self.weights = weights
        if self.gateway.state == CLOSED:
            try:
                limit = self._config.look_seconds
                await self._at_gateway("POST", "/weights", weights._asdict(), limit)
            except GatewayError as error:
                _log.warning("weights of version %d: %s", weights.version, error)

    async def sweep(self) -> None:
        """Ends sessions of this hub that it knows nothing of: whose gateway was down when they should have ended, or that a
        hub before it left, which had the same journal and was killed."""
        while True:
            try:
                found = await self._at_gateway("GET", "/sessions")
                for name in found["sessions"]:
                    if name.startswith(self._life) and name not in self._under_way:
                        _log.info("session %s was left behind", name)
                        await self._at_gateway("DELETE", f"/sessions/{name}")
            except (GatewayError, LookupError, TypeError, AttributeError) as error:
                _log.debug("sessions are not looked at: %s", error)
            await asyncio.sleep(self._config.sweep_seconds)

    async def _tried(self, service: Service, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What is in a trajectory of one try. ServerError if the environment failed."""
        name = asked["rollout_id"]
        begin = {"id": name, "seed": asked["seed"]}
        if self.weights is not None:
            begin["weights"] = self.weights._asdict()
        self._under_way.add(name)
        try:
            await self._opened(begin)
            said = await self._asked(service, asked)
            if said.reward.value is None:
                raise ServerError(said.reward.error or "the environment failed")
            records = await self._samples(name, asked["group_id"])
        finally:
            await self._end(name)
        if not any(record.loss_mask.any() for record in records):
            raise ServerError(f"{service.spec.name} has sampled nothing in session {name}")
        return {
            "messages": said.messages,
            "reward": said.reward,
            "metrics": said.metrics,
            "records": records,
        }

    async def _end(self, name: str) -> None:
        """Ends a session, if there is one and the gateway is not down."""
        try:
            await self._at_gateway("DELETE", f"/sessions/{name}")
        except GatewayError as error:
            _log.debug("session %s: %s", name, error)
        finally:
            self._under_way.discard(name)

    async def _samples(self, name: str, group_id: str) -> tuple[TokenRecord, ...]:
        """What was sampled in a session. GatewayError."""
        told = await self._at_gateway("POST", f"/sessions/{name}/samples")
        try:
            return tuple(
                heard(record, rollout_id=name, group_id=group_id) for record in told["records"]
            )
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise GatewayError(f"the samples of session {name} are none: {error}") from None

    async def _opened(self, begin: Mapping[str, Any]) -> None:
        """As `_open`; who cancels it waits for its end, or the session might begin once it has been ended."""
        opening = asyncio.ensure_future(self._open(begin))
        try:
            await asyncio.shield(opening)
        finally:
            await asyncio.wait({opening})

    async def _open(self, begin: Mapping[str, Any]) -> None:
        try:
            await self._at_gateway("POST", "/sessions", begin)
        except GatewayError as error:
            if error.status != 409:
                raise
            # Of a hub before this one, which was killed.
            await self._at_gateway("DELETE", f"/sessions/{begin['id']}")
            await self._at_gateway("POST", "/sessions", begin)

    async def _asked(self, service: Service, asked: Mapping[str, Any]) -> Outcome:
        """The service's answer. ServerError for what is none, and once the service is lost."""
        limit = service.spec.seconds + self._config.slack
        url = service.spec.url.rstrip("/")
        bounds = dict(
            most_bytes=self._config.max_answer_bytes,
            limits=JsonLimits(num_values=self._config.max_answer_values),
        )
        token = service.spec.token
        call = asyncio.create_task(
            self._services.ask(
                "POST", f"{url}/rollout", dict(asked), seconds=limit, api_key=token, **bounds
            )
        )
        service.calls.add(call)
        try:
            await asyncio.wait({call})  # which has its own limit
            if call.cancelled():
                raise ServerError(f"{service.spec.name} is lost: {service.error}")
            return outcome(call.result())
        except ValueError as error:
            raise ServerError(str(error)) from None
        finally:
            service.calls.discard(call)
            heard_of = call.done() and not call.cancelled() and _status(call) is not None
            call.cancel()
            if not (heard_of or service.lost):
                # One that does not see that nobody listens any more.
                await self._call_off(url, asked["rollout_id"], token)

    async def _call_off(self, url: str, name: str, token: str | None) -> None:
        body, limit = {"rollout_id": name}, self._config.cancel_seconds
        try:
            await self._services.ask("POST", f"{url}/cancel", body, seconds=limit, api_key=token)
        except ServerError as error:
            _log.debug("cancel %s: %s", name, error)

    async def _at_gateway(
        self, method: str, path: str, body: Any = None, seconds: float | None = None
    ) -> Any:
        """Its answer. GatewayError."""
        seconds = self._config.call_seconds if seconds is None else seconds
        try:
            found = await self._client.ask(method, self._url + path, body, seconds=seconds)
        except ServerError as error:
            # What it refuses it has at least answered.
            if error.status is None or error.status >= 429:
                self.error = str(error)
                self.gateway.failed(self._clock())
            raise GatewayError(str(error), error.status) from None
        self.gateway.succeeded()
        return found


def _names(group_id: str, place: int, tries: int) -> list[str]:
    """Of the tries of a rollout, and of their sessions."""
    first = f"{group_id}-{place}"
    return [first, *(f"{first}.{number}" for number in range(1, tries))]


def _status(call: asyncio.Task) -> int | None:
    """Of HTTP, of what is done; None if there was no answer."""
    error = call.exception()
    return 200 if error is None else getattr(error, "status", None)
