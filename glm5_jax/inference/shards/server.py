"""Serves shards of weights over HTTP: those of a trainer's process to engines, and those of an engine to other engines.

GET /weights/offer    the offer (a trainer's process only)
GET /weights/shard?weights=CHECKSUM&name=ARRAY&box=0:4,2:8    bytes of a box; see `store.EncodedPart`
    &base=CHECKSUM    the receiver holds the box of these weights, so that changes suffice
    &wait_s=SECONDS   waits for a box that has not arrived yet
"""

import asyncio
import time
from collections.abc import Callable, Mapping

import numpy as np
from aiohttp import web

from glm5_jax.inference.shards.offer import Offer
from glm5_jax.inference.shards.store import EncodedPart, Shards, encode
from glm5_jax.parallel.boxes import Box, format_box, parse_box
from glm5_jax.runtime.http_server import ApiError, Handler, HttpServer, ListenConfig
from glm5_jax.runtime.json_encoding import json_bytes

FORM, CRC = "X-Form", "X-Crc32"  # headers of a reply
_MAX_WAIT_S = 120.0
_POLL_S = 0.01
_WRITE_BYTES = 2**20  # of a reply that are written at once


class ShardLibrary:
    """Shards of some versions of weights, for the handler of requests.

    Attributes:
      versions: shards by the checksum of their version.
      sent_bytes: bytes sent so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """clock: clock of the wait for boxes, in seconds."""
        self.versions: dict[str, Shards] = {}
        self.sent_bytes = 0
        self._clock = clock

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Sends the bytes of a box. Raises ApiError, 404 if it is not held."""
        query = request.query
        try:
            box, wait_s = parse_box(query.get("box", "")), float(query.get("wait_s", "0"))
        except ValueError as error:
            raise ApiError(str(error)) from None
        checksum, name = query.get("weights", ""), query.get("name", "")
        deadline = self._clock() + min(wait_s, _MAX_WAIT_S)
        while (part := self._read(checksum, name, box)) is None and self._clock() < deadline:
            shards = self.versions.get(checksum)
            if shards is not None and not shards.is_awaited(name, box):
                break
            await asyncio.sleep(_POLL_S)
        if part is None:
            raise ApiError(f"{name[:200]} {format_box(box)} is not held here", 404)
        base = self._read(query.get("base", ""), name, box)
        encoded = await asyncio.get_running_loop().run_in_executor(None, encode, part, base)
        return await self._send(request, encoded)

    def _read(self, checksum: str, name: str, box: Box) -> np.ndarray | None:
        shards = self.versions.get(checksum)
        return None if shards is None else shards.read(name, box)

    async def _send(self, request: web.Request, encoded: EncodedPart) -> web.StreamResponse:
        headers = {FORM: encoded.form, CRC: str(encoded.crc)}
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/octet-stream"
        response.content_length = len(encoded.data)
        await response.prepare(request)
        data = memoryview(encoded.data)
        for start in range(0, len(data), _WRITE_BYTES):
            await response.write(data[start : start + _WRITE_BYTES])
        await response.write_eof()
        self.sent_bytes += len(data)
        return response


class ShardServer(HttpServer):
    """Server of the shards that a trainer's process holds.

    Attributes:
      library: shards of the offered weights, and of their base.
    """

    def __init__(self, offer: Offer, library: ShardLibrary, config: ListenConfig):
        super().__init__(config)
        self.library = library
        self._offer = json_bytes(offer)

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {"GET": {"/weights/offer": self._send_offer, "/weights/shard": self.library.answer}}

    async def _send_offer(self, request: web.Request) -> web.Response:
        return web.Response(body=self._offer, content_type="application/json")
