"""From chunk to chunk of the gated delta rule, forward and backward, with the state in registers.

A block has GROUP values of one head, 64 for each of two warpgroups, and a third one fetches. A state is [u h]
in pieces of PIECE columns, as are its gradients: its rows are those of every product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.gated_delta.gpu_chunks import (
    COLUMN,
    FACTORS,
    ROW,
    TILE,
    across,
    pairs,
    parts_of,
    split,
)

PIECE = 64  # columns of a state that are one operand
OWN = 64  # values of a warpgroup
GROUP = 2 * OWN
STAGES = 2


def scan(q, k, v, matrices, factors, state, *, keep, interpret):
    """[out [n, c TILE, u], final state float32[n u h], and if `keep` states [n c u h] before each chunk] of
    q, k [n, c TILE, h], v [n, c TILE, u], what `prepare` gives, and the state float32[n u h]."""
    ops = hopper.Ops(interpret)
    parts = parts_of(q.dtype)
    outs = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    if keep:
        outs.append(_states(q, state))

    def step(at, states, out_ref, *kept_ref):
        at.keep(states, *kept_ref)
        recalled = ops.zeros((OWN, 2 * TILE))
        for i, piece in enumerate(states):
            columns = pl.ds(i * PIECE, PIECE)
            recalled = ops.dots(
                recalled,
                pairs(split(piece, q.dtype, parts), [at.both(columns)]),
                b_transposed=True,
            )
        since = at.factor(0)
        inverse, reads = at.matrices()
        known = lax.slice(recalled, (0, 0), (OWN, TILE)) * since
        out = lax.slice(recalled, (0, TILE), (OWN, 2 * TILE)) * since
        new = split(at.add_values(-known) * at.factor(2), q.dtype, parts)
        written = ops.dots(ops.zeros((OWN, TILE)), pairs(new, inverse), b_transposed=True)
        out = ops.dots(out, pairs(split(written, q.dtype, parts), reads), b_transposed=True)
        at.send(out, out_ref)
        left = split(written * at.factor(1), q.dtype, parts)
        whole = at.whole()
        return tuple(
            ops.dots(piece * whole, pairs(left, [at.keys(pl.ds(i * PIECE, PIECE))]))
            for i, piece in enumerate(states)
        )

    return _run(
        ops, step, q, k, v, matrices, factors, state, outs, False, "gated_delta_forward", interpret
    )


def scan_back(q, k, dout, matrices, factors, dstate, *, interpret):
    """[gradient float32[n u h] of the state at the start, and [n c u h] of those behind each chunk] of
    dout [n, c TILE, u] and the final state's; the others as for `scan`."""
    ops = hopper.Ops(interpret)
    parts = parts_of(q.dtype)
    outs = [jax.ShapeDtypeStruct(dstate.shape, jnp.float32), _states(q, dstate)]

    def step(at, dstates, kept_ref):
        at.keep(dstates, kept_ref)
        shape = OWN, TILE
        since, to_end = at.factor(0), at.factor(1)
        inverse, reads = at.matrices()
        at_end = ops.zeros(shape)
        for i, piece in enumerate(dstates):
            keys = at.keys(pl.ds(i * PIECE, PIECE))
            both = pairs(split(piece, q.dtype, parts), [keys])
            at_end = ops.dots(at_end, both, b_transposed=True)
        dwritten = ops.dots(
            at_end * to_end,
            pairs([at.values()], reads),
            a_transposed=True,
        )
        dnew = ops.dots(ops.zeros(shape), pairs(split(dwritten, q.dtype, parts), inverse))
        read = split(at.add_values(ops.zeros(shape)) * since, q.dtype, parts)
        recalled = split(dnew * at.factor(2) * -since, q.dtype, parts)
        whole = at.whole()
        done = []
        for i, piece in enumerate(dstates):
            columns = pl.ds(i * PIECE, PIECE)
            both = pairs(read, [at.queries(columns)]) + pairs(recalled, [at.keys(columns)])
            done.append(ops.dots(piece * whole, both))
        return tuple(done)

    return _run(
        ops, step, q, k, dout, matrices, factors, dstate, outs, True, "gated_delta_back", interpret
    )


