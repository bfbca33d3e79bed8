"""Checkpoints of a run: model, optimiser, data position and random key, saved and restored together.

Layout of a workdir: `checkpoints/STEP/{model,optimizer,data,rng,meta}`. A step's folder gets its name
only when all of it is on disk, so a process killed in the middle of a save loses that save and
nothing else. This is the only module that knows Orbax.
"""

import contextlib
import errno
import json
import logging
import pathlib
import shutil
import threading
from collections.abc import Sequence
from typing import Self

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from glm5_jax.core import tree
from glm5_jax.core.hosts import everyones

_FOLDER = "checkpoints"
_PATIENCE = 10.0  # seconds for each thread that a failed save has left
_OVERHEAD = 2**20  # bytes per checkpoint beside the arrays: metadata, data position


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message names the last good one."""


class Store:
    """The checkpoints of one workdir, of which the newest `keep` stay.

    A context manager: leaving it waits for the save under way. (An exception that leaves a process
    with an unfinished save can hang it at exit, so `close` belongs into a `finally`.)
    """

    def __init__(self, workdir, keep: int = 2):
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
            self.folder,
            context=context,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        )
        self._saving: tuple[int, object] | None = None
        logging.getLogger("absl").addFilter(_not_orbax)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [c.step for c in self._orbax.checkpoints]

    @property
    def latest(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def last_good(self) -> str:
        """Words that name the newest complete checkpoint."""
        step = latest_step(self.folder.parent)
        if step is None:
            return "no checkpoint is complete yet"
        return f"the last good checkpoint is {self.folder / str(step)}"

    def save(self, state: dict, data: dict, meta: dict) -> None:
        """Starts to write `state` under its own step and returns once its arrays are copied.

        state: {"params", "optimizer", "step", ...}, of which the rest (random key, counters) becomes
        `rng`; the arrays may be donated to the next step at once. data, of which every process has its
        own part, and meta: dicts that JSON can hold. A failure of this save is raised by the next `save`,
        `wait` or `close`. SaveError.
        """
        self.wait()
        step = int(state["step"])
        if step in self.steps:
            return
        parts = {
            **_parts(state),
            "data": everyones(data),
            "meta": {**meta, "step": step},
        }
        try:
            saved = self._orbax.save_checkpointables_async(step, parts, force=True)
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error
        self._saving = (step, saved)

    def wait(self) -> None:
        """Returns when the save under way is on disk. SaveError if it failed."""
        if self._saving is None:
            return
        (step, saved), self._saving = self._saving, None
        try:
            saved.result()
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error

    def restore(self, abstract: dict, step: int | None = None) -> tuple[dict, dict, dict]:
        """(state, data, meta) of a step, the newest by default; data: those of all processes, joined (`load_data`).

        abstract: a state of `jax.ShapeDtypeStruct` with the shardings wanted now (default: the first
        device), which may be those of another mesh than the one that saved. ValueError if there is no such step, or if its
        arrays have other shapes.
        """
        step = self.latest if step is None else step
        if step not in self.steps:
            raise ValueError(f"no checkpoint {step} in {self.folder}; there are {self.steps}")
        abstract = _placed(abstract)
        wanted = {**_parts(abstract), "data": None, "meta": None}
        found = self._orbax.checkpointables_metadata(step).metadata
        check_shapes(wanted, found, f"checkpoint {step}")
        got = self._orbax.load_checkpointables(step, wanted)
        moments = tree.flatten(got["optimizer"])
        state = {
            "params": got["model"],
            "optimizer": tree.map_with_path(lambda p, _: moments[p], abstract["optimizer"]),
            "step": jax.device_put(np.asarray(step, np.int32), abstract["step"].sharding),
            **got["rng"],
        }
        return state, _joined(got["data"]), got["meta"]

    def close(self) -> None:
        """Waits for the save under way. SaveError if it failed."""
        try:
            self.wait()
        finally:
            try:
                self._orbax.close()
            except (OSError, ValueError):
                pass  # the failure that `wait` has just raised, once more
            _join_threads()
            logging.getLogger("absl").removeFilter(_not_orbax)

    def _failed(self, step: int, error: Exception) -> SaveError:
        self._clear_partial()
        reason = "the disk is full" if disk_full(error) else str(error).splitlines()[0]
        return SaveError(
            f"the checkpoint of step {step} could not be written ({reason}); {self.last_good}; "
            "free some space and run the same command to go on"
        )

    def _clear_partial(self) -> None:
        """Frees what an interrupted save has left."""
        if jax.process_index() == 0:
            for partial in self.folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(partial, ignore_errors=True)


def _join_threads() -> None:
    """Waits for what Orbax leaves running of a save that failed: at the interpreter's exit it would complain."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            # Each raises what went wrong in its own part of the save, of which `wait` has raised one.
            with contextlib.suppress(OSError, ValueError):
                thread.join(_PATIENCE)


