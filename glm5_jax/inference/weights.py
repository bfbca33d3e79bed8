"""Receives new weights for an engine: pulled from a trainer's processes, or from a folder.

    receiver = Receiver(engine, worker.call)
    receiver.pull(...)        pulls what the engine's devices need into host memory (shards/), while the engine samples
    receiver.commit(...)      loads the pulled weights into the engine

An interrupted push changes nothing. Each message may arrive twice. Only one push runs at a time. `status` reports what
the engine holds, so that a new sender or a restarted engine can continue.
"""

import asyncio
import concurrent.futures
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

from glm5_jax.checkpoint import hf_import
from glm5_jax.checkpoint.hf_files import open_tensors
from glm5_jax.checkpoint.manifest import FILE, Manifest, Tensor, checksum
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request_bodies import PullRequest
from glm5_jax.inference.runner import WeightSource
from glm5_jax.inference.shards.offer import Offer
from glm5_jax.inference.shards.receiver import Conflict, Pull, ShardReceiver
from glm5_jax.model import glm5

KINDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8"}  # safetensors'
Call = Callable[[Callable[[Engine], object]], concurrent.futures.Future]


def should_load(
    version: int,
    checksum: str | None,
    current_version: int,
    current_checksum: str | None,
    rewind: bool,
) -> bool:
    """Returns whether weights should replace the current ones: False if they are the same.

    Raises Conflict for an older version, and for the same version with another checksum, unless `rewind` is set: a
    trainer that went back to a checkpoint produces the same versions again with other weights.
    """
    is_same_version = version == current_version
    if is_same_version and checksum is not None and checksum == current_checksum:
        return False
    if version < current_version and not rewind:
        raise Conflict(
            f"version {current_version} is held, {version} is older; if the trainer went back to it, set rewind"
        )
    if is_same_version and current_checksum is not None and not rewind:
        raise Conflict(
            f"version {version} is held with other numbers; if the trainer went back and made it again, set rewind"
        )
    return True


