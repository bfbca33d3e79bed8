"""Tests of paths, nesting and first-match tables of nested dicts."""

import jax.numpy as jnp
import pytest

from glm5_jax.parallel import tree

NESTED = {"b": {"x": 1, "a": {"y": 2}}, "a": 3}


def test_flatten_and_unflatten_round_trip():
    flat = tree.flatten(NESTED)
    assert flat == {"a": 3, "b/a/y": 2, "b/x": 1}
    assert list(flat) == ["a", "b/a/y", "b/x"]  # the order of jax.tree.leaves
    assert tree.unflatten(flat) == NESTED


def test_flattens_lists_and_fields():
    flat = tree.flatten({"layers": [{"w": jnp.ones(2)}, {"w": jnp.ones(3)}]})
    assert {path: leaf.size for path, leaf in flat.items()} == {"layers/0/w": 2, "layers/1/w": 3}


def test_map_with_path_accepts_several_trees():
    other = {"b": {"x": 10, "a": {"y": 20}}, "a": 30}
    got = tree.map_with_path(lambda path, x, y: (path, x + y), NESTED, other)
    assert got == {"b": {"x": ("b/x", 11), "a": {"y": ("b/a/y", 22)}}, "a": ("a", 33)}


def test_first_match_uses_first_pattern():
    table = [(r"y$", "deep"), (r"^b/", "in b"), (r".", "rest")]
    assert tree.first_match(table, NESTED) == {"b": {"x": "in b", "a": {"y": "deep"}}, "a": "rest"}


def test_first_match_rejects_leaf_without_pattern():
    with pytest.raises(ValueError, match="no pattern covers a, b/x; patterns: "):
        tree.first_match([(r"y$", 1)], NESTED)