def latest_step(workdir) -> int | None:
    """Newest complete checkpoint of a workdir, without opening it."""
    folder = pathlib.Path(workdir) / _FOLDER
    steps = [int(p.name) for p in folder.glob("*") if p.name.isdigit()]
    return max(steps, default=None)


def load_data(workdir, step: int) -> dict:
    """The data position of a step: what the processes passed to `Store.save`, as one dict. What several have is the first's;
    if it is a dict, all of theirs."""
    [file] = (pathlib.Path(workdir) / _FOLDER / str(step) / "data").glob("*.json")
    return _joined(json.loads(file.read_text()))


def check_params(path, abstract, unshared: Sequence[str] = ()) -> pathlib.Path:
    """The folder of one step that the path means: a workdir's newest, or itself. ValueError unless it
    holds parameters of these shapes, but for paths that only one side has and a pattern of `unshared`
    is found in."""
    path = pathlib.Path(path).absolute()
    if (step := latest_step(path)) is not None:
        path = path / _FOLDER / str(step)
    if not (path / "model").is_dir():
        raise ValueError(f"{path} holds no checkpoint; give a workdir or its checkpoints/STEP")
    check_shapes({"model": abstract}, _metadata(path), f"checkpoint {path}", unshared)
    return path


def load_params(path, abstract, unshared: Sequence[str] = ()):
    """Parameters alone, from a workdir (its newest step) or from one step's folder: those of the abstract
    tree that it holds.

    abstract: tree of ShapeDtypeStruct with the shardings wanted. unshared, ValueError: as `check_params`.
    """
    path = check_params(path, abstract, unshared)
    held = tree.flatten(_metadata(path)["model"])
    wanted = {p: x for p, x in tree.flatten(_placed(abstract)).items() if p in held}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load_checkpointables(path, {"model": tree.unflatten(wanted)})["model"]


def check_space(workdir, abstract: dict, keep: int) -> None:
    """ValueError unless the disk of the workdir can hold keep + 1 checkpoints of this state.

    One more than are kept: the oldest is deleted only after the newest is complete. Counts what the
    workdir's checkpoints occupy already as free, and every array in full (they compress little).
    """
    folder = pathlib.Path(workdir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    leaves = jax.tree.leaves({k: v for k, v in abstract.items() if k != "step"})
    each = sum(np.dtype(x.dtype).itemsize * int(np.prod(x.shape)) for x in leaves) + _OVERHEAD
    own = (pathlib.Path(workdir) / _FOLDER).rglob("*")
    free = shutil.disk_usage(folder).free + sum(f.stat().st_size for f in own if f.is_file())
    needed = (keep + 1) * each
    if needed > free:
        raise ValueError(
            f"{keep + 1} checkpoints of {each:,} bytes need {needed:,} bytes and {folder} has "
            f"{free:,} free; use another --workdir, or a smaller --experiment.train.keep"
        )


def _parts(state: dict) -> dict:
    """The folders of a checkpoint. All are nested dicts, so what lies on disk knows nothing of optax."""
    rest = {k: v for k, v in state.items() if k not in ("params", "optimizer", "step")}
    optimizer = tree.unflatten(tree.flatten(state["optimizer"]))
    return {"model": state["params"], "optimizer": optimizer, "rng": rest}


def _placed(abstract):
    """The same tree with the first device where no sharding is given."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), abstract
    )


def _metadata(folder: pathlib.Path) -> dict:
    """Shapes of the arrays in a step's folder, by part."""
    return ocp.checkpointables_metadata(folder).metadata


def check_shapes(wanted: dict, found: dict, name: str, unshared: Sequence[str] = ()) -> None:
    """ValueError, in which what was found has that name, unless the parts that are wanted ("model",
    "optimizer", "rng": trees of whatever has a shape) are found alike. unshared: as `check_params`."""
    for part in ("model", "optimizer", "rng"):
        if part not in wanted:
            continue
        want, have = tree.flatten(wanted[part]), tree.flatten(found[part])
        wrong = sorted(p for p in set(want) ^ set(have) if not tree.found(unshared, p))
        wrong += [p for p in want if p in have and tuple(want[p].shape) != tuple(have[p].shape)]
        if wrong:
            there, here = (
                own[wrong[0]].shape if wrong[0] in own else "missing" for own in (have, want)
            )
            whose = "model and optimiser" if "optimizer" in wanted else "model"
            raise ValueError(
                f"{name} does not fit this {whose}: {len(wrong)} arrays differ, among them {part}/{wrong[0]}, "
                f"{there} there and {here} here"
            )


def _joined(parts: Sequence[dict]) -> dict:
    whole: dict = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, dict):
                whole[name] = _joined([whole.get(name, {}), value])
            else:
                whole.setdefault(name, value)
    return whole


def disk_full(error: BaseException) -> bool:
    """Whether an error of writing says that there is no room: disk, quota or file size limit."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    told = [f"os_error_code='{n}'" for n in numbers]  # so TensorStore says it
    return getattr(error, "errno", None) in numbers or any(t in str(error) for t in told)


def _not_orbax(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that Orbax's threads log of errors which `wait` raises anyway."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
