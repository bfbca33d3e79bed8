"""The exchange of rows between experts' devices, and the mixture on either side of it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from glm5_jax.core.mesh import Region, make_mesh
from glm5_jax.model.dispatch import dense_exchange, permute, routed_experts, sort_by_expert
from tests.oracles import experts as oracle

SHARDS, WIDTH, ROWS, ROOM = 8, 5, 24, 40


def ragged_all_to_all(operands, outputs, plans):
    """What `lax.ragged_all_to_all` documents, on lists with one entry per device."""
    results = [out.copy() for out in outputs]
    for sender, plan in enumerate(plans):
        for receiver in range(len(plans)):
            size = plan["send_sizes"][receiver]
            assert size == plans[receiver]["recv_sizes"][sender]
            source = plan["input_offsets"][receiver]
            target = plan["output_offsets"][receiver]
            results[receiver][target : target + size] = operands[sender][source : source + size]
    return results


def random_plans(sizes, draw):
    """Offsets that leave gaps on both sides, for sizes [from, to]."""
    plans = [{"send_sizes": sizes[i], "recv_sizes": sizes[:, i]} for i in range(len(sizes))]
    for name, room, per_device in (
        ("input_offsets", ROWS, sizes),
        ("output_offsets", ROOM, sizes.T),
    ):
        offsets = np.zeros_like(sizes)
        for device, chunks in enumerate(per_device):
            gap = draw.integers(0, room - chunks.sum() + 1)
            order = draw.permutation(len(chunks))
            offsets[device, order] = gap + np.cumsum(chunks[order]) - chunks[order]
        if name == "output_offsets":
            offsets = offsets.T
        for plan, own in zip(plans, offsets):
            plan[name] = own
    return plans


def run_exchange(operands, outputs, plans):
    mesh = make_mesh(expert=SHARDS)
    names = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
    stacked = [np.concatenate([plan[n] for plan in plans]).astype(np.int32) for n in names]

    def exchange(operand, output):
        local = jax.shard_map(
            lambda *args: dense_exchange(*args, axis_name="expert"),
            mesh=mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
            check_vma=False,
        )
        return local(operand, output, *stacked)

    return jax.jit(lambda *args: jax.vjp(exchange, *args[:2])[1](args[2]) + (exchange(*args[:2]),))(
        np.concatenate(operands), np.concatenate(outputs), jnp.ones((SHARDS * ROOM, WIDTH))
    )


def sizes_of(kind, draw):
    sizes = draw.integers(0, ROWS // SHARDS + 1, (SHARDS, SHARDS))
    if kind == "one receiver":
        sizes[:] = 0
        sizes[:, 3] = 5  # fills its buffer to the last row
    elif kind == "nothing":
        sizes[:] = 0
    return sizes


@pytest.mark.parametrize("kind", ["mixed", "one receiver", "nothing"])
def test_dense_exchange_does_what_ragged_all_to_all_documents(kind):
    draw = np.random.default_rng(0)
    plans = random_plans(sizes_of(kind, draw), draw)
    operands = [draw.standard_normal((ROWS, WIDTH), np.float32) for _ in plans]
    outputs = [draw.standard_normal((ROOM, WIDTH), np.float32) for _ in plans]
    sent, kept, got = map(np.asarray, run_exchange(operands, outputs, plans))
    want = np.concatenate(ragged_all_to_all(operands, outputs, plans))
    np.testing.assert_array_equal(got, want)

    # Each row that was sent has one copy, each row of the output survives or is overwritten.
    ones, zeros = np.ones((ROWS, WIDTH), np.float32), np.zeros((ROOM, WIDTH), np.float32)
    written = np.concatenate(ragged_all_to_all([ones] * SHARDS, [zeros] * SHARDS, plans))
    np.testing.assert_array_equal(kept, 1 - written)
    times = np.zeros((SHARDS, ROWS, 1), np.float32)
    for plan, own in zip(plans, times):
        for offset, size in zip(plan["input_offsets"], plan["send_sizes"]):
            own[offset : offset + size] += 1
    np.testing.assert_array_equal(
        sent, np.broadcast_to(times, (SHARDS, ROWS, WIDTH)).reshape(-1, WIDTH)
    )


def test_dense_exchange_takes_the_arguments_of_the_ragged_one():
    ragged = list(inspect.signature(lax.ragged_all_to_all).parameters)
    assert list(inspect.signature(dense_exchange).parameters) == ragged[:7]


def weights(draw, e=16, d=12, f=8):
    shapes = {"gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    return {k: draw.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def mixture_oracle(w, x, ids, combine):
    out = np.zeros_like(x)
    for a in range(ids.shape[1]):
        for row, e in enumerate(ids[:, a]):
            if e == len(w["gate"]):
                continue
            gate, up, down = w["gate"][e].T, w["up"][e].T, w["down"][e].T
            out[row] += combine[row, a] * oracle.swiglu(x[row], gate, up, down)
    return out


@pytest.mark.parametrize("routing", ["spread", "one expert", "with padding"])
@pytest.mark.parametrize(("shards", "chunk"), [(1, None), (1, 8), (8, None), (4, 2), (8, 2)])
def test_no_row_is_lost_whatever_the_routing(shards, chunk, routing):
    """Rows, weights and combine weights of every device reach the experts and come back, also when
    all tokens choose the same experts; what is no token comes back as zero."""
    draw = np.random.default_rng(0)
    rows, chosen = 32, 3
    w, x = weights(draw), draw.standard_normal((rows, 12)).astype(np.float32)
    ids = np.stack([draw.permutation(16)[:chosen] for _ in range(rows)]).astype(np.int32)
    if routing == "one expert":
        ids[:] = [5, 4, 6]
    if routing == "with padding":
        ids[::3] = 16
    combine = draw.random((rows, chosen)).astype(np.float32)
    mesh = make_mesh(expert=shards, fsdp=8 // shards)
    region = Region.of(mesh)
    run = jax.shard_map(
        lambda w, *args: routed_experts(w, *args, region, chunk),
        mesh=mesh,
        in_specs=(P("expert"), *[P(("fsdp", "expert"))] * 3),
        out_specs=P(("fsdp", "expert")),
        check_vma=False,
    )
    wide = {k: v.astype(np.float64) for k, v in w.items()}
    want = mixture_oracle(wide, x.astype(np.float64), ids, combine)
    got = jax.jit(run)(w, x, ids, combine)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_token_chunk_must_divide_the_tokens_of_a_device():
    draw = np.random.default_rng(0)
    x, ids = np.zeros((6, 12), np.float32), np.zeros((6, 2), np.int32)
    with pytest.raises(ValueError, match="token_chunk 4 does not divide the 6 tokens"):
        routed_experts(weights(draw), x, ids, np.ones((6, 2)), Region(), 4)


def test_sorting_is_stable_and_its_gradient_returns_every_row():
    ids = jnp.array([3, 0, 3, 1, 0, 3])
    order, inverse, counts = sort_by_expert(ids, 5)
    np.testing.assert_array_equal(order, [1, 4, 3, 0, 2, 5])
    np.testing.assert_array_equal(counts, [2, 1, 0, 3, 0])
    np.testing.assert_array_equal(order[inverse], np.arange(6))
    x = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)  # two rows for each
    source, targets = order // 2, inverse.reshape(3, 2)
    cotangent = np.random.default_rng(1).standard_normal((6, 2)).astype(np.float32)
    out, pull = jax.vjp(lambda x: permute(x, source, targets), x)
    np.testing.assert_array_equal(out, x[np.asarray(source)])
    want = np.zeros_like(x)
    np.add.at(want, np.asarray(source), cotangent)
    np.testing.assert_allclose(pull(cotangent)[0], want, rtol=1e-6)
