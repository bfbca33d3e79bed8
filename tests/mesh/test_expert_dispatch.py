"""The mixture on either side of the exchange between experts' devices, in one level and in two."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glm5_jax.model.expert_dispatch import permute, routed_experts, slices_of, sort_by_expert
from glm5_jax.parallel.mesh import Region, make_mesh
from tests.oracles import experts as oracle


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


def routed(draw, routing, rows=40, chosen=3):
    """x, expert ids and combine weights of all devices' tokens."""
    ids = np.stack([draw.permutation(16)[:chosen] for _ in range(rows)]).astype(np.int32)
    if routing == "one expert":
        ids[:] = [5, 4, 6]
    if routing == "with padding":
        ids[::3] = 16
    x = draw.standard_normal((rows, 12)).astype(np.float32)
    return x, ids, draw.random((rows, chosen)).astype(np.float32)


def run_on(shards, chunk=None, slices=1):
    mesh = make_mesh(expert=shards, fsdp=8 // shards)
    region = Region.of(mesh)
    return jax.shard_map(
        lambda w, *args: routed_experts(w, *args, region, chunk, slices=slices),
        mesh=mesh,
        in_specs=(P("expert"), *[P(("fsdp", "expert"))] * 3),
        out_specs=P(("fsdp", "expert")),
        check_vma=False,
    )


# Of 5 rows each: parts of 1, and of 2 with a row to fill.
LEVELS = [(1, None, 1), (1, 8, 1), (8, None, 1), (4, 1, 1), (8, 2, 1)]
LEVELS += [(8, None, 2), (8, 2, 4), (8, None, 8), (4, 2, 2)]
DEFAULT = {
    (1, None, 1, "with padding"),
    (4, 1, 1, "spread"),
    (8, 2, 1, "one expert"),
    (8, 2, 4, "with padding"),
}


def mostly_slow(levels, routings, default):
    """All pairs of a level and a routing; those that are not in `default` are slow."""
    cases = [(*level, routing) for level, routing in itertools.product(levels, routings)]
    assert default <= set(cases)
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        ("shards", "chunk", "slices", "routing"),
        [case if case in default else pytest.param(*case, marks=slow) for case in cases],
    )


@mostly_slow(LEVELS, ["spread", "one expert", "with padding"], DEFAULT)
def test_no_row_is_lost_whatever_the_routing(shards, chunk, slices, routing):
    """Rows, weights and combine weights of every device reach the experts and come back, also when
    all tokens choose the same experts; what is no token comes back as zero."""
    draw = np.random.default_rng(0)
    w, (x, ids, combine) = weights(draw), routed(draw, routing)
    wide = {k: v.astype(np.float64) for k, v in w.items()}
    want = mixture_oracle(wide, x.astype(np.float64), ids, combine)
    got = jax.jit(run_on(shards, chunk, slices))(w, x, ids, combine)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@mostly_slow(
    [(8, None, 2), (8, 2, 4), (4, None, 2)],
    ["spread", "with padding"],
    {(4, None, 2, "with padding")},
)
def test_gradients_of_two_levels_are_those_of_one_device(shards, chunk, slices, routing):
    draw = np.random.default_rng(1)
    w, (x, ids, combine) = weights(draw), routed(draw, routing)
    pull = draw.standard_normal(x.shape).astype(np.float32)

    def gradients(run):
        return jax.jit(
            jax.grad(lambda w, x, combine: jnp.sum(run(w, x, ids, combine) * pull), (0, 1, 2))
        )(w, x, combine)

    want = gradients(lambda *args: routed_experts(*args, Region()))
    got = gradients(run_on(shards, chunk, slices))
    for own, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(own, theirs, atol=1e-5 * np.abs(theirs).max())


def test_a_token_crosses_to_a_slice_once_and_to_none_without_its_experts():
    ids = jnp.array([[0, 1, 3], [4, 0, 15], [9, 8, 13], [16, 16, 16]])
    crossing = slices_of(ids, 8, 2)
    np.testing.assert_array_equal(crossing, [[1, 0], [1, 1], [0, 1], [0, 0]])
    np.testing.assert_array_equal(slices_of(ids, 4, 4).sum(1), [1, 3, 2, 0])


def test_slices_must_divide_the_experts_devices():
    draw = np.random.default_rng(0)
    with pytest.raises(ValueError, match="3 slices do not divide the mesh axis expert=8"):
        jax.eval_shape(run_on(8, None, 3), weights(draw), *routed(draw, "spread"))


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
