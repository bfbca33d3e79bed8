"""Muon Split: every matrix, every head of the Q/K/V up-projections and every expert on its own.

One step on a block G [r, c] (GLM-4.5 2.4; GLM-5 2.1 for the split by heads):

    M = momentum M + G;  N = G + momentum M;  X = newton_schulz(N)
    W -= learning_rate (rms sqrt(max(r, c)) X + weight_decay W)

X has singular values near 1, so the scale gives every block an update of about the same RMS whatever
its shape; the shape is the block's, not the stored array's.

Newton-Schulz multiplies whole matrices. On a mesh the shards of one weight are therefore exchanged in
one all-to-all (split the blocks, join the matrix), every device works on blocks of its own, and a
second all-to-all returns them. Devices that hold copies of a weight share the work as well, so no
block is computed twice and no matrix is ever summed over devices. A large mesh has more devices than
most weights have blocks; blocks of several weights then go to different devices, or the step would
wait for them one after the other.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from glm5_jax.core import tree
from glm5_jax.core.mesh import AXES, Region
from glm5_jax.core.sharding import spec_of

# The only matrices that paper 2.1 names, and their like in grouped-query attention.
SPLIT_BY_HEAD = re.compile(r"attn/(q_b|k_b|v_b|q|k|v)$")
MAX_ELEMENTS = 1 << 26  # of the blocks that one device iterates on at once; bounds the memory


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which dimensions of a weight number its blocks, and which are the blocks' rows and columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def to_blocks(self, x: jax.Array) -> jax.Array:
        """[b, *rows, *columns] of a weight, or of a shard of it."""
        dims = self.rows + self.columns
        return x.transpose(self.batch + dims).reshape(-1, *(x.shape[d] for d in dims))

    def from_blocks(self, blocks: jax.Array, shape) -> jax.Array:
        """The weight, or shard, of this shape whose `to_blocks` this is."""
        order = self.batch + self.rows + self.columns
        return blocks.reshape([shape[d] for d in order]).transpose(np.argsort(order))

    def size(self, shape) -> tuple[int, int]:
        """(r, c) of every block of a weight of this shape."""
        return math.prod(shape[d] for d in self.rows), math.prod(shape[d] for d in self.columns)


def layout_of(path: str, letters: str, split: str = "head") -> Layout:
    """Layout of the weight at a path, declared with these letters ("l q n hr").

    `split="head"` cuts the Q/K/V up-projections along their heads, "whole" leaves them one matrix each.
    Layers and experts are always separate. ValueError for anything that is not a stack of matrices.
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
        # Heads and what each holds are one side.
        if sides and names[sides[-1][-1]] in ("n", "y", "i"):
            sides[-1] += (dim,)
        else:
            sides.append((dim,))
    if len(sides) != 2:
        raise ValueError(
            f"{path} ({letters!r}) is not a stack of matrices; give it to another optimiser group"
        )
    return Layout(tuple(d for d, name in enumerate(names) if name in batch), *sides)


