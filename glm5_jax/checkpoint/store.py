"""Saves and restores the checkpoints of a run: model, optimiser, data position and random key.

Layout of a workdir: `checkpoints/STEP/{model,optimizer,data,rng,meta}`. A step's folder gets its name after all of it is
on disk, so a process killed during a save loses only that save. This is the only module that uses Orbax.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jaxtyping import PyTree

from glm5_jax.checkpoint.checksums import ReadChecksums, changed_arrays, checksums
from glm5_jax.parallel import tree
from glm5_jax.parallel.multihost import all_gather_objects
from glm5_jax.runtime.files import read_text

# Imported late, as Orbax, because `models` reports most errors of users without them.
if TYPE_CHECKING:
    import tensorstore

_FOLDER = "checkpoints"
_STEP_NAME = re.compile(r"0|[1-9][0-9]*")
_JOIN_TIMEOUT_S = 10.0  # for each thread that a failed save has left
_MAX_REASON = 300  # characters
# In the meta of a checkpoint.
_CHECKSUMS = "checksums"  # of the arrays
_DIGEST = "digest"  # of the data position and the rest of the meta
_OVERHEAD_BYTES = 2**20  # per checkpoint in addition to the arrays: metadata, data position


class SaveError(RuntimeError):
    """Raised if a checkpoint could not be written; the message names the last good one."""


class Store:
    """Checkpoints of one workdir; it deletes all but the newest `keep`.

    A context manager: its exit waits for the running save. Without it, call `close` in a `finally`, because a process
    that ends with an unfinished save can hang at exit.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int = 2):
        from orbax.checkpoint import v1 as ocp

        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
        self.folder = pathlib.Path(workdir).absolute() / _FOLDER
        self._clear_partial()
        registry = ocp.handlers.local_registry(include_global_registry=True)
        for name in ("data", "meta"):
            registry.add(ocp.handlers.JsonHandler, checkpointable_name=name)
        context = ocp.Context()
        context.checkpointables.registry = registry
        self._orbax = ocp.training.Checkpointer(
            str(self.folder),
            context=context,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # pyright: ignore[reportArgumentType]: its parameter names differ from the protocol's
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),  # pyright: ignore[reportArgumentType]: its parameter names differ from the protocol's
        )
        self._saving: tuple[int, ocp.AsyncResponse[bool]] | None = None
        logging.getLogger("absl").addFilter(_not_orbax)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        return [c.step for c in self._orbax.checkpoints]

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None: there is none."""
        return max(self.steps, default=None)

    @property
    def last_good(self) -> str:
        """Text that names the newest complete checkpoint."""
        return last_good(self.folder.parent)

    def save(self, state: dict, data: dict, meta: dict) -> None:
        """Starts to write `state` under its step, and returns after its arrays are copied.

        - state: {"params", "optimizer", "step", ...}; the other entries (random key, counters) become `rng`. The
          arrays may be donated to the next step after the return.
        - data: JSON-serialisable dict with this process's part of the data position.
        - meta: JSON-serialisable dict.

        Raises SaveError if the previous save failed. The next `save`, `wait` or `close` raises it if this one fails.
        """
        self.wait()
        step = int(state["step"])
        if step in self.steps:
            return
        arrays, positions = _parts(state), all_gather_objects(data)
        meta = {**meta, "step": step, _CHECKSUMS: checksums(arrays)}
        parts = {
            **arrays,
            "data": positions,
            "meta": {**meta, _DIGEST: _digest(positions, meta)},
        }
        try:
            saved = self._orbax.save_checkpointables_async(step, parts, force=True)
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error
        assert saved is not None, "force saves every step"
        self._saving = (step, saved)

    def wait(self) -> None:
        """Blocks until the running save is on disk. Raises SaveError if it failed."""
        if self._saving is None:
            return
        (step, saved), self._saving = self._saving, None
        try:
            saved.result()
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error

    def restore(self, abstract: dict, step: int | None = None) -> tuple[dict, dict, dict]:
        """Restores (state, data, meta) of a step.

        - abstract: state of `jax.ShapeDtypeStruct` with the shardings to restore to; None: the first device. They may
          belong to another mesh than that of the save.
        - step: step to restore; None: the newest.

        `data` joins the parts of all processes (`load_data`). Raises ValueError if there is no such step, it is damaged,
        or its arrays have other shapes.
        """
        step = self.latest if step is None else step
        if step not in self.steps:
            raise ValueError(f"no checkpoint {step} in {self.folder}; there are {self.steps}")
        abstract = _with_shardings(abstract)
        wanted = {**_parts(abstract), "data": None, "meta": None}
        with self._reading(step):
            stored = dict(self._orbax.checkpointables_metadata(step).metadata)
            missing = wanted.keys() - stored.keys()
            missing |= {part for part in ("model", "optimizer") if not stored.get(part)}
            if missing:
                raise FileNotFoundError(f"it has no {', '.join(sorted(missing))}")
        check_shapes(wanted, stored, f"checkpoint {step}")
        with self._reading(step):
            loaded = self._orbax.load_checkpointables(step, wanted)
            _check_digest(loaded["data"], loaded["meta"])
            saved = loaded["meta"].pop(
                _CHECKSUMS, {}
            )  # a checkpoint of an earlier release has none
            arrays = {part: loaded[part] for part in _parts(abstract)}
            _check_bits(arrays, stored, saved)
        moments = tree.flatten(loaded["optimizer"])
        state = {
            "params": loaded["model"],
            "optimizer": tree.map_with_path(lambda p, _: moments[p], abstract["optimizer"]),
            "step": jax.device_put(np.asarray(step, np.int32), abstract["step"].sharding),
            **loaded["rng"],
        }
        loaded["meta"].pop(_DIGEST, None)
        return state, _join(loaded["data"]), loaded["meta"]

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns errors of reading a checkpoint into a ValueError with the fix."""
        try:
            yield
        except Exception as error:  # Orbax raises its own kinds, KeyErrors and JSON's
            why = " ".join(str(error).split())[:_MAX_REASON]
            before = max((other for other in self.steps if other < step), default=None)
            then = "starts from scratch" if before is None else f"resumes from step {before}"
            raise ValueError(
                f"checkpoint {self.folder / str(step)} is damaged ({type(error).__name__}: {why}); move it to another "
                f"folder, and the same command {then}"
            ) from error

    def close(self) -> None:
        """Waits for the running save. Raises SaveError if it failed."""
        try:
            self.wait()
        finally:
            try:
                self._orbax.close()
            except (OSError, ValueError):
                pass  # the same failure that `wait` has just raised
            _join_threads()
            logging.getLogger("absl").removeFilter(_not_orbax)

    def _failed(self, step: int, error: Exception) -> SaveError:
        self._clear_partial()
        reason = "the disk is full" if is_disk_full(error) else str(error).splitlines()[0]
        return SaveError(
            f"the checkpoint of step {step} could not be written ({reason}); {self.last_good}; "
            "free some space and run the same command to resume"
        )

    def _clear_partial(self) -> None:
        """Deletes the partial files of an interrupted save."""
        if jax.process_index() == 0:
            for partial in self.folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(partial, ignore_errors=True)


