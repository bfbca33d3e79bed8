"""Tests of the lists of tiles to multiply against the visibility of each key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_mla import tile_schedule
from pallas_kernels.flash_mla.tile_schedule import (
    CLOSES,
    FIRST,
    LAST,
    MASKED,
    OPENS,
    UNMASKED,
    Tiling,
    has_flag,
)
from tests.kernels.implementations import in_tiers

TILINGS = {
    "square": (Tiling(t=64, s=64, row=16, key=16, rows=4, keys=4), 0),
    "wide keys": (Tiling(t=60, s=90, row=8, key=32, rows=8, keys=3), 30),
    "wide rows": (Tiling(t=70, s=70, row=32, key=8, rows=3, keys=9), 0),
    "queries past the keys": (Tiling(t=30, s=20, row=8, key=8, rows=4, keys=3), 3),
    "two heads in a tile": (Tiling(t=9, s=33, row=24, key=8, rows=1, keys=5), 20),
}
QUICK = ("wide keys", "queries past the keys", "two heads in a tile")
DOCUMENTS = {"one": None, "in order": False, "in any order": True}


def random_segments(tiling, documents, start):
    """Returns segments [2, all rows] and [2, all keys] of short and long documents, with padding (0)."""
    if DOCUMENTS[documents] is None:
        return ()
    rng = np.random.default_rng(tiling.t)
    length = max(tiling.s, start + tiling.t)
    row = np.repeat(rng.permutation(12) if DOCUMENTS[documents] else np.arange(12), 1 + length // 5)
    keys = np.stack([row[:length], np.roll(row, 7)[:length]]).astype(np.int32)
    q_segments, keys = keys[:, start : start + tiling.t], keys[:, : tiling.s]
    heads = tiling.rows * tiling.row // tiling.t
    q_segments = np.tile(q_segments, (1, heads))
    pad = [(0, 0), (0, tiling.rows * tiling.row - q_segments.shape[1])]
    return np.pad(q_segments, pad), np.pad(keys, [(0, 0), (0, tiling.keys * tiling.key - tiling.s)])


def visibility(tiling, start, segments):
    """Returns int [b or 1, all rows, all keys]: 1 visible, 0 hidden, -1 in padding rows."""
    row, key = np.arange(tiling.rows * tiling.row), np.arange(tiling.keys * tiling.key)
    real = row < tiling.rows * tiling.row // tiling.t * tiling.t
    seen = ((key <= start + row[:, None] % tiling.t) & (key < tiling.s))[None]
    if segments:
        q_segments, keys = segments
        seen = seen & (q_segments[:, :, None] == keys[:, None]) & (q_segments != 0)[..., None]
    return np.where(real[:, None], seen, -1)


def check(tiles, seen, flip, outer, inner):
    """Checks that a list covers the visible keys, and that its flags of masks and tile boundaries are right.

    seen: [b or 1, outer, inner, ., .].
    flip: True if outer tiles count backwards.
    """
    entries = np.asarray(tiles.entries)
    assert int(tiles.count) <= entries.shape[1]
    for row, wanted in zip(entries, seen, strict=True):
        live = row[has_flag(row, MASKED | UNMASKED)]
        assert len(live) <= int(tiles.count)
        assert not has_flag(row[len(live) :], 63).any(), "an idle step has a flag"
        assert (row[len(live) :] >> 6 == live[-1] >> 6).all(), "an idle step moves a tile"
        pairs = list(
            zip(tile_schedule.outer_tile(live), tile_schedule.inner_tile(live), strict=True)
        )
        assert pairs == sorted(set(pairs))
        assert {o for o, _ in pairs} == set(range(outer))
        for o in range(outer):
            for i in range(inner):
                block = wanted[outer - 1 - o if flip else o, i]
                assert (o, i) in pairs or not (block == 1).any(), "a visible tile is missing"
        for (o, i), entry in zip(pairs, live, strict=True):
            block = wanted[outer - 1 - o if flip else o, i]
            assert has_flag(entry, UNMASKED) != has_flag(entry, MASKED)
            assert has_flag(entry, MASKED) or block.all(), "a hidden key is not masked"
            mates = [x for x in pairs if x[0] == o]
            assert has_flag(entry, FIRST) == (mates[0] == (o, i))
            assert has_flag(entry, LAST) == (mates[-1] == (o, i))
            mates = [x for x in pairs if x[1] == i]
            assert has_flag(entry, OPENS) == (mates[0] == (o, i))
            assert has_flag(entry, CLOSES) == (mates[-1] == (o, i))


def split_into_tiles(seen, tiling):
    """Returns [b or 1, row tiles, key tiles, row, key]."""
    shape = (-1, tiling.rows, tiling.row, tiling.keys, tiling.key)
    return seen.reshape(shape).swapaxes(2, 3)


# With segments the lists are computed by XLA.
by_rows = jax.jit(tile_schedule.by_rows, static_argnums=(0, 1))
by_keys = jax.jit(tile_schedule.by_keys, static_argnums=(0, 1, 4))
latest_closed = jax.jit(tile_schedule.latest_closed)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("name", in_tiers(QUICK, sorted(TILINGS.keys() - QUICK)))
def test_lists_cover_visible_tiles(name, documents):
    tiling, start = TILINGS[name]
    segments = random_segments(tiling, documents, start)
    seen = split_into_tiles(visibility(tiling, start, segments), tiling)
    tiles = (by_rows if segments else tile_schedule.by_rows)(tiling, start, segments)
    check(tiles, seen, False, tiling.rows, tiling.keys)
    units = 2 * tiling.rows  # two heads; the unit after them is padding
    unit = np.arange(units + 1)
    of_units = np.concatenate([seen, seen, -np.ones_like(seen[:, :1])], axis=1).swapaxes(1, 2)
    tiles = (by_keys if segments else tile_schedule.by_keys)(tiling, start, segments, unit, units)
    check(tiles, of_units, True, tiling.keys, units + 1)

    closed = np.asarray((latest_closed if segments else tile_schedule.latest_closed)(tiles))
    for row, latest in zip(np.asarray(tiles.entries), closed, strict=True):
        closing = has_flag(row, CLOSES)
        assert sorted(tile_schedule.inner_tile(row)[closing]) == list(unit)
        expected = tile_schedule.inner_tile(row)[closing][np.maximum(np.cumsum(closing) - 1, 0)]
        np.testing.assert_array_equal(latest, expected)


@pytest.mark.parametrize("documents", ["one", "in order"])
def test_traced_start_gives_the_same_lists(documents):
    tiling, start = TILINGS["wide keys"]
    segments = random_segments(tiling, documents, start)
    unit = np.arange(8)

    def make(start):
        rows = tile_schedule.by_rows(tiling, start, segments)
        return rows, tile_schedule.by_keys(tiling, start, segments, unit, 8)

    known = (jax.jit(make, static_argnums=0) if segments else make)(start)
    for tiles, later in zip(known, jax.jit(make)(start), strict=True):
        count = int(tiles.count)
        assert int(later.count) == count
        np.testing.assert_array_equal(tiles.entries[:, :count], later.entries[:, :count])


def test_skips_tiles_hidden_by_causality():
    tiling = Tiling(t=4096, s=4096, row=1024, key=1024, rows=4, keys=4)
    tiles = tile_schedule.by_rows(tiling, 0)
    assert tiles.count == tiles.entries.shape[1] == 10
    assert has_flag(tiles.entries, MASKED).sum() == 4
    units = np.arange(8)
    tiling = tiling._replace(row=512, rows=8)
    assert tile_schedule.by_keys(tiling, 0, (), units, 8).count == 20


def test_skips_tiles_of_other_documents():
    """With four documents of one tile each only the diagonal tiles remain, which need a mask."""
    tiling = Tiling(t=64, s=64, row=16, key=16, rows=4, keys=4)
    segments = jnp.asarray(np.repeat([[1, 2, 3, 4]], 16, axis=1))
    tiles = by_rows(tiling, 0, (segments, segments))
    assert int(tiles.count) == 4
    # From the last key on, every query sees complete tiles of its document only.
    unmasked = by_rows(tiling, 64, (segments, segments))
    assert int(unmasked.count) == 4 and has_flag(unmasked.entries[0, :4], UNMASKED).all()
