"""Tests of the FLOP counter: loops, scopes, kernels and errors."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from glm5_jax.parallel.flops import REST, Work, count_flops, work_by_scope
from glm5_jax.parallel.mesh import abstract_mesh

A = jax.ShapeDtypeStruct((4, 5), jnp.float32)
B = jax.ShapeDtypeStruct((5, 6), jnp.float32)
PRODUCT = 2 * 4 * 5 * 6


def test_counts_products():
    batched = jax.ShapeDtypeStruct((3, 4, 5), jnp.float32)
    nested = functools.partial(lax.map, lambda x: lax.map(lambda row: row @ x.T, x))
    for name, function, args, flops in (
        ("product", jnp.matmul, (A, B), PRODUCT),
        ("batch", lambda x, b: jnp.einsum("bts,sd->btd", x, b), (batched, B), 3 * PRODUCT),
        ("no product", lambda a: jnp.exp(a).sum() + a.max(), (A,), 0),
        ("map", lambda a, b: lax.map(lambda row: row @ b, a), (A, B), PRODUCT),
        (
            "loop",
            lambda a, b: lax.fori_loop(0, 7, lambda i, x: x + a @ b, a @ b),
            (A, B),
            8 * PRODUCT,
        ),
        ("nested loops", nested, (batched,), 3 * 2 * 4 * 5 * 4),
        ("jit and checkpoint", jax.jit(jax.checkpoint(jnp.matmul)), (A, B), PRODUCT),
        ("vmap", jax.vmap(jnp.dot, (0, None)), (A, B), PRODUCT),
    ):
        assert count_flops(function, *args) == flops, name


def test_counts_recomputation_of_checkpoint():
    def loss(a, b):
        return jnp.sum(jnp.sin(a @ b))

    assert count_flops(jax.value_and_grad(loss, (0, 1)), A, B) == 3 * PRODUCT
    again = jax.value_and_grad(jax.checkpoint(loss), (0, 1))
    assert count_flops(again, A, B) == 4 * PRODUCT


def test_ignores_unused_work():
    """Like XLA, the counter drops unused work, also in loops, branches and recomputation."""

    def loop(a, b):
        return lax.scan(lambda x, row: (x + 1, (row * 2, row @ b)), jnp.float32(0), a)[0]

    assert count_flops(loop, A, B) == 0

    def carried(a, b):
        (x, _), _ = lax.scan(
            lambda c, r: ((c[0] + c[1], c[1] + jnp.sum(r @ b)), None), (0.0, 0.0), a
        )
        return x

    assert count_flops(carried, A, B) == PRODUCT

    def branch(a, b):
        return lax.cond(a[0, 0] > 0, lambda: (a @ b, a), lambda: (jnp.zeros((4, 6)), a))[1]

    assert count_flops(branch, A, B) == 0

    # The gradient does not need the last product of the recomputation.
    def chain(a, b):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ b) @ b.T)(a))

    assert count_flops(jax.value_and_grad(chain), A, B) == (2 + 1 + 2) * PRODUCT


def test_counts_most_expensive_branch():
    def branch(a, b):
        return lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.zeros((4, 6)))

    assert count_flops(branch, A, B) == PRODUCT


def test_unbounded_loop_requires_trips():
    def loop(a, b, n):
        return lax.fori_loop(0, n, lambda i, x: x + a @ b, jnp.zeros((4, 6)))

    args = (A, B, jax.ShapeDtypeStruct((), jnp.int32))
    with pytest.raises(ValueError, match="while_trips"):
        count_flops(loop, *args)
    assert count_flops(loop, *args, while_trips=5) == 5 * PRODUCT

    def outside_loop(a, b, n):
        with jax.named_scope("wanted"):
            y = a @ b
        return y + loop(a, b, n)

    assert count_flops(outside_loop, *args, scope="wanted") == PRODUCT


def test_counts_one_scope():
    def model(a, b):
        def row(x):
            with jax.named_scope("wanted"):
                return x @ b

        return lax.map(jax.checkpoint(row), a) + jax.vmap(row)(a) + a @ b

    assert count_flops(model, A, B, scope="wanted") == 2 * PRODUCT
    assert count_flops(model, A, B, scope="want") == 0
    assert count_flops(model, A, B) == 3 * PRODUCT


def test_scope_includes_loop_body():
    def model(a, b):
        with jax.named_scope("wanted"):
            y = lax.map(lambda x: x @ b, a)
        return y + a @ b

    assert count_flops(model, A, B, scope="wanted") == PRODUCT


def test_assigns_work_to_first_matching_scope():
    def model(a, b):
        with jax.named_scope("outer"):
            x = a @ b
            with jax.named_scope("inner"):
                return x + lax.map(lambda row: row @ b, a) + jnp.ones((4, 5)) @ b + 0 * x

    jaxpr = jax.make_jaxpr(lambda a, b: model(a, b) + a @ b)(A, B)
    one = Work(PRODUCT, 0)
    assert work_by_scope(jaxpr, ("inner", "outer")) == {
        "inner": Work(2 * PRODUCT, 0),
        "outer": one,
        REST: one,
    }
    assert work_by_scope(jaxpr, ("outer", "inner")) == {
        "outer": Work(3 * PRODUCT, 0),
        "inner": Work(),
        REST: one,
    }


def test_assigns_gradients_to_scope_of_forward():
    @jax.custom_vjp
    def twice(a, b):
        return a @ b

    twice.defvjp(lambda a, b: (a @ b, (a, b)), lambda saved, d: (d @ saved[1].T, saved[0].T @ d))

    @jax.checkpoint
    def model(a, b):
        with jax.named_scope("mine"):
            y = jnp.sin(twice(a, b))
        with jax.named_scope("plain"):
            return jnp.sum(jnp.sin(y @ b.T))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(model, (0, 1)))(A, B)
    work = work_by_scope(jaxpr, ("mine", "plain"))
    assert work == {"mine": Work(4 * PRODUCT, 0), "plain": Work(4 * PRODUCT, 0), REST: Work()}


def test_counts_one_device_of_manual_region():
    mesh = abstract_mesh({"fsdp": 2, "expert": 2})
    spec = P(("fsdp", "expert"))

    def local(a, b):
        return a @ b

    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
    assert count_flops(run, A, B) == PRODUCT // 4
    assert count_flops(lambda a, b: run(a, b) + a @ b, A, B) == PRODUCT // 4 + PRODUCT


def test_counts_rows_of_ragged_product_once():
    """Forward, gradient of rows and gradient of weights each multiply every row once."""
    w, sizes = jax.ShapeDtypeStruct((3, 5, 6), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    assert count_flops(lax.ragged_dot, A, w, sizes) == PRODUCT

    def loss(a, w, sizes):
        return jnp.sum(jnp.sin(lax.ragged_dot(a, w, sizes)))

    assert count_flops(jax.value_and_grad(loss, (0, 1)), A, w, sizes) == 3 * PRODUCT


def kernel(cost):
    def body(a, b, out):
        out[...] = a[...] @ b[...]

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((4, 6), jnp.float32),
        cost_estimate=cost,
        interpret=True,
        name="some_kernel",
    )


def test_counts_cost_estimate_of_kernel():
    cost = pl.CostEstimate(flops=7, bytes_accessed=5, transcendentals=1)
    jaxpr = jax.make_jaxpr(lambda a, b: lax.map(lambda _: kernel(cost)(a, b), jnp.arange(3)))(A, B)
    assert work_by_scope(jaxpr)[REST] == Work(21, 15)
    assert count_flops(lambda a, b: (kernel(cost)(a, b), a)[1], A, B) == 0


def test_rejects_kernel_without_cost_estimate():
    with pytest.raises(ValueError, match="kernel 'some_kernel' has no cost estimate"):
        count_flops(kernel(None), A, B)