def _join_threads() -> None:
    """Joins the threads that Orbax leaves running after a failed save, which would log errors at exit."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            # Each raises the error of its part of the save. `wait` has already raised one of them.
            with contextlib.suppress(OSError, ValueError):
                thread.join(_JOIN_TIMEOUT_S)


def latest_step(workdir: str | os.PathLike) -> int | None:
    """Returns the step of the newest complete checkpoint of a workdir, without opening it; None: there is none."""
    folder = pathlib.Path(workdir) / _FOLDER
    steps = [int(p.name) for p in folder.glob("*") if _is_step(p)]
    return max(steps, default=None)


def last_good(workdir: str | os.PathLike) -> str:
    """Returns a text that names the newest complete checkpoint of a workdir."""
    step = latest_step(workdir)
    if step is None:
        return "no checkpoint is complete yet"
    return f"the last good checkpoint is {pathlib.Path(workdir).absolute() / _FOLDER / str(step)}"


def _is_step(path: pathlib.Path) -> bool:
    """Returns True if Orbax treats a path as a complete checkpoint: a folder whose name is a number."""
    return bool(_STEP_NAME.fullmatch(path.name)) and path.is_dir()


def load_data(workdir: str | os.PathLike, step: int) -> dict:
    """Loads the data position of a step: the dicts that the processes passed to `Store.save`, joined.

    An entry of several processes is that of the first one; dicts are joined recursively. Raises ValueError if it
    cannot be read.
    """
    folder = pathlib.Path(workdir) / _FOLDER / str(step)
    try:
        positions = _read_json(folder / "data")
        _check_digest(positions, _read_meta(folder))
        return _join(positions)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"checkpoint {folder} is damaged (its data position: {error}); move it to another folder, and the same "
            "command resumes from the previous one"
        ) from error


def _digest(positions: Sequence[dict], meta: Mapping[str, Any]) -> str:
    """Returns a digest of a data position and a meta, which is the same before and after they were JSON."""
    value = json.loads(json.dumps([positions, meta]))
    text = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _check_digest(positions: Sequence[dict], meta: Mapping[str, Any]) -> None:
    """Raises ValueError unless a data position and a meta have the digest in the meta; an older checkpoint has none."""
    content = {name: value for name, value in meta.items() if name != _DIGEST}
    if _DIGEST in meta and meta[_DIGEST] != _digest(positions, content):
        raise ValueError("the data position or the counters are not those that were saved")


def _read_meta(step: pathlib.Path) -> dict[str, Any]:
    """Returns the meta in a step's folder; empty: it has none. Raises ValueError and OSError."""
    return _read_json(step / "meta") if (step / "meta").is_dir() else {}