class Receiver:
    """Receives and loads new weights. All methods run in one event loop.

    Attributes:
      shards: receiver of the weights that this process pulls.
    """

    def __init__(
        self,
        engine: Engine,
        call: Call,
        timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        key: str | None = None,
    ):
        """Creates a receiver.

        Args:
          call: runs a function of the engine in its thread (`Worker.call`).
          timeout_s: time between pull and commit after which a push is dropped, in seconds of `clock`.
          key: API key of the trainer's processes and of other engines; None: none is sent.
        """
        self._engine, self._call, self._timeout_s, self._clock = engine, call, timeout_s, clock
        self._cfg, mesh = engine.cfg, engine.computation.mesh
        self._shardings = None if mesh is None else glm5.param_shardings(self._cfg, mesh)
        self.shards = ShardReceiver(self._cfg, engine.weights, key)
        self._pulled_at = 0.0  # time at which the last pull ended
        self._loading: _Loading | None = None
        self._replies: dict[str, dict] = {}  # of the last push, by its name
        self._current = _Weights(engine.version, None)

    def status(self) -> dict:
        """Returns the version and checksum that the engine holds, and the version that is being received.

        The checksum is None for weights that were not pushed. "frozen" is the checksum of the weights in host memory, to
        which a push can add adapters; None: there are none.
        """
        current, receiving = self._current_weights(), self._loading or self._current_pull()
        return {
            "version": current.version,
            "checksum": current.checksum,
            "receiving": receiving and receiving.version,
            "frozen": self.shards.frozen_checksum,
        }

    async def pull(self, request: PullRequest) -> dict:
        """Pulls weights into host memory; see `ShardReceiver.pull`. Raises Conflict if another push is running."""
        pull = self._current_pull()
        if self._loading is not None or (pull is not None and pull.request.push != request.push):
            self._check_free()

        def check(offer: Offer) -> None:
            current = self._current_weights()
            should_load(offer.version, None, current.version, current.checksum, request.rewind)

        reply = await self.shards.pull(request, check)
        self._pulled_at = self._clock()
        return reply

    async def commit(self, name: str, policy: str) -> dict:
        """Ends a push: loads the pulled weights into the engine. Raises Conflict if it was not pulled."""
        if name in self._replies:
            return self._replies[name]
        if self._loading is None or self._loading.name != name:
            self._check_loading()
            pull = self._find_pull(name)
            if pull.weights is None:
                raise Conflict(f"the push {name!r} is not complete; wait for the reply to its pull")
            task = asyncio.create_task(self._commit(name, pull.weights.offer, policy))
            self._loading = _Loading(name, pull.version, task)
        # A sender that disconnects must not leave the engine between two versions.
        return await asyncio.shield(self._loading.task)

    async def _commit(self, name: str, offer: Offer, policy: str) -> dict:
        try:
            if self._engine.has_followers:
                params = WeightSource(fields={"pull": name})
            else:
                params = self.shards.take(name)
            return await self._load(offer.version, offer.checksum, params, policy, name)
        finally:
            self._loading = None

    def abort(self, name: str) -> None:
        """Drops a push. Raises Conflict if it is not running or is being loaded."""
        if self._loading is not None and self._loading.name == name:
            raise Conflict(f"the push {name!r} is complete, and the engine is loading it")
        self.shards.abort(name)

    async def open(
        self,
        path: str,
        version: int,
        policy: str,
        *,
        load: Callable[[str], dict],
        rewind: bool = False,
    ) -> dict:
        """Loads the weights of a folder. Raises ValueError, and the engine is then unchanged.

        A pushed folder has a manifest, which must match. load: reads the weights of other folders, of any version.
        """
        self._check_free()
        task = asyncio.create_task(self._open(path, version, policy, load, rewind))
        self._loading = _Loading(None, version, task)
        return await asyncio.shield(task)

    async def _open(self, path, version, policy, load, rewind) -> dict:
        try:
            if not (pathlib.Path(path) / FILE).exists():
                if self._engine.has_followers:
                    params = WeightSource(fields={"path": path})
                else:
                    params = await self._in_executor(load, path)
                await self._update(params, version, policy)
                self._current = _Weights(version, None)
                return {"version": version}
            manifest = await self._in_executor(Manifest.read, path)
            if manifest.version != version:
                raise ValueError(f"{path} holds version {manifest.version}, not {version}")
            current = self._current_weights()
            if not should_load(
                manifest.version, manifest.checksum, current.version, current.checksum, rewind
            ):
                return {"version": manifest.version, "checksum": manifest.checksum}
            tensors = await self._in_executor(_open_tensors, path, manifest, self._cfg)
            if self._engine.has_followers:
                params = WeightSource(fields={"path": path})
            else:
                params = hf_import.from_tensors(tensors, self._cfg, self._shardings)
            return await self._load(manifest.version, manifest.checksum, params, policy)
        finally:
            self._loading = None

    async def _load(
        self, version: int, checksum: str, params, policy: str, name: str | None = None
    ) -> dict:
        await self._update(params, version, policy)
        self._current = _Weights(version, checksum)
        reply = {"version": version, "checksum": checksum}
        self._replies = {} if name is None else {name: reply}
        return reply

    async def _update(self, params, version: int, policy: str) -> None:
        await asyncio.wrap_future(
            self._call(lambda engine: engine.update_weights(params, version, policy))
        )

    def _current_weights(self) -> "_Weights":
        """Returns the held weights, without checksum if the engine was updated by another path."""
        if self._current.version != self._engine.version:
            self._current = _Weights(self._engine.version, None)
        return self._current

    def _current_pull(self) -> Pull | None:
        """Returns the running pull, or the one that waits for its commit; drops it if the commit is late."""
        pull = self.shards.current
        if pull is not None and pull.weights is not None and self._loading is None:
            if self._clock() - self._pulled_at > self._timeout_s:
                self.shards.abort(pull.request.push)
        return self.shards.current

    def _find_pull(self, name: str) -> Pull:
        if (pull := self._current_pull()) is None or pull.request.push != name:
            raise Conflict(
                f"there is no push {name!r}; it was never pulled, or is over: pull again"
            )
        return pull

    def _check_free(self) -> None:
        """Raises Conflict if weights are being received or loaded."""
        self._check_loading()
        if (pull := self._current_pull()) is not None:
            version = "a push" if pull.version is None else f"version {pull.version}"
            raise Conflict(f"{version} is being loaded; push again after that")

    def _check_loading(self) -> None:
        """Raises Conflict if weights are being loaded."""
        if self._loading is not None:
            raise Conflict(
                f"version {self._loading.version} is being loaded; push again after that"
            )

    async def _in_executor(self, function, *arguments):
        """Runs function(*arguments) in another thread, because receiving and hashing weights takes long."""
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


class _Weights(NamedTuple):
    """Weights that an engine holds. checksum: None: they were not pushed."""

    version: int
    checksum: str | None


class _Loading(NamedTuple):
    """Weights that the engine is loading. name: name of the push; None: they are from a folder."""

    name: str | None
    version: int | None
    task: asyncio.Task[dict]


def _open_tensors(path: str, manifest: Manifest, cfg) -> dict:
    """Opens the tensors of a pushed folder without reading them into memory.

    Raises ValueError unless they match the manifest, and it fits the model.
    """
    manifest.check(cfg)
    stored = open_tensors(path)
    wrong = [f"{name} is missing" for name in manifest.tensors if name not in stored]
    for name, tensor in manifest.tensors.items():
        if name in stored:
            kind = stored[name].kind
            actual = Tensor(KINDS.get(kind, kind), stored[name].shape)
            if actual != tensor._replace(checksum=None):
                wrong.append(f"{name} is {actual.dtype} {list(actual.shape)}")
            elif checksum(stored[name][...]) != tensor.checksum:
                wrong.append(f"{name} in {stored[name].file.name} has another checksum")
    if wrong:
        raise ValueError(f"{path} is not what was written there: {'; '.join(wrong[:5])}")
    return stored
