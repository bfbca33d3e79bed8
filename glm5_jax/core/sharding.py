"""One table from axis letters to mesh axes; weights, momentum and manual regions all read it.

A rule claims its mesh axis for a dimension if no other dimension of the weight has claimed that axis
and the dimension divides; the table's order is the priority. Axes go to dimensions of their own where
they can, which is what makes XLA emit an all-gather forward and a reduce-scatter backward. `data`
replicates. A pattern's letters follow each other; the starred one, or else the last, is the dimension.
XLA:TPU sums in full what it should scatter along a last dimension (see `gather`), so of an expert's
down projection ("e f") fsdp takes f, and of "d f" context goes to d, before f takes what remains.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.core.tree import is_compound

RULES = (
    ("e", "expert"),
    ("v", "expert"),
    ("n", "expert"),
    ("y", "expert"),
    ("i", "expert"),
    ("f", "tensor"),  # before the others on f: what stays sharded must be the outer cut
    ("e f", "fsdp"),
    ("d", "fsdp"),
    ("*d f", "context"),
    ("f", "context"),
    ("f", "expert"),
    ("dd", "expert"),
    ("q", "expert"),
    ("q", "fsdp"),
    ("c", "fsdp"),
    ("cr", "expert"),
    ("j", "expert"),
    ("u", "context"),
    ("u", "expert"),  # of more devices than there are heads
    ("hr", "context"),
    ("h", "context"),
    ("v", "context"),
    ("q", "context"),
)


def spec_of(letters: str, shape, axis_sizes, small: bool = False) -> P:
    """PartitionSpec of a weight declared with these letters ("l d q") on axes of these sizes.

    Vectors (one letter beside `l`), and what else is small, stay whole but for what stays cut while it is used:
    gathering them would cost more than it saves.
    """
    names = letters.split()
    if len(names) != len(shape):
        raise ValueError(f"letters {letters!r} do not fit the shape {tuple(shape)}")
    claimed: list[list[str]] = [[] for _ in names]
    small = small or len([n for n in names if n != "l"]) == 1
    keep, taken = stationary(letters), set()
    for pattern, axis in RULES:
        dim = _dim_of(pattern, names)
        if dim is None or axis in taken or axis_sizes[axis] == 1:
            continue
        if small and axis not in keep.get(names[dim], ()):
            continue
        parts = math.prod(axis_sizes[a] for a in claimed[dim]) * axis_sizes[axis]
        if shape[dim] % parts == 0:
            claimed[dim].append(axis)
            taken.add(axis)
    return P(*(tuple(c) if len(c) > 1 else (c[0] if c else None) for c in claimed))


def _dim_of(pattern: str, names: list[str]) -> int | None:
    """Index of the starred letter, or else of the last, where the pattern's letters follow each other."""
    wanted = pattern.replace("*", "").split()
    own = next((i for i, w in enumerate(pattern.split()) if w[0] == "*"), len(wanted) - 1)
    starts = range(len(names) - len(wanted) + 1)
    return next((i + own for i in starts if names[i : i + len(wanted)] == wanted), None)


def cut_of(w, letters: str, shape, axis_sizes, whole: bool = False):
    """(letters, PartitionSpec) of a weight w of this whole shape, of which it may be a part; of a `Compound`, both
    with one for each of its arrays. Those of fewer dimensions than the weight are small. whole: it stays so on every
    device, but for what stays cut while it is used."""

    def spec(own, sizes):
        small = whole or len(own.split()) < len(letters.split())
        return spec_of(own, sizes, axis_sizes, small=small)

    if not is_compound(w):
        return letters, spec(letters, shape)
    return w.each(lambda own, _: own, letters, shape), w.each(spec, letters, shape)


def sharding_of(w, letters: str, mesh, whole: bool = False):
    """NamedSharding of a whole weight w, or its shape, as `cut_of`; of a `Compound` one for each of its arrays."""
    spec = cut_of(w, letters, w.shape, mesh.shape, whole)[1]
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec, is_leaf=lambda s: isinstance(s, P))


