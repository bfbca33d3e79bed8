"""Tests of grouped products and SwiGLU of rows sorted by expert, against a loop over experts."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from pallas_kernels import compat
from pallas_kernels.grouped_matmul import cases, grouped_matmul, grouped_swiglu, tiles, tpu
from tests.kernels.expert_problem import D, E, F, gradients, weights
from tests.kernels.implementations import in_tiers, marks, over_implementations, race_checked
from tests.oracles import experts as oracle

ROWS = 140  # several times a block's capacity if all belong to one expert
SIZES = {
    "uneven": (27, 1, 53, 12, 47),
    "empty experts": (0, 70, 0, 70, 0),
    "all on the first": (ROWS, 0, 0, 0, 0),
    "all on the last": (0, 0, 0, 0, ROWS),
    "full tiles": (32, 0, 64, 32, 0),
    "unassigned rows": (3, 0, 4, 50, 1),
    "less than a tile": (3, 0, 4, 0, 1),
    "no rows": (0, 0, 0, 0, 0),
}
FEW = (3, 0, 20, 9, 1)  # of 40 rows
over_all = over_implementations("grouped_matmul")
over_all_slow_on_hopper = over_implementations("grouped_matmul", slow="gpu")


def over_sizes(test):
    """Parametrises a test by `implementation` and `all_sizes`; Hopper's emulator takes seconds for each."""
    forms = [(p.id, *p.values) for p in over_all.args[1]]
    params = [
        pytest.param(how, list(SIZES.values()), id=form, marks=marks(form == "gpu"))
        for form, how in forms
    ]
    params += [
        pytest.param(how, [FEW], id=f"few-{form}", marks=marks("swiglu" in test.__name__))
        for form, how in forms
        if form == "gpu"
    ]
    return pytest.mark.parametrize(("implementation", "all_sizes"), params)(test)


def slices(sizes):
    """Returns the rows of each group as slices."""
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes)]


@pytest.fixture(scope="module")
def problem():
    """Returns x [m d], w [e d f] and dy [m f]."""
    rng = np.random.default_rng(1)
    arrays = (rng.standard_normal(s).astype(np.float32) for s in ((ROWS, D), (E, D, F), (ROWS, F)))
    return tuple(map(jnp.asarray, arrays))


@functools.cache
def with_gradients(implementation):
    @jax.jit
    def run(x, w, dy, sizes):
        y, pull = jax.vjp(
            lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w
        )
        return y, *pull(dy)

    return run


