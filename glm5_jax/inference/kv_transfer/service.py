"""Prefills prompts for servers that decode, and sends the pages of their cache.

Pages are sent while the rest of the prompt is computed. They stay in the prefix cache, so that a later prompt with the same
beginning is computed from where it differs.
"""

import asyncio
import dataclasses

from aiohttp import web

from glm5_jax.inference.engine import Engine
from glm5_jax.inference.kv_transfer.messages import END, PrefillRequest, encode_part
from glm5_jax.inference.kv_transfer.pages import PrefixPages
from glm5_jax.inference.request import FAILED, Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.worker import Worker
from glm5_jax.runtime.http_server import ApiError

_POLL_S = 0.005
_WRITE_BYTES = 2**20  # of a part that are written at once


class _OtherWeights(Exception):
    """Raised if the engine has other weights than those of a request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillService:
    """Answers requests for the pages of prompts.

    Attributes:
      worker: thread of the engine.
      model: name of the served model.
      timeout_s: time limit of a request, in seconds; None: no limit.
    """

    worker: Worker
    model: str
    timeout_s: float | None

    def check(self, body: PrefillRequest) -> Request:
        """Returns the engine's request of a body. Raises ApiError if this engine's pages would not fit."""
        engine = self.worker.engine
        for name, theirs, mine in (
            ("model", body.model, self.model),
            ("version", body.version, engine.version),
            ("layout", body.layout, engine.page_layout),
        ):
            if theirs != mine:
                raise ApiError(
                    f"{name} is {theirs!r:.200}, and this server's is {mine!r}; start both servers with the same checkpoint, "
                    "page_size, num_speculative_tokens, index_cache and latent_cache",
                    409,
                    "conflict",
                    name,
                )
        request = Request(body.ids, Sampling(max_tokens=0), timeout_s=self.timeout_s)
        engine.check(request)
        return request

    async def answer(
        self, http_request: web.Request, request: Request, start: int, version: int
    ) -> web.StreamResponse:
        """Computes a prompt and sends its pages from `start` on, as long as the weights have this version."""

        def read(engine: Engine) -> PrefixPages | None:
            # Weights may change while the prompt waits or is computed. The receiver would take the pages for those of the
            # version that it asked for.
            if engine.version != version:
                raise _OtherWeights
            return engine.read_prefix(request.ids, start)

        handle = await asyncio.wrap_future(self.worker.call(lambda engine: engine.submit(request)))
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        loop = asyncio.get_running_loop()
        try:
            await response.prepare(http_request)
            while True:
                has_ended = handle.finish_reason is not None
                if handle.finish_reason == FAILED:
                    break  # without END, so that the receiver knows
                if handle.cached_tokens is None and not has_ended:
                    # The prompt waits. Reads of all waiting prompts would delay every step.
                    await asyncio.sleep(_POLL_S)
                    continue
                try:
                    part = await asyncio.wrap_future(self.worker.call(read))
                except _OtherWeights:
                    break
                if part is not None:
                    data = memoryview(await loop.run_in_executor(None, encode_part, part))
                    for first in range(0, len(data), _WRITE_BYTES):
                        await response.write(data[first : first + _WRITE_BYTES])
                    start += part.count
                elif has_ended:
                    await response.write(END)
                    break
                else:
                    await asyncio.sleep(_POLL_S)
            await response.write_eof()
        finally:
            handle.cancel()
        return response
