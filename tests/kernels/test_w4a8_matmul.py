"""Tests of int8 rows times int4 weights, dense and sorted by expert, against integers in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from pallas_kernels import compat
from pallas_kernels.w4a8_matmul import tpu, w4a8_grouped_matmul, w4a8_matmul
from pallas_kernels.w4a8_matmul.quantize import dequantize_w4, quantize_a8, quantize_w4, unpack_int4
from tests.kernels.implementations import (
    in_tiers,
    marks,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.oracles import quantize as oracle

M, K, N, E, GROUP = 140, 384, 200, 5, 128
SIZES = {
    "uneven": (27, 1, 53, 12, 47),
    "empty experts": (0, 70, 0, 70, 0),
    "all on the last": (0, 0, 0, 0, M),
    "unassigned rows": (3, 0, 4, 50, 1),
    "less than a tile": (3, 0, 4, 0, 1),
    "no rows": (0, 0, 0, 0, 0),
}
FEW = (3, 0, 20, 9, 1)  # of 40 rows
over_all = over_implementations("w4a8_matmul")
over_all_slow_on_hopper = over_implementations("w4a8_matmul", slow="gpu")
over_xla = over_implementations("w4a8_matmul", slow="tpu gpu")


def over_all_and(name, values, quick):
    """Parametrises a test by `implementation` and by all values of a name.

    quick: value for Hopper's emulator in the default tier, None for none; the slow tier runs all.
    """
    forms = [(p.id, *p.values) for p in over_all.args[1]]
    params = [pytest.param(how, values, id=form, marks=marks(form == "gpu")) for form, how in forms]
    params += [
        pytest.param(how, (quick,), id="few-gpu") for form, how in forms if form == "gpu" and quick
    ]
    return pytest.mark.parametrize(("implementation", name), params)


def problem(m=M, k=K, n=N, e=E, group=GROUP):
    """Returns (x, x_scale, w, w_scale) with all bytes, including -128 and -8."""
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (m, k)).astype(np.int8)
    w = rng.integers(-128, 128, (e, k // 2, n)).astype(np.int8)
    x_scale = rng.uniform(0.01, 0.02, m).astype(np.float32)
    w_scale = rng.uniform(0.01, 0.02, (e, k // group, n)).astype(np.float32)
    return tuple(map(jnp.asarray, (x, x_scale, w, w_scale)))


def dense(e=2, **named):
    x, x_scale, w, w_scale = problem(**named)
    return x, x_scale, w[e], w_scale[e]


def expected(x, x_scale, w, w_scale):
    group = x.shape[1] // w_scale.shape[-2]
    q = np.asarray(unpack_int4(w, group))
    return oracle.w4a8(*(np.asarray(a) for a in (x, x_scale, q, w_scale)))


@functools.cache
def runner(implementation, grouped=False, out_dtype=jnp.float32):
    run = w4a8_grouped_matmul if grouped else w4a8_matmul
    return jax.jit(functools.partial(run, out_dtype=out_dtype, implementation=implementation))


@over_all_and("groups", (128, 256, 768), quick=None)
def test_dense_product_equals_oracle(implementation, groups):
    for group in groups:
        args = dense(m=75, k=768, n=72, group=group)
        got = runner(implementation)(*args)
        np.testing.assert_allclose(got, expected(*args), rtol=1e-5, atol=1e-4, err_msg=str(group))
        # Groups are added in the same order; only fused multiply-adds may differ.
        np.testing.assert_allclose(got, runner("xla")(*args), rtol=1e-6, atol=4e-6)


@over_implementations("w4a8_matmul", slow="xla gpu")
def test_products_are_exact_at_extremes(implementation):
    """A group's sums are the largest of both signs, and their neighbours."""
    x = jnp.full((3, 256), -128, jnp.int8).at[1].set(127).at[2, 0].set(-127)
    w = jnp.full((128, 128), -0x78, jnp.int8).at[:, 1].set(0x77).at[0, 2].set(-0x77)
    ones = jnp.ones(3), jnp.ones((2, 128))
    got = runner(implementation)(x, ones[0], w, ones[1])
    np.testing.assert_array_equal(got, expected(x, ones[0], w, ones[1]))
    assert got[0, 0] == 256 * 128 * 8 and got[1, 1] == 256 * 127 * 7


@over_all_and("names", tuple(SIZES), quick="few")
def test_grouped_product_equals_oracle(implementation, names):
    inputs = problem(m=40, k=128, n=256) if names == ("few",) else problem()
    x, all_scales, w, w_scale = map(np.asarray, inputs)
    for name in names:
        sizes = FEW if name == "few" else SIZES[name]
        filled = sum(sizes)
        x_scale = np.where(np.arange(len(x)) < filled, all_scales, np.nan).astype(np.float32)
        args = (x, x_scale, w, w_scale, jnp.asarray(sizes))
        got = np.asarray(runner(implementation, grouped=True)(*args))
        for e, (size, end) in enumerate(zip(sizes, np.cumsum(sizes))):
            rows = slice(end - size, end)
            wanted = expected(x[rows], x_scale[rows], w[e], w_scale[e])
            np.testing.assert_allclose(got[rows], wanted, rtol=1e-5, atol=1e-4, err_msg=name)
        assert not got[filled:].any(), name
        np.testing.assert_array_equal(got, runner("xla", grouped=True)(*args), err_msg=name)


