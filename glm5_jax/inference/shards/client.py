"""Pulls the boxes that an engine process needs from the processes of a trainer and from other engines.

Engines pull the same pieces. Each piece has one engine that requests it from the trainer, and the others request it from
that engine. So the trainer sends each number about once, and no link carries the weights once per engine. A piece that its
engine does not have in time is requested from the trainer.
"""

import asyncio
import itertools
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import aiohttp
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Sharding

from glm5_jax.inference.request_bodies import PullRequest
from glm5_jax.inference.shards.offer import Offer
from glm5_jax.inference.shards.server import CRC, FORM
from glm5_jax.inference.shards.store import EncodedPart, Shards, decode
from glm5_jax.parallel.boxes import Box, cover, format_box, local_boxes, split

_READ_BYTES = 2**20


class PullFailed(OSError):
    """Raised if no process sends a box."""


class ShardPiece(NamedTuple):
    """Part of an array that is sent in one reply.

    Attributes:
      name: name of the array.
      box: box of the piece.
      target: box of this process that contains it.
      owners: numbers of the trainer's processes that hold it.
    """

    name: str
    box: Box
    target: Box
    owners: tuple[int, ...]

    @property
    def number(self) -> int:
        """A number that is equal for the piece in all engines."""
        return zlib.crc32(f"{self.name} {format_box(self.box)}".encode())


def empty_shards(
    offer: Offer, targets: Mapping[str, Sharding], reused: Collection[str] = ()
) -> Shards:
    """Returns shards for the boxes of this process's devices, without numbers.

    targets: sharding of each array. reused: names of the arrays that `Shards.reuse` adds.
    """
    arrays = {}
    for name, array in offer.arrays.items():
        if name in reused:
            continue
        dtype = jnp.dtype(array.dtype)
        boxes = local_boxes(targets[name], array.shape)
        arrays[name] = {box: np.empty([b - a for a, b in box], dtype) for box in boxes}
    return Shards(offer.checksum, arrays, is_complete=False)


def pieces_of(offer: Offer, needed: Iterable[tuple[str, Box]], max_bytes: int) -> list[ShardPiece]:
    """Returns the pieces of at most `max_bytes` that make up the needed boxes of arrays.

    Raises ValueError if the offer does not cover them.
    """
    pieces = []
    for name, target in needed:
        array = offer.arrays[name]
        max_size = max(1, max_bytes // jnp.dtype(array.dtype).itemsize)
        for i, common in cover(target, array.boxes):
            pieces += [
                ShardPiece(name, box, target, array.owners[i]) for box in split(common, max_size)
            ]
    return pieces


def in_order(pieces: list[ShardPiece], engine: int, num_engines: int) -> list[ShardPiece]:
    """Returns the pieces that this engine requests from the trainer, then those of the following engines in turn."""
    return sorted(pieces, key=lambda piece: (piece.number - engine) % num_engines)


class Puller:
    """Pull of one process.

    Attributes:
      from_trainer, from_engines: bytes received so far.
    """

    def __init__(self, request: PullRequest, key: str | None):
        """key: API key of the trainer's processes and of the engines; None: none is sent."""
        self._request, self._key = request, key
        self.from_trainer = self.from_engines = 0
        self._failed_engines: set[str] = set()

    async def fetch_offer(self) -> Offer:
        """Returns the trainer's offer. Raises PullFailed or ValueError."""
        async with self._client() as client:
            try:
                url = f"{self._request.sources[0]}/weights/offer"
                async with client.get(url) as response:
                    if response.status != 200:
                        raise PullFailed(f"{url} answers {response.status}")
                    data = await response.read()
            except (TimeoutError, aiohttp.ClientError) as error:
                raise PullFailed(f"{url}: {_describe(error)}") from None
        try:
            return msgspec.json.decode(data, type=Offer)
        except msgspec.DecodeError as error:
            raise ValueError(f"{url} sends no offer: {error}") from None

    async def pull(self, offer: Offer, shards: Shards, base: Shards | None) -> None:
        """Pulls the missing boxes of the shards. base: shards that this process holds of the offer's base; None: none.

        Raises PullFailed if a box is not sent, and ValueError if the offer does not cover one.
        """
        request = self._request
        pieces = pieces_of(offer, shards.missing(), request.max_part_bytes)
        ordered = iter(in_order(pieces, request.engine, len(request.peers)))
        async with self._client() as client:
            workers = (
                self._work(client, ordered, offer, shards, base)
                for _ in range(min(request.max_connections, len(pieces)))
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    for worker in workers:
                        tasks.create_task(worker)
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        shards.mark_complete()

    async def _work(
        self, client, pieces: Iterator[ShardPiece], offer, shards: Shards, base
    ) -> None:
        """Fetches pieces one after another."""
        for piece in pieces:
            part = await self._fetch(client, piece, offer, base)
            shards.write(piece.name, piece.target, piece.box, part)

    async def _fetch(
        self, client, piece: ShardPiece, offer: Offer, base: Shards | None
    ) -> np.ndarray:
        """Returns the numbers of a piece, from the first process that sends them."""
        held = None if base is None else base.read(piece.name, piece.box)
        shape = tuple(stop - start for start, stop in piece.box)
        dtype = jnp.dtype(offer.arrays[piece.name].dtype)
        problems = []
        for url, wait_s in self._urls(piece):
            query = {"weights": offer.checksum, "name": piece.name, "box": format_box(piece.box)}
            if held is not None:
                query["base"] = offer.base or ""
            if wait_s:
                query["wait_s"] = str(wait_s)
            try:
                encoded = await self._get(client, f"{url}/weights/shard", query)
                loop = asyncio.get_running_loop()
                part = await loop.run_in_executor(None, decode, encoded, shape, dtype, held)
            except (ValueError, OSError, TimeoutError, aiohttp.ClientError) as error:
                problems.append(f"{url}: {_describe(error)}")
                if wait_s:
                    self._failed_engines.add(url)  # each of its pieces would wait as long
                continue
            if wait_s:
                self.from_engines += len(encoded.data)
            else:
                self.from_trainer += len(encoded.data)
            return part
        raise PullFailed(f"{piece.name} {format_box(piece.box)} did not arrive: {problems[-1]}")

    def _urls(self, piece: ShardPiece) -> Iterator[tuple[str, float]]:
        """Yields (URL, seconds of waiting there) of the processes to request a piece from, in order."""
        request, number = self._request, piece.number
        designated = number % len(request.peers)
        if designated != request.engine and request.process < len(request.peers[designated]):
            url = request.peers[designated][request.process]
            if url not in self._failed_engines:
                yield url, request.timeout_s / 2
        first = (request.engine + number // len(request.peers)) % len(piece.owners)
        owners = piece.owners[first:] + piece.owners[:first]
        for owner in itertools.islice(itertools.cycle(owners), max(len(owners), request.max_tries)):
            yield request.sources[owner], 0.0

    async def _get(self, client, url: str, query: dict[str, str]) -> EncodedPart:
        async with client.get(url, params=query) as response:
            if response.status != 200:
                raise OSError(f"status {response.status}: {(await response.text())[:200]}")
            data = await response.read()
            headers = response.headers
        return EncodedPart(headers.get(FORM, ""), data, int(headers.get(CRC, "-1")))

    def _client(self) -> aiohttp.ClientSession:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._request.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=_READ_BYTES,
        )


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
