"""The five mesh axes, and the collectives of the manual regions that run on them.

Every mesh has all five axes; an axis of size 1 costs nothing. The batch is sharded over
`data, fsdp, expert` and the sequence over `context, tensor`. Inside a manual region
(`jax.shard_map` over all axes) the functions below take a tuple of axis names and leave out the axes
of size 1, so the same code runs on one device without any region at all.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
SEQUENCE_AXES = ("context", "tensor")


def make_mesh(shape=None, *, devices=None, expert_slices: int = 1, **axes: int) -> Mesh:
    """A mesh with the axes `data, fsdp, expert, context, tensor`.

    `make_mesh(fsdp=2, expert=4)`, or the same as a dict; axes not named have size 1, one axis may be
    -1 for "what is left". expert_slices: see `placed`. ValueError if the axes do not multiply to the number
    of devices.
    """
    axes = {**(shape or {}), **axes}
    devices = jax.devices() if devices is None else devices
    sizes = resolve(axes, len(devices))
    return Mesh(
        placed(devices, sizes, expert_slices), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def placed(devices, sizes: tuple[int, ...], expert_slices: int = 1) -> np.ndarray:
    """The devices as an array of these sizes of all five axes, neighbours on an axis near each other.

    Later axes have the nearest neighbours, the GPUs of a host for example. Axes of TPUs follow the dimensions of their torus, of which
    an axis may take a part; of several slices `data` has as many as divide it, and `fsdp` the rest. expert_slices: so many
    parts of `expert` are farthest apart instead, in slices or hosts of their own: of hosts, `context` is then across them too.
    ValueError names the axis that does not fit.
    """
    expert = sizes[AXES.index("expert")]
    if expert_slices < 1 or expert % expert_slices:
        raise ValueError(
            f"expert_slices {expert_slices} does not divide the mesh axis expert={expert}; choose a divisor of it"
        )
    if getattr(devices[0], "platform", "") == "tpu":
        return _on_tori(devices, sizes, expert_slices)
    names, parts = zip(*nesting(sizes, expert_slices))
    order = sorted(range(len(names)), key=lambda n: AXES.index(names[n]))
    return np.asarray(devices).reshape(parts).transpose(order).reshape(sizes)


def nesting(sizes: Sequence[int], expert_slices: int = 1) -> tuple[tuple[str, int], ...]:
    """(axis, size) of GPUs as they are numbered, the nearest last. The devices of a slice of `expert` then come before
    those of `context`: rows are dealt out among them."""
    if expert_slices == 1:
        return tuple(zip(AXES, sizes))
    data, fsdp, expert, context, tensor = sizes
    inside = ("context", context), ("expert", expert // expert_slices), ("tensor", tensor)
    return ("expert", expert_slices), ("data", data), ("fsdp", fsdp), *inside


def _on_tori(devices, sizes: tuple[int, ...], expert_slices: int) -> np.ndarray:
    count = len({getattr(device, "slice_index", 0) for device in devices})
    split = {"allow_split_physical_axes": True}
    try:
        if count == 1:
            return mesh_utils.create_device_mesh(sizes, devices, **split)
        outer = _slices_along(count, sizes, expert_slices)
        inner = [size // number for size, number in zip(sizes, outer)]
        return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, **split)
    except NotImplementedError as error:  # "... logical_axis_index 1 of size 3 ..."
        index = re.search(r"logical_axis_index (\d)", str(error))
        named = f"{AXES[int(index[1])]}={sizes[int(index[1])]}" if index else str(tuple(sizes))
        raise ValueError(
            f"mesh axis {named} does not fit the torus of {len(devices)} devices in {count} slices; let its size be a "
            "product of factors of its dimensions"
        ) from None


def _slices_along(count: int, sizes: tuple[int, ...], expert_slices: int) -> tuple[int, ...]:
    """How many slices each axis has."""
    data, fsdp, *_ = sizes
    along_data = math.gcd(data, count // expert_slices)
    along_fsdp = count // (expert_slices * along_data)
    if count % expert_slices or fsdp % along_fsdp:
        raise ValueError(
            f"mesh axes data={data}, fsdp={fsdp} and expert_slices {expert_slices} do not fit {count} slices of TPUs; let "
            "expert_slices divide them, and data be a multiple of what that leaves, or fsdp of what data leaves"
        )
    outer = {"data": along_data, "fsdp": along_fsdp, "expert": expert_slices}
    return tuple(outer.get(axis, 1) for axis in AXES)


def abstract_mesh(axes: dict[str, int], device_kind: str = "TPU v5p") -> AbstractMesh:
    """A mesh of chips that are not there, as their runtime names them ("TPU v5p", "NVIDIA H200"), to trace programs
    for. ValueError if an axis is left open (-1)."""
    if -1 in axes.values():
        [name, *_] = [name for name, size in axes.items() if size == -1]
        raise ValueError(
            f"mesh axis {name} is left open (-1), and there are no devices to fill it; set mesh.{name}"
        )
    sizes = resolve(axes, math.prod(axes.values()))
    chip = AbstractDevice(
        device_kind=device_kind,
        num_cores=None,
        platform="tpu" if device_kind.startswith("TPU") else "cuda",
    )
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=chip)


def resolve(axes: dict[str, int], num_devices: int) -> tuple[int, ...]:
    """Sizes of all five axes, with one -1 filled in; ValueError unless they use every device."""
    if unknown := sorted(set(axes) - set(AXES)):
        raise ValueError(f"unknown mesh axis {unknown}; the axes are {', '.join(AXES)}")
    sizes = [int(axes.get(name, 1)) for name in AXES]
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ValueError(
            f"mesh {dict(zip(AXES, sizes))}: sizes must be >= 1, at most one may be -1"
        )
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and num_devices % known == 0:
        sizes[sizes.index(-1)] = num_devices // known
    if math.prod(sizes) != num_devices:
        shape = ", ".join(f"{n}={s}" for n, s in zip(AXES, sizes) if s != 1) or "all 1"
        raise ValueError(
            f"mesh {shape} does not divide the {num_devices} devices; "
            f"the axes must multiply to {num_devices} (one may be -1)"
        )
    return tuple(sizes)


def row_group(mesh: Mesh) -> tuple[int, int]:
    """(index, count): which of `count` equal parts of a batch's rows this process holds.

    Processes that share a row (`context` or `tensor` spans them) have the same part. ValueError if
    the processes' rows overlap otherwise.
    """
    shards = math.prod(mesh.shape[a] for a in BATCH_AXES)
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES)).devices_indices_map((shards,))
    held = collections.defaultdict(set)
    for device, (part,) in rows.items():
        held[device.process_index].add(part.start or 0)
    parts = disjoint_parts(held.values(), shards)
    if parts is None:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: some processes share a part of their rows; let context * tensor "
            "be a multiple or a divisor of the devices of a process"
        )
    return parts.index(sorted(held[jax.process_index()])), len(parts)


def disjoint_parts(held: Iterable[set[int]], count: int) -> list[list[int]] | None:
    """The different sets among `held`, each sorted; None unless they cut range(count) into equal parts."""
    parts = [list(part) for part in sorted({tuple(sorted(part)) for part in held})]
    equal = len({len(part) for part in parts}) == 1
    return parts if equal and sorted(sum(parts, [])) == list(range(count)) else None


@dataclasses.dataclass(frozen=True)
class Region:
    """What a function inside a manual region knows of its mesh; `Region()` is one device.

    shard_sequence is false where the sequence is too short to split (decoding): the tokens are then
    the same on every device of `context` and `tensor`. far: axes along which devices are in several slices of TPUs.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    shard_sequence: bool = True
    far: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh, shard_sequence: bool = True) -> "Region":
        sizes = {a: mesh.shape[a] for a in AXES}
        return cls(**sizes, shard_sequence=shard_sequence, far=_across_slices(mesh))

    def live(self, axes) -> tuple[str, ...]:
        """Those of the axes that have more than one device."""
        return tuple(a for a in axes if getattr(self, a) > 1)

    def size(self, axes) -> int:
        return math.prod(getattr(self, a) for a in axes)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        return self.live(SEQUENCE_AXES) if self.shard_sequence else ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes over which tokens differ."""
        return self.live(BATCH_AXES) + self.sequence_axes

    def all_gather(self, x, axes, dim: int):
        live = self.live(axes)
        return lax.all_gather(x, live, axis=dim, tiled=True) if live else x

    def whole_sequence(self, x):
        """[b t ...] of all tokens, of x [b t ...] of this device's. The gradient is scattered.

        Gathered as a matrix of t rows: the gradient of a gather along a second dimension XLA:TPU sums in
        full on every device, if what takes it looks at parts of it, as norm and rotation do.
        """
        if not self.sequence_axes:
            return x
        rows = jnp.moveaxis(x, 1, 0)
        whole = self.all_gather(rows.reshape(len(rows), -1), self.sequence_axes, 0)
        return jnp.moveaxis(whole.reshape(-1, *rows.shape[1:]), 0, 1)

    def psum_scatter(self, x, axes, dim: int):
        live = self.live(axes)
        return lax.psum_scatter(x, live, scatter_dimension=dim, tiled=True) if live else x

    def all_to_all(self, x, axes, split: int, join: int):
        """x cut along one dimension over the devices of the axes, which get all parts along another."""
        live = self.live(axes)
        return lax.all_to_all(x, live, split, join, tiled=True) if live else x

    def psum(self, x, axes):
        live = self.live(axes)
        return lax.psum(x, live) if live else x

    def pmax(self, x, axes):
        live = self.live(axes)
        return lax.pmax(x, live) if live else x

    def index(self, axes):
        """Position of this device along the axes, the first axis slowest."""
        live = self.live(axes)
        return lax.axis_index(live) if live else 0


@functools.cache
def _across_slices(mesh) -> tuple[str, ...]:
    if isinstance(mesh, AbstractMesh):
        return ()
    slices = np.vectorize(lambda device: getattr(device, "slice_index", 0))(mesh.devices)
    return tuple(axis for n, axis in enumerate(AXES) if np.diff(slices, axis=n).any())


def check_batch(b: int, t: int, region: Region) -> None:
    """ValueError if a batch [b t] cannot be split over the devices of a region."""
    for name, size, axes_ in (("batch size", b, BATCH_AXES), ("sequence length", t, SEQUENCE_AXES)):
        if axes_ is SEQUENCE_AXES and not region.shard_sequence:
            continue
        if size % region.size(axes_):
            raise ValueError(
                f"{name} {size} does not divide over the mesh axes {' * '.join(axes_)} = "
                f"{region.size(axes_)}; use a multiple of it"
            )
