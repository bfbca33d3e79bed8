"""HTTP connection of a pusher to one engine, for the duration of a push."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any

import aiohttp

from glm5_jax.inference.request_bodies import AbortPush, PullRequest
from glm5_jax.rl.weights.pusher import DELTA, FULL, EngineAck, SyncConfig
from glm5_jax.runtime.api_keys import load_api_key
from glm5_jax.runtime.json_encoding import json_bytes
from glm5_jax.runtime.json_structs import JsonStruct


class EngineError(Exception):
    """Raised if the response of an engine is an error."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class EngineConnection:
    """Connection to an engine during one push.

    Attributes:
      url: URL of the engine.
      mode: FULL, DELTA or CURRENT.
      error: why the push failed; None: it has not failed.
      sent_bytes: bytes sent so far.
      has_begun, has_loaded: whether the engine expects the push, and whether it has loaded the weights.
      is_refused: whether the engine refused the push, and would do so again.
    """

    def __init__(self, url: str, client: aiohttp.ClientSession, config: SyncConfig):
        self.url, self._client, self._config = url, client, config
        self.mode, self.sent_bytes = FULL, 0
        self.error: str | None = None
        self.has_begun = self.has_loaded = self.is_refused = False

    @property
    def ack(self) -> EngineAck:
        """Returns the result of the push."""
        return EngineAck(self.url, self.mode, self.sent_bytes, self.error, self.is_refused)

    async def attempt(self, action: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of an action; None, with `error` set, if the engine does not respond or refuses."""
        try:
            return await action
        except (EngineError, TimeoutError, aiohttp.ClientError, OSError) as error:
            self.error = self.error or str(error) or type(error).__name__
            # 409: another push is running, or the engine's weights have changed; a later push may succeed.
            status = error.status if isinstance(error, EngineError) else None
            self.is_refused |= status is not None and 400 <= status < 500 and status != 409
            return None

    async def pull(self, request: PullRequest, checksum: str) -> None:
        """Makes all processes of the engine pull the weights with this checksum.

        Meanwhile the engine must respond to other requests. Raises EngineError if a process pulls other weights.
        """
        self.has_begun = True
        pulls = [
            self.request(
                "/weights/pull",
                request.replace(process=process),
                timeout_s=self._config.load_timeout_s,
                url=url,
            )
            for process, url in enumerate(request.peers[request.engine])
        ]
        pull, watch = asyncio.gather(*pulls), asyncio.create_task(self._watch())
        try:
            await asyncio.wait((pull, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                await watch
            replies = await pull
        finally:
            pull.cancel()
            watch.cancel()
            await asyncio.gather(pull, watch, return_exceptions=True)
        for reply in replies:
            if reply["checksum"] != checksum:
                raise EngineError(200, f"has pulled {reply['checksum']}, not {checksum}")
            self.sent_bytes += reply["from_trainer"] + reply["from_engines"]
        self.mode = DELTA if all(reply["delta"] for reply in replies) else FULL

    async def abort(self, request: PullRequest) -> None:
        """Makes all processes of the engine drop a pull."""
        body = AbortPush(push=request.push)
        urls = request.peers[request.engine]
        aborts = (self.request("/weights/abort", body, url=url) for url in urls)
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _watch(self) -> None:
        """Sends requests until one fails, so that an engine that has died ends its pull."""
        while True:
            await asyncio.sleep(self._config.timeout_s / 2)
            await self.request("/weights")

    def check_loaded(self, state: Mapping[str, Any], checksum: str) -> None:
        """Records that the engine has loaded the weights. Raises EngineError if it reports another checksum."""
        if state.get("checksum") != checksum:
            raise EngineError(200, f"holds {state.get('checksum')}, not {checksum}")
        self.has_loaded = True

    async def request(
        self,
        path: str,
        body: JsonStruct | None = None,
        timeout_s: float | None = None,
        url: str | None = None,
    ) -> dict[str, Any]:
        """Sends a GET without a body, or a POST of a message, and returns the JSON response.

        url: URL of the process; None: that of the engine.
        """
        timeout_s = self._config.timeout_s if timeout_s is None else timeout_s
        method = "GET" if body is None else "POST"
        data = None if body is None else json_bytes(body)
        num_tries = 0
        while True:
            num_tries += 1
            status = 0
            try:
                async with asyncio.timeout(timeout_s):
                    call = self._client.request(method, (url or self.url) + path, data=data)
                    async with call as response:
                        status = response.status
                        value = await response.json(content_type=None)
            except TimeoutError:
                raise TimeoutError(f"no answer to {path} within {timeout_s} s") from None
            except (ValueError, RecursionError):  # not JSON, or nested too deeply
                raise EngineError(status, f"the answer to {path} is no JSON ({status})") from None
            except (aiohttp.ClientError, OSError):
                if num_tries >= self._config.max_tries:
                    raise
                continue
            if status == 200 and isinstance(value, dict):
                return value
            raise EngineError(status, _error_message(value)[:1000])


def _error_message(value: Any) -> str:
    match value:
        case {"error": {"message": str(message)}}:
            return message
    return f"it answers {value!r}"


@contextlib.asynccontextmanager
async def connect_engines(
    urls: Iterable[str], config: SyncConfig
) -> AsyncIterator[list[EngineConnection]]:
    """Opens a connection to each URL, with the key of the config, and closes all of them."""
    key = load_api_key(config)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connector, no_timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=no_timeout
    ) as client:
        yield [EngineConnection(url.rstrip("/"), client, config) for url in urls]


def without_error(engines: Iterable[EngineConnection]) -> list[EngineConnection]:
    """Returns the engines whose push has not failed."""
    return [engine for engine in engines if engine.error is None]
