"""Tests of w4a8_matmul on Hopper: wide blocks, and the register layouts against the emulator's forms."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu.fragmented_array import Replicated
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, hopper
from pallas_kernels.w4a8_matmul import Static, gpu, int4_layout, w4a8_grouped_matmul
from tests.kernels.implementations import race_checked

RNG = np.random.default_rng(0)
EMULATED = hopper.Ops(True)


@pytest.mark.slow
def test_computes_wide_blocks_of_several_experts(monkeypatch):
    """Like for GLM-5's experts, two warpgroups take 128 columns each; groups end inside tiles."""
    monkeypatch.setattr(gpu, "FEW_COLUMNS", 0)
    x = jnp.asarray(RNG.integers(-128, 128, (101, 384)), jnp.int8)
    w = jnp.asarray(RNG.integers(-128, 128, (3, 192, 300)), jnp.int8)
    scales = (jnp.asarray(RNG.uniform(size=s), jnp.float32) for s in (101, (3, 3, 300)))
    x_scale, w_scale = scales
    args = x, x_scale, w, w_scale, jnp.asarray((13, 0, 86))
    got, wanted = (
        jax.jit(lambda *args, form=form: w4a8_grouped_matmul(*args, implementation=form))(*args)
        for form in (race_checked("gpu"), "xla")
    )
    assert not compat.has_races("gpu")
    np.testing.assert_array_equal(got, wanted)


def test_w4a8_gpu_names_unsupported_groups():
    shape = jax.ShapeDtypeStruct
    x, w = shape((8, 2048), jnp.int8), shape((1024, 8), jnp.int8)
    assert "groups of 64" in gpu.unsupported_reason(x, w, shape((32, 8), jnp.float32))
    assert "groups of 2048" in gpu.unsupported_reason(x, w, shape((1, 8), jnp.float32))
    assert gpu.unsupported_reason(x, w, shape((16, 8), jnp.float32)) is None


def test_plan_uses_valid_product_widths():
    """Int8 products have 8, 24 or a multiple of 16 columns."""
    shape = jax.ShapeDtypeStruct
    for m in range(1, 140):
        static = Static(backend=None, group=128, expected_rows=m, out_dtype=jnp.dtype("bfloat16"))
        plan = gpu.make_plan(shape((m, 256), jnp.int8), shape((1, 2, 256), jnp.float32), static)
        assert plan.rows in (8, 24) or plan.rows % 16 == 0, m


class IntegerRegisters:
    """Implements `int4_layout.MlirRegisters` on integers."""

    def word(self, register, v):
        return sum(int(byte) % 256 << 8 * i for i, byte in enumerate(register))

    def bytes(self, word):
        return [word >> 8 * i & 255 for i in range(4)]

    def permute(self, a, b, pick):
        both = self.bytes(a) + self.bytes(b)
        return self.word([both[pick >> 4 * i & 7] for i in range(4)], 4)

    def halves(self, word):
        return word << 4 & 0xF0F0F0F0, word & 0xF0F0F0F0

    def element(self, register, i):
        return register[i]

    def vector(self, values):
        return list(values)


def element_positions(layout, shape):
    """Returns int [warps lanes *registers vector]: the flat index of each element of a tiled layout."""
    layout = layout.to_mgpu()
    tiled = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, rank = tiled.ndim - len(tile), len(tile)
        cut = zip(tiled.shape[lead:], tile)
        cut = itertools.chain.from_iterable((size // part, part) for size, part in cut)
        tiled = tiled.reshape(*tiled.shape[:lead], *cut)
        order = *range(lead, lead + 2 * rank, 2), *range(lead + 1, lead + 2 * rank, 2)
        tiled = tiled.transpose(*range(lead), *order)

    def index(dims, number):
        sizes = [d.times if isinstance(d, Replicated) else tiled.shape[d] for d in dims]
        at = zip(dims, np.unravel_index(number, sizes))
        return {d: i for d, i in at if not isinstance(d, Replicated)}

    registers = layout.registers_shape(shape)
    out = np.empty((4, 32, *registers, layout.vector_length), int)
    for warp, lane in np.ndindex(4, 32):
        fixed = index(layout.warp_dims, warp) | index(layout.lane_dims, lane)
        fixed[layout.vector_dim] = slice(None)
        for register in np.ndindex(registers):
            at = [fixed.get(d - len(register), i) for d, i in enumerate(register)]
            out[warp, lane, *register] = tiled[tuple(at)]
    return out


def through_registers(function, inputs, layout, out_layout, shape, results):
    """Applies a function to the registers of inputs in layout, and returns its arrays from out_layout."""
    into = [element_positions(layout, x.shape) for x in inputs]
    back = element_positions(out_layout, shape)
    outs = [np.zeros(np.prod(shape), np.int64) for _ in range(results)]
    for thread in np.ndindex(4, 32):
        registers = []
        for x, place in zip(inputs, into):
            held = np.empty(place.shape[2:-1], object)
            for at in np.ndindex(held.shape):
                held[at] = list(x.reshape(-1)[place[thread][at]])
            registers.append(held)
        for out, register_array in zip(outs, function(registers)):
            for at in np.ndindex(register_array.shape):
                out[back[thread][at]] = register_array[at]
    return np.stack(outs).reshape(results, *shape)


@pytest.mark.parametrize("v", int4_layout.WIDTHS)
def test_unpacks_bytes_to_operands(v):
    packed = RNG.integers(-128, 128, (int4_layout.ROWS, int4_layout.WIDTHS[v])).astype(np.int8)
    got = through_registers(
        lambda registers: int4_layout.to_operands(registers[0], v, IntegerRegisters()),
        [packed],
        int4_layout.bytes_layout(v),
        plgpu.Layout.WGMMA_8BIT,
        (64, 2 * int4_layout.ROWS),
        v // 2,
    )
    np.testing.assert_array_equal(
        got.astype(np.int8), int4_layout.unpack(EMULATED, jnp.asarray(packed))
    )


@pytest.mark.parametrize("v", int4_layout.WIDTHS)
def test_spreads_column_scales_to_rows(v):
    numbers = np.arange(int4_layout.WIDTHS[v])
    row = hopper.WGMMA.reduce(1)
    got = through_registers(
        lambda registers: int4_layout.to_rows(registers[0], v, IntegerRegisters()),
        [numbers],
        int4_layout.column_layout(v),
        row,
        (64,),
        v // 2,
    )
    np.testing.assert_array_equal(got, int4_layout.spread_scales(EMULATED, jnp.asarray(numbers)))


@pytest.mark.parametrize("v", int4_layout.WIDTHS)
def test_writes_sums_by_column(v):
    sums = list(RNG.integers(0, 1 << 30, (v // 2, 64, 24)))
    shape = 24, int4_layout.WIDTHS[v]
    got = through_registers(
        lambda registers: [int4_layout.to_columns(registers, shape, IntegerRegisters())],
        sums,
        hopper.WGMMA,
        int4_layout.out_layout(v),
        shape,
        1,
    )
    np.testing.assert_array_equal(
        got[0], int4_layout.join_columns(EMULATED, list(map(jnp.asarray, sums)))
    )
