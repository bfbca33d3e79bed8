"""The weights with a row or a column for every token: the embedding and the output projection.

Of GLM-5 either is 1.9 GB in bfloat16, which a device would gather whole. With a `vocab_block` the vocabulary is gone through
in parts of at most so many tokens: a part is gathered, used and given up, the output projection's in the backward pass
again, and its gradient is reduce-scattered before the next. What stays whole for a step (`training.accumulation`) is only
cut for its use.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.model.plan import Plan
from pallas_kernels.cross_entropy import LOGZ, linear_cross_entropy
from pallas_kernels.numerics import wide


def embed(params, weights, tokens, vocab_block: int | None = None):
    """Rows of the embedding table for tokens int[...], [... d] in the compute dtype. weights: `glm5.Weights`;
    vocab_block: as of `Plan`."""
    table = params["embed"]["weight"]
    if (cut := weights.by_tokens("embed/weight", table, 0, tokens.size)) is not None:
        return _rows_of_all(*cut, tokens, weights.region)
    if vocab_block is None:
        whole = weights("embed", params["embed"])["weight"]
        return _rows(whole, tokens, whole.shape, float("nan"))
    size = weights.whole("embed/weight").shape[0]
    parts = _parts(table, 0, size, vocab_block)
    which, row = _place(tokens, table.shape[0], len(parts))

    def add(total, xs):
        number, part = xs
        own = weights("embed", {"weight": part})["weight"]
        # Kept for the backward pass is a number of each token: a mask of rows would be kept as wide as they are.
        here = jnp.where(which == number, row, own.shape[0])
        return total + _rows(own, here, own.shape, 0.0), None

    first = jax.eval_shape(lambda: weights("embed", {"weight": parts[0]})["weight"])
    zeros = jnp.zeros((*tokens.shape, first.shape[1]), first.dtype)
    return lax.scan(add, zeros, (jnp.arange(len(parts)), parts))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rows(table, tokens, shape: tuple[int, int], beyond: float):
    """Rows of a table of this shape, those beyond its end filled with a number. Its gradient is summed wide: in bfloat16
    a token's would stop growing at 256 times what each of its occurrences adds."""
    return jnp.take(table, tokens, axis=0, mode="fill", fill_value=beyond)


def _rows_forward(table, tokens, shape, beyond):
    return _rows(table, tokens, shape, beyond), (tokens, jnp.zeros((), table.dtype))


def _rows_backward(shape, beyond, kept, gradient):
    tokens, zero = kept
    blank = jnp.zeros(shape, wide(zero.dtype))
    _, pull = jax.vjp(lambda table: jnp.take(table, tokens, axis=0, mode="fill"), blank)
    return pull(gradient.astype(blank.dtype))[0].astype(zero.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def _rows_of_all(part, axes, tokens, region):
    """Rows for all devices' tokens, of which each device finds those that it has, and all their own."""
    every = region.all_gather(tokens.reshape(-1), axes, 0) - region.index(axes) * len(part)
    here = jnp.where((every >= 0) & (every < len(part)), every, len(part))
    found = jnp.take(part, here, axis=0, mode="fill", fill_value=0)
    return region.psum_scatter(found, axes, 0).reshape(*tokens.shape, -1)


@jax.named_scope("head")
def read_logits(params, hidden, weights, only=None):
    """wide[b t v] of hidden [b t d], or of the one place of each row that `only` int[b 1] names."""
    if only is not None:
        hidden = jnp.take_along_axis(hidden, only[..., None], 1)
    kind = wide(hidden.dtype)
    name, dim = ("lm_head", 1) if "lm_head" in params else ("embed", 0)
    cut = weights.by_tokens(
        f"{name}/weight", params[name]["weight"], dim, math.prod(hidden.shape[:2])
    )
    if cut is None:
        return jnp.einsum("btd,dv->btv", hidden, head(params, weights), preferred_element_type=kind)
    part, axes = cut
    rows = weights.region.all_gather(hidden.reshape(-1, hidden.shape[2]), axes, 0)
    logits = jnp.matmul(rows, part if dim else part.T, preferred_element_type=kind)
    own = weights.region.all_to_all(logits, axes, split=0, join=1)
    return own.reshape(*hidden.shape[:2], -1)


def head(params, weights):
    """The output projection [d v] in the compute dtype (the embedding's transpose where tied)."""
    if "lm_head" in params:
        return weights("lm_head", params["lm_head"])["weight"]
    return weights("embed", params["embed"])["weight"].T


def cross_entropy(params, weights, hidden, targets, chunk: int, plan: Plan):
    """(nll, log partition), wide[m], of targets int32[m] behind hidden [m d]; as `linear_cross_entropy`."""
    run = functools.partial(linear_cross_entropy, chunk=chunk, implementation=plan.kernels)
    if plan.vocab_block is None:
        return run(hidden, head(params, weights), targets)
    name, dim = ("lm_head", 1) if "lm_head" in params else ("embed", 0)
    table = params[name]["weight"]
    parts = _parts(table, dim, weights.whole(f"{name}/weight").shape[dim], plan.vocab_block)
    which, column = _place(targets, table.shape[dim], len(parts))

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(LOGZ))
    def one(hidden, number, part):
        own = weights(name, {"weight": part})["weight"]
        nll, logz = run(hidden.astype(dtype), own if dim else own.T, column)
        return logz, jnp.where(which == number, logz - nll, 0.0)

    # A scan sums the gradient of what all its turns read in that array's dtype.
    dtype, hidden = hidden.dtype, hidden.astype(wide(hidden.dtype))
    numbers = jnp.arange(len(parts))
    _, (logz, logits) = lax.scan(lambda _, xs: (None, one(hidden, *xs)), None, (numbers, parts))
    logz = jax.nn.logsumexp(logz, axis=0)
    return logz - logits.sum(0), logz


def _parts(table, dim: int, size: int, most: int):
    """A device's part of a table as parts of the vocabulary [n ...], of at most so many tokens on all devices together."""
    own = table.shape[dim]
    count = num_parts(size, size // own, most)
    shape = (*table.shape[:dim], count, own // count, *table.shape[dim + 1 :])
    return jnp.moveaxis(table.reshape(shape), dim, 0)


def num_parts(size: int, shards: int, most: int) -> int:
    """How many equal parts of at most so many tokens a vocabulary of this size, cut over shards, is gone through in.
    ValueError if there are none, or all are much smaller."""
    own = size // shards
    counts = (n for n in range(1, own + 1) if own % n == 0 and size // n <= most)
    count = next(counts, None)
    if count is None:
        raise ValueError(
            f"vocab_block is {most}; {shards} parts of the vocabulary are cut over devices, use at least that"
        )
    if 2 * size // count < min(most, size):
        smaller = max(n for n in range(1, count) if own % n == 0)
        raise ValueError(
            f"vocab_block is {most}; equal parts of {size} tokens on {shards} devices have {size // count} or "
            f"{size // smaller}, use one of these"
        )
    return count


def _place(tokens, own: int, count: int):
    """(part, place in it once it is gathered) of tokens, of which each device has `own`."""
    shard, row = tokens // own, tokens % own
    size = own // count
    return row // size, shard * size + row % size
