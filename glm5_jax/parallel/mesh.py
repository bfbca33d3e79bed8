"""Defines the five mesh axes, and the collectives of the manual regions that run on them.

Every mesh has all five axes; an axis of size 1 costs nothing. The batch is sharded over
`data, fsdp, expert` and the sequence over `context, tensor`. Inside a manual region
(`jax.shard_map` over all axes) the collectives of `Region` take a tuple of axis names and leave out the axes
of size 1. So the same code runs on one device without a manual region.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

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

Arrays = TypeVar("Arrays")  # an array or a tree of arrays


def make_mesh(
    shape: Mapping[str, int] | None = None,
    *,
    devices: Sequence | None = None,
    expert_slices: int = 1,
    **axes: int,
) -> Mesh:
    """Returns a mesh with the axes `data, fsdp, expert, context, tensor`.

    `make_mesh(fsdp=2, expert=4)`, or the same as a dict (shape). Axes not named have size 1. One axis may be -1 and
    then takes the remaining devices. devices: those of the mesh; None: all. expert_slices: see `device_grid`.

    Raises ValueError if the product of the axes is not the number of devices.
    """
    axes = {**(shape or {}), **axes}
    devices = jax.devices() if devices is None else devices
    sizes = resolve(axes, len(devices))
    return Mesh(
        device_grid(devices, sizes, expert_slices), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def device_grid(devices: Sequence, sizes: tuple[int, ...], expert_slices: int = 1) -> np.ndarray:
    """Arranges devices in an array of these axis sizes, with neighbours on an axis close in the network.

    - Later axes have the closest neighbours, for example the GPUs of a host.
    - On TPUs the axes follow the dimensions of the torus; an axis may take part of a dimension.
    - With several TPU slices, `data` spans as many slices as divide it, and `fsdp` the rest.
    - expert_slices: number of parts of `expert` that are placed farthest apart, each in its own slice or host. In
      the case of hosts, `context` then spans hosts, too.

    Raises ValueError with the axis that does not fit.
    """
    expert = sizes[AXES.index("expert")]
    if expert_slices < 1 or expert % expert_slices:
        raise ValueError(
            f"expert_slices {expert_slices} does not divide the mesh axis expert={expert}; choose a divisor of it"
        )
    if getattr(devices[0], "platform", "") == "tpu":
        return _on_tori(devices, sizes, expert_slices)
    names, parts = zip(*axis_order(sizes, expert_slices))
    order = sorted(range(len(names)), key=lambda n: AXES.index(names[n]))
    return np.asarray(devices).reshape(parts).transpose(order).reshape(sizes)


def axis_order(sizes: Sequence[int], expert_slices: int = 1) -> tuple[tuple[str, int], ...]:
    """Returns (axis, size) in the order in which GPUs are numbered, the axis of the closest GPUs last.

    With several expert slices, the devices of a slice of `expert` are closer than those of `context`, because they
    exchange rows.
    """
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
    """Returns the number of TPU slices along each axis."""
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
    """Returns a mesh without devices, to trace programs for other chips.

    device_kind: name of the chip as its runtime reports it ("TPU v5p", "NVIDIA H200"). Raises ValueError if an axis is
    -1.
    """
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
    """Returns the sizes of all five axes, with -1 resolved. Raises ValueError unless they use every device."""
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
            f"mesh {shape} does not divide the {num_devices} device{'s' * (num_devices != 1)}; "
            f"the axes must multiply to {num_devices} (one may be -1)"
        )
    return tuple(sizes)


def row_group(mesh: Mesh) -> tuple[int, int]:
    """Returns (index, count): this process holds part `index` of `count` equal parts of a batch's rows.

    Processes that share a row (`context` or `tensor` spans them) have the same part. Raises ValueError if
    the rows of processes overlap otherwise.
    """
    shards = math.prod(mesh.shape[a] for a in BATCH_AXES)
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES)).devices_indices_map((shards,))
    starts_by_process = collections.defaultdict(set)
    for device, (rows_of_device,) in rows.items():
        starts_by_process[device.process_index].add(rows_of_device.start or 0)
    parts = disjoint_parts(starts_by_process.values(), shards)
    if parts is None:
        raise ValueError(
            f"mesh {dict(mesh.shape)}: some processes share a part of their rows; let context * tensor "
            "be a multiple or a divisor of the devices of a process"
        )
    return parts.index(sorted(starts_by_process[jax.process_index()])), len(parts)


def disjoint_parts(held: Iterable[set[int]], count: int) -> list[list[int]] | None:
    """Returns the distinct sets of `held`, each sorted; None unless they divide range(count) into equal parts."""
    parts = [list(part) for part in sorted({tuple(sorted(part)) for part in held})]
    equal = len({len(part) for part in parts}) == 1
    return parts if equal and sorted(sum(parts, [])) == list(range(count)) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """Mesh as seen by a function inside a manual region; `Region()` is one device.

    Attributes:
      data, fsdp, expert, context, tensor: sizes of the mesh axes.
      shard_sequence: whether the sequence is sharded. False where it is too short (decoding): every device of
        `context` and `tensor` then has the same tokens.
      dcn_axes: axes that span several TPU slices, which the data-center network connects.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    shard_sequence: bool = True
    dcn_axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, shard_sequence: bool = True) -> "Region":
        """Returns the region of a mesh."""
        sizes = {a: mesh.shape[a] for a in AXES}
        return cls(**sizes, shard_sequence=shard_sequence, dcn_axes=_across_slices(mesh))

    def nontrivial_axes(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Returns the axes that have more than one device."""
        return tuple(a for a in axes if getattr(self, a) > 1)

    def size(self, axes: Iterable[str]) -> int:
        """Returns the number of devices along the axes."""
        return math.prod(getattr(self, a) for a in axes)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """The axes over which the sequence is sharded."""
        return self.nontrivial_axes(SEQUENCE_AXES) if self.shard_sequence else ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes over which tokens differ."""
        return self.nontrivial_axes(BATCH_AXES) + self.sequence_axes

    def all_gather(self, x: jax.Array, axes: Iterable[str], dim: int) -> jax.Array:
        nontrivial = self.nontrivial_axes(axes)
        return lax.all_gather(x, nontrivial, axis=dim, tiled=True) if nontrivial else x

    def gather_sequence(self, x: jax.Array) -> jax.Array:
        """Gathers x [b t ...] over the sequence axes into [b t ...] of all tokens; its gradient is scattered.

        It gathers a matrix of t rows. If it gathered along the second dimension, XLA:TPU would sum the gradient in
        full on every device where the consumer reads parts of it, as norm and rotation do.
        """
        if not self.sequence_axes:
            return x
        rows = jnp.moveaxis(x, 1, 0)
        gathered = self.all_gather(rows.reshape(len(rows), -1), self.sequence_axes, 0)
        return jnp.moveaxis(gathered.reshape(-1, *rows.shape[1:]), 0, 1)

    def psum_scatter(self, x: jax.Array, axes: Iterable[str], dim: int) -> jax.Array:
        nontrivial = self.nontrivial_axes(axes)
        return (
            lax.psum_scatter(x, nontrivial, scatter_dimension=dim, tiled=True) if nontrivial else x
        )

    def all_to_all(self, x: jax.Array, axes: Iterable[str], split: int, join: int) -> jax.Array:
        """Splits x along one dimension over the devices of the axes, and concatenates their parts along another."""
        nontrivial = self.nontrivial_axes(axes)
        return lax.all_to_all(x, nontrivial, split, join, tiled=True) if nontrivial else x

    def psum(self, x: Arrays, axes: Iterable[str]) -> Arrays:
        """Sums an array, or each array of a tree, over the devices of the axes."""
        nontrivial = self.nontrivial_axes(axes)
        return lax.psum(x, nontrivial) if nontrivial else x

    def pmax(self, x: jax.Array, axes: Iterable[str]) -> jax.Array:
        nontrivial = self.nontrivial_axes(axes)
        return lax.pmax(x, nontrivial) if nontrivial else x

    def index(self, axes: Iterable[str]) -> jax.Array | int:
        """Returns the position of this device along the axes; the first axis varies slowest."""
        nontrivial = self.nontrivial_axes(axes)
        return lax.axis_index(nontrivial) if nontrivial else 0


@functools.cache
def _across_slices(mesh) -> tuple[str, ...]:
    if isinstance(mesh, AbstractMesh):
        return ()
    slices = np.vectorize(lambda device: getattr(device, "slice_index", 0))(mesh.devices)
    return tuple(axis for n, axis in enumerate(AXES) if np.diff(slices, axis=n).any())


def check_batch(b: int, t: int, region: Region) -> None:
    """Raises ValueError if a batch [b t] cannot be split over the devices of a region."""
    for name, size, axes_ in (("batch size", b, BATCH_AXES), ("sequence length", t, SEQUENCE_AXES)):
        if axes_ is SEQUENCE_AXES and not region.shard_sequence:
            continue
        if size % region.size(axes_):
            raise ValueError(
                f"{name} {size} does not divide over the mesh axes {' * '.join(axes_)} = "
                f"{region.size(axes_)}; use a multiple of it"
            )