@jax.named_scope("newton_schulz")
def newton_schulz(x: jax.Array, coefficients, steps: int) -> jax.Array:
    """Every matrix of x [b, r, c], orthogonalised: singular values near 1, the same singular vectors.

    X <- a X + (b X X^T + c (X X^T)^2) X, `steps` times from X / ||X||. Products are taken in the dtype
    of x and summed in float32. Matrices of zeros stay zero. At most MAX_ELEMENTS are worked on at
    once, the rest waits in a loop.
    """
    num, rows, columns = x.shape
    if rows > columns:
        return newton_schulz(x.swapaxes(1, 2), coefficients, steps).swapaxes(1, 2)
    chunks = min(num, -(-x.size // MAX_ELEMENTS))
    if chunks > 1:
        size = -(-num // chunks)
        looped = num - num % size
        parts = x[:looped].reshape(-1, size, rows, columns)
        parts = lax.map(lambda part: newton_schulz(part, coefficients, steps), parts)
        parts = parts.reshape(-1, rows, columns)
        if looped == num:
            return parts
        return jnp.concatenate([parts, newton_schulz(x[looped:], coefficients, steps)])

    a, b, c = coefficients
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def product(spec, y, z):
        return jnp.einsum(spec, y, z, preferred_element_type=wide)

    def step(_, y):
        gram = product("brc,bsc->brs", y, y)
        half = gram.astype(x.dtype)
        poly = b * gram + c * product("brs,bst->brt", half, half)
        moved = product("brs,bsc->brc", poly.astype(x.dtype), y)
        return (a * y.astype(wide) + moved).astype(x.dtype)

    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(wide)), axis=(1, 2), keepdims=True))
    return lax.fori_loop(0, steps, step, (x / jnp.maximum(norm, 1e-12)).astype(x.dtype))


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the blocks of a weight lie on the mesh; weights that agree in it are exchanged together."""

    piece: tuple[int, ...]  # one device's part of every matrix dimension, rows first
    num_rows: int  # how many of these dimensions make up the rows
    cut: tuple[tuple[str, ...], ...]  # mesh axes that shard each of them
    copies: tuple[str, ...]  # mesh axes on which the devices hold copies

    @classmethod
    def of(cls, layout: Layout, shape, spec: P, region: Region) -> "Placement":
        """Placement of a weight whose shard on this device has this shape."""
        entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec]
        dims = layout.rows + layout.columns
        return cls(
            piece=tuple(shape[d] for d in dims),
            num_rows=len(layout.rows),
            cut=tuple(region.live(entries[d]) for d in dims),
            copies=region.live(a for a in AXES if not any(a in entry for entry in entries)),
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which pieces of one block lie, in the order of the mesh."""
        return tuple(a for a in AXES if any(a in names for names in self.cut))

    def whole(self, region: Region) -> tuple[int, int]:
        """(r, c) of the whole blocks."""
        sizes = [size * region.size(names) for size, names in zip(self.piece, self.cut)]
        return math.prod(sizes[: self.num_rows]), math.prod(sizes[self.num_rows :])

    def join(self, x: jax.Array, region: Region, first: int = 0) -> jax.Array:
        """[k, r, c]: of the blocks of which x [b, *piece] holds the pieces, those that this device owns, whole.

        b, padded with zeros, is shared out among the devices that hold pieces or copies of the same blocks; the
        first zeros come before them. `part` is the inverse.
        """
        devices = region.size(self.axes) * region.size(self.copies)
        padding = (first, -(first + len(x)) % devices)
        y = jnp.pad(x, [padding] + [(0, 0)] * (x.ndim - 1))
        if self.copies:
            share = len(y) // region.size(self.copies)
            y = lax.dynamic_slice_in_dim(y, region.index(self.copies) * share, share)
        if self.axes:
            # The barrier keeps the joined blocks one array: XLA would exchange the blocks one by one, each
            # in the layout of its weight, and refuse the mixture.
            y = lax.all_to_all(lax.optimization_barrier(y), self.axes, 0, 0, tiled=True)
        y = y.reshape(*(region.size((a,)) for a in self.axes), -1, *self.piece)
        return y.transpose(self._order).reshape(-1, *self.whole(region))

    def part(self, y: jax.Array, num: int, region: Region, first: int = 0) -> jax.Array:
        """[num, *piece]: this device's pieces of all blocks, from the whole ones [k, r, c] that each owns."""
        sizes = [
            (*(region.size((a,)) for a in names), size) for size, names in zip(self.piece, self.cut)
        ]
        y = y.reshape(-1, *itertools.chain(*sizes)).transpose(np.argsort(self._order))
        y = y.reshape(-1, *self.piece)
        if self.axes:
            y = lax.all_to_all(y, self.axes, 0, 0, tiled=True)
        return region.all_gather(y, self.copies, 0)[first : first + num]

    @property
    def _order(self) -> list[int]:
        """Of [*axes, k, *piece], so that every axis stands before the dimension that it shards, and k in front."""
        order = [len(self.axes)]
        for i, names in enumerate(self.cut):
            order += [self.axes.index(a) for a in names] + [len(self.axes) + 1 + i]
        return order


def on_whole_blocks(function, pieces: dict[Placement, jax.Array], region: Region) -> dict:
    """function [k, r, c] -> [k, r, c] on the whole blocks of which {placement: x [b, *piece]} hold the pieces.

    Blocks are shared out among the devices that hold pieces or copies of them. To be called inside a manual
    region over the mesh, or anywhere with `Region()`. GLM-5 2.4 calls it zero-redundant: a device gathers what it
    owns, and iterates on that alone. Blocks of several placements that are too few for all devices go to different
    ones, and all of these iterate at once: blocks whose longer side is shorter than others' get zeros there, which
    stay zero and change no product.
    """
    out = {}
    for shared in _together({placement: len(x) for placement, x in pieces.items()}, region):
        shapes = {placement: placement.whole(region) for placement in shared}
        height, width = next(iter(shapes.values()))
        turned = {p: (r > c) != (height > width) for p, (r, c) in shapes.items()}
        longer = max(map(max, shapes.values()))
        size = (longer, width) if height > width else (height, longer)
        joined = []
        for placement, first in shared.items():
            y = placement.join(pieces[placement], region, first)
            y = y.swapaxes(1, 2) if turned[placement] else y
            missing = [(0, n - own) for n, own in zip(size, y.shape[1:])]
            joined.append(jnp.pad(y, [(0, 0), *missing]))
        # Of one placement at most a device owns a block, the others give it zeros.
        y = function(functools.reduce(jnp.add, joined))
        for placement, first in shared.items():
            r, c = reversed(shapes[placement]) if turned[placement] else shapes[placement]
            own = y[:, :r, :c].swapaxes(1, 2) if turned[placement] else y[:, :r, :c]
            out[placement] = placement.part(own, len(pieces[placement]), region, first)
    return out


