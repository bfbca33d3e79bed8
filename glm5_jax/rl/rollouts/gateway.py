"""TITO gateway (token in, token out): agents chat in messages, engines read and write ids, samples are kept (GLM-5 4.1.2).

    gateway = Gateway(tokenizer, ["http://10.0.0.1:8000"], GatewayConfig(port=9000, journal="DIR"))
    asyncio.run(gateway.serve())

    POST   /sessions                              {id, seed, weights}: opens the session of a rollout
    POST   /sessions/ID/v1/chat/completions       OpenAI's chat API, for an agent that need not know the gateway
    GET    /sessions                              {"sessions": [ID], "finished": [ID]}: returns open and finished sessions
    GET    /sessions/ID                           returns numbers of the open session so far
    POST   /sessions/ID/finish                    ends the session, keeps its records, and returns their `RecordSummary`
    GET    /sessions/ID/records                   returns the records of all branches (`record_codec`)
    DELETE /sessions/ID                           ends the session, and deletes its records
    POST   /weights                               {lease, version, checksum}: requires these weights of all engines

A reply is written to the journal before it is stored and sent, and a reply that was not sent leaves no trace. A gateway
that was killed continues all its sessions, and an agent that repeats its request gets a reply. After weights are required,
engines with others get no requests: an engine that restarted, or that a push has not reached, is lost until it has them.

The records of a finished session stay here, in the journal's folder if there is one, until the trainer has fetched them
and the orchestrator deletes the session. Sessions that nobody deletes are deleted after `record_retention_s`.
"""

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from glm5_jax.inference.chat_options import refuse_constraints, thinking_of, tools_of
from glm5_jax.inference.client import INSTANCE
from glm5_jax.inference.request_bodies import ChatCompletionRequest
from glm5_jax.rl.request_bodies import BeginSession, SetWeights
from glm5_jax.rl.rollouts.engine_answers import (
    REQUEST_ERRORS,
    EngineReply,
    error_message,
    read_reply,
)
from glm5_jax.rl.rollouts.open_session import OpenSession
from glm5_jax.rl.rollouts.record_codec import digest_of, encode_records
from glm5_jax.rl.rollouts.record_store import RecordStore
from glm5_jax.rl.rollouts.router import NoRankError, RouterConfig, SessionRouter, parse_rank
from glm5_jax.rl.rollouts.session_journal import JournalError, SessionJournal
from glm5_jax.rl.rollouts.sessions import Session, SessionConfig, SessionError, TurnPlan
from glm5_jax.rl.trajectory import RecordSummary, summarize_records
from glm5_jax.rl.types import WeightVersion, check_lease, is_lease_ahead
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.http_server import ApiError, Handler, HttpServer, ListenConfig, json_response
from glm5_jax.runtime.json_structs import decode
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Fields of OpenAI's chat API that a session accepts; `Gateway._sampling` checks their values.
_FIELDS = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "model", "stream", "n"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "user", "metadata"),
    *("thinking", "chat_template_kwargs"),
)
EXPIRY_INTERVAL_S = 60.0  # between two searches for records that have expired
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewayConfig(ListenConfig):
    """Options of the gateway. Raises ValueError for values out of range.

    Attributes:
      temperature: temperature of all samples, which the learner must know; requests with another one are refused.
      max_tokens: maximum length of a reply, in tokens, if the request does not give one.
      reply_timeout_s: time limit of a reply from one engine, in seconds.
      max_tries: maximum number of engines that are asked for a reply.
      probe_interval_s: time between two checks of lost engines, and time limit of an engine's response, in seconds.
      max_sessions: maximum number of open sessions; more are refused with 429.
      record_retention_s: time after which the records of a finished session are deleted if nobody has deleted them, in
        seconds.
      journal: folder of the sessions, for the next gateway; None: no journal.
      model: name of the served model.
      session, router: options of the parts.
    """

    temperature: float = 1.0
    max_tokens: int = 65_536  # GLM-4.5 3.2; GLM-5's is not disclosed
    reply_timeout_s: float = 1800.0
    max_tries: int = 3
    probe_interval_s: float = 5.0
    max_sessions: int = 4096
    record_retention_s: float = 7 * 24 * 3600.0  # ours: a run may pause over a weekend
    journal: str | None = None
    model: str = "glm-5"
    session: SessionConfig = SessionConfig()
    router: RouterConfig = RouterConfig()

    def __post_init__(self):
        super().__post_init__()
        for name in (
            "temperature",
            "max_tokens",
            "reply_timeout_s",
            "max_tries",
            "probe_interval_s",
            "max_sessions",
            "record_retention_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class Gateway(HttpServer):
    """Server of sessions in front of engines. It sends engines its own API key.

    ranks: URLs of engines, each followed by @N if it is the rank N of several that share its URL.
    """

    config: GatewayConfig

    def __init__(
        self, tokenizer: Tokenizer, ranks: Sequence[str], config: GatewayConfig = GatewayConfig()
    ):
        super().__init__(config)
        if not ranks:
            raise ValueError("there is no engine; give the URL of at least one")
        for rank in ranks:
            if urlsplit(rank).scheme not in ("http", "https"):
                raise ValueError(
                    f"{rank!r} is no URL of an engine; give one such as http://HOST:8000"
                )
        self._tokenizer, self._ranks = tokenizer, tuple(ranks)
        self._router = SessionRouter(ranks, config.router)
        self._sessions: dict[str, OpenSession] = {}
        self._required: WeightVersion | None = None  # weights of all engines that get requests
        # For each rank, the process in which the required weights were last seen.
        self._known_instances: dict[str, str | None] = {}
        self._refresh_lock = asyncio.Lock()
        self._locks = contextlib.ExitStack()
        self._journal = None
        if config.journal is not None:
            # Two gateways would overwrite each other's sessions.
            self._locks.enter_context(FolderLock(config.journal))
            self._journal = SessionJournal(config.journal)
            self._required = self._journal.read_weights()
        self._records = RecordStore(
            None if config.journal is None else pathlib.Path(config.journal)
        )
        if self._journal is not None:
            for name, session, rank in self._journal.read(self._make_session):
                if name in self._records:
                    self._journal.end(
                        name
                    )  # the last process was killed while it finished the session
                else:
                    self._sessions[name] = OpenSession(session)
                    self._router.restore(name, rank)

    def _make_session(self, seed: int) -> Session:
        return Session(self._tokenizer, self.config.session, seed)

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "POST": {
                "/sessions": self._begin,
                "/sessions/{id}/v1/chat/completions": self._chat,
                "/sessions/{id}/finish": self._finish,
                "/weights": self._set_weights,
            },
            "GET": {
                "/sessions": self._list,
                "/sessions/{id}": self._describe,
                "/sessions/{id}/records": self._get_records,
                "/health": self._health,
                "/server_info": self._info,
            },
            "DELETE": {"/sessions/{id}": self._end},
        }

    def to_api_error(self, error: Exception) -> ApiError | None:
        if isinstance(error, SessionError):
            return ApiError(str(error), error.status)
        if isinstance(error, JournalError):
            _log.error("%s", error)
            return ApiError(str(error), 503, "unavailable")
        if isinstance(error, NoRankError):
            which = (
                f" that has the weights of version {self._required.version}"
                if self._required
                else ""
            )
            return ApiError(f"no engine{which} answers; ask again later", 502, "unavailable")
        return super().to_api_error(error)

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        client = aiohttp.ClientSession(headers=headers, connector=connector)
        with self._locks:
            async with client as self._client:
                if self._required is not None:
                    await self._refresh_engines(self._ranks, self._required)
                loops = [
                    asyncio.create_task(loop())
                    for loop in (self._probe_lost_engines, self._expire_records)
                ]
                yield
                for task in loops:
                    task.cancel()
                await asyncio.wait(loops)

    # -- sessions ------------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: decode(body, BeginSession), empty=b"{}")
        if body.weights is not None:
            await self._require_weights(_weight_version(body.weights))
        name = body.id or secrets.token_hex(16)
        if not _NAME.fullmatch(name):
            raise ApiError(
                f"id is {name[:200]!r}; use up to 128 letters, digits, dots, dashes and underscores",
                param="id",
            )
        if name in self._sessions or name in self._records:
            raise ApiError(f"there is a session {name!r} already; delete it first", 409, param="id")
        if len(self._sessions) >= self.config.max_sessions:
            raise ApiError(
                f"{self.config.max_sessions} sessions are open, which is the maximum; end one, or try again later",
                429,
                "overloaded",
            )
        self._router.route(name)
        seed = secrets.randbits(62) if body.seed is None else body.seed
        if self._journal is not None:
            try:
                self._journal.begin(name, seed)
            except JournalError:
                self._router.release(name)
                raise
        self._sessions[name] = OpenSession(self._make_session(seed))
        return json_response({"id": name})

    async def _list(self, request: web.Request) -> web.Response:
        return json_response(
            {"sessions": list(self._sessions), "finished": self._records.rollout_ids}
        )

    async def _describe(self, request: web.Request) -> web.Response:
        name, session = self._session_of(request)
        turns = session.session.turns
        return json_response(
            {
                "id": name,
                "rank": self._router.rank_by_session.get(name),
                "turns": len(turns),
                "kinds": [turn.kind for turn in turns],
                "tokens": [len(turn.output) for turn in turns],
                "finish_reasons": [turn.finish_reason for turn in turns],
                "cached_tokens": session.cached_tokens,
                "read_tokens": session.prompt_tokens,
            }
        )

    async def _finish(self, request: web.Request) -> web.Response:
        name, session = self._session_of(request)

        def encode() -> tuple[bytes, RecordSummary]:
            records = session.session.records()
            content = encode_records(records)
            return content, summarize_records(records, digest_of(content))

        async with session.lock:  # requests of other sessions continue meanwhile
            session.check_open(name)
            loop = asyncio.get_running_loop()
            content, summary = await loop.run_in_executor(None, encode)
            session.check_open(name)
            self._records.write(name, content)
            try:
                self._close(name, session)
            except JournalError:
                self._records.delete(name)
                raise
        return json_response(dataclasses.asdict(summary))

    async def _get_records(self, request: web.Request) -> web.Response:
        name, loop = request.match_info["id"], asyncio.get_running_loop()
        if name in self._records:
            content = await loop.run_in_executor(None, self._records.read, name)
            if content is None:
                raise ApiError(f"the records of session {name!r} are lost", 404)
        else:
            _, session = self._session_of(request)
            async with session.lock:
                content = await loop.run_in_executor(
                    None, lambda: encode_records(session.session.records())
                )
        return web.Response(body=content, content_type="application/msgpack")

    async def _end(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name in self._records:
            self._records.delete(name)
        else:
            self._close(*self._session_of(request))
        return json_response({"id": name, "deleted": True})

    def _close(self, name: str, session: OpenSession) -> None:
        """Ends an open session. Raises JournalError, and then changes nothing."""
        if self._journal is not None:
            self._journal.end(name)
        del self._sessions[name]
        session.end()
        self._router.release(name)

    async def _expire_records(self) -> None:
        """Deletes expired records at intervals, until it is cancelled."""
        while True:
            try:
                self._records.expire(self.config.record_retention_s)
            except JournalError as error:
                _log.warning("%s", error)
            await asyncio.sleep(EXPIRY_INTERVAL_S)

    def _session_of(self, request: web.Request) -> tuple[str, OpenSession]:
        name = request.match_info["id"]
        if name not in self._sessions:
            raise ApiError(f"there is no session {name!r}; it was never begun, or has ended", 404)
        return name, self._sessions[name]

    # -- replies -------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.Response:
        if self._draining:
            raise ApiError("the gateway is shutting down; use another gateway", 503, "unavailable")
        name, session = self._session_of(request)
        chat = await self.read_body(request, lambda body: decode(body, ChatCompletionRequest))
        sampling = self._sampling(chat)
        options = tools_of(chat)
        refuse_constraints(chat, options)
        thinking, _ = thinking_of(chat)
        tools = options.shown
        plan = await session.plan(chat.messages, tools, thinking)
        sampling["sampling_seed"] = session.session.reply_seed(plan)
        self._active += 1
        try:
            reply = await self._generate(name, session, plan, sampling)
            async with session.lock:
                session.check_open(name)
                return json_response(self._add_reply(name, session, plan, reply, tools, thinking))
        finally:
            session.pending_plans.remove(plan)
            self._active -= 1

    def _sampling(self, chat: ChatCompletionRequest) -> dict[str, Any]:
        """Returns the sampling parameters for `/generate`.

        Raises ApiError for a field or a value with which the samples could not be trained on as they were sampled.
        """
        config, fields = self.config, chat.non_default_fields()
        if unknown := [field for field in fields if field not in _FIELDS]:
            raise ApiError(f"sessions take no {unknown[0]}; leave it out", param=unknown[0])
        fixed = {"temperature": config.temperature, "top_p": 1, "n": 1, "stream": False}
        for field, value in fixed.items():
            if fields.get(field, value) != value:
                raise ApiError(
                    f"{field} is {fields[field]}; samples of this gateway have {value}, which is what is trained on: leave "
                    "it out",
                    param=field,
                )
        max_tokens = chat.max_completion_tokens or chat.max_tokens or config.max_tokens
        return {"temperature": config.temperature, "top_p": 1.0, "max_new_tokens": max_tokens}

    async def _generate(
        self, name: str, session: OpenSession, plan: TurnPlan, sampling: Mapping[str, Any]
    ) -> EngineReply:
        """Returns an engine's reply to a plan. Raises ApiError.

        An engine that does not respond, or has failed, is lost. The session then continues at another one, with the same
        seed.
        """
        why = ""
        for _ in range(self.config.max_tries):
            session.check_open(
                name
            )  # the router would add an ended session again, and nothing would release it
            rank = self._router.route(name)
            url, number = parse_rank(rank)
            required, instance_before = self._required, self._known_instances.get(rank)
            body = {"input_ids": plan.ids, "sampling_params": sampling, "return_logprob": True}
            if number is not None:
                body["data_parallel_rank"] = number

            # Send the request, and check the response.
            try:
                call = self._post(f"{url}/generate", body, name)
                status, response, instance = await session.call_engine(name, call)
                reply = read_reply(response) if status == 200 else None
            except _NO_RESPONSE as error:
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
            if status != 200 and rank in self._router.loads:
                self._remove_engine(rank)
        raise ApiError(
            f"no engine has answered, of {self.config.max_tries} tries; {why}", 502, "unavailable"
        )

    async def _post(self, url: str, body: Mapping, name: str) -> tuple[int, Any, str | None]:
        """Returns the status, the JSON body and the process id of an engine's response."""
        headers = {"X-SMG-Routing-Key": name}
        async with (
            asyncio.timeout(self.config.reply_timeout_s),
            self._client.post(url, json=body, headers=headers, timeout=_NO_TIMEOUT) as response,
        ):
            return response.status, await response.json(), response.headers.get(INSTANCE)

    def _add_reply(
        self,
        name: str,
        session: OpenSession,
        plan: TurnPlan,
        reply: EngineReply,
        tools: Sequence[Mapping] | None,
        thinking: bool,
    ) -> dict[str, Any]:
        """Adds a reply to its session, and returns it as a response of OpenAI's API."""
        # Parse the reply, and store its turn: first in the journal, then in the session.
        meta, ids = reply.meta_info, reply.output_ids
        reason = meta.finish_reason.type
        parsed = parse_reply(ids, tools, tokenizer=self._tokenizer, thinking=thinking)
        turn = session.session.make_turn(
            plan, ids, reply.logprobs, meta.weight_versions, reason, parsed.message
        )
        if self._journal is not None:
            self._journal.add(name, turn, self._router.rank_by_session.get(name))
        session.session.add(turn)
        session.cached_tokens += meta.cached_tokens
        session.prompt_tokens += len(plan.ids)

        # Encode it for the agent.
        count = len(session.session.turns)
        calls = [
            {"id": f"call_{count}_{i}", "type": "function", "function": call.function}
            for i, call in enumerate(parsed.tool_calls)
        ]
        message = parsed.message | ({"tool_calls": calls} if calls else {})
        if calls and reason == "stop" and not parsed.problem:
            reason = "tool_calls"
        return {
            "id": f"{name}-{count - 1}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.config.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": reason,
                    "logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": len(plan.ids),
                "completion_tokens": len(ids),
                "total_tokens": len(plan.ids) + len(ids),
                "prompt_tokens_details": {"cached_tokens": meta.cached_tokens},
            },
        }

    # -- engines -------------------------------------------------------------------------------------------

    async def _set_weights(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: decode(body, SetWeights))
        await self._require_weights(_weight_version(body))
        required = self._required
        return json_response({} if required is None else required._asdict())

    async def _require_weights(self, weights: WeightVersion) -> None:
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
            before = self._required
            if self._is_required(weights):
                return
            if self._journal is not None:
                self._journal.write_weights(weights)
            strict = before is None or weights.lease != before.lease
            await self._refresh_engines(self._ranks, weights, strict)
            self._required = weights

    def _is_required(self, weights: WeightVersion) -> bool:
        """Returns whether these weights, or newer ones, are required already."""
        before = self._required
        if before is None or is_lease_ahead(before.lease, time.time()):
            return False
        return weights[:2] <= before[:2]

    async def _probe_lost_engines(self) -> None:
        """Adds lost engines again when they are ready, until it is cancelled."""
        while True:
            await asyncio.sleep(self.config.probe_interval_s)
            async with self._refresh_lock:
                lost = [rank for rank in self._ranks if rank not in self._router.loads]
                try:
                    await self._refresh_engines(lost, self._required)
                except Exception:
                    # An invalid response of one engine must not keep the others lost.
                    _log.exception("lost engines cannot be checked")

    async def _refresh_engines(
        self, ranks: Sequence[str], required: WeightVersion | None, strict: bool = False
    ) -> None:
        """Adds engines that are ready to the router, and removes others. strict: see `_is_ready`."""
        results = await asyncio.gather(*(self._is_ready(rank, required, strict) for rank in ranks))
        for rank, is_ready in zip(ranks, results):
            if is_ready and rank not in self._router.loads:
                _log.info("%s is available again", rank)
                self._router.add(rank)
            elif not is_ready and rank in self._router.loads:
                version = None if required is None else required.version
                _log.warning("%s does not have the weights of version %s", rank, version)
                self._remove_engine(rank)

    def _remove_engine(self, rank: str) -> None:
        self._router.remove(rank)
        self._known_instances.pop(rank, None)

    async def _is_ready(self, rank: str, required: WeightVersion | None, strict: bool) -> bool:
        """Returns whether an engine responds and has the required weights, or newer ones.

        Newer weights occur because weights are pushed before they are required. strict: accepts only the same weights,
        because those of another trainer, or those with which a new process started, may only seem newer.
        """
        url, _ = parse_rank(rank)
        if await self._get(f"{url}/health") is None:
            return False
        if required is None:
            return True
        state = await self._get(f"{url}/weights")
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

    async def _get(self, url: str) -> Any:
        """Returns the JSON of an engine's response; None without a response in time, and for an error."""
        timeout = aiohttp.ClientTimeout(total=self.config.probe_interval_s)
        try:
            async with self._client.get(url, timeout=timeout) as response:
                return await response.json() if response.status == 200 else None
        except _NO_RESPONSE:
            return None

    async def _health(self, request: web.Request) -> web.Response:
        """Reports the gateway's own health, not that of engines.

        Restarting it for lack of engines would end all sessions. Programs that push weights to engines may also wait for
        the gateway.
        """
        state = "draining" if self._draining else "ok" if self._router.loads else "no engine"
        return json_response({"status": state}, 503 if self._draining else 200)

    async def _info(self, request: web.Request) -> web.Response:
        return json_response(
            {
                "sessions": len(self._sessions),
                "finished": len(self._records.rollout_ids),
                "active": self._active,
                "loads": self._router.loads,
                "weights": self._required and self._required._asdict(),
            }
        )


# Errors of an engine that does not respond, or whose response is not JSON or is nested too deeply.
_NO_RESPONSE = (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError)
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # `GatewayConfig.reply_timeout_s` is the limit


def _weight_version(body: SetWeights) -> WeightVersion:
    return WeightVersion(body.lease, body.version, body.checksum)
