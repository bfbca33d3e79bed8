"""TITO gateway (token in, token out): agents chat in messages, engines read and write ids, samples are kept (GLM-5 4.1.2).

    gateway = Gateway(tokenizer, ["http://10.0.0.1:8000"], GatewayConfig(port=9000, journal="DIR"))
    asyncio.run(gateway.serve())

    POST   /sessions                              {id, seed, weights, temperature, top_p}: opens the session of a rollout
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
import functools
import logging
import pathlib
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from glm5_jax.inference.chat_options import refuse_constraints, thinking_of, tools_of
from glm5_jax.inference.request_bodies import ChatCompletionRequest
from glm5_jax.rl.request_bodies import BeginSession, SetWeights
from glm5_jax.rl.rollouts.chat_api import chat_response, sampling_of
from glm5_jax.rl.rollouts.engine_answers import EngineReply
from glm5_jax.rl.rollouts.engine_connection import EngineConnections
from glm5_jax.rl.rollouts.engine_pool import EnginePool
from glm5_jax.rl.rollouts.open_session import OpenSession
from glm5_jax.rl.rollouts.record_codec import digest_of, encode_records
from glm5_jax.rl.rollouts.record_store import RecordStore
from glm5_jax.rl.rollouts.router import NoRankError, RouterConfig, SessionRouter
from glm5_jax.rl.rollouts.session_journal import JournalError, SessionJournal
from glm5_jax.rl.rollouts.sessions import (
    Session,
    SessionConfig,
    SessionError,
    SessionStart,
    TurnPlan,
)
from glm5_jax.rl.trajectory import RecordSummary, summarize_records
from glm5_jax.rl.types import WeightVersion
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.http_server import ApiError, Handler, HttpServer, ListenConfig, json_response
from glm5_jax.runtime.json_structs import decode
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import Reply, parse_reply

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
EXPIRY_INTERVAL_S = 60.0  # between two searches for records that have expired
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewayConfig(ListenConfig):
    """Options of the gateway. Raises ValueError for values out of range.

    Attributes:
      temperature: temperature of all samples, which the learner must know; requests with another one are refused. Only a
        session whose samples are not trained on may begin with another one.
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
        self._tokenizer = tokenizer
        router = SessionRouter(ranks, config.router)
        self._sessions: dict[str, OpenSession] = {}
        self._locks = contextlib.ExitStack()
        self._journal = None
        if config.journal is not None:
            # Two gateways would overwrite each other's sessions.
            self._locks.enter_context(FolderLock(config.journal))
            self._journal = SessionJournal(config.journal)
        self._connections = EngineConnections(
            self.api_key,
            reply_timeout_s=config.reply_timeout_s,
            probe_timeout_s=config.probe_interval_s,
        )
        self._engines = EnginePool(
            router,
            self._connections,
            max_tries=config.max_tries,
            journal=self._journal,
        )
        self._records = RecordStore(
            None if config.journal is None else pathlib.Path(config.journal)
        )
        if self._journal is not None:
            self._restore_sessions(self._journal)

    def _restore_sessions(self, journal: SessionJournal) -> None:
        """Opens the sessions of an earlier process again."""
        for name, start, session, rank in journal.read(self._make_session):
            if name in self._records:
                journal.end(name)  # the last process was killed while it finished the session
            else:
                self._sessions[name] = OpenSession(session, start)
                self._engines.router.restore(name, rank)

    def _make_session(self, start: SessionStart) -> Session:
        return Session(self._tokenizer, self.config.session, start.seed)

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
            required = self._engines.required
            which = f" that has the weights of version {required.version}" if required else ""
            return ApiError(f"no engine{which} answers; ask again later", 502, "unavailable")
        return super().to_api_error(error)

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        with self._locks:
            async with self._connections:
                await self._engines.check_restored_weights()
                loops = [
                    asyncio.create_task(
                        self._engines.probe_lost_engines(self.config.probe_interval_s)
                    ),
                    asyncio.create_task(self._expire_records()),
                ]
                yield
                for task in loops:
                    task.cancel()
                await asyncio.wait(loops)

    # -- sessions ------------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: decode(body, BeginSession), empty=b"{}")
        if body.weights is not None:
            await self._engines.require_weights(_weight_version(body.weights))
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
        self._engines.router.route(name)
        start = SessionStart(
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            temperature=self.config.temperature if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
        )
        if self._journal is not None:
            try:
                self._journal.begin(name, start)
            except JournalError:
                self._engines.router.release(name)
                raise
        self._sessions[name] = OpenSession(self._make_session(start), start)
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
                "rank": self._engines.router.rank_by_session.get(name),
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
        self._engines.router.release(name)

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
        sampling = sampling_of(chat, session.start, self.config.max_tokens)
        options = tools_of(chat)
        refuse_constraints(chat, options)
        thinking, _ = thinking_of(chat)
        tools = options.shown
        plan = await session.plan(chat.messages, tools, thinking)
        sampling["sampling_seed"] = session.session.reply_seed(plan)
        self._active += 1
        try:
            reply = await self._engines.generate(name, session, plan, sampling)
            parse = functools.partial(
                parse_reply, reply.output_ids, tools, tokenizer=self._tokenizer, thinking=thinking
            )
            # In another thread, because 65,000 tokens take a sixth of a second, and other sessions must not wait.
            parsed = await asyncio.get_running_loop().run_in_executor(None, parse)
            async with session.lock:
                session.check_open(name)
                return json_response(self._add_reply(name, session, plan, reply, parsed))
        finally:
            session.pending_plans.remove(plan)
            self._active -= 1

    def _add_reply(
        self,
        name: str,
        session: OpenSession,
        plan: TurnPlan,
        reply: EngineReply,
        parsed: Reply,
    ) -> dict[str, Any]:
        """Adds a reply to its session, and returns it as a response of OpenAI's API."""
        meta = reply.meta_info
        turn = session.session.make_turn(
            plan,
            reply.output_ids,
            reply.logprobs,
            meta.weight_versions,
            meta.finish_reason.type,
            parsed.message,
        )
        # The turn is stored first in the journal, then in the session.
        if self._journal is not None:
            self._journal.add(name, turn, self._engines.router.rank_by_session.get(name))
        session.session.add(turn)
        session.cached_tokens += meta.cached_tokens
        session.prompt_tokens += len(plan.ids)
        num_turns = len(session.session.turns)
        return chat_response(name, num_turns, plan, reply, parsed, self.config.model)

    # -- engines -------------------------------------------------------------------------------------------

    async def _set_weights(self, request: web.Request) -> web.Response:
        body = await self.read_body(request, lambda body: decode(body, SetWeights))
        await self._engines.require_weights(_weight_version(body))
        required = self._engines.required
        return json_response({} if required is None else required._asdict())

    async def _health(self, request: web.Request) -> web.Response:
        """Reports the gateway's own health, not that of engines.

        Restarting it for lack of engines would end all sessions. Programs that push weights to engines may also wait for
        the gateway.
        """
        state = (
            "draining" if self._draining else "ok" if self._engines.router.loads else "no engine"
        )
        return json_response({"status": state}, 503 if self._draining else 200)

    async def _info(self, request: web.Request) -> web.Response:
        required = self._engines.required
        return json_response(
            {
                "sessions": len(self._sessions),
                "finished": len(self._records.rollout_ids),
                "active": self._active,
                "loads": self._engines.router.loads,
                "weights": required and required._asdict(),
            }
        )


def _weight_version(body: SetWeights) -> WeightVersion:
    return WeightVersion(body.lease, body.version, body.checksum)
