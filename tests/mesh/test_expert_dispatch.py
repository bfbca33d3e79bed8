"""Tests of expert dispatch over devices with exchanges of one and of two levels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glm5_jax.model.expert_dispatch import routed_experts, slices_of
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


def random_routing(draw, routing, rows=40, chosen=3):
    """Returns x, expert ids and combine weights of the tokens of all devices."""
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


# A device has 5 rows: chunks of 1, and chunks of 2 with a row of padding.
LEVELS = [(1, None, 1), (1, 8, 1), (8, None, 1), (4, 1, 1), (8, 2, 1)]
LEVELS += [(8, None, 2), (8, 2, 4), (8, None, 8), (4, 2, 2)]
DEFAULT = {
    (1, None, 1, "with padding"),
    (4, 1, 1, "spread"),
    (8, 2, 1, "one expert"),
    (8, 2, 4, "with padding"),
}


def mostly_slow(levels, routings, default):
    """Parametrises over levels and routings; those that are not in `default` are slow."""
    cases = [(*level, routing) for level, routing in itertools.product(levels, routings)]
    assert default <= set(cases)
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        ("shards", "chunk", "slices", "routing"),
        [case if case in default else pytest.param(*case, marks=slow) for case in cases],
    )


@mostly_slow(LEVELS, ["spread", "one expert", "with padding"], DEFAULT)
def test_dispatch_equals_oracle_for_any_routing(shards, chunk, slices, routing):
    """Results are exact even if all tokens select the same experts; padding results in zeros."""
    draw = np.random.default_rng(0)
    w, (x, ids, combine) = weights(draw), random_routing(draw, routing)
    wide = {k: v.astype(np.float64) for k, v in w.items()}
    want = mixture_oracle(wide, x.astype(np.float64), ids, combine)
    got = jax.jit(run_on(shards, chunk, slices))(w, x, ids, combine)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@mostly_slow(
    [(8, None, 2), (8, 2, 4), (4, None, 2)],
    ["spread", "with padding"],
    {(4, None, 2, "with padding")},
)
def test_two_level_gradients_equal_one_device(shards, chunk, slices, routing):
    draw = np.random.default_rng(1)
    w, (x, ids, combine) = weights(draw), random_routing(draw, routing)
    pull = draw.standard_normal(x.shape).astype(np.float32)

    def gradients(run):
        return jax.jit(
            jax.grad(lambda w, x, combine: jnp.sum(run(w, x, ids, combine) * pull), (0, 1, 2))
        )(w, x, combine)

    want = gradients(lambda *args: routed_experts(*args, Region()))
    got = gradients(run_on(shards, chunk, slices))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_sends_token_once_per_slice_of_its_experts():
    ids = jnp.array([[0, 1, 3], [4, 0, 15], [9, 8, 13], [16, 16, 16]])
    crossing = slices_of(ids, 8, 2)
    np.testing.assert_array_equal(crossing, [[1, 0], [1, 1], [0, 1], [0, 0]])
    np.testing.assert_array_equal(slices_of(ids, 4, 4).sum(1), [1, 3, 2, 0])


def test_rejects_slices_that_do_not_divide_expert_axis():
    draw = np.random.default_rng(0)
    with pytest.raises(ValueError, match="3 slices do not divide the mesh axis expert=8"):
        jax.eval_shape(run_on(8, None, 3), weights(draw), *random_routing(draw, "spread"))
