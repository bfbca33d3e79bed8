"""New weights as they come to a served engine: over the network in parts, or in a folder that others wrote.

    receiver = Receiver(engine, worker.call)
    receiver.begin(...)       what will come, checked against the model before anything is sent
    receiver.take(...)        a part: safetensors of whole tensors or pieces, or of what changed in those that are held
    receiver.commit(...)      all has come, with the checksums that the sender has: only now the engine is told

What has come waits in host memory, so that a push that breaks off leaves nothing behind. Each message may come twice.
There is one push at a time, and what an engine holds is told by `status`, so that a sender that knows nothing, or an
engine that was started anew, needs nobody else to go on.
"""

import asyncio
import concurrent.futures
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import safetensors

from glm5_jax.checkpoint import hf_import
from glm5_jax.checkpoint.manifest import FILE, Manifest, Tensor, checksum
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5

# A piece of a tensor: NAME@START, flat; of one that is held what changed: a bit for each number, and the new ones.
AT, MASK, VALUES = "@", "#mask", "#values"
KINDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8"}  # safetensors'
Call = Callable[[Callable[[Engine], object]], concurrent.futures.Future]


class Conflict(ValueError):
    """It cannot be done as things stand: another push is under way, or other weights are held than the sender
    thinks."""


def admit(
    version: int, checksum: str | None, held: int, held_checksum: str | None, rewind: bool
) -> bool:
    """Whether weights of a version are to be loaded where those of the version `held` are: False if they are there
    already. Conflict for an older version, or the same one with other numbers, unless `rewind` says that the trainer
    went back to a checkpoint: what it has made since is another lineage, whose versions come again with other
    weights."""
    if version == held and checksum is not None and checksum == held_checksum:
        return False
    if version < held and not rewind:
        raise Conflict(
            f"version {held} is held, {version} is older; if the trainer went back to it, say so with rewind"
        )
    if version == held and held_checksum is not None and not rewind:
        raise Conflict(
            f"version {version} is held with other numbers; if the trainer went back and made it anew, say so with "
            "rewind"
        )
    return True


