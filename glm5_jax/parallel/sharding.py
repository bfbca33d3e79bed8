"""Maps axis letters to mesh axes by one table, for weights, momentum and manual regions.

- A rule claims its mesh axis for a dimension if no other dimension of the weight has claimed that axis, and if the
  size of the dimension is divisible. The order of the table is the priority.
- Where possible each axis gets a separate dimension, so that XLA emits an all-gather forward and a reduce-scatter
  backward.
- `data` replicates.
- A pattern matches consecutive letters. The starred letter, or else the last one, is the dimension.
- XLA:TPU turns a scatter along a last dimension into a full sum (see `gather`). So fsdp takes f of an expert's down
  projection ("e f"), and context takes d of "d f" before f takes the remaining axes.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from glm5_jax.parallel.mesh import Region
from glm5_jax.parallel.tree import is_compound

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


def spec_of(
    letters: str, shape: Sequence[int], axis_sizes: Mapping[str, int], small: bool = False
) -> P:
    """Returns the PartitionSpec of a weight declared with these letters ("l d q") on axes of these sizes.

    Vectors (one letter besides `l`) and other small weights are replicated, because gathering them would cost more than
    it saves. Only the axes that stay sharded during computation are excepted (`kept_sharded_axes`).

    small: treat the weight as small. Raises ValueError if letters and shape differ in length.
    """
    names = letters.split()
    if len(names) != len(shape):
        raise ValueError(f"letters {letters!r} do not fit the shape {tuple(shape)}")
    claimed: list[list[str]] = [[] for _ in names]
    small = small or len([n for n in names if n != "l"]) == 1
    keep, used = kept_sharded_axes(letters), set()
    for pattern, axis in RULES:
        dim = _dim_of(pattern, names)
        if dim is None or axis in used or axis_sizes[axis] == 1:
            continue
        if small and axis not in keep.get(names[dim], ()):
            continue
        parts = math.prod(axis_sizes[a] for a in claimed[dim]) * axis_sizes[axis]
        if shape[dim] % parts == 0:
            claimed[dim].append(axis)
            used.add(axis)
    return P(*(tuple(c) if len(c) > 1 else (c[0] if c else None) for c in claimed))


def _dim_of(pattern: str, names: list[str]) -> int | None:
    """Returns the dimension that a pattern selects, or None if its letters are not consecutive in names."""
    letters = pattern.replace("*", "").split()
    offset = next((i for i, w in enumerate(pattern.split()) if w[0] == "*"), len(letters) - 1)
    starts = range(len(names) - len(letters) + 1)
    return next((i + offset for i in starts if names[i : i + len(letters)] == letters), None)


def weight_spec(
    w: PyTree,
    letters: str,
    shape: tuple[int, ...],
    axis_sizes: Mapping[str, int],
    replicated: bool = False,
) -> tuple[PyTree, PyTree]:
    """Returns (letters, PartitionSpec) of a weight; of a `CompositeWeight`, both as trees over its arrays.

    - w: the weight, or this device's part of it.
    - shape: shape of the full weight.
    - replicated: replicate the weight, except on the axes that stay sharded during computation.

    Arrays of a `CompositeWeight` with fewer dimensions than the weight count as small.
    """

    def spec(array_letters, sizes):
        small = replicated or len(array_letters.split()) < len(letters.split())
        return spec_of(array_letters, sizes, axis_sizes, small=small)

    if not is_compound(w):
        return letters, spec(letters, shape)
    return w.map_arrays(lambda names, _: names, letters, shape), w.map_arrays(spec, letters, shape)


def sharding_of(
    w: PyTree, letters: str, mesh: Mesh | AbstractMesh, replicated: bool = False
) -> PyTree:
    """Returns the NamedSharding of a full weight w or its shape; a tree of them for a `CompositeWeight`.

    replicated: see `weight_spec`.
    """
    spec = weight_spec(w, letters, w.shape, mesh.shape, replicated)[1]
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec, is_leaf=lambda s: isinstance(s, P))


def kept_sharded_axes(letters: str) -> dict[str, tuple[str, ...]]:
    """Returns per letter the mesh axes on which a weight stays sharded during the computation.

    Expert stacks stay with their owners (tokens travel instead), and `tensor` splits the width f of
    every feed-forward.
    """
    names = set(letters.split())
    width = {"f": ("tensor",)} if "f" in names else {}
    # Expert stacks have a width, their adapters a rank.
    return width | ({"e": ("expert",)} if "e" in names and names & {"f", "o"} else {})


def gather(
    w: PyTree,
    letters: str,
    spec: P,
    region: Region,
    dtype: DTypeLike,
    reduce_dtype: DTypeLike | None = None,
) -> PyTree:
    """Gathers the full weight on this device, inside a manual region, after a cast to the compute dtype.

    It gathers one dimension at a time over all axes except those of `kept_sharded_axes`. The gradient is
    reduce-scattered in reduce_dtype (None: dtype) and returned in the weight's dtype. For a `CompositeWeight`, letters and
    spec are trees over its arrays.

    Order of the dimensions:

    - Parts in other TPU slices come first, so that the network between slices carries a device's part, not the full
      weight.
    - Then the last dimension, so that the gradient is scattered along the leading ones while it is large: XLA:TPU turns
      a scatter along the last dimension into a full all-reduce.
    """
    if is_compound(w):
        w = w.astype(dtype)
        return jax.tree.map(
            lambda x, its_letters, its_spec: gather(x, its_letters, its_spec, region, x.dtype),
            w,
            letters,
            spec,
        )
    gathers = _cuts(letters, spec, region)
    if not gathers or reduce_dtype is None or reduce_dtype == dtype:
        w = w.astype(dtype)
        for dim, axes in gathers:
            w = region.all_gather(w, axes, dim)
        return w

    @jax.custom_vjp
    def gathered(w):
        w = w.astype(dtype)
        for dim, axes in gathers:
            w = region.all_gather(w, axes, dim)
        return w

    def backward(zero, g):
        return (scatter(g, letters, spec, region, reduce_dtype).astype(zero.dtype),)

    gathered.defvjp(lambda w: (gathered(w), jnp.zeros((), w.dtype)), backward)
    return gathered(w)


def scatter(
    gradient: jax.Array, letters: str, spec: P, region: Region, dtype: DTypeLike
) -> jax.Array:
    """Reduce-scatters the gradient of a full weight, inside a manual region.

    Returns this device's part, summed in dtype over the devices that `gather` the weight from each other.
    """
    for dim, axes in reversed(_cuts(letters, spec, region)):
        gradient = region.psum_scatter(gradient.astype(dtype), axes, dim)
    return gradient


def _cuts(letters: str, spec: P, region) -> list[tuple[int, tuple[str, ...]]]:
    """Returns the dimensions that `gather` gathers, in its order, each with its mesh axes."""
    keep, cuts = kept_sharded_axes(letters), []
    for dim, (letter, entry) in reversed(list(enumerate(zip(letters.split(), spec)))):
        axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        axes = region.nontrivial_axes(a for a in axes if a not in keep.get(letter, ()))
        # The last axes of a dimension are the inner split, which can be gathered separately.
        near = len(axes)
        while near and axes[near - 1] in region.dcn_axes:
            near -= 1
        cuts += [(dim, part) for part in (axes[near:], axes[:near]) if part]
    return sorted(cuts, key=lambda cut: not set(cut[1]) & set(region.dcn_axes))


def fetch_slice(leaf: jax.Array, at: tuple[int, ...]) -> jax.Array:
    """Returns `leaf[at]` of an array that several processes hold; all of them must call it with the same arguments.

    The slice is on a device of this process. Only that slice is sent. A device holds one copy of it per part of the
    indexed dimensions.
    Raises ValueError if the array has no NamedSharding.
    """
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(f"an array on several hosts has no mesh: {leaf.sharding}")
    fetch = _fetcher(leaf.sharding.mesh, leaf.sharding.spec, leaf.ndim, len(at))
    return fetch(leaf, np.asarray(at, np.int32)).addressable_data(0)


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
        # Select the owner's copy instead of a sum, because -0.0 + 0.0 is 0.0.
        for axes, owner in owners:
            x = lax.all_gather(x, axes)[owner] if axes else x
        return x

    region = jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=P(), check_vma=False)
    return jax.jit(region)