def _read_json(folder: pathlib.Path) -> Any:
    """Returns the JSON value of a part of a checkpoint. Raises ValueError and OSError."""
    [file] = folder.glob("*.json")
    return json.loads(read_text(file))


def check_params(
    path: str | os.PathLike, abstract: PyTree, may_differ: Sequence[str] = ()
) -> pathlib.Path:
    """Checks the parameters of a checkpoint, and returns the folder of its step.

    path: a workdir, whose newest step is used, or the folder of a step. Raises ValueError unless it holds parameters
    of these shapes. Paths that match a pattern of may_differ may be on one side only.
    """
    path = pathlib.Path(path).absolute()
    if (step := latest_step(path)) is not None:
        path = path / _FOLDER / str(step)
    if not (path / "model").is_dir():
        raise ValueError(f"{path} holds no checkpoint; give a workdir or its checkpoints/STEP")
    check_shapes({"model": abstract}, _metadata(path), f"checkpoint {path}", may_differ)
    return path


def load_params(
    path: str | os.PathLike, abstract: PyTree, may_differ: Sequence[str] = ()
) -> PyTree:
    """Loads the parameters of a checkpoint, without the rest of its state.

    path: see `check_params`. abstract: tree of ShapeDtypeStruct with the shardings to load to; leaves that the
    checkpoint lacks are left out. may_differ and errors: see `check_params`.
    """
    from orbax.checkpoint import v1 as ocp

    path = check_params(path, abstract, may_differ)
    stored = _metadata(path)
    held = tree.flatten(stored["model"])
    wanted = {p: x for p, x in tree.flatten(_with_shardings(abstract)).items() if p in held}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp.load_checkpointables(str(path), {"model": tree.unflatten(wanted)})["model"]
    saved = _saved_checksums(path)
    try:
        _check_bits({"model": loaded}, stored, saved)
    except ValueError as error:
        raise _damaged(path, error) from error
    return loaded


class StoredArray:
    """Array of a checkpoint; indexing with slices reads that part.

    Attributes:
      shape, dtype: shape and dtype of the array.
    """

    def __init__(self, array: "tensorstore.TensorStore", name: str, checks: ReadChecksums):
        self.shape, self.dtype = tuple(array.shape), array.dtype.numpy_dtype
        self._array, self._name, self._checks = array, name, checks

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> np.ndarray:
        part = self._array[index].read().result()
        parts = index if isinstance(index, tuple) else (index,)
        parts += (slice(None),) * (len(self.shape) - len(parts))
        ranges = [
            range(n)[i] if isinstance(i, slice) else range(n)[i : i + 1]
            for i, n in zip(parts, self.shape)
        ]
        box = part.reshape([len(r) for r in ranges])
        self._checks.add(self._name, [r.start for r in ranges], box, self.shape)
        return part


class StoredArrays(dict[str, StoredArray]):
    """Arrays of a checkpoint by path, which are read when they are indexed.

    path: folder of the checkpoint.
    """

    def __init__(
        self, path: pathlib.Path, arrays: Mapping[str, StoredArray], checks: ReadChecksums
    ):
        super().__init__(arrays)
        self._path, self._checks = path, checks

    def check_bits(self) -> None:
        """Raises ValueError if an array that was read in full has other bits than when it was saved.

        In a pod all processes must call it.
        """
        sizes = {f"model/{name}": math.prod(array.shape) for name, array in self.items()}
        if changed := self._checks.changed(sizes):
            raise _damaged(self._path, _changed_bits(changed))


def open_arrays(path: str | os.PathLike, abstract: PyTree) -> StoredArrays:
    """Opens the parameters of a checkpoint without reading them. path, abstract and errors: see `check_params`."""
    import tensorstore

    step = check_params(path, abstract)
    folder, arrays, checks = step / "model", {}, ReadChecksums(_saved_checksums(step))
    for name in tree.flatten(abstract):
        key_value_store = {
            "driver": "ocdbt",
            "base": f"file://{folder}/",
            "path": f"{name.replace('/', '.')}/",
        }
        spec = {"driver": "zarr3", "kvstore": key_value_store}
        try:
            array = tensorstore.open(spec, open=True, read=True).result()
        except ValueError as error:
            raise ValueError(
                f"{folder} is damaged: {' '.join(str(error).split())[:_MAX_REASON]}"
            ) from None
        arrays[name] = StoredArray(array, f"model/{name}", checks)
    return StoredArrays(step, arrays, checks)


