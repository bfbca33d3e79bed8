"""Dispatcher of rollouts: runs a rollout at a task service, with retries if the environment fails.

One attempt opens a session at the gateway, sends the rollout to the service, and finishes the session. The gateway keeps
the token records and returns their summary. The result of a rollout is a `Trajectory`, without the records.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.orchestrator.fair_share import CLOSED, OPEN, CircuitBreaker, CircuitBreakerConfig
from glm5_jax.rl.orchestrator.staleness import GroupTicket
from glm5_jax.rl.orchestrator.task_registry import RegisteredService
from glm5_jax.rl.orchestrator.task_service import Outcome, RolloutRequest, outcome_from_json
from glm5_jax.rl.request_bodies import BeginSession, CancelRollout, EvaluateTasks, SetWeights
from glm5_jax.rl.rollouts.sessions import derive_seed
from glm5_jax.rl.trajectory import RecordSummary, Trajectory, summary_from_json
from glm5_jax.rl.types import Reward, WeightVersion, has_used_tools
from glm5_jax.runtime.json_body import JsonLimits

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Options of the dispatcher. Raises ValueError for values out of range.

    Attributes:
      max_tries: attempts at a rollout whose environment fails, with the same seed, before the rollout fails.
      retry_delay_s: time before another attempt, in seconds.
      gateway_timeout_s: time limit of the gateway for opening, finishing or deleting a session, in seconds.
      cancel_timeout_s: time a service has to acknowledge a cancellation, in seconds.
      weights_timeout_s: time limit of the gateway for checking which engines have new weights, in seconds.
      poll_interval_s: time between two checks whether a service has capacity for an evaluation, in seconds.
      cleanup_interval_s: time between two searches for sessions to delete, in seconds.
      response_grace_s: time a service has to respond after its own deadline, in seconds.
      max_response_bytes: size limit of a service's response, in bytes.
      max_response_values: maximum number of JSON values in a service's response.
      breaker: circuit breaker of the gateway.
    """

    max_tries: int = 2  # ours
    retry_delay_s: float = 1.0  # ours
    gateway_timeout_s: float = 60.0  # ours
    cancel_timeout_s: float = 5.0  # ours
    weights_timeout_s: float = 20.0  # ours: a gateway checks all engines at once, for 5 s each time
    poll_interval_s: float = 0.1  # ours
    cleanup_interval_s: float = 2.0  # ours
    response_grace_s: float = 15.0  # ours
    max_response_bytes: int = 2**23  # ours: 200,000 tokens are about a megabyte of text
    max_response_values: int = 20_000  # ours: a chat of 256 turns has some thousands
    breaker: CircuitBreakerConfig = CircuitBreakerConfig()

    def __post_init__(self):
        may_be_zero = ("retry_delay_s", "response_grace_s")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "breaker":
                continue
            if field.name in may_be_zero and not value >= 0:
                raise ValueError(f"{field.name} is {value}; it must not be negative")
            if field.name not in may_be_zero and not value > 0:
                raise ValueError(f"{field.name} is {value}; it must be positive")


