"""One chunk of the gated delta rule as a few matrix products, differentiable as it stands.

What position t writes beside its key, w_t = beta_t (v_t - exp(g_t) S_(t-1) k_t), depends on all w before it
in the chunk: (1 + A) W = B with A strictly lower triangular. Both implementations run this function,
forward and through its own derivative, so everything here is what Mosaic can do on the chip: two-
dimensional products with one leading axis, float32 as exact as the unit gives it.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Which axis of either operand [n . .] is summed over: of a b, of a b^T, of a^T b.
AXES = {"ab": (2, 1), "abt": (2, 2), "atb": (1, 1)}


def split(x, parts: int):
    """x as a sum of so many bfloat16 arrays, the largest first."""
    done = []
    for _ in range(parts):
        done.append(x.astype(jnp.bfloat16))
        x = x - done[-1].astype(x.dtype)
    return done


class Parts(NamedTuple):
    """Of how many bfloat16 numbers a product takes each operand; 0: of none, the unit's own float32.

    An operand that was bfloat16 is one exactly; two leave an error of 2^-17, and need two or three passes
    of the unit instead of the six of its float32. split: as the function of that name.
    """

    a: int
    b: int
    split: Callable = split


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(kind: str, parts: Parts, a, b):
    """A kind of AXES for every n. Its derivatives are of that family, so that nothing is transposed."""
    x, y = AXES[kind]
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=(((x,), (y,)), ((0,), (0,))),
        precision=lax.Precision.DEFAULT if parts.a else lax.Precision.HIGHEST,
        preferred_element_type=a.dtype,
    )
    if not parts.a:
        return dot(a, b)
    a, b = parts.split(a, parts.a), parts.split(b, parts.b)
    # The least first; below the last part of either there is nothing to gain.
    pairs = sorted(((i, j) for i in range(len(a)) for j in range(len(b))), key=sum, reverse=True)
    terms = [dot(a[i], b[j]) for i, j in pairs if i + j < max(parts.a, parts.b)]
    return functools.reduce(operator.add, terms)


def _product_backward(kind, parts, saved, d):
    a, b = saved
    two = 2 if parts.a else 0
    with_a, with_b = parts._replace(b=two), parts._replace(a=two)
    if kind == "ab":
        return product("abt", with_b, d, b), product("atb", with_a, a, d)
    if kind == "abt":
        return product("ab", with_b, d, b), product("atb", parts._replace(a=two, b=parts.a), d, a)
    return product("abt", parts._replace(a=parts.b, b=two), b, d), product("ab", with_a, a, d)


product.defvjp(
    lambda kind, parts, a, b: (product(kind, parts, a, b), (a, b)),
    _product_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def solve(parts, a, b, inverted):
    """(1 + a)^-1 b of a [n t s], strictly lower triangular, and b [n t u]; inverted: (1 + a)^-1 or None."""
    return _solve_forward(parts, a, b, inverted)[0]


def _solve_forward(parts, a, b, inverted):
    if inverted is None:
        inverted = inverse(parts, a)
    x = product("ab", parts, inverted, b)
    return x, (inverted, x)


def _solve_backward(parts, saved, dx):
    inverted, x = saved
    db = product("atb", parts, inverted, dx)
    return -product("abt", parts, db, x), db, None


solve.defvjp(_solve_forward, _solve_backward)


def inverse(parts, a):
    """(1 + a)^-1 of a [n t s], strictly lower triangular, from the inverses of its diagonal blocks.

    Blocks of 1, 2, 4, ... : what is left of a between the two halves of a block is carried over by both
    halves' inverses. A sum of powers of a is as short and breaks down where keys repeat: its terms
    are binomial coefficients, and cancel.
    """
    size = a.shape[1]
    row, column = _indices(size)
    inverted = jnp.where(row == column, 1, 0).astype(a.dtype) - jnp.where(row ^ column == 1, a, 0)
    for bit in range(1, (size - 1).bit_length()):
        between = jnp.where((row ^ column) >> bit == 1, a, 0)
        carried = product("ab", parts, between, inverted)
        inverted -= product("ab", parts, inverted, carried)
    return inverted


@jax.custom_vjp
def halves(x):
    """Both halves of x [n t .] along t. The derivative of a slice would be a padded array each."""
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


halves.defvjp(lambda x: (halves(x), None), lambda _, d: (jnp.concatenate(d, axis=1),))


def run(narrow, q, k, v, g, beta, state, inverted=None, split=split):
    """(out [n t u], state [n h u] behind the chunk) of q, k [n t h], v [n t u], g, beta [n 1 t] and the
    state [n h u] before it, all of one wide dtype.

    narrow: q and k hold bfloat16 numbers, and products may be as exact as `Parts` says of two. inverted:
    (1 + A)^-1 where it is known; it carries no gradient of its own.
    """
    parts = functools.partial(Parts, split=split)
    one, two, three = (1, 2, 3) if narrow else (0, 0, 0)
    row, column = _indices(q.shape[1])
    lower = row >= column
    # Sums of g over (s, t] one by one, not differences of sums from the start: after a hard reset those
    # are of huge numbers. They are sums of products with 0 and 1.
    later = jnp.where(row > column, _sum(row == column, g), 0)
    ones = jnp.broadcast_to(jnp.where(lower, 1, 0).astype(g.dtype), later.shape)
    decay = product("ab", parts(one, three), ones, later)
    decay = jnp.where(lower, jnp.exp(decay), 0)
    since_start = jnp.exp(_sum(lower, g))
    to_end = jnp.exp(_sum(row < column, g))
    whole = jnp.exp(jnp.sum(g, axis=2, keepdims=True))
    beta = _sum(row == column, beta)

    both = jnp.concatenate([q, k], axis=1)
    qk, kk = halves(product("abt", parts(one, one), both, k))
    q_state, k_state = halves(product("ab", parts(one, two), both, state))
    a = jnp.where(row > column, beta * decay * kk, 0)
    w = solve(parts(two, two), a, beta * (v - since_start * k_state), inverted)
    out = since_start * q_state + product("ab", parts(two, two), decay * qk, w)
    return out, whole * state + product("atb", parts(one, two), k, to_end * w)


def _indices(size: int):
    shape = (1, size, size)
    return lax.broadcasted_iota(jnp.int32, shape, 1), lax.broadcasted_iota(jnp.int32, shape, 2)


def _sum(mask, x):
    """[n t 1]: the sum of x [n 1 s] over the s that mask [1 t s] has for t."""
    return jnp.sum(jnp.where(mask, x, 0), axis=2, keepdims=True)
