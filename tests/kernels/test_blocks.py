"""Tests of the division of queries into blocks."""

import itertools

import pytest

from pallas_kernels.blocks import EXTENTS, query_runs


@pytest.mark.parametrize("start", [0, 40, None])
def test_query_runs_cover_visible_keys(start):
    for t, block in itertools.product([1, 7, 64, 100, 1000, 2048], [1, 16, 128]):
        s, case = t + 50, f"{t} queries in blocks of {block}"
        runs = query_runs(t, s, start, block)
        covered = [q for r in runs for q in range(r.first, r.first + r.count * r.size)]
        assert covered == list(range(t)), case
        assert all(r.size <= block for r in runs), case
        for run in runs:
            last = run.first + run.count * run.size - 1
            assert run.keys == s if start is None else run.keys > start + last, case
        if start is not None:
            assert len({run.keys for run in runs}) <= EXTENTS + 1, case
            # Wasted work is part of a block's triangle and of an extent's.
            needed = sum(min(start + q + 1, s) for q in range(t))
            wasted = sum(r.count * r.size * r.keys for r in runs) - needed
            assert wasted <= t * (block + t / EXTENTS), case
