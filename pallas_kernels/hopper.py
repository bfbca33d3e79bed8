"""Shared parts of the Hopper kernels: Mosaic GPU operations that its CPU emulator lacks, for chip and emulator.

A kernel body takes an `Ops`, so that one source runs on the chip and in the emulator. On the chip its values
are registers of a warpgroup in the named layout. In the emulator they are plain arrays, and `dot` is a plain
product. The emulator therefore checks addresses, copies, barriers and arithmetic; the offline compiler checks
layouts, shared memory and tensor-core shapes.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels import compat, warp_ops

# Layouts of registers; jax gives them several types that have no common public one.
WGMMA: Any = plgpu.Layout.WGMMA
ROW_OF: Any = plgpu.Layout.WGMMA.reduce(1)  # one number per row of a product
COLUMN_OF: Any = plgpu.Layout.WGMMA.reduce(0)  # one number per column of a product
Accumulator: Any = plgpu.WGMMAAccumulatorRef  # of tensor cores
Ref = Any  # of shared or global memory, or a view of it; jax has no public type
SMEM_BYTES = 232448  # of one block on an H100 or H200
MULTIPROCESSORS = 132  # of an H100 or H200


def compiler_params(**named) -> plgpu.CompilerParams:
    """Returns compiler parameters with Lane semantics.

    The default differs between jax versions, and with it the meaning of a kernel body.
    """
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **named)


def tile_transforms(dtype: DTypeLike, swizzle: int = 128) -> tuple:
    """Returns the transforms of a shared-memory tile for tensor cores: 8 rows of `swizzle` bytes, swizzled.

    A product is split along its contraction into pieces of `swizzle` bytes: 64 for a product over 32 bfloat16.
    """
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


class Ops:
    """Operations of one kernel body.

    interpret: as for `plgpu.kernel`; None or False: the chip.
    """

    def __init__(self, interpret: object):
        self.is_emulated = bool(interpret)

    def load(self, ref: Ref, index: tuple = (), layout: Any = WGMMA) -> Array:
        """Loads ref[index] from shared or global memory into registers; index holds full slices or `pl.ds`."""
        if self.is_emulated:
            return ref[index] if index else ref[...]
        return compat.load(ref, index, layout)

    def cast(self, x: Array, layout: Any = WGMMA) -> Array:
        """Returns x in registers of a layout. A value carried by a loop needs a layout that does not change."""
        return x if self.is_emulated else plgpu.layout_cast(x, layout)

    def zeros(
        self, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, layout: Any = WGMMA
    ) -> Array:
        """Returns registers filled with zeros."""
        return self.cast(jnp.zeros(shape, dtype), layout)

    def full(
        self, shape: tuple[int, ...], value, dtype: DTypeLike = jnp.float32, layout: Any = WGMMA
    ) -> Array:
        """Returns registers filled with one value."""
        return self.cast(jnp.full(shape, value, dtype), layout)

    def dot(
        self,
        acc: Float[Array, "m n"] | Int32[Array, "m n"],
        a: Array | Ref,
        b: Ref,
        b_transposed: bool = False,
        a_transposed: bool = False,
        max_columns: int = 256,
        on_issued: Callable = lambda: None,
    ) -> Array:
        """Returns acc + a @ b (or a @ b^T, a^T @ b) by tensor cores.

        a: registers or a tile. b: a tile. acc: registers. Tiles of 8-bit numbers must be contracted along their
        last dimension: b_transposed.
        max_columns: columns of one instruction. The compiler rejects 256 in a kernel of four warpgroups or
        more, whatever number of registers `set_max_registers` gives the warpgroup.
        on_issued: called when the product is under way.
        """
        if self.is_emulated:
            on_issued()
            dims = (((int(not a_transposed),), (int(b_transposed),)), ((), ()))
            product = lax.dot_general(a[...], b[...], dims, preferred_element_type=acc.dtype)
            # Tensor cores read in the order of copies. These plain reads need a fence to precede a copy.
            plgpu.commit_smem()
            return acc + product.astype(acc.dtype)

        def accumulate(acc_ref):
            columns = acc.shape[1]
            a_operand = compat.transpose_ref(a) if a_transposed else a
            if columns <= max_columns:
                plgpu.wgmma(acc_ref, a_operand, compat.transpose_ref(b) if b_transposed else b)
                return on_issued()
            for first in range(0, columns, max_columns):
                piece = pl.ds(first, min(max_columns, columns - first))
                part = b.at[piece] if b_transposed else b.at[:, piece]
                part = compat.transpose_ref(part) if b_transposed else part
                plgpu.wgmma(acc_ref.at[:, piece], a_operand, part)
            on_issued()

        total: Any = pl.run_state(accumulate)(Accumulator.init(acc))
        return total

    def sum_products(
        self,
        shapes: list[tuple[int, int]],
        steps,
        wait_for_operands: Callable,
        release: Callable,
        b_transposed: bool = False,
        a_transposed: bool = False,
    ) -> list[Array]:
        """Returns a list with the sum over i < steps of a_i @ b_i (or their transposes) per b.

        shapes: shapes of the float32 sums. wait_for_operands(i) waits for the operands of product i and returns
        (a, tuple of b); tensor cores read all of them. release(i) is called after they have been read. That is
        one step later, so that a product runs during the wait for the next operands.
        """
        if self.is_emulated:

            def step(i, accs):
                a, bs = wait_for_operands(i)
                accs = [self.dot(c, a, b, b_transposed, a_transposed) for c, b in zip(accs, bs)]
                release(i)
                return accs

            return lax.fori_loop(0, steps, step, [self.zeros(s) for s in shapes])

        def run(*accs):
            @pl.loop(0, steps)
            def _(i):
                a, bs = wait_for_operands(i)
                a = compat.transpose_ref(a) if a_transposed else a
                for acc, b in zip(accs, bs):
                    plgpu.wgmma(acc, a, compat.transpose_ref(b) if b_transposed else b)
                plgpu.wgmma_wait(len(accs))
                pl.when(i > 0)(lambda: release(i - 1))

            sums = [acc[...] for acc in accs]
            pl.when(steps > 0)(lambda: release(steps - 1))
            return sums

        return pl.run_scoped(run, *(Accumulator(s, jnp.float32) for s in shapes))

    def row_indices(self, shape: tuple[int, int]) -> Int32[Array, "m n"]:
        """Returns int32[shape] of row numbers in registers."""
        return self.cast(lax.broadcasted_iota(jnp.int32, shape, 0))

    def store_rows(self, ref: Ref, x: Shaped[Array, "m n"], begin, end, excluded) -> None:
        """Stores ref[i] = x[i] for begin <= i < end, except excluded[0] <= i < excluded[1]; x in WGMMA registers.

        ref: a view of global memory. Rows of the view that are not stored need not exist.
        """
        if not self.is_emulated:
            return warp_ops.store_rows(ref, x, begin, end, excluded)

        @pl.loop(begin, end)
        def _(i):
            @pl.when((i < excluded[0]) | (i >= excluded[1]))
            def _():
                ref[i] = lax.dynamic_index_in_dim(x, i, keepdims=False)

    def dots(
        self,
        acc: Float[Array, "m n"],
        pairs: list[tuple],
        b_transposed: bool = False,
        a_transposed: bool = False,
    ) -> Float[Array, "m n"]:
        """Returns acc + the sum of a @ b over pairs, in their order; otherwise as `dot`.

        It waits for each product. With several products in flight whose `a` are different registers, an H200
        gave wrong results in the rows of one register of `a`, by another amount in each run (jax 0.11.2).
        """
        if self.is_emulated:
            for a, b in pairs:
                acc = self.dot(acc, a, b, b_transposed, a_transposed)
            return acc

        def accumulate(acc_ref):
            for a, b in pairs:
                a_operand = compat.transpose_ref(a) if a_transposed else a
                plgpu.wgmma(acc_ref, a_operand, compat.transpose_ref(b) if b_transposed else b)
                plgpu.wgmma_wait(0)

        total: Any = pl.run_state(accumulate)(Accumulator.init(acc))
        return total

    def store_transposed(self, ref: Ref, x: Shaped[Array, "m n"]) -> None:
        """Stores ref[...] = x^T for x [m n] in WGMMA registers and ref [n m] in global or shared memory."""
        if self.is_emulated:
            ref[...] = x.T
        else:
            compat.transpose_ref(ref)[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def load_flat(self, ref: Ref) -> Shaped[Array, " n"]:
        """Loads ref as one dimension into registers in `warp_ops.thread_order_layout`.

        Its size is a multiple of 1024.
        """
        n = math.prod(ref.shape)
        if self.is_emulated:
            numbers = ref[...].reshape(n)
            plgpu.commit_smem()  # as in `dot`: on the chip a barrier precedes a copy into memory that was read
            return numbers
        return compat.load(ref.reshape(n), (), warp_ops.thread_order_layout(n))

    def positions(self, n: int) -> Int32[Array, " n"]:
        """Returns int32[n] of 0 to n - 1 in `warp_ops.thread_order_layout`."""
        return self.cast(lax.iota(jnp.int32, n), warp_ops.thread_order_layout(n))

    def running_count(
        self, flags: Int32[Array, " n"], totals: Ref, start=0
    ) -> tuple[Int32[Array, " n"], Int32[Array, ""]]:
        """Returns (int32[n] start + flags before each position, start + all flags); see `warp_ops.running_count`."""
        if self.is_emulated:
            return start + jnp.cumsum(flags) - flags, start + jnp.sum(flags)
        return warp_ops.running_count(flags, totals, jnp.int32(start))

    def scatter(
        self,
        ref: Ref,
        positions: Int32[Array, " n"],
        values: list[Int32[Array, " n"]],
        flags: Int32[Array, " n"],
        stride: int,
    ) -> None:
        """Stores ref[position + n stride] = values[n] where the flag is 1; see `warp_ops.scatter`."""
        if not self.is_emulated:
            return warp_ops.scatter(ref, positions, values, flags, stride)
        for n, value in enumerate(values):
            indices = jnp.where(flags == 1, positions + n * stride, ref.shape[0])
            ref[...] = ref[...].at[indices].set(value, mode="drop")


def kernel(body: Callable, *, interpret: object, **named) -> Callable:
    """`plgpu.kernel` under Lane semantics; `interpret` as in `backends.Implementation`."""
    params = named.pop("compiler_params", None) or compiler_params()
    emulator = interpret if interpret else None
    if emulator is True:
        emulator = compat.emulator_params("gpu")
    return plgpu.kernel(body, interpret=emulator, compiler_params=params, **named)


def broadcast_rows(x: Shaped[Array, " r"], shape: tuple[int, ...]) -> Shaped[Array, "r c"]:
    """Broadcasts x[r], one number per row, to an array of `shape`."""
    return lax.broadcast_in_dim(x, shape, [0])


def broadcast_columns(x: Shaped[Array, " c"], shape: tuple[int, ...]) -> Shaped[Array, "r c"]:
    """Broadcasts x[c], one number per column, to an array of `shape`."""
    return lax.broadcast_in_dim(x, shape, [1])


def store_via_smem(x: Float[Array, "r m"], via: Ref, target: Ref, columns) -> None:
    """Stores x [r m] from registers to target[:, columns] through the same columns of a shared tile `via`."""
    via[:, columns] = x.astype(via.dtype)
    plgpu.commit_smem()
    for row in range(0, x.shape[0], 8):  # a copy needs contiguous memory: one row of pieces
        window = pl.ds(row, 8), columns
        plgpu.copy_smem_to_gmem(via.at[window], target.at[window])
    plgpu.wait_smem_to_gmem(0)
