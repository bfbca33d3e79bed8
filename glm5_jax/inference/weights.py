"""Receives new weights for an engine: over the network in parts, or from a folder.

    receiver = Receiver(engine, worker.call)
    receiver.begin(...)       announces the tensors, which are checked against the model before any are sent
    receiver.take(...)        receives a part: safetensors of full tensors, pieces, or changes of tensors that are held
    receiver.commit(...)      compares checksums with the sender's, then loads the weights into the engine

Received parts wait in host memory, so that an interrupted push changes nothing. Each message may arrive twice. Only one
push runs at a time. `status` reports what the engine holds, so that a new sender or a restarted engine can continue.
"""

import asyncio
import concurrent.futures
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import safetensors

from glm5_jax.checkpoint import hf_import
from glm5_jax.checkpoint.hf_files import open_tensors
from glm5_jax.checkpoint.manifest import FILE, Manifest, Tensor, checksum
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5

# Keys of safetensors: NAME@START is a piece of a flattened tensor. NAME#mask and NAME#values are changes of a tensor
# that is held: a bit for each number, and the new numbers.
AT, MASK, VALUES = "@", "#mask", "#values"
KINDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8"}  # safetensors'
Call = Callable[[Callable[[Engine], object]], concurrent.futures.Future]


class Conflict(ValueError):
    """Raised if another push is running, or if the engine holds other weights than the sender expects."""


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
    """Receives and loads new weights. All methods run in one event loop."""

    def __init__(
        self,
        engine: Engine,
        call: Call,
        timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Creates a receiver.

        call: runs a function of the engine in its thread (`Worker.call`). timeout_s: time without a message after which
        a push is dropped, in seconds of `clock`.
        """
        self._engine, self._call, self._timeout_s, self._clock = engine, call, timeout_s, clock
        self._cfg, mesh = engine.cfg, engine.computation.mesh
        self._shardings = None if mesh is None else glm5.param_shardings(self._cfg, mesh)
        self._push: _Push | None = None
        self._loading: asyncio.Task | None = None
        self._replies: dict[str, dict] = {}  # of the last push, by its name
        self._current = _Weights(engine.version, None, None)

    def status(self) -> dict:
        """Returns the version and checksum that the engine holds, and the version that is being received.

        The checksum is None for weights that were not pushed. `base` says whether changes can be pushed.
        """
        current, push = self._current_weights(), self._current_push()
        return {
            "version": current.version,
            "checksum": current.manifest and current.manifest.checksum,
            "base": current.tensors is not None,
            "receiving": push and push.manifest.version,
        }

    async def begin(
        self,
        name: str,
        manifest: Manifest,
        base: tuple[int, str] | None = None,
        keep: bool = False,
        rewind: bool = False,
    ) -> None:
        """Begins a push. Raises Conflict, and ValueError that lists the tensors that do not fit the model.

        Args:
          name: name of the push.
          manifest: tensors of the push, without checksums.
          base: (version, checksum) of the held weights, if only changes of them are sent; None: all tensors are sent.
          keep: whether the new weights stay in host memory as a base of later pushes.
          rewind: see `should_load`.
        """
        await self._in_executor(manifest.check, self._cfg)
        if (push := self._current_push()) is not None and push.name == name:
            return
        self._check_free()
        current = self._current_weights()
        should_load(
            manifest.version,
            None,
            current.version,
            current.manifest and current.manifest.checksum,
            rewind,
        )
        if base is not None and base != current.base:
            raise Conflict(
                f"changes of version {base[0]} cannot be applied to what is held, version {current.version}; push all"
            )
        tensors = current.tensors if base is not None else None
        self._push = _Push(name, manifest, tensors, current.manifest, keep)
        self._push.last_message = self._clock()

    def check(self, name: str) -> None:
        """Raises Conflict unless this push is running."""
        self._find_push(name)

    async def take(self, name: str, data: bytes) -> int:
        """Receives a part. Returns the number of complete tensors. Raises ValueError if the part does not fit."""
        push = self._find_push(name)
        async with push.lock:
            push.last_message = self._clock()
            await self._in_executor(push.take, data)
            push.last_message = self._clock()
        return push.num_complete

    async def commit(self, name: str, checksums: Sequence[str], policy: str) -> dict:
        """Ends a push: compares the checksums, in the manifest's order, and loads the weights into the engine.

        Raises ValueError if checksums differ. The push is then dropped and the engine unchanged.
        """
        if name in self._replies:
            return self._replies[name]
        push = self._find_push(name)
        if self._loading is None:
            self._loading = asyncio.create_task(self._commit(push, list(checksums), policy))
        # A sender that disconnects must not leave the engine between two versions.
        return await asyncio.shield(self._loading)

    async def _commit(self, push: "_Push", checksums: list[str], policy: str) -> dict:
        try:
            async with push.lock:
                tensors = await self._in_executor(push.finish, checksums)
            return await self._load(push.manifest, tensors, push.keep, policy, push.name)
        finally:
            self._push = self._loading = None

    def abort(self, name: str) -> None:
        """Drops a push. Raises Conflict if it is not running or is being loaded."""
        self._find_push(name)
        if self._loading is not None:
            raise Conflict(f"the push {name!r} is complete, and the engine is loading it")
        self._push = None

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
        self._loading = asyncio.create_task(self._open(path, version, policy, load, rewind))
        return await asyncio.shield(self._loading)

    async def _open(self, path, version, policy, load, rewind) -> dict:
        try:
            if not (pathlib.Path(path) / FILE).exists():
                params = await self._in_executor(load, path)
                await self._update(params, version, policy)
                self._current = _Weights(version, None, None)
                return {"version": version}
            manifest = await self._in_executor(Manifest.read, path)
            if manifest.version != version:
                raise ValueError(f"{path} holds version {manifest.version}, not {version}")
            current = self._current_weights()
            current_checksum = current.manifest and current.manifest.checksum
            if not should_load(
                manifest.version, manifest.checksum, current.version, current_checksum, rewind
            ):
                return _to_reply(manifest)
            tensors = await self._in_executor(_open_tensors, path, manifest, self._cfg)
            return await self._load(manifest, tensors, False, policy)
        finally:
            self._loading = None

    async def _load(self, manifest, tensors, keep: bool, policy: str, name: str | None = None):
        params = hf_import.from_tensors(tensors, self._cfg, self._shardings)
        await self._update(params, manifest.version, policy)
        self._current = _Weights(manifest.version, manifest, tensors if keep else None)
        reply = _to_reply(manifest)
        self._replies = {} if name is None else {name: reply}
        return reply

    async def _update(self, params, version: int, policy: str) -> None:
        await asyncio.wrap_future(
            self._call(lambda engine: engine.update_weights(params, version, policy))
        )

    def _current_weights(self) -> "_Weights":
        """Returns the held weights, without checksum and tensors if the engine was updated by another path."""
        if self._current.version != self._engine.version:
            self._current = _Weights(self._engine.version, None, None)
        return self._current

    def _current_push(self) -> "_Push | None":
        """Returns the running push; drops it first if it has timed out."""
        push = self._push
        if push is not None and self._loading is None and not push.lock.locked():
            if self._clock() - push.last_message > self._timeout_s:
                self._push = None
        return self._push

    def _find_push(self, name: str) -> "_Push":
        if (push := self._current_push()) is None or push.name != name:
            raise Conflict(
                f"there is no push {name!r}; it was never begun, or is over: begin again"
            )
        return push

    def _check_free(self) -> None:
        if self._loading is not None or self._current_push() is not None:
            version = f"version {self._push.manifest.version}" if self._push else "a folder"
            raise Conflict(f"{version} is being loaded; push again after that")

    async def _in_executor(self, function, *arguments):
        """Runs function(*arguments) in another thread, because reading and hashing weights takes long."""
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


class _Weights:
    """Weights that an engine holds. tensors: their copy in host memory, or None."""

    def __init__(self, version: int, manifest: Manifest | None, tensors: Mapping | None):
        self.version, self.manifest, self.tensors = version, manifest, tensors

    @property
    def base(self) -> tuple[int, str] | None:
        """(version, checksum) if changes can be applied."""
        if self.tensors is None or self.manifest is None:
            return None
        return self.version, self.manifest.checksum


class _Push:
    """Received parts of one push. last_message: time of the last message."""

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        base: Mapping | None,
        base_manifest: Manifest | None,
        keep: bool,
    ):
        """base, base_manifest: tensors that the push changes, and their manifest; None: it sends all tensors."""
        self.name, self.manifest, self.keep = name, manifest, keep
        self.lock, self.last_message = asyncio.Lock(), 0.0
        self._base, self._base_manifest = base, base_manifest
        self._arrays: dict[str, np.ndarray] = {}  # flat
        self._pieces: dict[str, dict[int, int]] = {}  # {name: {start: numbers received}}
        self._complete: dict[str, str] = {}  # {name: checksum}

    @property
    def num_complete(self) -> int:
        """Number of complete tensors."""
        return len(self._complete)

    def take(self, data: bytes) -> None:
        """Reads a part. Raises ValueError if it does not fit the manifest."""
        try:
            entries = dict(safetensors.deserialize(data))
        except safetensors.SafetensorError as error:
            raise ValueError(f"the part is no safetensors: {error}") from None
        for key, entry in entries.items():
            if key.endswith(VALUES):
                continue
            piece = key.removesuffix(MASK)
            name, _, start = piece.partition(AT)
            if name not in self.manifest.tensors or not (start or "0").isdecimal():
                raise ValueError(f"{key!r} is no piece of a tensor of this push")
            if name in self._complete:
                continue  # a repeated message
            if key == piece:
                self._put(name, int(start or 0), self._read(name, entry))
            elif (values := entries.get(piece + VALUES)) is None:
                raise ValueError(f"{key!r} arrived without {piece + VALUES!r}")
            else:
                self._change(name, int(start or 0), entry, self._read(name, values))

    def finish(self, checksums: list[str]) -> dict[str, np.ndarray]:
        """Returns all tensors in their shapes. Raises ValueError unless they have these checksums."""
        tensors = self.manifest.tensors
        if len(checksums) != len(tensors):
            raise ValueError(f"{len(checksums)} checksums came of {len(tensors)} tensors")
        complete, wrong = {}, []
        for (name, tensor), expected in zip(tensors.items(), checksums):
            array, num_received = self._arrays.get(name), sum(self._pieces.get(name, {}).values())
            if array is None and self._base is not None and self._base_manifest is not None:
                # The push does not change this tensor.
                complete[name] = self._base[name]
                actual = self._base_manifest.tensors[name].checksum
            elif array is None or (self._base is None and name not in self._complete):
                size = np.prod(tensor.shape)
                wrong.append(f"{name} is missing, {num_received} of its {size} numbers came")
                continue
            else:
                complete[name] = array.reshape(tensor.shape)
                actual = self._complete.get(name) or checksum(array)
            if actual != expected:
                wrong.append(f"{name} has the checksum {actual}, not {expected}")
            tensors[name] = tensor._replace(checksum=actual)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors did not arrive: {'; '.join(wrong[:5])}")
        return complete

    def _read(self, name: str, entry: Mapping) -> np.ndarray:
        """Returns the numbers of an entry of safetensors."""
        tensor = self.manifest.tensors[name]
        if KINDS.get(entry["dtype"]) != tensor.dtype:
            raise ValueError(
                f"{name} arrives as {entry['dtype']}, not {tensor.dtype} as in the manifest"
            )
        return np.frombuffer(entry["data"], np.dtype(tensor.dtype))

    def _array(self, name: str, start: int, count: int) -> np.ndarray:
        """Returns the view of `count` numbers of a tensor from `start` on."""
        tensor = self.manifest.tensors[name]
        size = int(np.prod(tensor.shape))
        if start + count > size:
            raise ValueError(f"{name} has {size} numbers; {count} from {start} on are too many")
        if name not in self._arrays:
            if self._base is None:
                self._arrays[name] = np.empty(size, np.dtype(tensor.dtype))
            else:
                self._arrays[name] = self._base[name].reshape(-1).copy()
        return self._arrays[name][start : start + count]

    def _put(self, name: str, start: int, numbers: np.ndarray) -> None:
        """Stores a piece of a tensor."""
        self._array(name, start, len(numbers))[...] = numbers
        pieces = self._pieces.setdefault(name, {})
        pieces[start] = len(numbers)
        if self._base is None and sum(pieces.values()) == len(self._arrays[name]):
            self._complete[name] = checksum(self._arrays[name])

    def _change(self, name: str, start: int, mask: Mapping, numbers: np.ndarray) -> None:
        """Applies changes to a tensor of the base."""
        if self._base is None:
            raise ValueError(f"{name} comes in changes, and the push has no base")
        left = max(0, int(np.prod(self.manifest.tensors[name].shape)) - start)
        where = np.unpackbits(np.frombuffer(mask["data"], np.uint8))[:left].astype(bool)
        if where.sum() != len(numbers):
            raise ValueError(f"{name} has {where.sum()} changes and {len(numbers)} new numbers")
        self._array(name, start, len(where))[where] = numbers


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


def _to_reply(manifest: Manifest) -> dict:
    return {"version": manifest.version, "checksum": manifest.checksum}
