"""Muon Split: every matrix, every head of the Q/K/V up-projections and every expert on its own.

One step on a block G [r, c] (GLM-4.5 2.4; GLM-5 2.1 for the split by heads):

    M = momentum M + G;  N = G + momentum M;  X = newton_schulz(N)
    W -= learning_rate (rms sqrt(max(r, c)) X + weight_decay W)

X has singular values near 1, so the scale gives every block an update of about the same RMS whatever
its shape; the shape is the block's, not the stored array's.

Newton-Schulz multiplies whole matrices. On a mesh the shards of one weight are therefore exchanged in
one all-to-all (split the blocks, join the matrix), every device works on blocks of its own, and a
second all-to-all returns them. Devices that hold copies of a weight share the work as well, so no
block is computed twice and no matrix is ever summed over devices.
"""

import collections
import dataclasses
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
        parts = _pad(x, size).reshape(-1, size, rows, columns)
        parts = lax.map(lambda part: newton_schulz(part, coefficients, steps), parts)
        return parts.reshape(-1, rows, columns)[:num]

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


def _pad(x, multiple: int):
    return jnp.pad(x, [(0, -len(x) % multiple)] + [(0, 0)] * (x.ndim - 1))


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


def on_whole_blocks(function, x: jax.Array, placement: Placement, region: Region) -> jax.Array:
    """function [k, r, c] -> [k, r, c] on the whole blocks of which x [b, *piece] holds the pieces.

    Every device gets k blocks: b, padded with zeros, is shared out among the devices that hold pieces
    or copies of the same blocks. To be called inside a manual region over the mesh, or anywhere with
    `Region()`.
    """
    cut, copies = placement.cut, placement.copies
    axes = tuple(a for names in cut for a in names)
    y = _pad(x, region.size(axes) * region.size(copies))
    if copies:
        share = len(y) // region.size(copies)
        y = lax.dynamic_slice_in_dim(y, region.index(copies) * share, share)
    if axes:
        # The barrier keeps the joined blocks one array: XLA would exchange the blocks one by one, each
        # in the layout of its weight, and refuse the mixture.
        y = lax.all_to_all(lax.optimization_barrier(y), axes, 0, 0, tiled=True)

    # [*axes, k, *piece] -> [k, *matrix], every axis in front of the dimension that it shards
    order = [len(axes)]
    for i, names in enumerate(cut):
        order += [axes.index(a) for a in names] + [len(axes) + 1 + i]
    y = y.reshape(*(region.size((a,)) for a in axes), -1, *placement.piece).transpose(order)
    joined = y.shape
    whole = [size * region.size(names) for size, names in zip(placement.piece, cut)]
    y = function(y.reshape(len(y), math.prod(whole[: placement.num_rows]), -1))
    y = y.reshape(joined).transpose(np.argsort(order)).reshape(-1, *placement.piece)

    if axes:
        y = lax.all_to_all(y, axes, 0, 0, tiled=True)
    return region.all_gather(y, copies, 0)[: len(x)]


def orthogonalize(
    letters,
    *,
    mesh=None,
    split: str = "head",
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    dtype: str = "bfloat16",
    rms: float = 0.2,
) -> optax.GradientTransformation:
    """Stateless: replaces every block by rms sqrt(max(r, c)) newton_schulz(block).

    letters: tree of axis letters that covers every update; mesh: where the updates are sharded as
    `core.sharding.spec_of` says, None for one device. The exchange between devices and Newton-Schulz
    run in dtype, the result is in the update's own.
    """
    letters = tree.flatten(letters)

    def update(updates, state, params=None):
        del params
        flat = tree.flatten(updates)
        layouts = {path: layout_of(path, letters[path], split) for path in flat}
        region = Region() if mesh is None else Region.of(mesh)
        sizes = {a: getattr(region, a) for a in AXES}

        def iterate(blocks):
            return newton_schulz(blocks, coefficients, steps)

        specs = {path: spec_of(letters[path], x.shape, sizes) for path, x in flat.items()}
        scales = {p: rms * math.sqrt(max(layouts[p].size(x.shape))) for p, x in flat.items()}

        def run(shards):
            groups = collections.defaultdict(list)
            for path, x in shards.items():
                groups[Placement.of(layouts[path], x.shape, specs[path], region)].append(path)
            out = {}
            for placement, paths in groups.items():
                blocks = [layouts[p].to_blocks(shards[p]).astype(dtype) for p in paths]
                y = on_whole_blocks(iterate, jnp.concatenate(blocks), placement, region)
                ends = np.cumsum([len(b) for b in blocks])[:-1]
                for path, part in zip(paths, jnp.split(y, ends)):
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