class Receiver:
    """Gives an engine new weights. All its methods are of one event loop."""

    def __init__(
        self,
        engine: Engine,
        call: Call,
        seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """call: runs a function of the engine in its thread (`Worker.call`). seconds: a push that sends nothing for
        so long, by the clock, is over."""
        self._engine, self._call, self._seconds, self._time = engine, call, seconds, clock
        self._cfg, mesh = engine.cfg, engine.computation.mesh
        self._shardings = None if mesh is None else glm5.param_shardings(self._cfg, mesh)
        self._push: _Push | None = None
        self._loading: asyncio.Task | None = None
        self._answers: dict[str, dict] = {}  # of the last push, by its name
        self._held = _Held(engine.version, None, None)

    def status(self) -> dict:
        """What the engine holds, and what is coming. checksum: None of weights that were not pushed."""
        held, push = self._now(), self._current()
        return {
            "version": held.version,
            "checksum": held.manifest and held.manifest.checksum,
            "base": held.tensors is not None,
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
        """What will come: manifest without checksums. base: (version, checksum) of what is held and comes in changes
        alone. keep: whether these weights stay in host memory, to be such a base. ValueError that lists what does not
        fit the model; Conflict."""
        await self._apart(manifest.check, self._cfg)
        if (push := self._current()) is not None and push.name == name:
            return
        self._check_free()
        held = self._now()
        admit(
            manifest.version, None, held.version, held.manifest and held.manifest.checksum, rewind
        )
        if base is not None and base != held.base:
            raise Conflict(
                f"changes of version {base[0]} cannot be applied to what is held, version {held.version}; push all"
            )
        kept = held.tensors if base is not None else None
        self._push = _Push(name, manifest, kept, held.manifest, keep)
        self._push.heard = self._time()

    def check(self, name: str) -> None:
        """Raises Conflict unless parts of this push are expected, before one is received."""
        self._named(name)

    async def take(self, name: str, data: bytes) -> int:
        """A part; how many tensors are complete. ValueError if it is none of this push."""
        push = self._named(name)
        async with push.lock:
            push.heard = self._time()
            await self._apart(push.take, data)
            push.heard = self._time()
        return push.num_complete

    async def commit(self, name: str, checksums: Sequence[str], policy: str) -> dict:
        """All has come; checksums: in the order of the manifest. Once they fit, the engine takes the weights.
        ValueError if they do not; the push is then over and the engine as before."""
        if name in self._answers:
            return self._answers[name]
        push = self._named(name)
        if self._loading is None:
            self._loading = asyncio.create_task(self._commit(push, list(checksums), policy))
        # A sender that does not wait any longer must not leave the engine between two versions.
        return await asyncio.shield(self._loading)

    async def _commit(self, push: "_Push", checksums: list[str], policy: str) -> dict:
        try:
            async with push.lock:
                tensors = await self._apart(push.finish, checksums)
            return await self._load(push.manifest, tensors, push.keep, policy, push.name)
        finally:
            self._push = self._loading = None

    def abort(self, name: str) -> None:
        """The push is over; nothing of it stays. ValueError if there is none, or it is being loaded."""
        self._named(name)
        if self._loading is not None:
            raise Conflict(f"the push {name!r} is complete, and the engine is taking it")
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
        """Weights of a folder that this machine sees. One that was pushed has a manifest, which must fit in all;
        load: gives the weights of another, of any version. ValueError, and the engine is then as before."""
        self._check_free()
        self._loading = asyncio.create_task(self._open(path, version, policy, load, rewind))
        return await asyncio.shield(self._loading)

    async def _open(self, path, version, policy, load, rewind) -> dict:
        try:
            if not (pathlib.Path(path) / FILE).exists():
                params = await self._apart(load, path)
                await self._update(params, version, policy)
                self._held = _Held(version, None, None)
                return {"version": version}
            manifest = await self._apart(Manifest.read, path)
            if manifest.version != version:
                raise ValueError(f"{path} holds version {manifest.version}, not {version}")
            held = self._now()
            told = held.manifest and held.manifest.checksum
            if not admit(version, manifest.checksum, held.version, told, rewind):
                return _answer(manifest)
            tensors = await self._apart(_opened, path, manifest, self._cfg)
            return await self._load(manifest, tensors, False, policy)
        finally:
            self._loading = None

    async def _load(self, manifest, tensors, keep: bool, policy: str, name: str | None = None):
        params = hf_import.from_tensors(tensors, self._cfg, self._shardings)
        await self._update(params, manifest.version, policy)
        self._held = _Held(manifest.version, manifest, tensors if keep else None)
        answer = _answer(manifest)
        self._answers = {} if name is None else {name: answer}
        return answer

    async def _update(self, params, version: int, policy: str) -> None:
        await asyncio.wrap_future(
            self._call(lambda engine: engine.update_weights(params, version, policy))
        )

    def _now(self) -> "_Held":
        """What is held; an engine that was told otherwise, past this, has weights that nobody knows."""
        if self._held.version != self._engine.version:
            self._held = _Held(self._engine.version, None, None)
        return self._held

    def _current(self) -> "_Push | None":
        push = self._push
        if push is not None and self._loading is None and not push.lock.locked():
            if self._time() - push.heard > self._seconds:
                self._push = None
        return self._push

    def _named(self, name: str) -> "_Push":
        if (push := self._current()) is None or push.name != name:
            raise Conflict(
                f"there is no push {name!r}; it was never begun, or is over: begin again"
            )
        return push

    def _check_free(self) -> None:
        if self._loading is not None or self._current() is not None:
            version = f"version {self._push.manifest.version}" if self._push else "a folder"
            raise Conflict(f"{version} is being taken; push again once that is over")

    async def _apart(self, function, *arguments):
        """function(*arguments) in another thread, as what reads or hashes weights takes long."""
        return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


class _Held:
    """What an engine holds; tensors: None if they are on the device alone."""

    def __init__(self, version: int, manifest: Manifest | None, tensors: Mapping | None):
        self.version, self.manifest, self.tensors = version, manifest, tensors

    @property
    def base(self) -> tuple[int, str] | None:
        return None if self.tensors is None else (self.version, self.manifest.checksum)


class _Push:
    """What has come so far. heard: when something last did."""

    def __init__(
        self, name: str, manifest: Manifest, base: Mapping | None, told: Manifest | None, keep: bool
    ):
        """base, told: tensors that are held and their manifest, of which changes come."""
        self.name, self.manifest, self.keep = name, manifest, keep
        self.lock, self.heard = asyncio.Lock(), 0.0
        self._base, self._told = base, told
        self._arrays: dict[str, np.ndarray] = {}  # flat
        self._pieces: dict[str, dict[int, int]] = {}  # how many numbers came from where
        self._complete: dict[str, str] = {}  # checksums

    @property
    def num_complete(self) -> int:
        return len(self._complete)

    def take(self, data: bytes) -> None:
        """A part; ValueError."""
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
                continue  # it came before
            if key == piece:
                self._put(name, int(start or 0), self._read(name, entry))
            elif (values := entries.get(piece + VALUES)) is None:
                raise ValueError(f"{key!r} came without {piece + VALUES!r}")
            else:
                self._change(name, int(start or 0), entry, self._read(name, values))

    def finish(self, checksums: list[str]) -> dict[str, np.ndarray]:
        """All tensors, in their shapes; ValueError unless they have these checksums."""
        tensors = self.manifest.tensors
        if len(checksums) != len(tensors):
            raise ValueError(f"{len(checksums)} checksums came of {len(tensors)} tensors")
        found, wrong = {}, []
        for (name, own), wanted in zip(tensors.items(), checksums):
            array, came = self._arrays.get(name), sum(self._pieces.get(name, {}).values())
            if array is None and self._base is not None:
                found[name], has = self._base[name], self._told.tensors[name].checksum
            elif array is None or (self._base is None and name not in self._complete):
                wrong.append(f"{name} is missing, {came} of its {np.prod(own.shape)} numbers came")
                continue
            else:
                found[name] = array.reshape(own.shape)
                has = self._complete.get(name) or checksum(array)
            if has != wanted:
                wrong.append(f"{name} has the checksum {has}, not {wanted}")
            tensors[name] = own._replace(checksum=has)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors did not arrive: {'; '.join(wrong[:5])}")
        return found

    def _read(self, name: str, entry: Mapping) -> np.ndarray:
        own = self.manifest.tensors[name]
        if KINDS.get(entry["dtype"]) != own.dtype:
            raise ValueError(f"{name} comes as {entry['dtype']}, not {own.dtype} as was told")
        return np.frombuffer(entry["data"], np.dtype(own.dtype))

    def _array(self, name: str, start: int, count: int) -> np.ndarray:
        """Where a tensor's numbers from start on go."""
        own = self.manifest.tensors[name]
        size = int(np.prod(own.shape))
        if start + count > size:
            raise ValueError(f"{name} has {size} numbers; {count} from {start} on are too many")
        if name not in self._arrays:
            base = self._base and self._base[name]
            empty = base is None
            self._arrays[name] = (
                np.empty(size, np.dtype(own.dtype)) if empty else base.reshape(-1).copy()
            )
        return self._arrays[name][start : start + count]

    def _put(self, name: str, start: int, numbers: np.ndarray) -> None:
        self._array(name, start, len(numbers))[...] = numbers
        pieces = self._pieces.setdefault(name, {})
        pieces[start] = len(numbers)
        if self._base is None and sum(pieces.values()) == len(self._arrays[name]):
            self._complete[name] = checksum(self._arrays[name])

    def _change(self, name: str, start: int, mask: Mapping, numbers: np.ndarray) -> None:
        if self._base is None:
            raise ValueError(f"{name} comes in changes, and the push has no base")
        left = max(0, int(np.prod(self.manifest.tensors[name].shape)) - start)
        where = np.unpackbits(np.frombuffer(mask["data"], np.uint8))[:left].astype(bool)
        if where.sum() != len(numbers):
            raise ValueError(f"{name} has {where.sum()} changes and {len(numbers)} new numbers")
        self._array(name, start, len(where))[where] = numbers


def _opened(path: str, manifest: Manifest, cfg) -> dict:
    """The tensors of a pushed folder, none of which is read into memory; ValueError unless they are those of the
    manifest, and it fits the model."""
    manifest.check(cfg)
    stored = hf_import.open_tensors(path)
    wrong = [f"{name} is missing" for name in manifest.tensors if name not in stored]
    for name, own in manifest.tensors.items():
        if name in stored:
            kind = stored[name].kind
            there = Tensor(KINDS.get(kind, kind), stored[name].shape)
            if there != own._replace(checksum=None):
                wrong.append(f"{name} is {there.dtype} {list(there.shape)}")
            elif checksum(stored[name][...]) != own.checksum:
                wrong.append(f"{name} in {stored[name].file.name} has another checksum")
    if wrong:
        raise ValueError(f"{path} is not what was written there: {'; '.join(wrong[:5])}")
    return stored


def _answer(manifest: Manifest) -> dict:
    return {"version": manifest.version, "checksum": manifest.checksum}
