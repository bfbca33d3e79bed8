"""Pool of the gateway's engines: which ones get requests, for which sessions, and with which weights.

A request goes to the engine of its session. An engine that fails, or that lacks the required weights, is removed, and its
sessions continue at other engines. Probes add it again when it is ready.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.rl.rollouts.engine_answers import (
    REQUEST_ERRORS,
    EngineReply,
    error_message,
    read_reply,
)
from glm5_jax.rl.rollouts.engine_connection import NO_RESPONSE, EngineConnections
from glm5_jax.rl.rollouts.open_session import OpenSession
from glm5_jax.rl.rollouts.router import SessionRouter, parse_rank
from glm5_jax.rl.rollouts.session_journal import SessionJournal
from glm5_jax.rl.rollouts.sessions import TurnPlan
from glm5_jax.rl.types import WeightVersion, check_lease, is_lease_ahead
from glm5_jax.runtime.http_server import ApiError

_log = logging.getLogger(__name__)


class EnginePool:
    """Engines of the gateway, and the weights that they must have.

    - router: router with all engines.
    - connections: HTTP client of the engines.
    - max_tries: maximum number of engines that are asked for a reply.
    - journal: where the required weights are stored; None: nowhere.

    Attributes:
      router: assignment of sessions to the available engines.
      required: weights of all engines that get requests; None: any.
    """

    def __init__(
        self,
        router: SessionRouter,
        connections: EngineConnections,
        *,
        max_tries: int,
        journal: SessionJournal | None,
    ):
        self.router, self._ranks = router, tuple(router.loads)
        self._connections, self._max_tries, self._journal = connections, max_tries, journal
        self.required = None if journal is None else journal.read_weights()
        # For each rank, the process in which the required weights were last seen.
        self._known_instances: dict[str, str | None] = {}
        self._refresh_lock = asyncio.Lock()

    async def generate(
        self, name: str, session: OpenSession, plan: TurnPlan, sampling: Mapping[str, Any]
    ) -> EngineReply:
        """Returns an engine's reply to the plan of the session `name`. Raises ApiError.

        An engine that does not respond, or has failed, is lost. The session then continues at another one, with the same
        seed. An engine that responds to probes is not lost by a reply that takes too long.
        """
        why = ""
        for _ in range(self._max_tries):
            # The router would add an ended session again, and nothing would release it.
            session.check_open(name)
            rank = self.router.route(name)
            url, number = parse_rank(rank)
            required, instance_before = self.required, self._known_instances.get(rank)
            body = {"input_ids": plan.ids, "sampling_params": sampling, "return_logprob": True}
            if number is not None:
                body["data_parallel_rank"] = number

            # Send the request, and check the response.
            try:
                call = self._connections.generate(url, body, name)
                status, response, instance = await session.call_engine(name, call)
                reply = read_reply(response) if status == 200 else None
            except NO_RESPONSE as error:
                is_late = isinstance(error, TimeoutError)
                if is_late and await self._is_ready(rank, required, strict=False):
                    # Another engine would not be faster, and this one serves other sessions.
                    raise ApiError(
                        f"{rank} responds, but has not ended the reply in time; lower max_tokens, or raise reply_timeout_s",
                        504,
                        "timeout",
                    ) from None
                status, response, instance, reply = 503, {}, None, None
                why = f"{rank} does not answer: {type(error).__name__} {error}"
            if reply is not None:
                if required is None:
                    return reply
                is_current = min(reply.meta_info.weight_versions) >= required.version
                if instance == instance_before and is_current:
                    return reply
                status = 503
                why = f"{rank} has restarted, or does not have the weights of version {required.version}"
            if status in REQUEST_ERRORS:
                message = error_message(response)
                code = "context_length_exceeded" if "token" in message else None
                raise ApiError(f"the engine refuses: {message}", 400, code)
            if status == 429:
                # Not the agent's fault, as a status of 400 would say, and the engine is not lost.
                raise ApiError(
                    f"{rank} is overloaded: {error_message(response)}", 429, "overloaded"
                )

            # Try another engine.
            why = why or f"{rank} has failed: {str(response)[:200]}"
            _log.warning("session %s: %s", name, why)
            if status != 200 and rank in self.router.loads:
                self._remove(rank)
        raise ApiError(
            f"no engine has answered, of {self._max_tries} tries; {why}", 502, "unavailable"
        )

    async def require_weights(self, weights: WeightVersion) -> None:
        """Requires these weights from now on, unless newer ones are required already.

        Removes engines that have others. Raises ApiError for an invalid lease.
        """
        try:
            check_lease(weights.lease, time.time())
        except ValueError as error:
            raise ApiError(str(error), param="lease") from None
        if self._is_required(weights):
            return  # without the lock, which a check of engines that hang holds for seconds
        async with self._refresh_lock:
            before = self.required
            if self._is_required(weights):
                return
            if self._journal is not None:
                self._journal.write_weights(weights)
            strict = before is None or weights.lease != before.lease
            await self._refresh(self._ranks, weights, strict)
            self.required = weights

    def _is_required(self, weights: WeightVersion) -> bool:
        """Returns whether these weights, or newer ones, are required already."""
        before = self.required
        if before is None or is_lease_ahead(before.lease, time.time()):
            return False
        return weights[:2] <= before[:2]

    async def check_restored_weights(self) -> None:
        """Removes engines without the weights that the journal requires, before the first request."""
        if self.required is not None:
            await self._refresh(self._ranks, self.required)

    async def probe_lost_engines(self, interval_s: float) -> None:
        """Adds lost engines again when they are ready, until it is cancelled. interval_s: time between two checks."""
        while True:
            await asyncio.sleep(interval_s)
            async with self._refresh_lock:
                lost = [rank for rank in self._ranks if rank not in self.router.loads]
                try:
                    await self._refresh(lost, self.required)
                except Exception:
                    # An invalid response of one engine must not keep the others lost.
                    _log.exception("lost engines cannot be checked")

    async def _refresh(
        self, ranks: Sequence[str], required: WeightVersion | None, strict: bool = False
    ) -> None:
        """Adds engines that are ready to the router, and removes others. strict: see `_is_ready`."""
        results = await asyncio.gather(*(self._is_ready(rank, required, strict) for rank in ranks))
        for rank, is_ready in zip(ranks, results):
            if is_ready and rank not in self.router.loads:
                _log.info("%s is available again", rank)
                self.router.add(rank)
            elif not is_ready and rank in self.router.loads:
                version = None if required is None else required.version
                _log.warning("%s does not have the weights of version %s", rank, version)
                self._remove(rank)

    def _remove(self, rank: str) -> None:
        self.router.remove(rank)
        self._known_instances.pop(rank, None)

    async def _is_ready(self, rank: str, required: WeightVersion | None, strict: bool) -> bool:
        """Returns whether an engine responds and has the required weights, or newer ones.

        Newer weights occur because weights are pushed before they are required. strict: accepts only the same weights,
        because those of another trainer, or those with which a new process started, may only seem newer.
        """
        url, _ = parse_rank(rank)
        if await self._connections.probe(f"{url}/health") is None:
            return False
        if required is None:
            return True
        state = await self._connections.probe(f"{url}/weights")
        if not isinstance(state, dict) or not isinstance(state.get("version"), int):
            return False
        version, instance = state["version"], state.get("instance")
        if version == required.version:
            is_ready = required.checksum in (None, state.get("checksum"))
        else:
            is_same_process = (
                rank in self._known_instances and self._known_instances[rank] == instance
            )
            is_ready = not strict and is_same_process and version > required.version
        if is_ready:
            self._known_instances[rank] = instance
        return is_ready
