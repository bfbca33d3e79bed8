"""The TITO gateway: agents chat in messages, engines read and write token ids, and what was sampled is kept (GLM-5 4.1.2).

    gateway = Gateway(tokenizer, ["http://10.0.0.1:8000"], GatewayConfig(port=9000, journal="DIR"))
    asyncio.run(gateway.serve())

    POST   /sessions                              {id, seed, weights}: begins a rollout
    POST   /sessions/ID/v1/chat/completions       OpenAI's API, for an agent that knows nothing of all this
    GET    /sessions                              {"sessions": [ID]}: that have begun and not ended
    GET    /sessions/ID                           what has been said so far, in numbers
    POST   /sessions/ID/samples                   records of all branches
    DELETE /sessions/ID                           ends it
    POST   /weights                               {lease, version, checksum}: what engines must hold from now on

A reply is written to the journal before it is kept and told, and what was not told left nothing behind: a gateway that is
killed goes on with all its sessions, an agent that asks again is answered again. Once it has been told which weights are sampled
from, engines with others serve nobody: one that was started anew, or that a push has not reached, is lost until it has
them.
"""

import asyncio
import contextlib
import dataclasses
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from glm5_jax.inference.client import INSTANCE
from glm5_jax.inference.protocol import CHAT, thinking_of, tools_of
from glm5_jax.rl import request_schemas
from glm5_jax.rl.rollouts.engine_answers import REFUSED, check_generated, error_message
from glm5_jax.rl.rollouts.open_session import OpenSession
from glm5_jax.rl.rollouts.router import NoRank, Router, RouterConfig, parse_rank
from glm5_jax.rl.rollouts.session_journal import JournalError, SessionJournal
from glm5_jax.rl.rollouts.sessions import Plan, Session, SessionConfig, SessionError
from glm5_jax.rl.trajectory import told
from glm5_jax.rl.types import Weights, check_lease, is_ahead
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.http_server import ApiError, Handler, HttpServer, ListenConfig, json_response
from glm5_jax.runtime.json_pieces import encode_in_pieces
from glm5_jax.runtime.json_schema import validate
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Of OpenAI's API what a session has a say in; `Gateway._sampling` says what they may be.
_TAKEN = (
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "model", "stream", "n"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "user", "metadata"),
    *("thinking", "chat_template_kwargs"),
)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GatewayConfig(ListenConfig):
    """Construction refuses values out of range (ValueError).

    Attributes:
      temperature: of all samples, which the learner must know; requests that say another are refused.
      max_tokens: of a reply that is not asked for with fewer.
      seconds: that a reply may take, from one engine.
      tries: engines that are asked for a reply, at most.
      probe_seconds: between two looks whether a lost engine is there again, and that it has to answer one.
      max_sessions: at once; more are refused with 429.
      journal: folder with what has been said, for the next gateway; None: none.
      model: the name of what is served.
    """

    temperature: float = 1.0
    max_tokens: int = 65_536  # GLM-4.5 3.2; GLM-5's is not disclosed
    seconds: float = 1800.0
    tries: int = 3
    probe_seconds: float = 5.0
    max_sessions: int = 4096
    journal: str | None = None
    model: str = "glm-5"
    session: SessionConfig = SessionConfig()
    router: RouterConfig = RouterConfig()

    def __post_init__(self):
        super().__post_init__()
        for name in (
            "temperature",
            "max_tokens",
            "seconds",
            "tries",
            "probe_seconds",
            "max_sessions",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class Gateway(HttpServer):
    """Sessions in front of engines, to which it sends its own API key.

    ranks: URLs of engines, each followed by @N if it is the rank N of several that share its URL.
    """

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
        self._router = Router(ranks, config.router)
        self._sessions: dict[str, OpenSession] = {}
        self._wanted: Weights | None = None  # of all engines that serve
        self._seen: dict[str, str | None] = {}  # the processes that were seen to have them, by rank
        self._looking = asyncio.Lock()
        self._held = contextlib.ExitStack()
        self._journal = None
        if config.journal is not None:
            # Two gateways would write over each other's sessions.
            self._held.enter_context(FolderLock(config.journal))
            self._journal = SessionJournal(config.journal)
            self._wanted = self._journal.wanted()
            for name, session, rank in self._journal.read(self._begun):
                self._sessions[name] = OpenSession(session)
                self._router.place(name, rank)

    def _begun(self, seed: int) -> Session:
        return Session(self._tokenizer, self.config.session, seed)

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "POST": {
                "/sessions": self._begin,
                "/sessions/{id}/v1/chat/completions": self._chat,
                "/sessions/{id}/samples": self._samples,
                "/weights": self._set_weights,
            },
            "GET": {
                "/sessions": self._list,
                "/sessions/{id}": self._describe,
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
        if isinstance(error, NoRank):
            which = (
                f" that has the weights of version {self._wanted.version}" if self._wanted else ""
            )
            return ApiError(f"no engine{which} answers; ask again later", 502, "unavailable")
        return super().to_api_error(error)

    async def lifespan(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        client = aiohttp.ClientSession(headers=headers, connector=connector)
        with self._held:
            async with client as self._client:
                if self._wanted is not None:
                    await self._look(self._ranks, self._wanted)
                probe = asyncio.create_task(self._probe())
                yield
                probe.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await probe

    # -- sessions ------------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        said = await self.read_body(
            request, lambda said: validate(said, request_schemas.BEGIN_SESSION), empty=b"{}"
        )
        if "weights" in said:
            await self._want(Weights(**said["weights"]))
        name = said.get("id") or secrets.token_hex(16)
        if not _NAME.fullmatch(name):
            raise ApiError(
                f"id is {name[:200]!r}; use up to 128 letters, digits, dots, dashes and underscores",
                param="id",
            )
        if name in self._sessions:
            raise ApiError(f"there is a session {name!r} already; delete it first", 409, param="id")
        if len(self._sessions) >= self.config.max_sessions:
            raise ApiError(
                f"{self.config.max_sessions} sessions are open, and no more can be; end one, or ask again later",
                429,
                "overloaded",
            )
        self._router.rank_of(name)
        seed = said.get("seed", secrets.randbits(62))
        if self._journal is not None:
            try:
                self._journal.begin(name, seed)
            except JournalError:
                self._router.release(name)
                raise
        self._sessions[name] = OpenSession(self._begun(seed))
        return json_response({"id": name})

    async def _list(self, request: web.Request) -> web.Response:
        return json_response({"sessions": list(self._sessions)})

    async def _describe(self, request: web.Request) -> web.Response:
        name, own = self._found(request)
        turns = own.session.turns
        return json_response(
            {
                "id": name,
                "rank": self._router.placed.get(name),
                "turns": len(turns),
                "kinds": [turn.kind for turn in turns],
                "tokens": [len(turn.output) for turn in turns],
                "finish_reasons": [turn.finish_reason for turn in turns],
                "cached_tokens": own.cached,
                "read_tokens": own.read,
            }
        )

    async def _samples(self, request: web.Request) -> web.Response:
        _, own = self._found(request)

        def encode() -> bytes:
            return encode_in_pieces({"records": [told(record) for record in own.session.records()]})

        async with own.changing:  # other sessions go on meanwhile
            body = await asyncio.get_running_loop().run_in_executor(None, encode)
        return web.Response(body=body, content_type="application/json")

    async def _end(self, request: web.Request) -> web.Response:
        name, own = self._found(request)
        if self._journal is not None:
            self._journal.end(name)
        del self._sessions[name]
        own.end()
        self._router.release(name)
        return json_response({"id": name, "deleted": True})

    def _found(self, request: web.Request) -> tuple[str, OpenSession]:
        name = request.match_info["id"]
        if name not in self._sessions:
            raise ApiError(f"there is no session {name!r}; it was never begun, or has ended", 404)
        return name, self._sessions[name]

    # -- replies -------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.Response:
        if self._draining:
            raise ApiError("the gateway is ending; ask another", 503, "unavailable")
        name, own = self._found(request)
        said = await self.read_body(request, lambda said: validate(said, CHAT))
        sampling = self._sampling(said)
        thinking, _ = thinking_of(said)
        tools = tools_of(said)
        plan = await own.plan(said["messages"], tools, thinking)
        sampling["sampling_seed"] = own.session.seed_of(plan)
        self._active += 1
        try:
            reply = await self._generate(name, own, plan, sampling)
            async with own.changing:
                own.check(name)
                return json_response(self._take(name, own, plan, reply, tools, thinking))
        finally:
            own.asked.remove(plan)
            self._active -= 1

    def _sampling(self, said: Mapping) -> dict[str, Any]:
        """For `/generate`. ApiError for what would not be trained on as it was sampled."""
        config = self.config
        if more := [field for field in said if field not in _TAKEN]:
            raise ApiError(f"sessions take no {more[0]}; leave it out", param=more[0])
        only = {"temperature": config.temperature, "top_p": 1, "n": 1, "stream": False}
        for field, value in only.items():
            if said.get(field, value) != value:
                raise ApiError(
                    f"{field} is {said[field]}; samples of this gateway have {value}, which is what is trained on: leave "
                    "it out",
                    param=field,
                )
        most = said.get("max_completion_tokens", said.get("max_tokens", config.max_tokens))
        return {"temperature": config.temperature, "top_p": 1.0, "max_new_tokens": most}

    async def _generate(self, name: str, own: OpenSession, plan: Plan, sampling: Mapping) -> dict:
        """An engine's answer. One that does not answer, or has failed, is lost: the session goes on at another, with
        the same seed. ApiError."""
        why = ""
        for _ in range(self.config.tries):
            own.check(name)  # the router would place it anew, and nobody would release it
            rank = self._router.rank_of(name)
            url, number = parse_rank(rank)
            wanted, seen = self._wanted, self._seen.get(rank)
            body = {"input_ids": plan.ids, "sampling_params": sampling, "return_logprob": True}
            if number is not None:
                body["data_parallel_rank"] = number
            try:
                call = self._call(f"{url}/generate", body, name)
                status, found, instance = await own.until_ended(name, call)
                is_reply = status == 200 and check_generated(found)
            except _NO_ANSWER as error:
                status, found, is_reply = 503, {}, False
                why = f"{rank} does not answer: {type(error).__name__} {error}"
            if is_reply:
                versions = found["meta_info"]["weight_versions"]
                if wanted is None or (instance == seen and min(versions) >= wanted.version):
                    return found
                status = 503
                why = f"{rank} was started anew, or has not the weights of version {wanted.version}"
            if status in REFUSED:
                message = error_message(found)
                code = "context_length_exceeded" if "token" in message else None
                raise ApiError(f"the engine refuses: {message}", 400, code)
            if status == 429:
                # Neither the agent's fault, which an answer of 400 would make it, nor an engine that is lost.
                raise ApiError(f"{rank} is overloaded: {error_message(found)}", 429, "overloaded")
            why = why or f"{rank} has failed: {str(found)[:200]}"
            _log.warning("session %s: %s", name, why)
            if status != 200 and rank in self._router.loads:
                self._lose(rank)
        raise ApiError(
            f"no engine has answered, of {self.config.tries} tries; {why}", 502, "unavailable"
        )

    async def _call(self, url: str, body: Mapping, name: str) -> tuple[int, Any, str | None]:
        """(status, what is said, the process that says it)."""
        headers = {"X-SMG-Routing-Key": name}
        async with (
            asyncio.timeout(self.config.seconds),
            self._client.post(url, json=body, headers=headers, timeout=_FOREVER) as response,
        ):
            return response.status, await response.json(), response.headers.get(INSTANCE)

    def _take(
        self, name, own: OpenSession, plan: Plan, found: Mapping, tools, thinking: bool
    ) -> dict:
        """Keeps a reply, and tells it."""
        meta = found["meta_info"]
        ids = found["output_ids"]
        reason = meta["finish_reason"]["type"]
        parsed = parse_reply(ids, tools, tokenizer=self._tokenizer, thinking=thinking)
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        turn = own.session.answer(
            plan, ids, logprobs, meta["weight_versions"], reason, parsed.message
        )
        if self._journal is not None:
            self._journal.add(name, turn, self._router.placed.get(name))
        own.session.add(turn)
        own.cached += meta["cached_tokens"]
        own.read += len(plan.ids)
        count = len(own.session.turns)
        calls = [
            {"id": f"call_{count}_{i}", "type": "function", "function": call.function}
            for i, call in enumerate(parsed.tool_calls)
        ]
        message = parsed.message | ({"tool_calls": calls} if calls else {})
        if calls and reason == "stop" and not parsed.problem:
            reason = "tool_calls"
        return {
            "id": f"{name}-{len(own.session.turns) - 1}",
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
                "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
            },
        }

    # -- engines -------------------------------------------------------------------------------------------

    async def _set_weights(self, request: web.Request) -> web.Response:
        said = await self.read_body(request, lambda said: validate(said, request_schemas.WEIGHTS))
        await self._want(Weights(**said))
        return json_response(self._wanted._asdict())

    async def _want(self, weights: Weights) -> None:
        """From now on engines must have these, unless later ones were wanted before; who has others is lost."""
        try:
            check_lease(weights.lease, time.time())
        except ValueError as error:
            raise ApiError(str(error), param="lease") from None
        if self._has_wanted(weights):
            return  # before the lock, which a look at engines that hang holds for seconds
        async with self._looking:
            before = self._wanted
            if self._has_wanted(weights):
                return
            if self._journal is not None:
                self._journal.want(weights)
            strict = before is None or weights.lease != before.lease
            await self._look(self._ranks, weights, strict)
            self._wanted = weights

    def _has_wanted(self, weights: Weights) -> bool:
        """Whether these weights, or later ones, are wanted already."""
        before = self._wanted
        if before is None or is_ahead(before.lease, time.time()):
            return False
        return weights[:2] <= before[:2]

    async def _probe(self) -> None:
        """Takes lost engines in again once they are well."""
        while True:
            await asyncio.sleep(self.config.probe_seconds)
            async with self._looking:
                lost = [rank for rank in self._ranks if rank not in self._router.loads]
                try:
                    await self._look(lost, self._wanted)
                except Exception:
                    # Whatever one engine says, the others must not stay lost for it.
                    _log.exception("lost engines cannot be looked at")

    async def _look(
        self, ranks: Sequence[str], wanted: Weights | None, strict: bool = False
    ) -> None:
        """Takes in those that are well, and loses others."""
        found = await asyncio.gather(*(self._is_well(rank, wanted, strict) for rank in ranks))
        for rank, well in zip(ranks, found):
            if well and rank not in self._router.loads:
                _log.info("%s is there again", rank)
                self._router.add(rank)
            elif not well and rank in self._router.loads:
                _log.warning("%s has not the weights of version %d", rank, wanted.version)
                self._lose(rank)

    def _lose(self, rank: str) -> None:
        self._router.lose(rank)
        self._seen.pop(rank, None)

    async def _is_well(self, rank: str, wanted: Weights | None, strict: bool) -> bool:
        """Whether an engine answers and has the weights, or later ones: those are pushed before they are wanted. strict: only
        the same, as what another trainer pushed may seem to be later; so may what a new process was started with."""
        url, _ = parse_rank(rank)
        if await self._asked(f"{url}/health") is None:
            return False
        if wanted is None:
            return True
        said = await self._asked(f"{url}/weights")
        if not isinstance(said, dict) or not isinstance(said.get("version"), int):
            return False
        version, instance = said["version"], said.get("instance")
        if version == wanted.version:
            well = wanted.checksum in (None, said.get("checksum"))
        else:
            same = not strict and rank in self._seen and self._seen[rank] == instance
            well = same and version > wanted.version
        if well:
            self._seen[rank] = instance
        return well

    async def _asked(self, url: str) -> Any:
        """What an engine says; None unless it does so soon."""
        limit = aiohttp.ClientTimeout(total=self.config.probe_seconds)
        try:
            async with self._client.get(url, timeout=limit) as response:
                return await response.json() if response.status == 200 else None
        except _NO_ANSWER:
            return None

    async def _health(self, request: web.Request) -> web.Response:
        """Its own: what would be started anew for want of engines would end the sessions' chats, and those that push
        weights to engines may wait for it to be there."""
        state = "draining" if self._draining else "ok" if self._router.loads else "no engine"
        return json_response({"status": state}, 503 if self._draining else 200)

    async def _info(self, request: web.Request) -> web.Response:
        told = {"sessions": len(self._sessions), "active": self._active}
        weights = self._wanted and self._wanted._asdict()
        return json_response(told | {"loads": self._router.loads, "weights": weights})


# Of an engine that does not answer, or whose answer is no JSON, or nested too deeply.
_NO_ANSWER = (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError)
_FOREVER = aiohttp.ClientTimeout(total=None)  # `GatewayConfig.seconds` counts