def _states(q, state):
    n, u, h = state.shape
    return jax.ShapeDtypeStruct((n, q.shape[1] // TILE, u, h), jnp.float32)


class _At:
    """Where a warpgroup stands: its views of the tiles of one chunk."""

    def __init__(self, ops, refs, head, chunk, stage, rows, role):
        self._ops, self._refs = ops, refs
        self._head, self._chunk, self._stage = head, chunk, stage
        self._rows, self._own = rows, pl.ds(role * OWN, OWN)

    def both(self, columns):
        """Keys, and queries below them."""
        return self._refs["both"].at[self._stage, :, columns]

    def keys(self, columns):
        return self._refs["both"].at[self._stage, pl.ds(0, TILE), columns]

    def queries(self, columns):
        return self._refs["both"].at[self._stage, pl.ds(TILE, TILE), columns]

    def values(self):
        """v or its like, this warpgroup's columns."""
        return self._refs["values"].at[self._stage, :, self._own]

    def add_values(self, acc):
        """acc and the same in registers, transposed by a product with 1."""
        one = self._refs["one"].at[lax.axis_index("role")]
        return self._ops.dot(acc, self.values(), one, a_transposed=True)

    def matrices(self):
        """Both of `prepare`, in parts."""
        tile = self._refs["matrices"].at[self._stage]
        tiles = [tile.at[pl.ds(i * TILE, TILE)] for i in range(tile.shape[0] // TILE)]
        return tiles[: len(tiles) // 2], tiles[len(tiles) // 2 :]

    def factor(self, i):
        """A factor of `prepare`, a number per column."""
        index = self._stage, i
        return across(self._ops.load(self._refs["factors"].at[index], (), COLUMN), 1)

    def whole(self):
        """What is left of the state at the end."""
        return self._refs["factors"][self._stage, 0, TILE - 1]

    def keep(self, states, to_ref=None):
        """Writes the pieces of a state."""
        for i, piece in enumerate(states if to_ref is not None else ()):
            to_ref[self._head, self._chunk, self._rows, pl.ds(i * PIECE, PIECE)] = piece

    def send(self, out, to_ref):
        """Writes out [OWN, TILE] of registers as the rows of its chunk."""
        tile = self._refs["sent"].at[lax.axis_index("role")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._ops.store_transposed(tile, out.astype(to_ref.dtype))
        plgpu.commit_smem()
        to = to_ref.at[self._head, pl.ds(self._chunk * TILE, TILE), self._rows]
        plgpu.copy_smem_to_gmem(tile, to)


def _run(ops, step, q, k, values, matrices, factors, state, outs, reverse, name, interpret):
    """The kernel of a step (at, pieces of the state, *outputs but the final state) -> pieces of the next."""
    n, rows, h = q.shape
    c, u = rows // TILE, values.shape[2]
    last = c - 1

    def body(q_ref, k_ref, values_ref, matrices_ref, factors_ref, state_ref, *out_refs, **refs):
        head, group = lax.axis_index("head"), lax.axis_index("group")
        role = lax.axis_index("role")
        final_ref = out_refs[0 if reverse else 1]
        others = [ref for ref in out_refs if ref is not final_ref]

        def load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, c)
            def _(i):
                chunk, stage = last - i if reverse else i, lax.rem(i, jnp.int32(STAGES))
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(refs["free"].at[stage]))
                place, full = pl.ds(chunk * TILE, TILE), refs["full"].at[stage]
                both = refs["both"]
                for first, ref in ((0, k_ref), (TILE, q_ref)):
                    to = both.at[stage, pl.ds(first, TILE)]
                    plgpu.copy_gmem_to_smem(ref.at[head, place], to, full)
                own = values_ref.at[head, place, pl.ds(group * GROUP, GROUP)]
                plgpu.copy_gmem_to_smem(own, refs["values"].at[stage], full)
                for name, ref in (("matrices", matrices_ref), ("factors", factors_ref)):
                    plgpu.copy_gmem_to_smem(ref.at[head, chunk], refs[name].at[stage], full)

            for stage in range(min(STAGES, c)):  # who waits for a barrier must see all of it
                plgpu.barrier_wait(refs["free"].at[stage])

        def add():
            plgpu.set_max_registers(232, action="increase")
            own = pl.ds(group * GROUP + role * OWN, OWN)
            row, column = (
                across(ops.cast(lax.iota(jnp.int32, TILE), layout), axis)
                for axis, layout in enumerate((ROW, COLUMN))
            )
            refs["one"][role] = jnp.where(row == column, 1.0, 0.0).astype(q.dtype)
            plgpu.commit_smem()
            pieces = [pl.ds(i * PIECE, PIECE) for i in range(h // PIECE)]

            def one(i, states):
                chunk, stage = last - i if reverse else i, lax.rem(i, jnp.int32(STAGES))
                plgpu.barrier_wait(refs["full"].at[stage])
                at = _At(ops, refs, head, chunk, stage, own, role)
                states = step(at, states, *others)
                plgpu.barrier_arrive(refs["free"].at[stage])
                return states

            states = tuple(ops.load(state_ref, (head, own, piece)) for piece in pieces)
            states = lax.fori_loop(0, c, one, states)
            for piece, x in zip(pieces, states):
                final_ref[head, own, piece] = x
            plgpu.wait_smem_to_gmem(0)

        lax.cond(role == 2, load, add)

    tile = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=hopper.tiled(q.dtype))
    scratch = {
        "both": tile((STAGES, 2 * TILE, h)),
        "values": tile((STAGES, TILE, GROUP)),
        "matrices": tile((STAGES, *matrices.shape[2:])),
        "factors": plgpu.SMEM((STAGES, FACTORS, TILE), jnp.float32),
        "one": tile((2, TILE, TILE)),
        "full": plgpu.Barrier(num_barriers=STAGES, num_arrivals=5),
        "free": plgpu.Barrier(num_barriers=STAGES, num_arrivals=2),
    }
    if not reverse:
        scratch["sent"] = tile((2, TILE, OWN))
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
