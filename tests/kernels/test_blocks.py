"""Cutting queries into blocks."""

import pytest

from pallas_kernels.blocks import EXTENTS, query_runs


@pytest.mark.parametrize("t", [1, 7, 64, 100, 1000, 2048])
@pytest.mark.parametrize("start", [0, 40, None])
@pytest.mark.parametrize("block", [1, 16, 128])
def test_runs_cover_every_query_once_and_every_key_it_sees(t, start, block):
    s = t + 50
    runs = query_runs(t, s, start, block)
    assert [q for r in runs for q in range(r.first, r.first + r.count * r.size)] == list(range(t))
    assert all(r.size <= block for r in runs)
    for run in runs:
        last = run.first + run.count * run.size - 1
        assert run.keys == s if start is None else run.keys > start + last
    if start is not None:
        assert len({run.keys for run in runs}) <= EXTENTS + 1
        # Beyond what each query sees: part of a block's triangle and of an extent's.
        wasted = sum(r.count * r.size * r.keys for r in runs) - sum(
            min(start + q + 1, s) for q in range(t)
        )
        assert wasted <= t * (block + t / EXTENTS)