class GatewayError(ServerError):
    """Raised if the gateway failed, and not the service."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AttemptResult:
    """Fields of a trajectory that one attempt determines."""

    reward: Reward
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    has_used_tools: bool = False
    summary: RecordSummary | None = None


class RolloutDispatcher:
    """Sends rollouts to task services, over sessions of the gateway at `url`.

    - client: HTTP client of the gateway, with the run's key.
    - services: HTTP client of the task services, without that key.
    - seed: seed of all rollouts.
    - clock: returns the time in seconds.
    - run_id: prefix of the names of all sessions of this orchestrator.
    - has_group: returns whether the records of a group's rollouts are still needed.

    Attributes:
      gateway: circuit breaker of the gateway.
      error: last error of the gateway; "" if there was none.
      weights: weights that the gateway's engines must have; None: any.
    """

    def __init__(
        self,
        client: JsonClient,
        services: JsonClient,
        url: str,
        *,
        seed: int,
        config: DispatcherConfig,
        clock: Callable[[], float],
        run_id: str,
        has_group: Callable[[str], bool],
        weights: WeightVersion | None = None,
    ):
        self._run_id, self._open_sessions = run_id, set[str]()
        self._has_group = has_group
        self._client, self._services = client, services
        self._url, self._seed = url.rstrip("/"), seed
        self._config, self._clock = config, clock
        self.weights = weights
        self.gateway, self.error = CircuitBreaker(config.breaker), ""
        self._num_evaluations = 0

    async def run_rollout(
        self,
        service: RegisteredService,
        group: GroupTicket,
        index: int,
        evaluation: EvaluateTasks | None = None,
    ) -> Trajectory:
        """Runs one rollout of a group, with retries if the environment fails.

        If all attempts fail, the trajectory holds only the error. Raises only when cancelled. index: index of the
        rollout in its group. evaluation: the evaluation that the rollout is part of; None: it is trained on.
        """
        start = self._clock()
        names = _attempt_names(group.group_id, index, self._config.max_tries)
        for name in names:
            request = RolloutRequest(
                rollout_id=name,
                group_id=group.group_id,
                number=group.number,
                held_out=evaluation is not None,
                base_url=f"{self._url}/sessions/{name}",
                seed=derive_seed(self._seed, group.order, group.tries, index),
            )
            error = ""
            try:
                result = await self._attempt_once(service, request, evaluation)
            except ServerError as failure:
                error = str(failure)
                result = _AttemptResult(reward=Reward(None, error=error))
                _log.info("rollout %s: %s", name, error)
                # Without a gateway no service works, so that the failure is not the service's.
                if not isinstance(failure, GatewayError) and self.gateway.state == CLOSED:
                    service.record_try(error, self._clock())
            except Exception as failure:
                # An unexpected error comes from this service too, and must not end the rollouts of others.
                error = f"{type(failure).__name__}: {failure}"
                result = _AttemptResult(reward=Reward(None, error=error))
                _log.warning("rollout %s", name, exc_info=failure)
                service.record_try(error, self._clock())
            else:
                service.record_try("", self._clock())
            if not error or name == names[-1]:
                break
            await asyncio.sleep(self._config.retry_delay_s)
            if service.is_lost or OPEN in (service.breaker.state, self.gateway.state):
                break
        trajectory = Trajectory(
            rollout_id=name,
            group_id=group.group_id,
            task=group.task,
            number=group.number,
            reward=result.reward,
            summary=result.summary,
            metrics=result.metrics,
            has_used_tools=result.has_used_tools,
            duration_s=self._clock() - start,
        )
        service.record_rollout(trajectory)
        return trajectory

    async def evaluate(self, service: RegisteredService, body: EvaluateTasks) -> dict[str, Any]:
        """Runs attempts at the first held-out tasks of a service, before its groups.

        Returns "reward", the mean reward or None; "count", the attempts with a reward; "failed", the attempts that
        failed or have not ended in time.
        """
        name, self._num_evaluations = service.spec.name, self._num_evaluations + 1
        evaluation = self._num_evaluations
        count = num_pending = min(body.count, service.spec.held_out) * body.group
        trajectories: list[Trajectory] = []

        async def run(attempt: int) -> None:
            number, index = divmod(attempt, body.group)
            # The seed of a held-out task is always the same, its session never is.
            group_id = f"{self._run_id}held-out-{name}-{number}-{evaluation}"
            group = GroupTicket(
                order=-1 - number, group_id=group_id, task=name, number=number, tries=0
            )
            trajectories.append(await self.run_rollout(service, group, index, body))

        def finish(_: asyncio.Task) -> None:
            service.in_flight -= 1

        service.num_evaluations += num_pending
        try:
            async with asyncio.timeout(body.timeout_s), asyncio.TaskGroup() as attempts:
                while num_pending and not service.is_lost:
                    if service.in_flight < service.spec.max_inflight:
                        task = attempts.create_task(run(count - num_pending))
                        task.add_done_callback(finish)
                        service.in_flight += 1
                        service.num_evaluations -= 1
                        num_pending -= 1
                    else:
                        await asyncio.sleep(self._config.poll_interval_s)
        except TimeoutError:
            _log.warning(
                "%d attempts at held-out tasks of %s are late", count - len(trajectories), name
            )
        finally:
            service.num_evaluations -= num_pending
        values = [t.reward.value for t in trajectories if not t.has_failed]
        rewards = [value for value in values if value is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        return {"reward": mean, "count": len(rewards), "failed": count - len(rewards)}

    async def require_weights(self, weights: WeightVersion) -> int:
        """Requires these weights from now on. A gateway that is down gets them with the next session.

        Returns the lease whose weights the gateway requires then, which is another if it knows a later one; that of these
        weights if the gateway does not respond.
        """
        self.weights = weights
        if self.gateway.state == CLOSED:
            try:
                timeout_s = self._config.weights_timeout_s
                body = SetWeights(**weights._asdict())
                response = await self._call_gateway("POST", "/weights", body, timeout_s)
                lease = response.get("lease") if isinstance(response, dict) else None
                return lease if isinstance(lease, int) else weights.lease
            except GatewayError as error:
                _log.warning("weights of version %d: %s", weights.version, error)
        return weights.lease

    async def delete_orphans(self) -> None:
        """Deletes sessions of this run that nothing needs any more, at intervals, until it is cancelled.

        - Finished sessions of groups that were trained on or dropped.
        - Sessions that the gateway did not delete because it was down, and those of an orchestrator with the same journal
          that was killed.
        """
        while True:
            try:
                response = await self._call_gateway("GET", "/sessions")
                # A session of the first list may have finished meanwhile, so that both have the same test.
                for name in (*response["sessions"], *response["finished"]):
                    if name.startswith(self._run_id) and not self._is_needed(name):
                        await self._delete_session(name)
            except (GatewayError, LookupError, TypeError, AttributeError) as error:
                _log.debug("sessions cannot be deleted: %s", error)
            await asyncio.sleep(self._config.cleanup_interval_s)

    def _is_needed(self, name: str) -> bool:
        """Returns whether a session has not ended, or has records of a group that is not yet trained on."""
        return name in self._open_sessions or self._has_group(_group_of_attempt(name))

    async def _attempt_once(
        self,
        service: RegisteredService,
        request: RolloutRequest,
        evaluation: EvaluateTasks | None,
    ) -> _AttemptResult:
        """Runs one attempt at a rollout. Raises ServerError if the environment failed."""
        name = request.rollout_id
        weights = None if self.weights is None else SetWeights(**self.weights._asdict())
        session = BeginSession(
            id=name,
            seed=request.seed,
            weights=weights,
            temperature=evaluation and evaluation.temperature,
            top_p=evaluation and evaluation.top_p,
        )
        self._open_sessions.add(name)
        is_finished = False
        try:
            await self._open_session(session)
            outcome = await self._call_service(service, request)
            if outcome.reward.value is None:
                raise ServerError(outcome.reward.error or "the environment failed")
            summary = await self._finish_session(name)
            if not summary.versions:
                raise ServerError(f"{service.spec.name} has sampled nothing in session {name}")
            is_finished = True
        finally:
            if is_finished and not request.held_out:
                self._open_sessions.discard(name)
            else:
                await self._delete_session(name)
        return _AttemptResult(
            reward=outcome.reward,
            metrics=outcome.metrics,
            has_used_tools=has_used_tools(outcome.messages),
            summary=summary,
        )

    async def _delete_session(self, name: str) -> None:
        """Ends a session without keeping its records. An error is ignored, because `delete_orphans` tries again."""
        try:
            await self._call_gateway("DELETE", f"/sessions/{name}")
        except GatewayError as error:
            _log.debug("session %s: %s", name, error)
        finally:
            self._open_sessions.discard(name)

    async def _finish_session(self, name: str) -> RecordSummary:
        """Ends a session, whose records the gateway keeps, and returns their summary. Raises GatewayError."""
        response = await self._call_gateway("POST", f"/sessions/{name}/finish")
        try:
            return summary_from_json(response)
        except ValueError as error:
            raise GatewayError(f"the summary of session {name} is none: {error}") from None

    async def _open_session(self, body: BeginSession) -> None:
        """Opens a session, and waits for the response even if it is cancelled.

        Otherwise the session could be opened after it was ended.
        """
        opening = asyncio.ensure_future(self._open_or_replace_session(body))
        try:
            await asyncio.shield(opening)
        finally:
            await asyncio.wait({opening})

    async def _open_or_replace_session(self, body: BeginSession) -> None:
        try:
            await self._call_gateway("POST", "/sessions", body)
        except GatewayError as error:
            if error.status != 409:
                raise
            # The session is that of an earlier orchestrator, which was killed.
            await self._call_gateway("DELETE", f"/sessions/{body.id}")
            await self._call_gateway("POST", "/sessions", body)

    async def _call_service(self, service: RegisteredService, request: RolloutRequest) -> Outcome:
        """Returns the outcome of a service. Raises ServerError for another response, and if the service is lost."""
        url, token = service.spec.url.rstrip("/"), service.spec.token
        call = asyncio.create_task(
            self._services.request(
                "POST",
                f"{url}/rollout",
                request,
                timeout_s=service.spec.rollout_timeout_s + self._config.response_grace_s,
                api_key=token,
                max_response_bytes=self._config.max_response_bytes,
                limits=JsonLimits(num_values=self._config.max_response_values),
            )
        )
        service.calls.add(call)
        try:
            await asyncio.wait({call})  # it has a time limit
            if call.cancelled():
                raise ServerError(f"{service.spec.name} is lost: {service.error}")
            return outcome_from_json(call.result())
        except ValueError as error:
            raise ServerError(str(error)) from None
        finally:
            service.calls.discard(call)
            has_responded = (
                call.done() and not call.cancelled() and _response_status(call) is not None
            )
            call.cancel()
            if not (has_responded or service.is_lost):
                # The service may not notice that the connection is closed.
                await self._cancel_rollout(url, request.rollout_id, token)

    async def _cancel_rollout(self, url: str, name: str, token: str | None) -> None:
        body, timeout_s = CancelRollout(rollout_id=name), self._config.cancel_timeout_s
        try:
            await self._services.request(
                "POST", f"{url}/cancel", body, timeout_s=timeout_s, api_key=token
            )
        except ServerError as error:
            _log.debug("cancel %s: %s", name, error)

    async def _call_gateway(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> Any:
        """Returns the response of the gateway. Raises GatewayError."""
        timeout_s = self._config.gateway_timeout_s if timeout_s is None else timeout_s
        try:
            response = await self._client.request(
                method, self._url + path, body, timeout_s=timeout_s
            )
        except ServerError as error:
            # Other 4xx responses still prove that the gateway is alive.
            if error.status is None or error.status >= 429:
                self.error = str(error)
                self.gateway.record_failure(self._clock())
            raise GatewayError(str(error), error.status) from None
        self.gateway.record_success()
        return response


def _attempt_names(group_id: str, index: int, max_tries: int) -> list[str]:
    """Returns the names of the attempts at a rollout, which are those of their sessions too."""
    first = f"{group_id}-{index}"
    return [first, *(f"{first}.{number}" for number in range(1, max_tries))]


def _group_of_attempt(name: str) -> str:
    """Returns the id of the group of an attempt with a name of `_attempt_names`."""
    return name.rpartition("-")[0]


def _response_status(call: asyncio.Task) -> int | None:
    """Returns the HTTP status of a call that has ended; None if there was no response."""
    error = call.exception()
    return 200 if error is None else getattr(error, "status", None)
