"""Tests of attention on Hopper: rings of tiles, split ranges, wide latents."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.flash_mla import flash_mla, gpu, tile_schedule
from pallas_kernels.flash_mla.tile_schedule import Tiling
from tests.kernels.implementations import in_tiers, race_checked
from tests.kernels.offline import compile_for

RNG = np.random.default_rng(0)
SCALE = 0.3


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def assert_close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("t", "n"), [(140, 1), (70, 2)])
def test_ring_wraps_and_widths_differ(t, n):
    """128 rows of one head, or of two that share keys, meet four tiles of keys in three documents."""
    s, start = 200, 200 - t
    q, k, v, dy = normal(1, t, n, 70), normal(1, s, 1, 70), normal(1, s, 1, 20), normal(1, t, n, 20)
    segments = jnp.asarray(np.repeat([[1, 2, 0, 3]], [30, 100, 10, 60], axis=1), jnp.int32)

    def run(implementation):
        def attend(q, k, v):
            out, *rest = flash_mla(
                q,
                k,
                v,
                scale=SCALE,
                start=start,
                q_segments=segments[:, start : start + t],
                k_segments=segments,
                implementation=implementation,
            )
            return out, rest

        out, pull, rest = jax.vjp(attend, q, k, v, has_aux=True)
        return out, rest, pull(dy)

    assert_close(jax.jit(run, static_argnums=0)(race_checked("gpu")), run("xla"))
    assert not compat.has_races("gpu")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_splits_wide_latents(shared):
    """Two queries of three heads meet one tile or five in two pieces, of which one may see nothing."""
    q, k = normal(1, 2, 3, 70), normal(1, 300, 1, 70)
    v = k if shared else normal(1, 300, 1, 40)

    def run(implementation, start):
        return flash_mla(q, k, v, scale=SCALE, start=start, implementation=implementation)

    with mock.patch.multiple(gpu, MAX_NARROW=0, MULTIPROCESSORS=2, PIECE_TILES=1):
        on_gpu = jax.jit(functools.partial(run, race_checked("gpu")))
        for start in (3, 298 if shared else 130):
            assert_close(on_gpu(jnp.int32(start)), run("xla", start))
            assert not compat.has_races("gpu")


@pytest.mark.parametrize("by_keys", in_tiers([True], [False]))
@pytest.mark.parametrize("packed", in_tiers([True], [False]))
def test_visible_ranges_contain_visible_tiles(by_keys, packed):
    """A range holds all visible tiles, its full part no partly hidden one; its pieces are contiguous."""
    tiling = Tiling(t=90, s=150, row=16, key=8, rows=6, keys=19)
    segments = ()
    if packed:
        of_keys = np.sort(RNG.integers(0, 4, (2, 152)), axis=1).astype(np.int32)
        of_keys[:, 150:] = 0
        of_rows = np.zeros((2, 96), np.int32)
        of_rows[:, :90] = of_keys[:, 60:150]
        segments = jnp.asarray(of_rows), jnp.asarray(of_keys)
    known = jax.jit(lambda: gpu.visible_ranges(tiling, 60, segments, by_keys))()
    later = jax.jit(lambda start: gpu.visible_ranges(tiling, start, segments, by_keys))
    np.testing.assert_array_equal(known, later(60))
    met, full = (np.asarray(x) for x in tile_schedule.tile_visibility(tiling, 60, *segments))
    if by_keys:
        met, full = met.swapaxes(1, 2), full.swapaxes(1, 2)
    tile = np.arange(met.shape[2])
    begin, end, low, high = (np.asarray(known)[..., i, None] for i in range(4))
    assert not (met & ~((begin <= tile) & (tile < end))).any()
    assert not (~full & (low <= tile) & (tile < high)).any()
    assert ((low <= tile) & (tile < high)).sum() > 0.5 * full.sum()
    assert (begin == end).any() == (~met.any(2)).any()
    pieces = np.asarray(gpu.split_ranges(known, 3)).reshape(*known.shape[:2], 3, 4)
    inside = (pieces[..., :1] <= tile) & (tile < pieces[..., 1:2])
    np.testing.assert_array_equal(inside.sum(axis=2), (begin <= tile) & (tile < end))


@pytest.mark.parametrize(
    ("x", "y", "reason"), [(256, 256, None), (576, 512, None), (640, 512, "keys of 640")]
)
def test_flash_mla_names_unsupported_width(x, y, reason):
    q, k, v = (jax.ShapeDtypeStruct((1, 1, 1, 4, c), jnp.bfloat16) for c in (x, x, y))
    message = gpu.unsupported_reason(q, k, v, None)
    assert message == reason or reason in message


@pytest.mark.aot
@pytest.mark.parametrize(("heads", "x", "y"), [(8, 192, 128), (8, 64, 192), (1, 576, 512)])
def test_compiles_values_of_other_width(heads, x, y):
    """Only the compiler detects gaps in what a copy writes, such as missing columns of a tile."""

    def run(q, k, v):
        def out(q, k, v):
            return flash_mla(q, k, v, scale=SCALE, start=200, implementation="gpu")[0]

        out_array, pull = jax.vjp(out, q, k, v)
        return pull(out_array)

    shapes = (1, 100, 8, x), (1, 300, heads, x), (1, 300, heads, y)
    compile_for("h200", run, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


def test_splits_decoding_over_multiprocessors():
    """A batch row of 64 heads and 8 queries is 8 blocks, and the range of each is split into 16."""
    q, k = jnp.zeros((1, 1, 64, 1, 64)), jnp.zeros((1, 1, 8192, 64))
    blocks = gpu.RowBlocks(q, k, gpu.ROWS, gpu.KEYS)
    assert (blocks.parts, blocks.tiling.rows) == (1, 1)
    blocks = gpu.RowBlocks(jnp.zeros((1, 1, 64, 8, 64)), k, gpu.ROWS, gpu.KEYS)
    assert (blocks.group, blocks.parts, blocks.tiling.rows) == (8, 8, 1)
