"""Tests of the union of the rows of neighbouring queries against Python sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_flash_attention import gather_union


def random_topk(rng, b, t, k, rows):
    """Returns int32 [b t k] of distinct rows, ascending, with -1 at random positions."""
    topk = np.full((b, t, k), -1, np.int32)
    for query in topk.reshape(-1, k):
        count = rng.integers(0, min(k, len(rows)) + 1)
        places = np.sort(rng.choice(k, count, replace=False))
        query[places] = np.sort(rng.choice(rows, count, replace=False))
    return topk


CASES = {  # number of rows, rows in use, queries of a block, b, t, k, multiple
    "neighbours overlap": (40, range(40), 8, 2, 16, 12, 16),
    "fewer rows than entries, last block not full": (20, range(20), 4, 2, 13, 9, 8),
    "too many rows to pack with the bits": (2**26, [0, 5, 2**25, 2**26 - 1], 8, 1, 9, 3, 1),
    "many queries": (9, range(9), 31, 1, 40, 4, 4),
    "one query": (20, range(20), 1, 2, 3, 6, 4),
    "one query, more entries than rows": (20, range(20), 1, 2, 3, 50, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_union_equals_python_sets(name):
    s, rows, queries, b, t, k, multiple = CASES[name]
    topk = random_topk(np.random.default_rng(0), b, t, k, np.array(rows))
    topk[0, 0] = -1
    topk[-1, -1, -1] = s  # no row
    got = jax.jit(gather_union.unite, static_argnums=(1, 2, 3))(topk, s, queries, multiple)
    got = jax.tree.map(np.asarray, got)
    capacity = gather_union.capacity(queries, k, s, multiple)
    assert capacity % multiple == 0
    assert got.rows.shape == got.members.shape == (b, gather_union.num_blocks(t, queries), capacity)
    for i, g in np.ndindex(got.count.shape):
        chose = {}
        for a, query in enumerate(topk[i, g * queries : (g + 1) * queries]):
            for row in query[(query >= 0) & (query < s)].tolist():
                chose[row] = chose.get(row, 0) | 1 << a
        used = slice(got.count[i, g])
        listed = list(zip(got.rows[i, g, used], got.members[i, g, used], strict=True))
        assert [pair for pair in listed if pair[1]] == sorted(chose.items())
        assert queries == 1 or all(members for _, members in listed)
        assert not got.rows[i, g, used.stop :].any() and not got.members[i, g, used.stop :].any()


@pytest.mark.parametrize(("s", "queries"), [(10, 0), (10, 32), (2**28, 9)])
def test_rejects_unsupported_block_sizes(s, queries):
    with pytest.raises(ValueError, match="blocks of"):
        gather_union.unite(jnp.zeros((1, 2, 3), jnp.int32), s, queries)
