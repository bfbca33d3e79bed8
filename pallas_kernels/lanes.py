"""Counting and placing across the 128 threads of a Hopper warpgroup, which Mosaic GPU has no operation for.

Both are written with MLIR's own operations, so the emulator cannot run them: it takes the plain forms in
`hopper.Ops`, and what is here is checked by the compiler and on a chip alone.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import arith, ir, llvm, memref, nvvm, vector

WARPS, LANES, VECTOR = 4, 32, 4
GROUP = WARPS * LANES * VECTOR


def in_order(n: int):
    """The layout of n numbers in which a thread's order is theirs: warp, register, lane, element.

    n is a multiple of 1024. A warp holds a quarter of them, as rows of 32 lanes by 4 neighbours.
    """
    return plgpu.Layout.TILED(
        Tiling(((n,), (n // WARPS,), (LANES * VECTOR,), (VECTOR,))),
        warp_dims=(-4,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def running_count(flags, totals, start):
    """(int32[n] start and the flags before each place, start and all flags), of flags int32[n] 0 or 1 `in_order`.

    totals: int32[4] of shared memory.
    """
    (n,) = flags.shape
    layout = in_order(n)

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=(
            plgpu.ShapeDtypeStruct((n,), jnp.int32, layout=layout),
            plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
        ),
    )
    def run(_, flags, totals, start):
        rows = [[_element(row, i) for i in range(VECTOR)] for row in flags.registers.flat]
        before = []  # in each row, of the lane's own elements
        counts = []
        for row in rows:
            sums = [_int(0)]
            for flag in row:
                sums.append(arith.addi(sums[-1], flag))
            before.append(sums[:-1])
            counts.append(sums[-1])
        # A lane counts at most 4 and a warp 128 in a row, so that four rows are summed in the bytes of a word.
        inclusive = [_over_lanes(_pack(counts[i : i + 4])) for i in range(0, len(rows), 4)]
        whole = [_shuffle(word, _int(LANES - 1), nvvm.ShflKind.idx) for word in inclusive]
        own, starts = _int(0), []  # of the warp
        for i in range(len(rows)):
            starts.append(own)
            own = arith.addi(own, _byte(whole[i // 4], i % 4))
        mgpu.warpgroup_barrier()  # whoever still reads the totals of the call before
        with mgpu.when(_equal(_lane(), 0)):
            memref.store(own, totals, [_index(_warp())])
        mgpu.warpgroup_barrier()
        total = offset = start.registers.item()
        for warp in range(WARPS):
            earlier = arith.cmpi(arith.CmpIPredicate.ult, _int(warp), _warp())
            count = memref.load(totals, [_index(_int(warp))])
            offset = arith.addi(offset, arith.select(earlier, count, _int(0)))
            total = arith.addi(total, count)
        registers = flags.registers.copy()
        for i, place in enumerate(_places(registers)):
            lane = arith.subi(_byte(inclusive[i // 4], i % 4), counts[i])
            base = arith.addi(arith.addi(offset, starts[i]), lane)
            registers[place] = _vector([arith.addi(base, sums) for sums in before[i]])
        ranks = mgpu.FragmentedArray(
            _registers=registers, _layout=layout.to_mgpu(), _is_signed=True
        )
        return ranks, mgpu.FragmentedArray.splat(total, (), is_signed=True)

    return run(flags, totals, start)


def scatter(ref, places, values, flags, stride):
    """ref[place + n stride] = values[n], where the flag is 1; ref int32[...] of shared memory.

    places, flags and each of values: int32[n] `in_order`. Every thread sees the stores afterwards.
    """
    layout = in_order(*places.shape)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, [layout] * len(values)))
    def run(_, ref, places, flags, values):
        start = llvm.ptrtoint(_int32(), mgpu.utils.memref_ptr(ref))
        for at in _places(places.registers):
            for i in range(VECTOR):
                offset = arith.muli(_element(places.registers[at], i), _int(4))
                address = arith.addi(start, offset)
                flag = _element(flags.registers[at], i)
                for n, value in enumerate(values):
                    # A branch around the store would cost more than the stores that it saves.
                    store = f"@p st.shared.b32 [$0+{4 * n * stride}], $1;"
                    llvm.inline_asm(
                        None,
                        [address, _element(value.registers[at], i), flag],
                        f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {store} }}",
                        "r,r,r,~{memory}",
                        has_side_effects=True,
                    )
        mgpu.warpgroup_barrier()

    run(ref, places, flags, list(values))


def store_rows(ref, x, begin, end, without):
    """ref[i] = x[i] for begin <= i < end, but not in without[0] <= i < without[1].

    ref [m n] in global memory; x [m n] of 16 bits each in the layout WGMMA.
    """
    splat = plgpu.Layout.WG_SPLAT
    bounds = [begin, end, *without]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, [splat] * len(bounds)))
    def run(_, ref, x, bounds):
        begin, end, stop, resume = (bound.registers.item() for bound in bounds)
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        width = x.shape[1]
        # A thread's first number; the others are at constant distances, which cost no registers.
        place = next(iter(x.layout.thread_idxs(x.shape)))
        row, column = (arith.index_cast(_int32(), i) for i in place)
        start = arith.addi(_times(row, 2 * stride), _times(column, 2))
        start = arith.addi(start, llvm.ptrtoint(_int64(), mgpu.utils.memref_ptr(ref)))
        steps = x.layout.tiling.tile_strides((width, 1))
        for at in _places(x.registers):
            down, across = divmod(sum(i * step for i, step in zip(at, steps)), width)
            own = arith.addi(row, _int(down))
            mine = arith.andi(_compare("sge", own, begin), _compare("slt", own, end))
            outside = arith.ori(_compare("slt", own, stop), _compare("sge", own, resume))
            further = mgpu.c(2 * (down * stride + across), _int64())
            pair = vector.bitcast(ir.VectorType.get((1,), _int32()), x.registers[at])
            llvm.inline_asm(
                None,
                [
                    arith.addi(start, further),
                    _element(pair, 0),
                    arith.extui(_int32(), arith.andi(mine, outside)),
                ],
                "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1; }",
                "l,r,r,~{memory}",
                has_side_effects=True,
            )

    run(ref, x, bounds)


def _compare(how: str, a, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, how), a, b)


def _times(value, factor: int):
    """A product of 64 bits."""
    return arith.muli(arith.extsi(_int64(), value), mgpu.c(factor, _int64()))


def _int64():
    return ir.IntegerType.get_signless(64)


def _places(registers):
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


def _equal(value, to: int):
    return arith.cmpi(arith.CmpIPredicate.eq, value, _int(to))


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


def _over_lanes(word):
    """The sum of word over this lane and the lower ones."""
    distance = 1
    while distance < LANES:
        lower = _shuffle(word, _int(distance), nvvm.ShflKind.up)
        exists = arith.cmpi(arith.CmpIPredicate.uge, _lane(), _int(distance))
        word = arith.addi(word, arith.select(exists, lower, _int(0)))
        distance *= 2
    return word
