"""Paths of a nested dict ("moe_layers/attn/q_b") and first-match pattern tables over them.

A `Compound` (a quantised weight) is one leaf here, where `jax.tree` sees its arrays.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import numpy as np

from pallas_kernels.quantised import Compound


@dataclasses.dataclass(frozen=True, eq=False)
class Lazy:
    """A leaf that is made when it is needed, so that a tree of them takes no memory: make() gives the array, of this
    shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], jax.Array]


def made(leaf):
    """The array of a leaf that may be `Lazy`."""
    return leaf.make() if isinstance(leaf, Lazy) else leaf


def path_of(key_path) -> str:
    """ "a/b/c" from the key path of `jax.tree_util`."""
    return "/".join(
        str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in key_path
    )


def is_compound(x) -> bool:
    """Whether x is a leaf made of several arrays."""
    return isinstance(x, Compound)


def flatten(tree) -> dict[str, object]:
    """{path: leaf}, in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_compound)
    return {path_of(p): leaf for p, leaf in leaves}


def unflatten(flat: dict[str, object]) -> dict:
    """Nested dicts from {path: leaf}."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def map_with_path(function, tree, *rest):
    """`jax.tree.map` whose function receives the path first."""
    return jax.tree_util.tree_map_with_path(
        lambda p, *x: function(path_of(p), *x), tree, *rest, is_leaf=is_compound
    )


def found(patterns, path: str) -> bool:
    """Whether any of the regular expressions is found in a path (`re.search`); ValueError for one that is
    none."""
    for pattern in patterns:
        try:
            if re.search(pattern, path):
                return True
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
    return False


def match(table, tree):
    """Tree of the values that a first-match table [(regex, value), ...] gives to every leaf's path.

    The regex is searched for (`re.search`). ValueError names each path that no pattern covers.
    """
    missed = []

    def value(path, _):
        for pattern, val in table:
            if re.search(pattern, path):
                return val
        missed.append(path)
        return None

    out = map_with_path(value, tree)
    if missed:
        raise ValueError(
            f"no pattern covers {', '.join(missed)}; patterns: {[p for p, _ in table]}"
        )
    return out