def loop(x, w, dy, sizes):
    """Returns (y, dx, dw) in float64 by a loop over experts; unassigned rows are zero."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    for e, rows in enumerate(slices(sizes)):
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return y, dx, dw


@over_sizes
def test_product_and_gradients_equal_loop(implementation, all_sizes, problem):
    x, w, dy = problem
    if all_sizes == [FEW]:
        x, dy = x[:40], dy[:40]
    for sizes in all_sizes:
        got = with_gradients(implementation)(x, w, dy, jnp.asarray(sizes))
        for a, b in zip(got, loop(x, w, dy, sizes)):
            np.testing.assert_allclose(a, b, atol=1e-4, err_msg=str(sizes))
        filled = sum(sizes)
        assert not got[0][filled:].any() and not got[1][filled:].any(), sizes
        assert not got[2][np.asarray(sizes) == 0].any(), sizes


@over_all_slow_on_hopper
def test_ignores_unassigned_rows(implementation, problem):
    x, w, dy = problem
    sizes = SIZES["unassigned rows"]
    filled = sum(sizes)
    x, dy = x.at[filled:].set(jnp.nan), dy.at[filled:].set(jnp.inf)
    got = with_gradients(implementation)(x, w, dy, jnp.asarray(sizes))
    for a, b in zip(got, with_gradients(implementation)(*problem, jnp.asarray(sizes))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@over_all
def test_sums_bfloat16_in_float32(implementation):
    """A bfloat16 sum of ones would stop at 256."""
    x, w, dy = (jnp.ones(s, jnp.bfloat16) for s in ((320, 400), (2, 400, 320), (320, 320)))
    y, dx, dw = with_gradients(implementation)(x, w, dy, jnp.asarray((304, 0)))
    assert {a.dtype for a in (y, dx, dw)} == {jnp.dtype(jnp.bfloat16)}
    assert set(np.unique(y[:304])) == {400} and set(np.unique(dx[:304])) == {320}
    assert set(np.unique(dw[0])) == {304} and not dw[1].any()


@over_all_slow_on_hopper
def test_is_deterministic(implementation, problem):
    run = functools.partial(with_gradients(implementation), *problem)
    sizes = jnp.asarray(SIZES["uneven"])
    for a, b in zip(run(sizes), run(sizes)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@over_all
def test_vmaps_over_rows_and_weights(implementation, problem):
    x, w, dy = problem[0][:40], problem[1], problem[2][:40]
    sizes = jnp.asarray(FEW)
    run = with_gradients(implementation)
    expected = run(x, w, dy, sizes)
    batch = (jnp.stack([a, 2 * a]) for a in (x, w, dy))
    for a, b in zip(jax.vmap(run, (0, 0, 0, None))(*batch, sizes), expected):
        np.testing.assert_allclose(a, jnp.stack([b, 4 * b]), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@over_implementations("grouped_matmul", several_devices=True)
def test_shards_experts_over_devices(implementation, problem):
    x, w, sizes = problem[0][:40], problem[1], jnp.asarray(FEW)
    expected = loop(x, w, problem[2][:40], FEW)[0]
    mesh = Mesh(np.array(jax.devices()[:8]), ("expert",))
    spread = jax.shard_map(
        functools.partial(grouped_matmul, implementation=implementation),
        mesh=mesh,
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=False,
    )
    many = [jnp.concatenate([a] * 8) for a in (x, w, sizes)]
    np.testing.assert_allclose(jax.jit(spread)(*many), np.concatenate([expected] * 8), atol=1e-4)


@over_implementations("grouped_matmul", slow="tpu gpu")
def test_traces_once_for_all_sizes(implementation, problem):
    traced = []

    @jax.jit
    def run(sizes):
        traced.append(sizes)
        return grouped_matmul(*problem[:2], sizes, implementation=implementation)

    for sizes in SIZES.values():
        run(jnp.asarray(sizes))
    assert len(traced) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_swiglu_has_no_races(name, x_dy):
    # Full tiles, because the emulator pads arrays that are written in place.
    x, dy = (jnp.asarray(a[:48]) for a in x_dy)
    y, dx, dw = swiglu_with_gradients(race_checked(name))(x, dy, jnp.asarray(FEW), weights())
    assert not compat.has_races(name)
    expected = swiglu_loop(np.asarray(x), np.asarray(dy), FEW)
    np.testing.assert_allclose(y, expected[0], atol=1e-4)
    np.testing.assert_allclose(dx, expected[1], atol=1e-4)
    for key, value in expected[2].items():
        np.testing.assert_allclose(dw[key], value, atol=1e-3)


@pytest.mark.slow
def test_weight_prefetch_has_no_races(problem):
    """The prefetch crosses from one of three column tiles to the next."""
    rng = np.random.default_rng(2)
    x, dy = problem[0][:40], jnp.asarray(rng.standard_normal((40, 384)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((E, D, 384)), jnp.float32)

    def run(x, w):
        return grouped_matmul(x, w, jnp.asarray(FEW), implementation=race_checked("tpu"))

    with mock.patch.object(tpu, "MAX_COLUMNS", 128):
        y, pull = jax.vjp(run, x, w)
        assert not compat.has_races("tpu")
        got = (y, *pull(dy))
    assert not compat.has_races("tpu")
    for a, b in zip(got, loop(x, w, dy, FEW)):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(("tile", "rows"), [(16, 149), (64, 160)])
def test_schedules_row_tiles(tile, rows):
    rng = np.random.default_rng(tile + rows)
    num_tiles = -(-rows // tile)
    draws = rng.multinomial(rows, np.full(6, 1 / 6), 30) * rng.integers(0, 2, (30, 6))
    run = jax.jit(tiles.schedule_row_tiles, static_argnums=(1, 2, 3))
    for sizes in np.concatenate([draws, [[rows, 0, 0, 0, 0, 0], [0] * 6, [tile] + [0] * 5]]):
        work = jax.device_get(run(sizes.astype(np.int32), rows, tile))
        count = work.count
        assert count <= num_tiles + 5
        owner = np.full(num_tiles * tile, -1)
        for group, at, begin, end in zip(work.group[:count], work.tile, work.begin, work.end):
            assert (owner[at * tile + begin : at * tile + end] == -1).all()
            owner[at * tile + begin : at * tile + end] = group
        expected = np.repeat(np.arange(6), sizes)
        np.testing.assert_array_equal(owner[: len(expected)], expected)
        assert (owner[len(expected) :] == -1).all()
        np.testing.assert_array_equal(np.unique(work.tile[:count]), np.arange(num_tiles))
        assert (np.diff(work.tile[:count]) >= 0).all() and (work.source < num_tiles).all()
        filled = work.end[:count] > work.begin[:count]
        np.testing.assert_array_equal(work.source[:count][filled], work.tile[:count][filled])
        assert len(np.unique(work.source[:count][~filled])) <= 1, "a tile without rows is read"
        used = np.flatnonzero(sizes)
        for group, after in zip(work.group[:count][filled], work.following):
            assert after == min((u for u in used if u > group), default=-1)

        every = jax.device_get(run(sizes.astype(np.int32), rows, tile, True))
        assert every.count <= num_tiles + 5 and every.group[every.count] == 6
        np.testing.assert_array_equal(np.unique(every.group[: every.count]), np.arange(6))
        for group, size in enumerate(sizes):
            mine = np.flatnonzero(every.group[: every.count] == group)
            assert (every.end - every.begin)[mine].sum() == size and (np.diff(mine) == 1).all()


def test_selects_column_tiles():
    assert tiles.column_tile(2048, 1536) == 1024, "one tile per core"
    assert tiles.column_tile(6144, 1536) == 1536
    assert tiles.column_tile(384, 1536) == 384 and tpu.column_tile(100, 1536) == 100


def test_rejects_unsupported_inputs(problem):
    x, w, _ = problem
    sizes = jnp.asarray(SIZES["uneven"])
    with pytest.raises(ValueError, match=r"\[m k\], \[e k n\] and \[e\]"):
        grouped_matmul(x, w.swapaxes(1, 2), sizes)
    with pytest.raises(ValueError, match="group sizes"):
        grouped_swiglu(x, sizes[:-1], w, w, w.swapaxes(1, 2))
    assert "float16" in tpu.unsupported_reason(x.astype(jnp.float16), w)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    assert "rows of 20000" in tpu.unsupported_reason(shape((8, 20000)), shape((1, 20000, 128)))
    assert "6144 by 4000" in tpu.unsupported_reason(shape((8, 6144)), shape((1, 6144, 4000)))
    assert tpu.unsupported_reason(shape((8, 6144)), shape((1, 6144, 2048))) is None


# SwiGLU


def swiglu(x, sizes, w, **named):
    return grouped_swiglu(x, sizes, w["gate"], w["up"], w["down"], **named)


def swiglu_loop(x, dy, sizes):
    """Returns (y, dx, dw) of rows sorted by expert by a loop over experts; unassigned rows are zero."""
    w = weights()
    y, dx = np.zeros(x.shape), np.zeros(x.shape)
    dw = {k: np.zeros(v.shape) for k, v in w.items()}
    for e, rows in enumerate(slices(sizes)):
        y[rows], dx[rows], dw["gate"][e], dw["up"][e], dw["down"][e] = gradients(
            x[rows], dy[rows], w["gate"][e], w["up"][e], w["down"][e]
        )
    return y, dx, dw


@pytest.fixture(scope="module")
def x_dy():
    return np.random.default_rng(1).standard_normal((2, ROWS, D)).astype(np.float32)


@functools.cache
def swiglu_with_gradients(implementation):
    @jax.jit
    def run(x, dy, sizes, w):
        y, pull = jax.vjp(lambda x, w: swiglu(x, sizes, w, implementation=implementation), x, w)
        return y, *pull(dy)

    return run


@over_sizes
def test_swiglu_and_gradients_equal_loop(implementation, all_sizes, x_dy):
    x, dy = x_dy[:, :40] if all_sizes == [FEW] else x_dy
    for sizes in all_sizes:
        y, dx, dw = swiglu_with_gradients(implementation)(x, dy, np.int32(sizes), weights())
        expected = swiglu_loop(x, dy, sizes)
        np.testing.assert_allclose(y, expected[0], atol=1e-4, err_msg=str(sizes))
        assert not y[sum(sizes) :].any() and not dx[sum(sizes) :].any(), sizes
        np.testing.assert_allclose(dx, expected[1], atol=1e-4, err_msg=str(sizes))
        for key, value in expected[2].items():
            np.testing.assert_allclose(dw[key], value, atol=1e-3, err_msg=f"{key} {sizes}")


def test_loop_equals_oracle(x_dy):
    x = x_dy[0][:3]
    w = {k: v[1] for k, v in weights().items()}
    expected = oracle.swiglu(x, w["gate"].T, w["up"].T, w["down"].T)
    np.testing.assert_allclose(swiglu_loop(x, x, (0, 3, 0, 0, 0))[0], expected, atol=1e-5)


@over_implementations("grouped_matmul", slow="tpu gpu")
@pytest.mark.parametrize("expected_rows", in_tiers([1], [4000]))
def test_expected_rows_do_not_change_results(implementation, expected_rows, x_dy):
    sizes = SIZES["uneven"]
    run = functools.partial(swiglu, expected_rows=expected_rows, implementation=implementation)
    got = jax.jit(run)(x_dy[0], np.asarray(sizes, np.int32), weights())
    np.testing.assert_allclose(got, swiglu_loop(*x_dy, sizes)[0], atol=1e-4)


@pytest.mark.parametrize("spread", [cases.even, cases.skewed])
@pytest.mark.parametrize("sizes", [cases.UP, cases.SMALL])
def test_cases_fill_counted_rows(spread, sizes):
    got = np.asarray(spread(sizes))
    assert got.sum() == sizes["filled"] and got.shape == (sizes["e"],) and (got >= 0).all()
    assert got.dtype == np.int32 and (np.ptp(got) < 2) == (spread is cases.even)