@over_xla
@pytest.mark.parametrize("expected_rows", in_tiers([1], [4000]))
def test_w4a8_ignores_expected_rows(implementation, expected_rows):
    args = *problem(), jnp.asarray(SIZES["uneven"])
    run = functools.partial(w4a8_grouped_matmul, out_dtype=jnp.float32)
    run = functools.partial(run, expected_rows=expected_rows, implementation=implementation)
    got = jax.jit(run)(*args)
    np.testing.assert_array_equal(got, runner("xla", grouped=True)(*args))


@pytest.mark.slow
@over_all
def test_one_expert_equals_dense_product(implementation):
    x, x_scale, w, w_scale = dense()
    got = runner(implementation)(x, x_scale, w, w_scale)
    np.testing.assert_array_equal(got, runner(implementation)(x, x_scale, w, w_scale))
    one_expert = runner(implementation, grouped=True)(
        x, x_scale, w[None], w_scale[None], jnp.asarray([M])
    )
    np.testing.assert_array_equal(got, one_expert)
    rounded = runner(implementation, out_dtype=jnp.bfloat16)(x, x_scale, w, w_scale)
    np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


@over_xla
def test_error_of_float_product_is_rounding(implementation):
    """Rounding is wrong by at most 1/7 and 1/127 of a maximum."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((20, 256)).astype(np.float32)
    w = rng.standard_normal((256, 40)).astype(np.float32)
    (q, x_scale), (packed, w_scale) = jax.jit(lambda x, w: (quantize_a8(x), quantize_w4(w)))(x, w)
    got = runner(implementation)(q, x_scale, packed, w_scale)
    near = np.asarray(q * x_scale[:, None], np.float64) @ np.asarray(dequantize_w4(packed, w_scale))
    np.testing.assert_allclose(got, near, atol=1e-4)
    assert 0.05 < np.std(got - x @ w) / np.std(x @ w) < 0.2


@pytest.mark.slow
@over_all
def test_w4a8_vmaps(implementation):
    x, x_scale, w, w_scale = dense(m=20, k=256, n=128)
    run = runner(implementation)
    both = jax.vmap(run, (0, 0, None, None))(
        jnp.stack([x, -x]), jnp.stack([x_scale, x_scale]), w, w_scale
    )
    once = run(x, x_scale, w, w_scale)
    np.testing.assert_array_equal(both[0], once)
    np.testing.assert_array_equal(both[1], run(-x, x_scale, w, w_scale))


@over_implementations("w4a8_matmul", several_devices=True, slow="xla tpu")
def test_w4a8_shards_columns(implementation):
    x, x_scale, w, w_scale = dense(m=20, k=256, n=1024)
    run = runner(implementation)
    mesh = Mesh(np.array(jax.devices()[:8]), ("tensor",))
    columns = P(None, "tensor")
    spread = jax.shard_map(
        run, mesh=mesh, in_specs=(P(), P(), columns, columns), out_specs=columns, check_vma=False
    )
    once = run(x, x_scale, w, w_scale)
    np.testing.assert_array_equal(jax.jit(spread)(x, x_scale, w, w_scale), once)


@over_xla
def test_w4a8_traces_once_for_all_sizes(implementation):
    traced = []

    @jax.jit
    def run(sizes):
        traced.append(sizes)
        return w4a8_grouped_matmul(*problem(), sizes, implementation=implementation)

    for sizes in SIZES.values():
        run(jnp.asarray(sizes))
    assert len(traced) == 1


@pytest.mark.slow
@over_pallas_forms("w4a8_matmul")
def test_w4a8_has_no_races(name):
    x, x_scale, w, w_scale = problem(m=40, k=128, n=256)
    args = (x, x_scale, w, w_scale, jnp.asarray(FEW))
    got = runner(race_checked(name), grouped=True)(*args)
    assert not compat.has_races(name)
    np.testing.assert_array_equal(got, runner("xla", grouped=True)(*args))


def test_w4a8_rejects_unsupported_inputs():
    x, x_scale, w, w_scale = dense()
    for args in (
        (x, x_scale[1:], w, w_scale),
        (x, x_scale, w[1:], w_scale),
        (x, x_scale, w, w_scale[:, 1:]),
        (x[:, 1:], x_scale, w, w_scale),
    ):
        with pytest.raises(ValueError, match=r"\[k/2 n\] and \[k/group n\]"):
            w4a8_matmul(*args)
    with pytest.raises(ValueError, match="leading e"):
        w4a8_grouped_matmul(x, x_scale, w, w_scale, jnp.asarray([M]))
    with pytest.raises(ValueError, match="uint8.*both are int8"):
        w4a8_matmul(x, x_scale, w.astype(jnp.uint8), w_scale)
    shape = jax.ShapeDtypeStruct
    assert "groups of 64" in tpu.unsupported_reason(x, w, shape((K // 64, N), jnp.float32))
    assert "groups of 2048" in tpu.unsupported_reason(
        shape((8, 2048), jnp.int8), w, shape((1, N), jnp.float32)
    )
    assert "VMEM" in tpu.unsupported_reason(
        shape((8, 1 << 18), jnp.int8), w, shape((1 << 11, N), jnp.float32)
    )
    assert tpu.unsupported_reason(x, w, w_scale) is None
