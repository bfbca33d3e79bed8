"""Scan over the chunks of the gated delta rule, forward and backward, with the state in registers.

Grid: (head, group of values). A block has GROUP = 128 values of one head, 64 for each of two warpgroups; a third one
loads. A state is [u h] in pieces of PIECE = 64 columns, and so are its gradients: its rows are those of every
product. For h = 192 a warpgroup's part float32[64 192] takes 96 registers per thread.

Shared memory, for h = 192 in bfloat16: two stages of keys and queries [128 h] (96 KiB), of values [64 128] (32 KiB), of
the matrices of `gpu_chunks` [256 64] (64 KiB) and of its factors; an identity [64 64] per warpgroup (16 KiB), and in
the forward output tiles (16 KiB).

Phases of a program, per chunk, from the last to the first in the backward:

- Loader warpgroup: the chunk's operands.
- Compute warpgroups, forward: write the state if it is needed; recall by keys and queries; written values by the
  inverse; output; next state.
- Compute warpgroups, backward: write the gradient of the state; gradient of the written values; gradient of the state
  before the chunk.

Nothing is summed between blocks. Padding: values to full groups and columns to full pieces, with zeros.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import hopper
from pallas_kernels.gated_delta.gpu_chunks import (
    COLUMN,
    FACTORS,
    ROW,
    TILE,
    broadcast_to_tile,
    num_parts,
    product_pairs,
    split_parts,
)

PIECE = 64  # columns of a state per operand
WARPGROUP_VALUES = 64  # values of a warpgroup
GROUP = 2 * WARPGROUP_VALUES
STAGES = 2


def scan(
    q: Float[Array, "n rows h"],
    k: Float[Array, "n rows h"],
    v: Float[Array, "n rows u"],
    matrices: Float[Array, "n c x tile"],
    factors: Float[Array, "n c 3 tile"],
    state: Float[Array, "n u h"],
    *,
    keep: bool,
    interpret: object,
) -> list[Array]:
    """Returns [out, final state float32[n u h], and if `keep` states [n c u h] before each chunk].

    matrices and factors: the results of `prepare`.
    """
    ops = hopper.Ops(interpret)
    parts = num_parts(q.dtype)
    outs = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    if keep:
        outs.append(_states(q, state))

    def step(view, states, out_ref, *states_ref):
        view.store_states(states, *states_ref)
        # Recall by keys and queries from the previous state.
        recalled = ops.zeros((WARPGROUP_VALUES, 2 * TILE))
        for i, piece in enumerate(states):
            columns = pl.ds(i * PIECE, PIECE)
            recalled = ops.dots(
                recalled,
                product_pairs(split_parts(piece, q.dtype, parts), [view.keys_and_queries(columns)]),
                b_transposed=True,
            )
        # Written values and output of the chunk.
        since = view.factor(0)
        inverse, reads = view.matrices()
        recalled_values = lax.slice(recalled, (0, 0), (WARPGROUP_VALUES, TILE)) * since
        out = lax.slice(recalled, (0, TILE), (WARPGROUP_VALUES, 2 * TILE)) * since
        corrected = split_parts(view.add_values(-recalled_values) * view.factor(2), q.dtype, parts)
        written = ops.dots(
            ops.zeros((WARPGROUP_VALUES, TILE)),
            product_pairs(corrected, inverse),
            b_transposed=True,
        )
        out = ops.dots(
            out, product_pairs(split_parts(written, q.dtype, parts), reads), b_transposed=True
        )
        view.store_output(out, out_ref)
        scaled_write = split_parts(written * view.factor(1), q.dtype, parts)
        total_decay = view.total_decay()
        return tuple(
            ops.dots(
                piece * total_decay,
                product_pairs(scaled_write, [view.keys(pl.ds(i * PIECE, PIECE))]),
            )
            for i, piece in enumerate(states)
        )

    return _run(
        ops, step, q, k, v, matrices, factors, state, outs, False, "gated_delta_forward", interpret
    )


def scan_back(
    q: Float[Array, "n rows h"],
    k: Float[Array, "n rows h"],
    dout: Float[Array, "n rows u"],
    matrices: Float[Array, "n c x tile"],
    factors: Float[Array, "n c 3 tile"],
    dstate: Float[Array, "n u h"],
    *,
    interpret: object,
) -> list[Array]:
    """Returns [gradient float32[n u h] of the initial state, and [n c u h] of the states after each chunk].

    Inputs: dout [n, c TILE, u] and the gradient of the final state; the others as for `scan`.
    """
    ops = hopper.Ops(interpret)
    parts = num_parts(q.dtype)
    outs = [jax.ShapeDtypeStruct(dstate.shape, jnp.float32), _states(q, dstate)]

    def step(view, dstates, states_ref):
        view.store_states(dstates, states_ref)
        shape = WARPGROUP_VALUES, TILE
        since, to_end = view.factor(0), view.factor(1)
        inverse, reads = view.matrices()
        # Gradient of the written values.
        at_end = ops.zeros(shape)
        for i, piece in enumerate(dstates):
            keys = view.keys(pl.ds(i * PIECE, PIECE))
            operands = product_pairs(split_parts(piece, q.dtype, parts), [keys])
            at_end = ops.dots(at_end, operands, b_transposed=True)
        dwritten = ops.dots(
            at_end * to_end,
            product_pairs([view.values()], reads),
            a_transposed=True,
        )
        dnew = ops.dots(
            ops.zeros(shape), product_pairs(split_parts(dwritten, q.dtype, parts), inverse)
        )
        # Gradient of the state before the chunk.
        read = split_parts(view.add_values(ops.zeros(shape)) * since, q.dtype, parts)
        recalled = split_parts(dnew * view.factor(2) * -since, q.dtype, parts)
        total_decay = view.total_decay()
        new_dstates = []
        for i, piece in enumerate(dstates):
            columns = pl.ds(i * PIECE, PIECE)
            operands = product_pairs(read, [view.queries(columns)]) + product_pairs(
                recalled, [view.keys(columns)]
            )
            new_dstates.append(ops.dots(piece * total_decay, operands))
        return tuple(new_dstates)

    return _run(
        ops, step, q, k, dout, matrices, factors, dstate, outs, True, "gated_delta_back", interpret
    )


def _states(q, state):
    n, u, h = state.shape
    return jax.ShapeDtypeStruct((n, q.shape[1] // TILE, u, h), jnp.float32)


class _ChunkView:
    """A warpgroup's views of the tiles of one chunk."""

    def __init__(self, ops, refs, head, chunk, stage, rows, role):
        self._ops, self._refs = ops, refs
        self._head, self._chunk, self._stage = head, chunk, stage
        self._rows, self._columns = rows, pl.ds(role * WARPGROUP_VALUES, WARPGROUP_VALUES)

    def keys_and_queries(self, columns):
        """View of the keys, followed by the queries."""
        return self._refs["keys_and_queries"].at[self._stage, :, columns]

    def keys(self, columns):
        return self._refs["keys_and_queries"].at[self._stage, pl.ds(0, TILE), columns]

    def queries(self, columns):
        return self._refs["keys_and_queries"].at[self._stage, pl.ds(TILE, TILE), columns]

    def values(self):
        """View of this warpgroup's columns of v, or of dout."""
        return self._refs["values"].at[self._stage, :, self._columns]

    def add_values(self, acc):
        """Returns acc + values in registers, transposed by a product with the identity."""
        identity = self._refs["identity"].at[lax.axis_index("role")]
        return self._ops.dot(acc, self.values(), identity, a_transposed=True)

    def matrices(self):
        """Returns both matrices of `prepare`, in parts."""
        tile = self._refs["matrices"].at[self._stage]
        tiles = [tile.at[pl.ds(i * TILE, TILE)] for i in range(tile.shape[0] // TILE)]
        return tiles[: len(tiles) // 2], tiles[len(tiles) // 2 :]

    def factor(self, i):
        """Loads a factor of `prepare`, one number per column."""
        index = self._stage, i
        return broadcast_to_tile(self._ops.load(self._refs["factors"].at[index], (), COLUMN), 1)

    def total_decay(self):
        """Remaining share of the state at the end of the chunk."""
        return self._refs["factors"][self._stage, 0, TILE - 1]

    def store_states(self, states, target_ref: Any = None):
        """Writes the pieces of a state."""
        if target_ref is None:
            return
        for i, piece in enumerate(states):
            target_ref[self._head, self._chunk, self._rows, pl.ds(i * PIECE, PIECE)] = piece

    def store_output(self, out, target_ref):
        """Writes out [WARPGROUP_VALUES, TILE] from registers as the rows of its chunk."""
        tile = self._refs["output"].at[lax.axis_index("role")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._ops.store_transposed(tile, out.astype(target_ref.dtype))
        plgpu.commit_smem()
        target = target_ref.at[self._head, pl.ds(self._chunk * TILE, TILE), self._rows]
        plgpu.copy_smem_to_gmem(tile, target)


def _run(ops, step, q, k, values, matrices, factors, state, outs, reverse, name, interpret):
    """Runs the kernel of a step function.

    step(view, pieces of the state, *outputs but the final state) returns the pieces of the next state.
    """
    n, rows, h = q.shape
    c, u = rows // TILE, values.shape[2]
    last = c - 1

    def body(q_ref, k_ref, values_ref, matrices_ref, factors_ref, state_ref, *out_refs, **refs):
        head, group = lax.axis_index("head"), lax.axis_index("group")
        role = lax.axis_index("role")
        final_ref = out_refs[0 if reverse else 1]
        others = [ref for ref in out_refs if ref is not final_ref]

        # Loader warpgroup: operands of each chunk.
        def load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, c)
            def _(i):
                chunk, stage = last - i if reverse else i, lax.rem(i, jnp.int32(STAGES))
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(refs["free"].at[stage]))
                place, full = pl.ds(chunk * TILE, TILE), refs["full"].at[stage]
                keys_and_queries_ring = refs["keys_and_queries"]
                for first, ref in ((0, k_ref), (TILE, q_ref)):
                    target = keys_and_queries_ring.at[stage, pl.ds(first, TILE)]
                    plgpu.copy_gmem_to_smem(ref.at[head, place], target, full)
                value_slice = values_ref.at[head, place, pl.ds(group * GROUP, GROUP)]
                plgpu.copy_gmem_to_smem(value_slice, refs["values"].at[stage], full)
                for name, ref in (("matrices", matrices_ref), ("factors", factors_ref)):
                    plgpu.copy_gmem_to_smem(ref.at[head, chunk], refs[name].at[stage], full)

            for stage in range(min(STAGES, c)):  # a waiting warpgroup must wait for all arrivals
                plgpu.barrier_wait(refs["free"].at[stage])

        # Compute warpgroups: carry the state from chunk to chunk.
        def add():
            plgpu.set_max_registers(232, action="increase")
            value_slice = pl.ds(group * GROUP + role * WARPGROUP_VALUES, WARPGROUP_VALUES)
            row, column = (
                broadcast_to_tile(ops.cast(lax.iota(jnp.int32, TILE), layout), axis)
                for axis, layout in enumerate((ROW, COLUMN))
            )
            refs["identity"][role] = jnp.where(row == column, 1.0, 0.0).astype(q.dtype)
            plgpu.commit_smem()
            pieces = [pl.ds(i * PIECE, PIECE) for i in range(h // PIECE)]

            def run_step(i, states):
                chunk, stage = last - i if reverse else i, lax.rem(i, jnp.int32(STAGES))
                plgpu.barrier_wait(refs["full"].at[stage])
                view = _ChunkView(ops, refs, head, chunk, stage, value_slice, role)
                states = step(view, states, *others)
                plgpu.barrier_arrive(refs["free"].at[stage])
                return states

            states = tuple(ops.load(state_ref, (head, value_slice, piece)) for piece in pieces)
            states = lax.fori_loop(0, c, run_step, states)
            for piece, x in zip(pieces, states):
                final_ref[head, value_slice, piece] = x
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == 2, load, add)

    # Build and call the kernel.
    tile = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=hopper.tile_transforms(q.dtype))
    scratch = {
        "keys_and_queries": tile((STAGES, 2 * TILE, h)),
        "values": tile((STAGES, TILE, GROUP)),
        "matrices": tile((STAGES, *matrices.shape[2:])),
        "factors": plgpu.SMEM((STAGES, FACTORS, TILE), jnp.float32),
        "identity": tile((2, TILE, TILE)),
        "full": plgpu.Barrier(num_barriers=STAGES, num_arrivals=5),
        "free": plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
    }
    if not reverse:
        scratch["output"] = tile((2, TILE, WARPGROUP_VALUES))
    return hopper.kernel(
        body,
        kernel_name=name,
        interpret=interpret,
        out_type=outs,
        grid=(n, u // GROUP),
        grid_names=("head", "group"),
        num_threads=3,
        thread_name="role",
        compiler_params=hopper.compiler_params(approx_math=True, reduction_scratch_bytes=0),
        scratch_types=scratch,
    )(q, k, values, matrices, factors, state)
