"""Handles paths of nested dicts ("moe_layers/attn/q_b") and first-match pattern tables over them.

A `CompositeWeight` (a quantised weight) is one leaf in this module, but `jax.tree` sees its arrays.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jaxtyping import PyTree

from pallas_kernels.quantized_weights import CompositeWeight


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """Leaf whose array is created on demand, so that a tree of them takes no memory.

    Attributes:
      shape, dtype: shape and dtype of the array.
      make: function that returns the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], jax.Array]


def materialize(leaf: Any) -> Any:
    """Returns a leaf with its arrays, which may be `Lazy`."""
    return jax.tree.map(lambda x: x.make() if isinstance(x, Lazy) else x, leaf)


def path_of(key_path: Iterable[Any]) -> str:
    """Returns "a/b/c" for a key path of `jax.tree_util`."""
    return "/".join(
        str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in key_path
    )


def is_compound(x: Any) -> TypeGuard[CompositeWeight]:
    """Returns True if x is a leaf that consists of several arrays."""
    return isinstance(x, CompositeWeight)


def flatten(tree: PyTree) -> dict[str, Any]:
    """Returns {path: leaf}, in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_compound)
    return {path_of(p): leaf for p, leaf in leaves}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dicts of {path: leaf}."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def map_with_path(function: Callable, tree: PyTree, *rest) -> PyTree:
    """Maps a function over trees like `jax.tree.map`; its first argument is the path."""
    return jax.tree_util.tree_map_with_path(
        lambda p, *x: function(path_of(p), *x), tree, *rest, is_leaf=is_compound
    )


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Returns True if any regular expression matches within a path (`re.search`).

    Raises ValueError for a pattern that is not a regular expression.
    """
    for pattern in patterns:
        try:
            if re.search(pattern, path):
                return True
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    return False


def first_match(table: Sequence[tuple[str, Any]], tree: PyTree) -> PyTree:
    """Returns the tree of the values that a first-match table assigns to the paths of the leaves.

    table: [(regex, value), ...]; a regex matches anywhere in the path (`re.search`). Raises ValueError with the paths
    that no pattern covers.
    """
    uncovered = []

    def value(path, _):
        for pattern, entry in table:
            if re.search(pattern, path):
                return entry
        uncovered.append(path)
        return None

    out = map_with_path(value, tree)
    if uncovered:
        raise ValueError(
            f"no pattern covers {', '.join(uncovered)}; patterns: {[p for p, _ in table]}"
        )
    return out