def stationary(letters: str) -> dict[str, tuple[str, ...]]:
    """Mesh axes per letter on which a weight stays sharded while it is used.

    Expert stacks stay with their owners (tokens travel instead), and `tensor` splits the width f of
    every feed-forward.
    """
    names = letters.split()
    if "f" not in names:
        return {}
    return {"f": ("tensor",)} | ({"e": ("expert",)} if "e" in names else {})


def gather(w, letters: str, spec: P, region, dtype, reduce_dtype=None):
    """Inside a manual region: this device's whole copy of a weight, cast to the compute dtype first.

    Gathers one dimension at a time over all but the stationary axes; the gradient is reduce-scattered
    in reduce_dtype (default: dtype) and returned in the weight's own dtype. Of a `Compound`, letters and spec
    have one for each of its arrays.

    The last dimension goes first, so that the gradient is scattered along the leading ones while it
    is large: XLA:TPU makes a full all-reduce of a scatter along the last dimension. Before it goes what is in other
    slices, so that the network between them carries a device's part of the weight, not the whole.
    """
    if is_compound(w):
        w = w.astype(dtype)
        return jax.tree.map(lambda x, *own: gather(x, *own, region, x.dtype), w, letters, spec)
    plan = _cuts(letters, spec, region)
    if not plan or reduce_dtype is None or reduce_dtype == dtype:
        w = w.astype(dtype)
        for dim, axes in plan:
            w = region.all_gather(w, axes, dim)
        return w

    @jax.custom_vjp
    def gathered(w):
        w = w.astype(dtype)
        for dim, axes in plan:
            w = region.all_gather(w, axes, dim)
        return w

    def backward(own, g):
        return (scatter(g, letters, spec, region, reduce_dtype).astype(own.dtype),)

    gathered.defvjp(lambda w: (gathered(w), jnp.zeros((), w.dtype)), backward)
    return gathered(w)


def scatter(gradient, letters: str, spec: P, region, dtype):
    """Inside a manual region: this device's part of a whole weight's gradient, summed in dtype over the devices that
    `gather` the weight from each other."""
    for dim, axes in reversed(_cuts(letters, spec, region)):
        gradient = region.psum_scatter(gradient.astype(dtype), axes, dim)
    return gradient


def _cuts(letters: str, spec: P, region) -> list[tuple[int, tuple[str, ...]]]:
    """Dimensions that are gathered, in that order, each with its mesh axes: all but the stationary ones."""
    keep, cuts = stationary(letters), []
    for dim, (letter, entry) in reversed(list(enumerate(zip(letters.split(), spec)))):
        axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        axes = region.live(a for a in axes if a not in keep.get(letter, ()))
        # The last axes of a dimension are the inner cut, which can be undone alone.
        near = len(axes)
        while near and axes[near - 1] in region.far:
            near -= 1
        cuts += [(dim, part) for part in (axes[near:], axes[:near]) if part]
    return sorted(cuts, key=lambda cut: not set(cut[1]) & set(region.far))


def on_every_host(leaf, at: tuple[int, ...]) -> np.ndarray:
    """`leaf[at]` of an array that several processes hold, which all of them must call alike.

    Only that part travels; a device holds it once per part of the indexed dimensions besides.
    """
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(f"an array on several hosts has no mesh: {leaf.sharding}")
    fetch = _fetcher(leaf.sharding.mesh, leaf.sharding.spec, leaf.ndim, len(at))
    return np.asarray(fetch(leaf, np.asarray(at, np.int32)).addressable_data(0))


@functools.cache
def _fetcher(mesh, spec: P, ndim: int, depth: int):
    entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec]
    entries += [()] * (ndim - len(entries))

    def local(x, at):
        owners = []
        for i, axes in zip(at, entries[:depth]):
            owners.append((axes, i // x.shape[0]))
            x = lax.dynamic_index_in_dim(x, i % x.shape[0], keepdims=False)
        for dim, axes in enumerate(entries[depth:]):
            x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        # Picked, not summed: -0.0 + 0.0 is 0.0.
        for axes, owner in owners:
            x = lax.all_gather(x, axes)[owner] if axes else x
        return x

    region = jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=P(), check_vma=False)
    return jax.jit(region)
