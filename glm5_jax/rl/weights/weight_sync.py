"""Weights from a trainer to the engines that sample for it, each time with their version: the optimiser's steps.

    pusher = Network(cfg, ["http://10.0.0.1:8000"], SyncConfig(delta=True))
    pushed = pusher.push(state["params"], int(state["step"]))       # every K updates
    state = reset_optimizer(state)                                 # GLM-5 4.1.1

    Network         over HTTP, in buckets, at need only what has changed
    SharedStorage   through a folder that trainer and engines see
    Reshard         to engines of this process, device to device (reshard.py)

All give engines the same bits, in the dtype that they compute with, and compare checksums of both ends. A push of
what an engine holds already changes nothing. Versions rise; a trainer that went back to a checkpoint pushes what it
goes on from with `rewind`, before it samples anything: engines then leave the versions that it has made since and
that it will make again with other numbers.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp
import jax
import numpy as np
from safetensors.numpy import save

from glm5_jax.checkpoint.hf_export import named_tensors, save_hf
from glm5_jax.checkpoint.manifest import FILE, Manifest, transfer_dtypes
from glm5_jax.config import ModelConfig
from glm5_jax.inference.weights import AT, MASK, VALUES
from glm5_jax.parallel import multihost
from glm5_jax.rl.weights.pusher import CHANGES, HELD, WHOLE, Pushed, SyncConfig, Told, reported
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.runtime.http_server import load_api_key


class _Engines:
    """Behind HTTP. Subclasses push to those in `engines`, which may be set anew between pushes."""

    def __init__(self, engines: Sequence[str], config: SyncConfig):
        self.engines, self._config = tuple(engines), config
        self._given: tuple[int, str] | None = None  # version and checksum that all should have

    def push(self, params, version: int, *, rewind: bool = False) -> Pushed:
        raise NotImplementedError

    def refresh(self, params, version: int) -> Pushed | None:
        """See `Pusher`."""
        given, limit = self._given, self._config.look_seconds
        states = multihost.broadcast_from_first(lambda: run_sync(self._states(limit)))
        there = [url for url, own in states.items() if "error" not in own]
        lacking = [url for url in there if _held(states[url]) != given]
        if not lacking:
            return None
        others = self.engines
        self.engines = tuple(lacking if given and given[0] == version else there)
        try:
            return self.push(params, version, rewind=True)
        finally:
            self.engines = others

    async def _states(self, seconds: float | None = None) -> dict[str, dict]:
        """What engines hold; of those that do not answer, the error."""
        async with _opened(self.engines, self._config) as engines:
            asked = (engine.trying(engine.ask("/weights", seconds=seconds)) for engine in engines)
            found = await asyncio.gather(*asked)
        return {engine.url: own or {"error": engine.error} for engine, own in zip(engines, found)}

    def _reported(self, version: int, checksum: str, sent: int, *more) -> Pushed:
        """As `reported`; what all engines should have is then known."""
        pushed = reported(version, checksum, sent, *more)
        self._given = (version, checksum)
        return dataclasses.replace(pushed, shown=checksum)


class SharedStorage(_Engines):
    """Through a folder that trainer and engines see under one path: FOLDER/VERSION is a HuggingFace folder with a
    manifest, whole or not there. The folder is one trainer's alone. On a pod all processes push."""

    def __init__(
        self,
        cfg: ModelConfig,
        folder,
        engines: Sequence[str] = (),
        config: SyncConfig = SyncConfig(),
        tokenizer=None,
    ):
        """engines: URLs of servers that take weights, without any the folder is only written; it may be set anew
        between pushes. tokenizer: saved with every version, so that it can be served."""
        super().__init__(engines, config)
        self._cfg, self._tokenizer = cfg, tokenizer
        self._folder = pathlib.Path(folder).absolute()

    def push(self, params, version: int, *, rewind: bool = False) -> Pushed:
        """The weights in the folder, and in the engines that it was told. OSError or ValueError if they cannot be
        written; what was there before still is."""
        jax.block_until_ready(params)
        began, out, self._given = time.perf_counter(), self._folder / str(version), None
        multihost.run_on_first(lambda: self._clear(version + 1 if rewind else None))
        there = multihost.all_gather_objects(out.exists())[0]
        manifest = Manifest(version, self._cfg.arithmetic)
        if there:
            for name, tensor in named_tensors(params, self._cfg, self._kinds):
                manifest.add(name, tensor)
            there = multihost.broadcast_from_first(lambda: self._is_same(out, manifest, rewind))
        if not there:
            manifest = Manifest(version, self._cfg.arithmetic)
            # Experts that become int4 are written as they are: engines make them so.
            cfg = dataclasses.replace(
                self._cfg, int4_group=None, dtype=self._config.dtype or self._cfg.dtype
            )
            more = dict(tokenizer=self._tokenizer, dtype=self._kinds, manifest=manifest)
            save_hf(params, out, cfg=cfg, **more)

        def tell():
            told = run_sync(self._tell(out, manifest, rewind))
            return manifest.checksum, manifest.num_bytes, told

        checksum, whole, told = _of_first(tell)
        told = [Told(*own) for own in told]
        pushed = self._reported(version, checksum, 0 if there else whole, whole, began, told)
        multihost.run_on_first(self._prune)
        return pushed

    def _is_same(self, out: pathlib.Path, manifest: Manifest, rewind: bool) -> bool:
        """Whether a folder has these numbers; one of a lineage that was left is removed."""
        if manifest.checksum == Manifest.read(out).checksum:
            return True
        if not rewind:
            raise ValueError(
                f"{out} holds version {manifest.version} with other numbers; if the trainer went back and made it "
                "anew, say so with rewind"
            )
        shutil.rmtree(out)
        return False

    @property
    def _kinds(self) -> dict[str, np.dtype]:
        return transfer_dtypes(self._cfg, self._config.dtype)

    async def _tell(self, out: pathlib.Path, manifest: Manifest, rewind: bool) -> list[Told]:
        said = {"path": str(out), "version": manifest.version, "policy": self._config.policy}

        async def one(engine: "_Remote") -> None:
            limit = self._config.load_seconds
            told = await engine.ask("/update_weights", said | {"rewind": rewind}, seconds=limit)
            engine.check(told, manifest)

        async with _opened(self.engines, self._config) as engines:
            await asyncio.gather(*(engine.trying(one(engine)) for engine in engines))
        return [engine.told for engine in engines]

    def _clear(self, first: int | None) -> None:
        """Removes what a trainer that was killed left half-written, and versions from the first of another lineage
        on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path)
        for version in self._versions():
            if first is not None and version >= first:
                shutil.rmtree(self._folder / str(version))

    def _prune(self) -> None:
        for version in self._versions()[: -self._config.keep]:
            shutil.rmtree(self._folder / str(version))

    def _versions(self) -> list[int]:
        """Those in the folder, in order."""
        own = (path.parent.name for path in self._folder.glob(f"*/{FILE}"))
        return sorted(int(name) for name in own if name.isdecimal())


class Network(_Engines):
    """Over HTTP, to all engines at once: a pass over the weights, of which a bucket at a time is in memory, and each
    engine takes them only when all has come. On a pod all processes push, and the first one sends."""

    def __init__(self, cfg: ModelConfig, engines: Sequence[str], config: SyncConfig = SyncConfig()):
        """engines: URLs of servers that take weights; they may be set anew between pushes."""
        super().__init__(engines, config)
        self._cfg = cfg
        self._base: tuple[Manifest, dict[str, np.ndarray]] | None = None  # what was pushed last

    def push(self, params, version: int, *, rewind: bool = False) -> Pushed:
        """The weights in the engines. One that does not answer in time is told of in `Pushed.lost` and holds up
        nobody for longer than that. A delta is of the last push; an engine that holds another version gets all."""
        if not self.engines:
            raise ValueError(f"version {version} has nowhere to go; give the URL of an engine")
        jax.block_until_ready(params)
        began, self._given = time.perf_counter(), None
        manifest = Manifest.of(self._cfg, version, self._config.dtype)
        states = _of_first(lambda: run_sync(self._states()))
        # Which of those that hold this version have these numbers, only all of them tell.
        if any(own.get("version") == version for own in states.values()):
            for name, tensor in self._tensors(params):
                manifest.add(name, tensor)
        tensors = self._tensors(params)
        checksum, told = _of_first(
            lambda: run_sync(self._send(tensors, manifest, states, rewind)), tensors
        )
        told = [Told(*own) for own in told]
        sent = sum(own.bytes for own in told)
        return self._reported(version, checksum, sent, manifest.num_bytes, began, told)

    def _tensors(self, params) -> Iterator[tuple[str, np.ndarray]]:
        return named_tensors(params, self._cfg, transfer_dtypes(self._cfg, self._config.dtype))

    async def _send(self, tensors, manifest: Manifest, states: Mapping, rewind: bool):
        """(checksum, what became of it at each engine)."""
        known = None not in {own.checksum for own in manifest.tensors.values()}
        checksum = manifest.checksum if known else None
        async with _opened(self.engines, self._config) as engines:
            taking = []
            for engine in engines:
                state = states[engine.url]
                engine.error = state.get("error")
                if checksum is not None and state.get("checksum") == checksum:
                    engine.how = HELD if state.get("version") == manifest.version else WHOLE
                elif self._base is not None and _is(state, self._base[0]):
                    engine.how = CHANGES
                if engine.error is None and engine.how != HELD:
                    taking.append(engine)
            if not taking:
                return checksum, [engine.told for engine in engines]
            name, sent = secrets.token_hex(8), None
            try:
                begun = (self._begin(own, name, manifest, rewind) for own in taking)
                await asyncio.gather(*(own.trying(one) for own, one in zip(taking, begun)))
                sent = await self._stream(tensors, manifest, taking, name)
                checksums = [own.checksum for own in manifest.tensors.values()]
                said = {"push": name, "checksums": checksums, "policy": self._config.policy}

                async def commit(engine: "_Remote") -> None:
                    limit = self._config.load_seconds
                    engine.check(await engine.ask("/weights/commit", said, seconds=limit), manifest)

                await asyncio.gather(*(own.trying(commit(own)) for own in _well(taking)))
            finally:
                # Whoever has not taken it, has no use for half of it; nor has anybody if this is cut short.
                left = [own for own in taking if own.begun and not own.done]
                abort = (own.trying(own.ask("/weights/abort", {"push": name})) for own in left)
                await asyncio.gather(*abort)
            if sent is not None:
                self._base = (manifest, sent)
        return manifest.checksum, [engine.told for engine in engines]

    async def _begin(self, engine: "_Remote", name: str, manifest: Manifest, rewind: bool) -> None:
        said = {
            "push": name,
            "version": manifest.version,
            "arithmetic": manifest.arithmetic,
            "tensors": {n: (own.dtype, own.shape) for n, own in manifest.tensors.items()},
            "keep": self._config.delta,
            "rewind": rewind,
        }
        if engine.how == CHANGES:
            base = self._base[0]
            of = {"base": {"version": base.version, "checksum": base.checksum}}
            try:
                await engine.ask("/weights/begin", said | of)
                engine.begun = True
                return
            except _Refused as refused:
                if refused.status != 409:
                    raise
                engine.how = WHOLE  # it holds something else by now
        await engine.ask("/weights/begin", said)
        engine.begun = True

    async def _stream(self, tensors, manifest: Manifest, engines, name: str) -> dict | None:
        """Sends all that there is; the tensors, if they are kept for changes to come."""
        if not _well(engines):
            return None
        sent = {} if self._config.delta else None
        buckets = self._buckets(tensors, manifest, {own.how for own in _well(engines)}, sent)
        loop = asyncio.get_running_loop()
        coming = loop.run_in_executor(None, next, buckets, None)
        try:
            while (found := await coming) is not None:
                how, data = found
                coming = loop.run_in_executor(None, next, buckets, None)
                those = [own for own in _well(engines) if own.how == how]
                await asyncio.gather(*(own.trying(own.send(name, data)) for own in those))
                if not _well(engines):
                    return None
        finally:
            # A generator cannot be left while another thread is in it.
            await asyncio.wait([coming])
        return sent

    def _buckets(self, tensors, manifest: Manifest, hows, sent) -> Iterator[tuple[str, bytes]]:
        """(how, safetensors) of about bucket_bytes; manifest gets checksums, sent what is kept."""
        limit, filled = self._config.bucket_bytes, {how: {} for how in hows}
        for name, tensor in tensors:
            manifest.add(name, tensor)
            if sent is not None:
                sent[name] = tensor
            for how, bucket in filled.items():
                base = self._base[1][name] if how == CHANGES else None
                for piece in pieces(name, tensor, base, limit):
                    if bucket and _size(bucket) + _size(piece) > limit:
                        yield how, save(bucket)
                        bucket.clear()
                    bucket |= piece
        for how, bucket in filled.items():
            if bucket:
                yield how, save(bucket)


def _of_first(action: Callable[[], Any], tensors: Iterable = ()) -> Any:
    """What action gives in the first process, in JSON's types, for all of a pod; an error of its is one of all.
    tensors: which all processes bring together, whether or not action wants them all."""
    found = error = None
    if jax.process_index() == 0:
        try:
            found = action()
        except Exception as raised:
            error = raised
    if jax.process_count() > 1:
        for _ in tensors:
            pass
    multihost.raise_on_all(error)
    return multihost.all_gather_objects(found)[0]


def pieces(
    name: str, tensor: np.ndarray, base: np.ndarray | None, limit: int
) -> Iterator[dict[str, np.ndarray]]:
    """A tensor as safetensors of at most `limit` bytes, as `inference.weights` reads them. base: what is there
    already, of which come those pieces alone that changed, as a bit for each number and the new numbers where that is
    shorter."""
    if base is None and tensor.nbytes <= limit:
        yield {name: tensor}
        return
    flat, old = tensor.reshape(-1), None if base is None else base.reshape(-1)
    step = limit // flat.itemsize // 8 * 8
    for start in range(0, flat.size, step):
        part, key = flat[start : start + step], f"{name}{AT}{start}"
        if old is None:
            yield {key: part}
            continue
        changed = _bits(part) != _bits(old[start : start + step])
        if not changed.any():
            continue
        mask, values = np.packbits(changed), part[changed]
        shorter = mask.nbytes + values.nbytes < part.nbytes
        yield {key + MASK: mask, key + VALUES: values} if shorter else {key: part}


def _bits(x: np.ndarray) -> np.ndarray:
    """Numbers that are equal where all bits are, zeros of both signs and NaNs too."""
    return x.view(f"u{x.itemsize}")


def _size(bucket: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in bucket.values())


class _Refused(Exception):
    """An engine's answer is an error."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class _Remote:
    """An engine behind HTTP, during one push."""

    def __init__(self, url: str, client: aiohttp.ClientSession, config: SyncConfig):
        self.url, self._client, self._config = url, client, config
        self.how, self.error, self.bytes = WHOLE, None, 0
        self.begun = self.done = self.refused = False

    @property
    def told(self) -> Told:
        return Told(self.url, self.how, self.bytes, self.error, self.refused)

    async def trying(self, action):
        """What action gives; None, with the reason in `error`, if the engine does not answer or refuses."""
        try:
            return await action
        except (_Refused, TimeoutError, aiohttp.ClientError, OSError) as error:
            self.error = self.error or str(error) or type(error).__name__
            # 409: it is at another push, or holds something else by now.
            status = error.status if isinstance(error, _Refused) else None
            self.refused |= status is not None and 400 <= status < 500 and status != 409
            return None

    async def send(self, name: str, data: bytes) -> None:
        await self.ask("/weights/part", data, params={"push": name})
        self.bytes += len(data)

    def check(self, told: Mapping, manifest: Manifest) -> None:
        """Takes note that the engine has it all, by its own account."""
        if told.get("checksum") != manifest.checksum:
            raise _Refused(200, f"holds {told.get('checksum')}, not {manifest.checksum}")
        self.done = True

    async def ask(self, path: str, body=None, params=None, seconds: float | None = None) -> dict:
        """The answer to a GET, or to a POST of JSON or bytes."""
        seconds = self._config.seconds if seconds is None else seconds
        told = {"data": body} if isinstance(body, bytes) else {"json": body}
        method = "GET" if body is None else "POST"
        for left in reversed(range(self._config.tries)):
            try:
                async with asyncio.timeout(seconds):
                    call = self._client.request(method, self.url + path, params=params, **told)
                    async with call as response:
                        status = response.status
                        answer = await response.json(content_type=None)
            except TimeoutError:
                raise TimeoutError(f"no answer to {path} within {seconds} s") from None
            except (ValueError, RecursionError):  # deep JSON, too
                raise _Refused(status, f"the answer to {path} is no JSON ({status})") from None
            except (aiohttp.ClientError, OSError):
                if not left:
                    raise
                continue
            if status == 200 and isinstance(answer, dict):
                return answer
            raise _Refused(status, _message(answer)[:1000])


def _message(answer) -> str:
    match answer:
        case {"error": {"message": str(message)}}:
            return message
    return f"it answers {answer!r}"


@contextlib.asynccontextmanager
async def _opened(urls: Iterable[str], config: SyncConfig):
    key = load_api_key(config)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connector, never = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=never) as client:
        yield [_Remote(url.rstrip("/"), client, config) for url in urls]


def _well(engines: Iterable[_Remote]) -> list[_Remote]:
    return [engine for engine in engines if engine.error is None]


def _is(state: Mapping, base: Manifest) -> bool:
    """Whether an engine holds a base, and has it where changes can be applied."""
    return bool(state.get("base")) and _held(state) == (base.version, base.checksum)


def _held(state: Mapping) -> tuple[int | None, str | None]:
    return state.get("version"), state.get("checksum")
