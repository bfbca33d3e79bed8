"""The FLOP counter multiplies loops out, follows scopes and refuses what it cannot know."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from glm5_jax.core.flops import count_flops

A = jax.ShapeDtypeStruct((4, 5), jnp.float32)
B = jax.ShapeDtypeStruct((5, 6), jnp.float32)
PRODUCT = 2 * 4 * 5 * 6


def test_a_product_is_two_flops_per_multiply_add():
    assert count_flops(jnp.matmul, A, B) == PRODUCT
    batched = jax.ShapeDtypeStruct((3, 4, 5), jnp.float32)
    assert count_flops(lambda x, b: jnp.einsum("bts,sd->btd", x, b), batched, B) == 3 * PRODUCT


def test_elementwise_work_and_reductions_are_free():
    assert count_flops(lambda a: jnp.exp(a).sum() + a.max(), A) == 0


def test_loops_are_multiplied_out():
    assert count_flops(lambda a, b: lax.map(lambda row: row @ b, a), A, B) == PRODUCT
    assert count_flops(lambda a, b: lax.fori_loop(0, 7, lambda i, x: x + a @ b, a @ b), A, B) == (
        8 * PRODUCT
    )
    nested = functools.partial(lax.map, lambda x: lax.map(lambda row: row @ x.T, x))
    assert count_flops(nested, jax.ShapeDtypeStruct((3, 4, 5), jnp.float32)) == 3 * 2 * 4 * 5 * 4


def test_calls_and_checkpoints_are_entered():
    assert count_flops(jax.jit(jax.checkpoint(jnp.matmul)), A, B) == PRODUCT
    assert count_flops(jax.vmap(jnp.dot, (0, None)), A, B) == PRODUCT


def test_a_gradient_recomputes_under_a_checkpoint():
    def loss(a, b):
        return jnp.sum(jnp.sin(a @ b))

    assert count_flops(jax.grad(loss, (0, 1)), A, B) == 3 * PRODUCT
    assert count_flops(jax.grad(jax.checkpoint(loss), (0, 1)), A, B) == 4 * PRODUCT


def test_a_branch_counts_as_its_most_expensive_arm():
    def branch(a, b):
        return lax.cond(a[0, 0] > 0, lambda: a @ b, lambda: jnp.zeros((4, 6)))

    assert count_flops(branch, A, B) == PRODUCT


def test_a_loop_without_a_known_end_needs_its_number_of_trips():
    def loop(a, b, n):
        return lax.fori_loop(0, n, lambda i, x: x + a @ b, jnp.zeros((4, 6)))

    args = (A, B, jax.ShapeDtypeStruct((), jnp.int32))
    with pytest.raises(ValueError, match="while_trips"):
        count_flops(loop, *args)
    assert count_flops(loop, *args, while_trips=5) == 5 * PRODUCT


def test_a_scope_is_counted_alone():
    def model(a, b):
        def row(x):
            with jax.named_scope("wanted"):
                return x @ b

        return lax.map(jax.checkpoint(row), a) + jax.vmap(row)(a) + a @ b

    assert count_flops(model, A, B, scope="wanted") == 2 * PRODUCT
    assert count_flops(model, A, B, scope="want") == 0
    assert count_flops(model, A, B) == 3 * PRODUCT


def test_a_scope_around_a_loop_holds_its_body():
    def model(a, b):
        with jax.named_scope("wanted"):
            y = lax.map(lambda x: x @ b, a)
        return y + a @ b

    assert count_flops(model, A, B, scope="wanted") == PRODUCT
