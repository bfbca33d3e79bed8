"""Counting and placing across the 128 threads of a Hopper warpgroup; Mosaic GPU has no operations for them.

They use MLIR's own operations, which the emulator cannot run. The emulator takes the plain forms in
`hopper.Ops`; only the compiler and a chip check this module.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.compat import arith, ir, llvm, memref, nvvm, vector

WARPS, LANES, VECTOR = 4, 32, 4
GROUP = WARPS * LANES * VECTOR


def thread_order_layout(n: int):
    """Returns the layout of n numbers in thread order: warp, register, lane, element.

    n is a multiple of 1024. A warp holds a quarter of the numbers, as rows of 32 lanes by 4 neighbours.
    """
    return plgpu.Layout.TILED(
        Tiling(((n,), (n // WARPS,), (LANES * VECTOR,), (VECTOR,))),
        warp_dims=(-4,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def running_count(
    flags: Int32[Array, " n"], totals, start: Int32[Array, ""]
) -> tuple[Int32[Array, " n"], Int32[Array, ""]]:
    """Returns (int32[n] start + flags before each position, start + all flags) for flags int32[n], 0 or 1.

    flags have `thread_order_layout`. totals: int32[4] of shared memory.
    """
    (n,) = flags.shape
    layout = thread_order_layout(n)

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=(
            plgpu.ShapeDtypeStruct((n,), jnp.int32, layout=layout),
            plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
        ),
    )
    def run(_, flags, totals, start):
        # Counts within each lane.
        rows = [[_element(row, i) for i in range(VECTOR)] for row in flags.registers.flat]
        lane_offsets = []  # in each row, over the elements of the lane
        counts = []
        for row in rows:
            sums = [_int(0)]
            for flag in row:
                sums.append(arith.addi(sums[-1], flag))
            lane_offsets.append(sums[:-1])
            counts.append(sums[-1])
        # A lane counts at most 4 in a row and a warp at most 128, so the bytes of a word sum four rows.
        inclusive = [_prefix_sum_lanes(_pack(counts[i : i + 4])) for i in range(0, len(rows), 4)]
        warp_totals = [_shuffle(word, _int(LANES - 1), nvvm.ShflKind.idx) for word in inclusive]
        warp_sum, starts = _int(0), []  # sum over the warp
        for i in range(len(rows)):
            starts.append(warp_sum)
            warp_sum = arith.addi(warp_sum, _byte(warp_totals[i // 4], i % 4))
        mgpu.warpgroup_barrier()  # another warp may still read the totals of the previous call
        with mgpu.when(_equal(_lane(), 0)):
            memref.store(warp_sum, totals, [_index(_warp())])
        mgpu.warpgroup_barrier()
        # Prefix sums over the warps.
        total = offset = start.registers.item()
        for warp in range(WARPS):
            earlier = arith.cmpi(arith.CmpIPredicate.ult, _int(warp), _warp())
            count = memref.load(totals, [_index(_int(warp))])
            offset = arith.addi(offset, arith.select(earlier, count, _int(0)))
            total = arith.addi(total, count)
        # Write the counts before each element.
        registers = flags.registers.copy()
        for i, position in enumerate(_register_indices(registers)):
            lane = arith.subi(_byte(inclusive[i // 4], i % 4), counts[i])
            base = arith.addi(arith.addi(offset, starts[i]), lane)
            registers[position] = _vector([arith.addi(base, sums) for sums in lane_offsets[i]])
        ranks = mgpu.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=True
        )
        return ranks, mgpu.FragmentedArray.splat(total, (), is_signed=True)

    inserted: Any = run  # called with the arguments after the context
    return inserted(flags, totals, start)


def scatter(
    ref,
    positions: Int32[Array, " n"],
    values: list[Int32[Array, " n"]],
    flags: Int32[Array, " n"],
    stride: int,
) -> None:
    """Stores ref[position + n stride] = values[n] where the flag is 1; ref int32[...] of shared memory.

    positions, flags and each of values: int32[n] in `thread_order_layout`. Every thread sees the stores
    afterwards.
    """
    layout = thread_order_layout(*positions.shape)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, [layout] * len(values)))
    def run(_, ref, positions, flags, values):
        start = llvm.ptrtoint(_int32(), mgpu.utils.memref_ptr(ref))
        for register in _register_indices(positions.registers):
            for i in range(VECTOR):
                offset = arith.muli(_element(positions.registers[register], i), _int(4))
                address = arith.addi(start, offset)
                flag = _element(flags.registers[register], i)
                for n, value in enumerate(values):
                    # A branch around the store would cost more than the stores that it saves.
                    store = f"@p st.shared.b32 [$0+{4 * n * stride}], $1;"
                    llvm.inline_asm(
                        None,
                        [address, _element(value.registers[register], i), flag],
                        f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {store} }}",
                        "r,r,r,~{memory}",
                        has_side_effects=True,
                    )
        mgpu.warpgroup_barrier()

    inserted: Any = run  # called with the arguments after the context
    inserted(ref, positions, flags, list(values))


def store_rows(ref, x: Shaped[Array, "m n"], begin, end, excluded) -> None:
    """Stores ref[i] = x[i] for begin <= i < end, except excluded[0] <= i < excluded[1].

    ref [m n] in global memory; x [m n] of 16 bits each in the layout WGMMA.
    """
    splat = plgpu.Layout.WG_SPLAT
    bounds = [begin, end, *excluded]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, [splat] * len(bounds)))
    def run(_, ref, x, bounds):
        begin, end, stop, resume = (bound.registers.item() for bound in bounds)
        # Address of the thread's first number.
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        width = x.shape[1]
        # Only a thread's first number needs an address: the others are at constant distances, without registers.
        first_position = next(iter(x.layout.thread_idxs(x.shape)))
        row, column = (arith.index_cast(_int32(), i) for i in first_position)
        start = arith.addi(_multiply_64(row, 2 * stride), _multiply_64(column, 2))
        start = arith.addi(start, llvm.ptrtoint(_int64(), mgpu.utils.memref_ptr(ref)))
        steps = x.layout.tiling.tile_strides((width, 1))
        # Store each pair of numbers whose row is inside.
        for register in _register_indices(x.registers):
            down, across = divmod(sum(i * step for i, step in zip(register, steps)), width)
            row_index = arith.addi(row, _int(down))
            is_inside = arith.andi(
                _compare("sge", row_index, begin), _compare("slt", row_index, end)
            )
            outside = arith.ori(
                _compare("slt", row_index, stop), _compare("sge", row_index, resume)
            )
            byte_offset = mgpu.c(2 * (down * stride + across), _int64())
            pair = vector.bitcast(ir.VectorType.get((1,), _int32()), x.registers[register])
            llvm.inline_asm(
                None,
                [
                    arith.addi(start, byte_offset),
                    _element(pair, 0),
                    arith.extui(_int32(), arith.andi(is_inside, outside)),
                ],
                "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1; }",
                "l,r,r,~{memory}",
                has_side_effects=True,
            )

    inserted: Any = run  # called with the arguments after the context
    inserted(ref, x, bounds)


def _compare(how: str, a, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, how), a, b)


def _multiply_64(value, factor: int):
    """Returns a 64-bit product."""
    return arith.muli(arith.extsi(_int64(), value), mgpu.c(factor, _int64()))


def _int64():
    return ir.IntegerType.get_signless(64)


def _register_indices(registers):
    return list(np.ndindex(registers.shape))


def _int32():
    return ir.IntegerType.get_signless(32)


def _int(value: int):
    return mgpu.c(value, _int32())


def _index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def _lane():
    return arith.remui(mgpu.thread_idx(), _int(LANES))


def _warp():
    return arith.remui(arith.divui(mgpu.thread_idx(), _int(LANES)), _int(WARPS))


def _equal(value, target: int):
    return arith.cmpi(arith.CmpIPredicate.eq, value, _int(target))


def _element(register, i: int):
    return vector.extract(register, [], [i])


def _vector(values):
    return vector.from_elements(ir.VectorType.get((len(values),), _int32()), values)


def _pack(counts):
    word = counts[0]
    for i, count in enumerate(counts[1:], 1):
        word = arith.ori(word, arith.shli(count, _int(8 * i)))
    return word


def _byte(word, i: int):
    return arith.andi(arith.shrui(word, _int(8 * i)), _int(255))


def _shuffle(word, lane, kind):
    clamp = 0 if kind == nvvm.ShflKind.up else LANES - 1
    return nvvm.shfl_sync(_int(-1), word, lane, _int(clamp), kind, results=[_int32()])


def _prefix_sum_lanes(word):
    """Returns the sum of word over this lane and the lower ones."""
    distance = 1
    while distance < LANES:
        lower = _shuffle(word, _int(distance), nvvm.ShflKind.up)
        exists = arith.cmpi(arith.CmpIPredicate.uge, _lane(), _int(distance))
        word = arith.addi(word, arith.select(exists, lower, _int(0)))
        distance *= 2
    return word
