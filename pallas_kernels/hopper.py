"""What the kernels for Hopper share: operations of Mosaic GPU that its CPU emulator lacks, in a form that has both.

A kernel body takes an `Ops` and is then one source for the chip and for the emulator. On the chip the
values that it passes around are registers of a warpgroup in the layout that is named; in the emulator they
are plain arrays, and `dot` is a plain product, so that the emulator checks addresses, copies, barriers
and arithmetic, and the offline compiler checks layouts, shared memory and tensor-core shapes.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, lanes

WGMMA = plgpu.Layout.WGMMA
SMEM_BYTES = 232448  # of one block on an H100 or H200
MULTIPROCESSORS = 132  # of an H100 or H200


def compiler_params(**named) -> plgpu.CompilerParams:
    """Lane semantics: the default differs between jax versions, and with it what a body means."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **named)


def tiled(dtype, swizzle: int = 128) -> tuple:
    """Transforms of a shared-memory tile that tensor cores read: 8 rows of so many bytes, swizzled.

    A product is cut along its contraction into pieces of `swizzle` bytes: 64 for one over 32 bfloat16.
    """
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


class Ops:
    """Operations of one kernel body; interpret: as for `plgpu.kernel` (None or False: the chip)."""

    def __init__(self, interpret):
        self.emulated = bool(interpret)

    def load(self, ref, index=(), layout=WGMMA):
        """ref[index] in registers, from shared or global memory; index holds whole slices or `pl.ds`."""
        if self.emulated:
            return ref[index] if index else ref[...]
        return compat.load(ref, index, layout)

    def cast(self, x, layout=WGMMA):
        """x in registers of that layout; what a loop carries must have one that does not change."""
        return x if self.emulated else plgpu.layout_cast(x, layout)

    def zeros(self, shape, dtype=jnp.float32, layout=WGMMA):
        """Registers of zeros."""
        return self.cast(jnp.zeros(shape, dtype), layout)

    def full(self, shape, value, dtype=jnp.float32, layout=WGMMA):
        """Registers of one value."""
        return self.cast(jnp.full(shape, value, dtype), layout)

    def dot(
        self,
        acc,
        a,
        b,
        b_transposed=False,
        a_transposed=False,
        most: int = 256,
        issued=lambda: None,
    ):
        """acc + a @ b (or a @ b^T, a^T @ b) by tensor cores; a: registers or a tile, b: a tile; acc:
        registers.

        Tiles of 8-bit numbers must be contracted along their last dimension: b_transposed.
        most: columns of one instruction. The compiler refuses 256 of them in a kernel of four
        warpgroups or more, whatever registers `set_max_registers` gives the one that has them.
        issued: called when the product is under way.
        """
        if self.emulated:
            issued()
            dims = (((int(not a_transposed),), (int(b_transposed),)), ((), ()))
            product = lax.dot_general(a[...], b[...], dims, preferred_element_type=acc.dtype)
            # Tensor cores read in the order of copies; these plain reads need a fence to be before one.
            plgpu.commit_smem()
            return acc + product.astype(acc.dtype)

        def accumulate(acc_ref):
            columns = acc.shape[1]
            left = compat.transposed(a) if a_transposed else a
            if columns <= most:
                plgpu.wgmma(acc_ref, left, compat.transposed(b) if b_transposed else b)
                return issued()
            for first in range(0, columns, most):
                piece = pl.ds(first, min(most, columns - first))
                part = b.at[piece] if b_transposed else b.at[:, piece]
                part = compat.transposed(part) if b_transposed else part
                plgpu.wgmma(acc_ref.at[:, piece], left, part)
            issued()

        return pl.run_state(accumulate)(plgpu.ACC.init(acc))

    def sum_products(self, shapes, steps, operands, done, b_transposed=False, a_transposed=False):
        """A list of float32[shape], one for each b: the sum over i < steps of a_i @ b_i (or their transposes).

        operands(i) waits for what product i reads, and gives (a, tuple of b); tensor cores read all of them.
        done(i) is called when they have: one step later, so that a product runs while the next one's
        operands are waited for.
        """
        if self.emulated:

            def step(i, accs):
                a, bs = operands(i)
                accs = [self.dot(c, a, b, b_transposed, a_transposed) for c, b in zip(accs, bs)]
                done(i)
                return accs

            return lax.fori_loop(0, steps, step, [self.zeros(s) for s in shapes])

        def run(*accs):
            @pl.loop(0, steps)
            def _(i):
                a, bs = operands(i)
                a = compat.transposed(a) if a_transposed else a
                for acc, b in zip(accs, bs):
                    plgpu.wgmma(acc, a, compat.transposed(b) if b_transposed else b)
                plgpu.wgmma_wait(len(accs))
                pl.when(i > 0)(lambda: done(i - 1))

            sums = [acc[...] for acc in accs]
            pl.when(steps > 0)(lambda: done(steps - 1))
            return sums

        return pl.run_scoped(run, *(plgpu.ACC(s, jnp.float32) for s in shapes))

    def rows(self, shape):
        """int32[shape] of row numbers in registers."""
        return self.cast(lax.broadcasted_iota(jnp.int32, shape, 0))

    def store_rows(self, ref, x, begin, end, without):
        """ref[i] = x[i] for begin <= i < end, but not in without[0] <= i < without[1]; x in WGMMA registers.

        ref: a view of global memory; rows of it that are not stored need not exist.
        """
        if not self.emulated:
            return lanes.store_rows(ref, x, begin, end, without)

        @pl.loop(begin, end)
        def _(i):
            @pl.when((i < without[0]) | (i >= without[1]))
            def _():
                ref[i] = lax.dynamic_index_in_dim(x, i, keepdims=False)

    def dots(self, acc, pairs, b_transposed=False, a_transposed=False):
        """acc + the sum of a @ b over pairs, in their order; otherwise as `dot`.

        Each product is waited for. With several in flight whose `a` are different registers, results on an
        H200 were wrong in the rows of one register of `a`, by another amount in each run (jax 0.11.2).
        """
        if self.emulated:
            for a, b in pairs:
                acc = self.dot(acc, a, b, b_transposed, a_transposed)
            return acc

        def accumulate(acc_ref):
            for a, b in pairs:
                left = compat.transposed(a) if a_transposed else a
                plgpu.wgmma(acc_ref, left, compat.transposed(b) if b_transposed else b)
                plgpu.wgmma_wait(0)

        return pl.run_state(accumulate)(plgpu.ACC.init(acc))

    def store_transposed(self, ref, x):
        """ref[...] = x^T for x [m n] in WGMMA registers and ref [n m] of global or shared memory."""
        if self.emulated:
            ref[...] = x.T
        else:
            compat.transposed(ref)[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def flat(self, ref):
        """The numbers of ref in one dimension and in registers `lanes.in_order`; n: a multiple of 1024."""
        n = math.prod(ref.shape)
        if self.emulated:
            flat = ref[...].reshape(n)
            plgpu.commit_smem()  # as in `dot`: the chip puts a barrier before a copy into what was read
            return flat
        return compat.load(ref.reshape(n), (), lanes.in_order(n))

    def places(self, n: int):
        """int32[n] of 0 to n - 1, `lanes.in_order`."""
        return self.cast(lax.iota(jnp.int32, n), lanes.in_order(n))

    def running_count(self, flags, totals, start=0):
        """(int32[n] start and the flags before each place, start and all flags); see `lanes.running_count`."""
        if self.emulated:
            return start + jnp.cumsum(flags) - flags, start + jnp.sum(flags)
        return lanes.running_count(flags, totals, jnp.int32(start))

    def scatter(self, ref, places, values, flags, stride):
        """ref[place + n stride] = values[n], where the flag is 1; see `lanes.scatter`."""
        if not self.emulated:
            return lanes.scatter(ref, places, values, flags, stride)
        for n, value in enumerate(values):
            at = jnp.where(flags == 1, places + n * stride, ref.shape[0])
            ref[...] = ref[...].at[at].set(value, mode="drop")


def kernel(body, *, interpret, **named):
    """`plgpu.kernel` under Lane semantics; interpret as the implementations of `dispatch` take it."""
    params = named.pop("compiler_params", None) or compiler_params()
    emulator = interpret if interpret else None
    if emulator is True:
        emulator = compat.emulator("gpu")
    return plgpu.kernel(body, interpret=emulator, compiler_params=params, **named)


def over_rows(x, shape):
    """x[r], a number per row, as an array of that shape."""
    return lax.broadcast_in_dim(x, shape, [0])


def over_columns(x, shape):
    """x[c], a number per column, as an array of that shape."""
    return lax.broadcast_in_dim(x, shape, [1])


def send(x, via, to, columns):
    """to[:, columns] = x [r m] from registers, through the same columns of a shared tile `via`."""
    via[:, columns] = x.astype(via.dtype)
    plgpu.commit_smem()
    for row in range(0, x.shape[0], 8):  # a copy takes memory without gaps: one row of pieces
        place = pl.ds(row, 8), columns
        plgpu.copy_smem_to_gmem(via.at[place], to.at[place])
    plgpu.wait_smem_to_gmem(0)
