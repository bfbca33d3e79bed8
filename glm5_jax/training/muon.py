"""Muon Split: Muon on every matrix, where heads of the Q/K/V up-projections and experts are separate matrices.

One step on a block G [r, c] (GLM-4.5 2.4; GLM-5 2.1 for the split by heads):

    M = momentum M + G;  N = G + momentum M;  X = newton_schulz(N)
    W -= learning_rate (rms sqrt(max(r, c)) X + weight_decay W)

X has singular values near 1, so the scale gives every block an update of about the same RMS, whatever its
shape. The shape is that of the block, not of the stored array.

Newton-Schulz needs full matrices. On a mesh:

- One all-to-all exchanges the shards of a weight: it splits the blocks and joins the matrices.
- Every device iterates on the blocks that it owns. A second all-to-all returns them.
- Devices that hold copies of a weight share the work. No block is computed twice, and no matrix is
  summed over devices.
- A large mesh has more devices than most weights have blocks. Blocks of several weights then go to
  different devices and are iterated on together, not one weight after the other.
- A block that is too large for one owner, such as the LM head, stays divided by its longer side. All devices
  iterate on their parts and sum the products X X^T.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

from glm5_jax.parallel import tree
from glm5_jax.parallel.mesh import AXES, Region
from glm5_jax.parallel.sharding import spec_of

# The only matrices that paper 2.1 names, and their counterparts in grouped-query attention.
SPLIT_BY_HEAD = re.compile(r"attn/(q_b|k_b|v_b|q|k|v)$")
MAX_ELEMENTS = 1 << 26  # maximum elements that one device iterates on at a time; bounds the memory
# Maximum elements of a block with one owner. One v5p would iterate 0.26 s on GLM-5's LM head [6144, 154880].
MAX_OWNED_ELEMENTS = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Dimensions of a weight: those that number its blocks, and those of a block's rows and columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def to_blocks(self, x: Float[Array, "..."]) -> Float[Array, "b ..."]:
        """Returns the blocks [b, *rows, *columns] of a weight, or of a shard of it."""
        dims = self.rows + self.columns
        return x.transpose(self.batch + dims).reshape(-1, *(x.shape[d] for d in dims))

    def from_blocks(
        self, blocks: Float[Array, "b ..."], shape: tuple[int, ...]
    ) -> Float[Array, "..."]:
        """Returns the weight, or shard, of this shape; inverse of `to_blocks`."""
        order = self.batch + self.rows + self.columns
        return blocks.reshape([shape[d] for d in order]).transpose(np.argsort(order))

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns (r, c) of every block of a weight of this shape."""
        return math.prod(shape[d] for d in self.rows), math.prod(shape[d] for d in self.columns)


def layout_of(path: str, letters: str, split: str = "head") -> BlockLayout:
    """Returns the layout of the weight at a path, declared with these letters ("l q n hr").

    Layers and experts are always separate blocks.

    split: "head" splits the Q/K/V up-projections into their heads, "whole" makes each one block.

    Raises ValueError if the weight is not a stack of matrices, or split is unknown.
    """
    if split not in ("head", "whole"):
        raise ValueError(f"split is {split!r}; use 'head' or 'whole'")
    names = letters.split()
    batch = {"l"}
    if "experts" in path.split("/"):
        batch.add("e")
    if split == "head" and SPLIT_BY_HEAD.search(path):
        batch |= {"n", "y"}
    sides: list[tuple[int, ...]] = []
    for dim, name in enumerate(names):
        if name in batch:
            continue
        # Heads and their width form one side of the matrix.
        if sides and names[sides[-1][-1]] in ("n", "y", "i"):
            sides[-1] += (dim,)
        else:
            sides.append((dim,))
    if len(sides) != 2:
        raise ValueError(
            f"{path} ({letters!r}) is not a stack of matrices; give it to another optimiser group"
        )
    rows, columns = sides
    return BlockLayout(
        batch=tuple(d for d, name in enumerate(names) if name in batch), rows=rows, columns=columns
    )


