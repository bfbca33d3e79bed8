"""Has prompts prefilled by other servers, and adds the pages that they send to the engine's prefix cache.

A request is then served as if an earlier one had had its prompt: the engine reads the tokens after the last full page
and decodes. Where a server does not answer, the engine prefills the prompt itself. A server that failed is not asked
for as long as it took to fail, and at least 5 s, so that one that hangs does not delay every prompt.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import aiohttp

from glm5_jax.inference.kv_transfer.messages import PrefillRequest, read_part
from glm5_jax.inference.request import Request
from glm5_jax.inference.worker import Worker
from glm5_jax.runtime.json_encoding import json_bytes

_READ_BYTES = 2**20
_MIN_RETRY_S = 5.0  # time after which a server that failed is asked again
_ERROR_BYTES = 1000
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _PrefillServer:
    """A server that prefills: its URL, tokens that it is computing, and time until which it is not asked."""

    url: str
    num_tokens: int = 0
    failed_until: float = 0.0


class PrefillClient:
    """Client of the servers that prefill for one engine; without any, `fetch` does nothing."""

    def __init__(
        self,
        urls: Sequence[str],
        worker: Worker,
        *,
        model: str,
        min_tokens: int,
        timeout_s: float | None,
        max_silence_s: float,
        api_key: str | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Creates the client.

        Args:
          urls: servers that prefill.
          worker: thread of the engine that decodes.
          model: name of the served model, which the servers must have, too.
          min_tokens: minimum tokens that a prompt needs and the engine has not cached.
          timeout_s: time limit of one prompt, in seconds; None: no limit.
          max_silence_s: maximum time in which a server sends nothing, in seconds.
          api_key: key of the servers; None: none is sent.
          clock: clock in seconds.
        """
        self._servers = [_PrefillServer(url.rstrip("/")) for url in urls]
        self._worker, self._model, self._min_tokens = worker, model, min_tokens
        self._timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=max_silence_s, sock_read=max_silence_s
        )
        self._clock = clock
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def fetch(self, requests: Sequence[Request]) -> None:
        """Brings the pages of the prompts into the engine's cache, if they are long enough and a server computes them."""
        if not self._servers:
            return
        prompts = {request.ids: request for request in requests}
        await asyncio.gather(*map(self._fetch_prompt, prompts.values()))

    async def _fetch_prompt(self, request: Request) -> None:
        if len(request.ids) < self._min_tokens or request.sampling.prompt_logprobs:
            return
        engine = self._worker.engine
        start = await self._call(lambda engine: engine.count_prefix(request.ids))
        missing = len(request.ids) - start * engine.page_size
        # A server has no replies in its cache. Where most of a conversation is here, it would compute more.
        if missing < self._min_tokens or 2 * missing < len(request.ids):
            return
        now = self._clock()
        usable = [server for server in self._servers if server.failed_until <= now]
        if not usable:
            return
        server = min(usable, key=lambda server: server.num_tokens)
        server.num_tokens += missing
        try:
            await self._pull(server, request, start)
        except (OSError, ValueError, TimeoutError, EOFError, aiohttp.ClientError) as error:
            failed_at = self._clock()
            pause_s = max(_MIN_RETRY_S, failed_at - now)
            server.failed_until = failed_at + pause_s
            reason = str(error) or type(error).__name__
            _log.warning("%s prefills no prompts for %.1f s: %s", server.url, pause_s, reason)
        finally:
            server.num_tokens -= missing

    async def _pull(self, server: _PrefillServer, request: Request, start: int) -> None:
        """Adds the pages of a prompt as they arrive."""
        engine = self._worker.engine
        version, layout = engine.version, engine.page_layout
        body = PrefillRequest(
            ids=list(request.ids), start=start, model=self._model, version=version, layout=layout
        )
        async with self._client().post(f"{server.url}/prefill", data=json_bytes(body)) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:_ERROR_BYTES]
                raise OSError(f"status {response.status}: {text}")
            while (part := await read_part(_exactly(response.content), layout)) is not None:
                num_added = await self._call(
                    lambda engine, part=part: engine.write_prefix(
                        request.ids, part, version, request.dp_rank
                    )
                )
                if num_added == 0 and await self._call(
                    lambda engine, part=part: (
                        engine.count_prefix(request.ids) < part.start + part.count
                    )
                ):
                    return  # there is no room, or the weights have changed

    def _call(self, function):
        return asyncio.wrap_future(self._worker.call(function))

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers | {"Content-Type": "application/json"},
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=_READ_BYTES,
            )
        return self._session


def _exactly(stream: aiohttp.StreamReader):
    async def read(count: int) -> bytes:
        return await stream.readexactly(count)

    return read
