"""One chunk of the gated delta rule as a few matrix products, differentiable.

Position t writes w_t = beta_t (v_t - exp(g_t) S_(t-1) k_t) at its key. It depends on all earlier w of the chunk:
(1 + A) W = B with A strictly lower triangular. Both implementations run this function, forward and through its own
derivative. It therefore only uses operations that Mosaic supports: two-dimensional products with one leading axis,
in float32 as exact as the unit provides.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.custom_gradients import custom_vjp

# Contracted axis of each operand [n . .]: of a b, of a b^T, of a^T b.
AXES = {"ab": (2, 1), "abt": (2, 2), "atb": (1, 1)}


def split_bf16(x: Array, parts: int) -> list[Array]:
    """Splits x into a sum of `parts` bfloat16 arrays, the largest first."""
    result = []
    for _ in range(parts):
        result.append(x.astype(jnp.bfloat16))
        x = x - result[-1].astype(x.dtype)
    return result


class BF16Parts(NamedTuple):
    """Number of bfloat16 parts that a product uses per operand; 0: the unit's own float32.

    An operand that was bfloat16 is exactly one part. Two parts leave an error of 2^-17; they need two or three
    passes of the unit instead of the six of its float32. split_bf16: function like `split_bf16`.
    """

    a: int
    b: int
    split_bf16: Callable = split_bf16


@custom_vjp(2)
def batched_matmul(
    kind: str, parts: BF16Parts, a: Float[Array, "n ..."], b: Float[Array, "n ..."]
) -> Float[Array, "n x y"]:
    """Multiplies a and b for every n as one kind of AXES. The derivatives are kinds too, so nothing is transposed."""
    x, y = AXES[kind]
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=(((x,), (y,)), ((0,), (0,))),
        precision=lax.Precision.DEFAULT if parts.a else lax.Precision.HIGHEST,
        preferred_element_type=a.dtype,
    )
    if not parts.a:
        return dot(a, b)
    a, b = parts.split_bf16(a, parts.a), parts.split_bf16(b, parts.b)
    # The smallest first; products below the last part of either operand add no precision.
    pairs = sorted(((i, j) for i in range(len(a)) for j in range(len(b))), key=sum, reverse=True)
    terms = [dot(a[i], b[j]) for i, j in pairs if i + j < max(parts.a, parts.b)]
    return functools.reduce(operator.add, terms)


def _batched_matmul_backward(kind, parts, saved, d):
    a, b = saved
    two = 2 if parts.a else 0
    with_a, with_b = parts._replace(b=two), parts._replace(a=two)
    if kind == "ab":
        return batched_matmul("abt", with_b, d, b), batched_matmul("atb", with_a, a, d)
    if kind == "abt":
        return batched_matmul("ab", with_b, d, b), batched_matmul(
            "atb", parts._replace(a=two, b=parts.a), d, a
        )
    return batched_matmul("abt", parts._replace(a=parts.b, b=two), b, d), batched_matmul(
        "ab", with_a, a, d
    )


batched_matmul.defvjp(
    lambda kind, parts, a, b: (batched_matmul(kind, parts, a, b), (a, b)),
    _batched_matmul_backward,
)


@custom_vjp(1)
def solve(
    parts: BF16Parts,
    a: Float[Array, "n t s"],
    b: Float[Array, "n t u"],
    inverse_matrix: Float[Array, "n t s"] | None,
) -> Float[Array, "n t u"]:
    """Returns (1 + a)^-1 b for strictly lower triangular a [n t s] and b [n t u].

    inverse_matrix: (1 + a)^-1; None: it is computed.
    """
    return _solve_forward(parts, a, b, inverse_matrix)[0]


def _solve_forward(parts, a, b, inverse_matrix):
    if inverse_matrix is None:
        inverse_matrix = inverse(parts, a)
    x = batched_matmul("ab", parts, inverse_matrix, b)
    return x, (inverse_matrix, x)


def _solve_backward(parts, saved, dx):
    inverse_matrix, x = saved
    db = batched_matmul("atb", parts, inverse_matrix, dx)
    da: Array = batched_matmul("abt", parts, db, x)
    return -da, db, None


solve.defvjp(_solve_forward, _solve_backward)


def inverse(parts: BF16Parts, a: Float[Array, "n t s"]) -> Float[Array, "n t s"]:
    """Returns (1 + a)^-1 for strictly lower triangular a [n t s], from the inverses of its diagonal blocks.

    Blocks grow 1, 2, 4, ...: the part of a between the two halves of a block is multiplied by the inverses of
    both halves. A sum of powers of a is as short but fails where keys repeat: its terms are binomial
    coefficients, and cancel.
    """
    size = a.shape[1]
    row, column = _indices(size)
    result = jnp.where(row == column, 1, 0).astype(a.dtype) - jnp.where(row ^ column == 1, a, 0)
    for bit in range(1, (size - 1).bit_length()):
        between = jnp.where((row ^ column) >> bit == 1, a, 0)
        carried = batched_matmul("ab", parts, between, result)
        result -= batched_matmul("ab", parts, result, carried)
    return result


@jax.custom_vjp
def halves(x: Float[Array, "n t x"]) -> tuple[Array, Array]:
    """Returns both halves of x [n t .] along t. Slices would each have a padded array as derivative."""
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


halves.defvjp(lambda x: (halves(x), None), lambda _, d: (jnp.concatenate(d, axis=1),))


def run_chunk(
    is_bf16: bool,
    q: Float[Array, "n t h"],
    k: Float[Array, "n t h"],
    v: Float[Array, "n t u"],
    g: Float[Array, "n 1 t"],
    beta: Float[Array, "n 1 t"],
    state: Float[Array, "n h u"],
    inverse_matrix: Float[Array, "n t s"] | None = None,
    split_bf16: Callable = split_bf16,
) -> tuple[Float[Array, "n t u"], Float[Array, "n h u"]]:
    """Returns (out [n t u], state [n h u] after the chunk).

    Inputs: q, k [n t h], v [n t u], g, beta [n 1 t] and the state [n h u] before the chunk, all in one
    accumulation dtype.
    is_bf16: q and k hold bfloat16 numbers, and products may be as exact as two `BF16Parts`.
    inverse_matrix: (1 + A)^-1 if it is known; it carries no gradient.
    """
    parts = functools.partial(BF16Parts, split_bf16=split_bf16)
    one, two, three = (1, 2, 3) if is_bf16 else (0, 0, 0)
    row, column = _indices(q.shape[1])
    lower = row >= column
    # Sums of g over (s, t] are added directly, as products with 0 and 1. Differences of sums from the start
    # would be differences of huge numbers after a hard reset.
    later_gates = jnp.where(row > column, _masked_sum(row == column, g), 0)
    ones = jnp.broadcast_to(jnp.where(lower, 1, 0).astype(g.dtype), later_gates.shape)
    decay = batched_matmul("ab", parts(one, three), ones, later_gates)
    decay = jnp.where(lower, jnp.exp(decay), 0)
    since_start = jnp.exp(_masked_sum(lower, g))
    to_end = jnp.exp(_masked_sum(row < column, g))
    total_decay = jnp.exp(jnp.sum(g, axis=2, keepdims=True))
    beta = _masked_sum(row == column, beta)

    query_and_key = jnp.concatenate([q, k], axis=1)
    qk, kk = halves(batched_matmul("abt", parts(one, one), query_and_key, k))
    q_state, k_state = halves(batched_matmul("ab", parts(one, two), query_and_key, state))
    a = jnp.where(row > column, beta * decay * kk, 0)
    w = solve(parts(two, two), a, beta * (v - since_start * k_state), inverse_matrix)
    out = since_start * q_state + batched_matmul("ab", parts(two, two), decay * qk, w)
    return out, total_decay * state + batched_matmul("atb", parts(one, two), k, to_end * w)


def _indices(size: int):
    shape = (1, size, size)
    return lax.broadcasted_iota(jnp.int32, shape, 1), lax.broadcasted_iota(jnp.int32, shape, 2)


def _masked_sum(mask, x):
    """Returns [n t 1]: the sum of x [n 1 s] where mask [1 t s] is True."""
    return jnp.sum(jnp.where(mask, x, 0), axis=2, keepdims=True)