def _saved_checksums(step: pathlib.Path) -> dict[str, list[int]]:
    """Returns the checksums in the meta of a step's folder; an older checkpoint has none. Raises ValueError if it is damaged."""
    try:
        return _read_meta(step).get(_CHECKSUMS, {})
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(step, error) from error


def _damaged(path: pathlib.Path, error: object) -> ValueError:
    return ValueError(f"checkpoint {path} is damaged ({error}); give another one")


def _changed_bits(names: Sequence[str]) -> str:
    return f"{len(names)} arrays have other bits than when they were saved, among them {names[0]}"


def check_space(workdir: str | os.PathLike, abstract: dict, keep: int) -> None:
    """Raises ValueError unless the disk of the workdir can hold keep + 1 checkpoints of this state.

    The extra one is needed because the oldest is deleted after the newest is complete. The space of the workdir's
    checkpoints counts as free. Every array counts in full, because arrays compress little.
    """
    folder = pathlib.Path(workdir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    leaves = jax.tree.leaves({k: v for k, v in abstract.items() if k != "step"})
    each = sum(np.dtype(x.dtype).itemsize * int(np.prod(x.shape)) for x in leaves) + _OVERHEAD_BYTES
    files = (pathlib.Path(workdir) / _FOLDER).rglob("*")
    free = shutil.disk_usage(folder).free + sum(f.stat().st_size for f in files if f.is_file())
    needed = (keep + 1) * each
    if needed > free:
        raise ValueError(
            f"{keep + 1} checkpoints of {each:,} bytes need {needed:,} bytes and {folder} has "
            f"{free:,} free; use another --workdir, or a smaller --experiment.train.keep"
        )


def _parts(state: dict) -> dict:
    """Returns the contents of a checkpoint's folders as nested dicts, so that the files do not depend on optax."""
    rest = {k: v for k, v in state.items() if k not in ("params", "optimizer", "step")}
    optimizer = tree.unflatten(tree.flatten(state["optimizer"]))
    return {"model": state["params"], "optimizer": optimizer, "rng": rest}


def _with_shardings(abstract):
    """Returns the tree with the first device as the sharding of leaves that have none."""
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first), abstract
    )


def _metadata(folder: pathlib.Path) -> dict:
    """Returns the shapes of the arrays in a step's folder, by part."""
    from orbax.checkpoint import v1 as ocp

    return ocp.checkpointables_metadata(str(folder)).metadata


def check_shapes(wanted: dict, stored: dict, name: str, may_differ: Sequence[str] = ()) -> None:
    """Raises ValueError unless the wanted parts are stored with the same paths and shapes.

    wanted, stored: {"model", "optimizer", "rng": tree of objects with `.shape`}. name: name of the checkpoint in the
    error. may_differ: see `check_params`.
    """
    for part in ("model", "optimizer", "rng"):
        if part not in wanted:
            continue
        want, have = tree.flatten(wanted[part]), tree.flatten(stored[part])
        wrong = sorted(p for p in set(want) ^ set(have) if not tree.matches_any(may_differ, p))
        wrong += [p for p in want if p in have and tuple(want[p].shape) != tuple(have[p].shape)]
        if wrong:
            theirs, ours = (
                leaves[wrong[0]].shape if wrong[0] in leaves else "missing"
                for leaves in (have, want)
            )
            parts = "model and optimiser" if "optimizer" in wanted else "model"
            raise ValueError(
                f"{name} does not fit this {parts}: {len(wrong)} arrays differ, among them {part}/{wrong[0]}, "
                f"{theirs} there and {ours} here"
            )


def _check_bits(arrays: dict, stored: dict, saved: dict) -> None:
    """Raises ValueError if arrays have other checksums than saved ones.

    arrays: {"model", "optimizer", "rng": tree}. stored: the same of objects with the dtype that is on disk. An array that was
    converted to another dtype is not checked.
    """
    held = tree.flatten({part: stored[part] for part in arrays})
    same = {p: x for p, x in tree.flatten(arrays).items() if p in held and x.dtype == held[p].dtype}
    if changed := changed_arrays(tree.unflatten(same), saved):
        raise ValueError(_changed_bits(changed))


def _join(parts: Sequence[dict]) -> dict:
    joined: dict = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                joined[name] = _join([joined.get(name, {}), value])
            else:
                joined.setdefault(name, value)
    return joined


def is_disk_full(error: BaseException) -> bool:
    """Returns True if a write failed for lack of space: disk, quota or file size limit."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    codes = [f"os_error_code='{n}'" for n in numbers]  # the wording of TensorStore
    return getattr(error, "errno", None) in numbers or any(code in str(error) for code in codes)


def _not_orbax(record: logging.LogRecord) -> bool:
    """Drops the tracebacks of Orbax's threads from the log, because `wait` raises their errors anyway."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