def _together(numbers: dict[Placement, int], region: Region) -> list[dict[Placement, int]]:
    """Placements of so many blocks each, in groups that are worked on at once: {placement: the device that owns its
    first block}, 0 where devices own several."""

    def shape(placement):
        return placement.copies, placement.axes, min(placement.whole(region))

    groups: list[dict[Placement, int]] = []
    for placement, num in numbers.items():
        devices = region.size(placement.axes) * region.size(placement.copies)
        for group in groups:
            taken = sum(numbers[other] for other in group)
            if shape(placement) == shape(next(iter(group))) and taken + num <= devices:
                group[placement] = taken
                break
        else:
            groups.append({placement: 0})
    return groups


def on_gathered_blocks(function, pieces: dict[Placement, jax.Array], region: Region) -> dict:
    """The same, but every device gathers all blocks of which it holds pieces, and works on all of them: a block
    is computed as often as there are devices with a piece or a copy of it."""
    out = {}
    for placement, y in pieces.items():
        for dim, names in enumerate(placement.cut, 1):
            y = region.all_gather(y, names, dim)
        joined = y.shape
        y = function(y.reshape(-1, *placement.whole(region))).reshape(joined)
        for dim, (size, names) in enumerate(zip(placement.piece, placement.cut), 1):
            y = lax.dynamic_slice_in_dim(y, region.index(names) * size, size, dim)
        out[placement] = y
    return out


def orthogonalize(
    letters,
    *,
    mesh=None,
    split: str = "head",
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    dtype: str = "bfloat16",
    rms: float = 0.2,
    blocks: str = "owned",
) -> optax.GradientTransformation:
    """Stateless: replaces every block by rms sqrt(max(r, c)) newton_schulz(block).

    letters: tree of axis letters that covers every update; mesh: where the updates are sharded as
    `core.sharding.spec_of` says, None for one device. The exchange between devices and Newton-Schulz
    run in dtype, the result is in the update's own. blocks: what a device iterates on, its "owned" ones, or
    "everywhere" all of which it holds a part.
    """
    letters = tree.flatten(letters)

    def update(updates, state, params=None):
        del params
        flat = tree.flatten(updates)
        layouts = {path: layout_of(path, letters[path], split) for path in flat}
        region = Region() if mesh is None else Region.of(mesh)
        sizes = {a: getattr(region, a) for a in AXES}
        exchange = {"owned": on_whole_blocks, "everywhere": on_gathered_blocks}[blocks]

        def iterate(x):
            return newton_schulz(x, coefficients, steps)

        specs = {path: spec_of(letters[path], x.shape, sizes) for path, x in flat.items()}
        scales = {p: rms * math.sqrt(max(layouts[p].size(x.shape))) for p, x in flat.items()}

        def run(shards):
            groups = collections.defaultdict(list)
            for path, x in shards.items():
                groups[Placement.of(layouts[path], x.shape, specs[path], region)].append(path)
            pieces = {p: layouts[p].to_blocks(x).astype(dtype) for p, x in shards.items()}
            joined = {
                placement: jnp.concatenate([pieces[p] for p in paths])
                for placement, paths in groups.items()
            }
            done = exchange(iterate, joined, region)
            out = {}
            for placement, paths in groups.items():
                ends = np.cumsum([len(pieces[p]) for p in paths])[:-1]
                for path, part in zip(paths, jnp.split(done[placement], ends)):
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
    letters, *, momentum: float = 0.95, nesterov: bool = True, **options
) -> optax.GradientTransformation:
    """Momentum (float32, the only state), then `orthogonalize(letters, **options)`.

    Weight decay and learning rate follow as optax transformations.
    """
    return optax.chain(
        optax.trace(momentum, nesterov=nesterov, accumulator_dtype=jnp.float32),
        orthogonalize(letters, **options),
    )