@jax.named_scope("newton_schulz")
def newton_schulz(
    x: Float[Array, "b r c"],
    coefficients: tuple[float, float, float],
    steps: int,
    axes: tuple[str, ...] = (),
) -> Float[Array, "b r c"]:
    """Orthogonalises every matrix of x: same singular vectors, singular values near 1.

    X <- a X + (b X X^T + c (X X^T)^2) X, `steps` times from X / ||X||.

    - Products are taken in the dtype of x and summed in float32.
    - Matrices of zeros stay zero.
    - A loop processes at most MAX_ELEMENTS at a time.

    axes: mesh axes over which the columns are divided; call it inside a manual region over them.
    """
    num, rows, columns = x.shape
    if rows > columns and not axes:
        return newton_schulz(x.swapaxes(1, 2), coefficients, steps).swapaxes(1, 2)
    chunks = min(num, -(-x.size // MAX_ELEMENTS))
    if chunks > 1:
        size = -(-num // chunks)
        looped = num - num % size
        parts = x[:looped].reshape(-1, size, rows, columns)
        parts = lax.map(lambda part: newton_schulz(part, coefficients, steps, axes), parts)
        parts = parts.reshape(-1, rows, columns)
        if looped == num:
            return parts
        return jnp.concatenate([parts, newton_schulz(x[looped:], coefficients, steps, axes)])

    a, b, c = coefficients
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def product(spec, y, z):
        return jnp.einsum(spec, y, z, preferred_element_type=wide)

    def total(y):
        return lax.psum(y, axes) if axes else y

    def step(_, y):
        gram = total(product("brc,bsc->brs", y, y))
        half = gram.astype(x.dtype)
        poly = b * gram + c * product("brs,bst->brt", half, half)
        correction = product("brs,bsc->brc", poly.astype(x.dtype), y)
        return (a * y.astype(wide) + correction).astype(x.dtype)

    norm = jnp.sqrt(total(jnp.sum(jnp.square(x.astype(wide)), axis=(1, 2), keepdims=True)))
    return lax.fori_loop(0, steps, step, (x / jnp.maximum(norm, 1e-12)).astype(x.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPlacement:
    """Placement of a weight's blocks on the mesh. Weights with equal placements are exchanged together.

    Attributes:
      piece: a device's size of every matrix dimension, rows first.
      num_rows: number of these dimensions that form the rows.
      shard_axes: mesh axes that shard each dimension.
      copy_axes: mesh axes whose devices hold copies.
    """

    piece: tuple[int, ...]
    num_rows: int
    shard_axes: tuple[tuple[str, ...], ...]
    copy_axes: tuple[str, ...]

    @classmethod
    def of(
        cls, layout: BlockLayout, shape: tuple[int, ...], spec: P, region: Region
    ) -> "BlockPlacement":
        """Returns the placement of a weight whose shard on this device has this shape."""
        entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec]
        dims = layout.rows + layout.columns
        return cls(
            piece=tuple(shape[d] for d in dims),
            num_rows=len(layout.rows),
            shard_axes=tuple(region.nontrivial_axes(entries[d]) for d in dims),
            copy_axes=region.nontrivial_axes(
                a for a in AXES if not any(a in entry for entry in entries)
            ),
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the mesh axes over which pieces of one block lie, in the order of the mesh."""
        return tuple(a for a in AXES if any(a in names for names in self.shard_axes))

    def block_size(self, region: Region) -> tuple[int, int]:
        """Returns (r, c) of the joined blocks."""
        sizes = [size * region.size(names) for size, names in zip(self.piece, self.shard_axes)]
        return math.prod(sizes[: self.num_rows]), math.prod(sizes[self.num_rows :])

    def join(
        self, x: Float[Array, "b ..."], region: Region, first: int = 0
    ) -> Float[Array, "k r c"]:
        """Joins pieces [b, *piece] into the full blocks that this device owns.

        Blocks are padded with zeros and distributed over the devices that hold pieces or copies of them. `part` is the
        inverse.

        first: number of zero blocks before them.
        """
        devices = region.size(self.axes) * region.size(self.copy_axes)
        padding = (first, -(first + len(x)) % devices)
        y = jnp.pad(x, [padding] + [(0, 0)] * (x.ndim - 1))
        if self.copy_axes:
            share = len(y) // region.size(self.copy_axes)
            y = lax.dynamic_slice_in_dim(y, region.index(self.copy_axes) * share, share)
        if self.axes:
            # Without the barrier XLA would exchange the blocks one by one, each in the layout of its
            # weight, and reject the mixture of layouts.
            y = lax.all_to_all(lax.optimization_barrier(y), self.axes, 0, 0, tiled=True)
        y = y.reshape(*(region.size((a,)) for a in self.axes), -1, *self.piece)
        return y.transpose(self._order).reshape(-1, *self.block_size(region))

    def part(
        self, y: Float[Array, "k r c"], num: int, region: Region, first: int = 0
    ) -> Float[Array, "num ..."]:
        """Returns this device's pieces [num, *piece] of all blocks, from the full blocks that each device owns."""
        sizes = [
            (*(region.size((a,)) for a in names), size)
            for size, names in zip(self.piece, self.shard_axes)
        ]
        y = y.reshape(-1, *itertools.chain(*sizes)).transpose(np.argsort(self._order))
        y = y.reshape(-1, *self.piece)
        if self.axes:
            y = lax.all_to_all(y, self.axes, 0, 0, tiled=True)
        return region.all_gather(y, self.copy_axes, 0)[first : first + num]

    @property
    def _order(self) -> list[int]:
        """Returns the transposition of [*axes, k, *piece]: k first, every axis before the dimension that it shards."""
        order = [len(self.axes)]
        for i, names in enumerate(self.shard_axes):
            order += [self.axes.index(a) for a in names] + [len(self.axes) + 1 + i]
        return order


def apply_to_owned_blocks(
    function: Callable, pieces: dict[BlockPlacement, Array], region: Region
) -> dict[BlockPlacement, Array]:
    """Applies function [k, r, c] -> [k, r, c] to the full blocks whose pieces [b, *piece] the devices hold.

    Each block is owned by one of the devices that hold pieces or copies of it: GLM-5 2.4's zero-redundant Muon. If
    several placements have too few blocks for all devices, their blocks go to different devices, and all of these
    iterate together. Blocks whose longer side is shorter are padded with zeros, which stay zero and change no
    product.

    Call it inside a manual region over the mesh, or anywhere with `Region()`.
    """
    out = {}
    for group in group_placements({placement: len(x) for placement, x in pieces.items()}, region):
        # A common size for the group's blocks: their longer side lies as in the first placement.
        shapes = {placement: placement.block_size(region) for placement in group}
        height, width = next(iter(shapes.values()))
        transposed = {p: (r > c) != (height > width) for p, (r, c) in shapes.items()}
        longer = max(map(max, shapes.values()))
        size = (longer, width) if height > width else (height, longer)
        joined = []
        for placement, first in group.items():
            y = placement.join(pieces[placement], region, first)
            y = y.swapaxes(1, 2) if transposed[placement] else y
            padding = [(0, target - n) for target, n in zip(size, y.shape[1:])]
            joined.append(jnp.pad(y, [(0, 0), *padding]))
        # At most one device per placement owns a block; the others add zeros.
        y = function(functools.reduce(jnp.add, joined))
        for placement, first in group.items():
            r, c = reversed(shapes[placement]) if transposed[placement] else shapes[placement]
            blocks = y[:, :r, :c].swapaxes(1, 2) if transposed[placement] else y[:, :r, :c]
            out[placement] = placement.part(blocks, len(pieces[placement]), region, first)
    return out


def group_placements(
    numbers: dict[BlockPlacement, int], region: Region
) -> list[dict[BlockPlacement, int]]:
    """Groups placements, with these numbers of blocks each, whose blocks are iterated on together.

    Returns {placement: device that owns its first block} for each group; 0 where devices own several blocks.
    """

    def shape(placement):
        return placement.copy_axes, placement.axes, min(placement.block_size(region))

    groups: list[dict[BlockPlacement, int]] = []
    for placement, num in numbers.items():
        devices = region.size(placement.axes) * region.size(placement.copy_axes)
        for group in groups:
            num_owned = sum(numbers[other] for other in group)
            if shape(placement) == shape(next(iter(group))) and num_owned + num <= devices:
                group[placement] = num_owned
                break
        else:
            groups.append({placement: 0})
    return groups


def apply_to_gathered_blocks(
    function: Callable, pieces: dict[BlockPlacement, Array], region: Region
) -> dict[BlockPlacement, Array]:
    """Applies function as `apply_to_owned_blocks` does, but on every device with a piece or copy of a block.

    Every device gathers all blocks of which it holds pieces, so each block is computed as often as there are such
    devices.
    """
    out = {}
    for placement, y in pieces.items():
        for dim, names in enumerate(placement.shard_axes, 1):
            y = region.all_gather(y, names, dim)
        joined = y.shape
        y = function(y.reshape(-1, *placement.block_size(region))).reshape(joined)
        for dim, (size, names) in enumerate(zip(placement.piece, placement.shard_axes), 1):
            y = lax.dynamic_slice_in_dim(y, region.index(names) * size, size, dim)
        out[placement] = y
    return out


def apply_to_divided_blocks(
    function: Callable, pieces: dict[BlockPlacement, Array], region: Region
) -> dict[BlockPlacement, Array]:
    """Applies function([k, r, c], axes) -> [k, r, c] to blocks that stay divided by their longer side over these mesh axes.

    Every device gathers the shorter side of its pieces, as rows. Devices whose pieces differ in the shorter side only, and
    devices with copies, compute the same.
    """
    out = {}
    for placement, y in pieces.items():
        height, width = placement.block_size(region)
        rows = range(placement.num_rows)
        columns = range(placement.num_rows, len(placement.piece))
        shorter, longer = (rows, columns) if height <= width else (columns, rows)
        for dim in shorter:
            y = region.all_gather(y, placement.shard_axes[dim], dim + 1)
        joined = y.shape
        y = y.reshape(len(y), math.prod(joined[1 : placement.num_rows + 1]), -1)
        axes = tuple(a for a in AXES if any(a in placement.shard_axes[dim] for dim in longer))
        if height <= width:
            y = function(y, axes)
        else:
            y = function(y.swapaxes(1, 2), axes).swapaxes(1, 2)
        y = y.reshape(joined)
        for dim in shorter:
            size, names = placement.piece[dim], placement.shard_axes[dim]
            y = lax.dynamic_slice_in_dim(y, region.index(names) * size, size, dim + 1)
        out[placement] = y
    return out


def orthogonalize(
    letters: PyTree,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    split: str = "head",
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    dtype: str = "bfloat16",
    rms: float = 0.2,
    blocks: str = "owned",
    max_owned_elements: int = MAX_OWNED_ELEMENTS,
) -> optax.GradientTransformation:
    """Returns a stateless transformation that replaces every block by rms sqrt(max(r, c)) newton_schulz(block).

    Args:
      letters: tree of axis letters that covers every update.
      mesh: mesh on which `parallel.sharding.spec_of` shards the updates; None: one device.
      split: as for `layout_of`.
      dtype: dtype of the exchange between devices and of Newton-Schulz. The result has the dtype of the
        update.
      blocks: blocks that a device iterates on: "owned", or "everywhere", all of which it holds a part.
      max_owned_elements: maximum elements of a block with one owner; devices iterate on larger ones together.
    """
    letters = tree.flatten(letters)

    def update(updates, state, params=None):
        del params
        # Layout, sharding and scale of every weight.
        flat = tree.flatten(updates)
        layouts = {path: layout_of(path, letters[path], split) for path in flat}
        region = Region() if mesh is None else Region.of(mesh)
        sizes = {a: getattr(region, a) for a in AXES}
        exchange = {"owned": apply_to_owned_blocks, "everywhere": apply_to_gathered_blocks}[blocks]

        def iterate(x, axes=()):
            return newton_schulz(x, coefficients, steps, axes)

        specs = {path: spec_of(letters[path], x.shape, sizes) for path, x in flat.items()}
        scales = {p: rms * math.sqrt(max(layouts[p].size(x.shape))) for p, x in flat.items()}

        def run(shards):
            # Join the blocks of weights with equal placements, iterate, and split them again.
            groups = collections.defaultdict(list)
            for path, x in shards.items():
                groups[BlockPlacement.of(layouts[path], x.shape, specs[path], region)].append(path)
            pieces = {p: layouts[p].to_blocks(x).astype(dtype) for p, x in shards.items()}
            joined = {
                placement: jnp.concatenate([pieces[p] for p in paths])
                for placement, paths in groups.items()
            }
            divided = {
                placement: joined.pop(placement)
                for placement in list(joined)
                if blocks == "owned"
                and math.prod(placement.block_size(region)) > max_owned_elements
            }
            results = exchange(iterate, joined, region)
            results |= apply_to_divided_blocks(iterate, divided, region)
            out = {}
            for placement, paths in groups.items():
                ends = np.cumsum([len(pieces[p]) for p in paths])[:-1]
                for path, part in zip(paths, jnp.split(results[placement], ends)):
                    x = shards[path]
                    y = layouts[path].from_blocks(part, x.shape).astype(x.dtype)
                    out[path] = scales[path] * y
            return out

        if mesh is not None:
            run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
        values = run(flat)
        return jax.tree.unflatten(jax.tree.structure(updates), [values[p] for p in flat]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_muon(
    letters: PyTree, *, momentum: float = 0.95, nesterov: bool = True, **options
) -> optax.GradientTransformation:
    """Returns momentum (float32, the only state), followed by `orthogonalize(letters, **options)`.

    Weight decay and learning rate follow as optax transformations.
    """
    return optax.chain(
        optax.trace(momentum, nesterov=nesterov, accumulator_dtype=jnp.float32),
        orthogonalize(letters, **options),
    )
