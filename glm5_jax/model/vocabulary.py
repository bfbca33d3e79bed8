"""Embedding, output projection and cross-entropy: the weights with a row or column per vocabulary entry.

Either weight of GLM-5 takes 1.9 GB in bfloat16, which a device would gather in full. With a `vocab_block`
a device goes through the vocabulary in parts:

- A part is gathered, used and freed. The output projection's parts are gathered again in the backward pass.
- The gradient of a part is reduce-scattered before the next part.
- Weights that stay gathered for a step (`training.accumulation`) are only sliced.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.weight_gathering import WeightGatherer
from pallas_kernels.cross_entropy import LOGZ, linear_cross_entropy
from pallas_kernels.numerics import accum_dtype


def embed(
    params: PyTree,
    weights: WeightGatherer,
    tokens: Int[Array, "..."],
    vocab_block: int | None = None,
) -> Float[Array, "... d"]:
    """Returns the embeddings of tokens in the compute dtype.

    vocab_block: as in `ExecutionConfig`.
    """
    table = params["embed"]["weight"]
    # Decoding: the table stays sharded where that sends less.
    if (shard := weights.vocab_shard("embed/weight", table, 0, tokens.size)) is not None:
        part, axes = shard
        return _lookup_sharded(part, axes, tokens, weights.region)
    if vocab_block is None:
        gathered = weights("embed", params["embed"])["weight"]
        return _lookup(gathered, tokens, gathered.shape, float("nan"))
    # In parts: each adds the rows of its tokens, and zeros for the others.
    size = weights.full_shape("embed/weight")[0]
    parts = _parts(table, 0, size, vocab_block)
    part_of_token, row = _locate(tokens, table.shape[0], len(parts))

    def add(total, xs):
        number, part = xs
        gathered = weights("embed", {"weight": part})["weight"]
        # The backward pass stores one index per token; a mask would be stored as wide as the rows.
        index = jnp.where(part_of_token == number, row, gathered.shape[0])
        return total + _lookup(gathered, index, gathered.shape, 0.0), None

    first = jax.eval_shape(lambda: weights("embed", {"weight": parts[0]})["weight"])
    zeros = jnp.zeros((*tokens.shape, first.shape[1]), first.dtype)
    return lax.scan(add, zeros, (jnp.arange(len(parts)), parts))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table, tokens, shape: tuple[int, int], fill_value: float):
    """Returns rows of a table of this shape; indices after its end give fill_value.

    The gradient is summed in `accum_dtype`: in bfloat16 that of a token would stop growing at 256 times
    the gradient of one occurrence.
    """
    return jnp.take(table, tokens, axis=0, mode="fill", fill_value=fill_value)


def _lookup_forward(table, tokens, shape, fill_value):
    return _lookup(table, tokens, shape, fill_value), (tokens, jnp.zeros((), table.dtype))


def _lookup_backward(shape, fill_value, residuals, gradient):
    tokens, zero = residuals
    blank = jnp.zeros(shape, accum_dtype(zero.dtype))
    _, pull = jax.vjp(lambda table: jnp.take(table, tokens, axis=0, mode="fill"), blank)
    return pull(gradient.astype(blank.dtype))[0].astype(zero.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def _lookup_sharded(part, axes, tokens, region):
    """Looks up all devices' tokens in this device's part of the table, and reduce-scatters the rows."""
    index = region.all_gather(tokens.reshape(-1), axes, 0) - region.index(axes) * len(part)
    index = jnp.where((index >= 0) & (index < len(part)), index, len(part))
    rows = jnp.take(part, index, axis=0, mode="fill", fill_value=0)
    return region.psum_scatter(rows, axes, 0).reshape(*tokens.shape, -1)


@jax.named_scope("head")
def compute_logits(
    params: PyTree,
    hidden: Float[Array, "b t d"],
    weights: WeightGatherer,
    logit_positions: Int[Array, "b 1"] | None = None,
) -> Float[Array, "b t v"]:
    """Returns logits in `accum_dtype`.

    logit_positions: the one position of each row to compute,
    which gives [b 1 v]; None: all.
    """
    if logit_positions is not None:
        hidden = jnp.take_along_axis(hidden, logit_positions[..., None], 1)
    kind = accum_dtype(hidden.dtype)
    name, dim = ("lm_head", 1) if "lm_head" in params else ("embed", 0)
    shard = weights.vocab_shard(
        f"{name}/weight", params[name]["weight"], dim, math.prod(hidden.shape[:2])
    )
    if shard is None:
        return jnp.einsum(
            "btd,dv->btv", hidden, head_weight(params, weights), preferred_element_type=kind
        )
    part, axes = shard
    rows = weights.region.all_gather(hidden.reshape(-1, hidden.shape[2]), axes, 0)
    logits = jnp.matmul(rows, part if dim else part.T, preferred_element_type=kind)
    logits = weights.region.all_to_all(logits, axes, split=0, join=1)
    return logits.reshape(*hidden.shape[:2], -1)


def head_weight(params: PyTree, weights: WeightGatherer) -> Float[Array, "d v"]:
    """Returns the output projection in the compute dtype: the embedding's transpose where they are tied."""
    if "lm_head" in params:
        return weights("lm_head", params["lm_head"])["weight"]
    return weights("embed", params["embed"])["weight"].T


def cross_entropy(
    params: PyTree,
    weights: WeightGatherer,
    hidden: Float[Array, "m d"],
    targets: Int[Array, " m"],
    chunk: int,
    execution: ExecutionConfig,
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Returns (negative log-likelihood, log partition) of targets, in `accum_dtype`.

    chunk: rows of logits at a time, as in `linear_cross_entropy`.
    """
    run = functools.partial(linear_cross_entropy, chunk=chunk, implementation=execution.kernels)
    if execution.vocab_block is None:
        return run(hidden, head_weight(params, weights), targets)
    name, dim = ("lm_head", 1) if "lm_head" in params else ("embed", 0)
    # In parts: each gives a partial log partition, and the logits of the targets in it.
    table = params[name]["weight"]
    size = weights.full_shape(f"{name}/weight")[dim]
    parts = _parts(table, dim, size, execution.vocab_block)
    part_of_target, column = _locate(targets, table.shape[dim], len(parts))

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(LOGZ))
    def one(hidden, number, part):
        gathered = weights(name, {"weight": part})["weight"]
        nll, logz = run(hidden.astype(dtype), gathered if dim else gathered.T, column)
        return logz, jnp.where(part_of_target == number, logz - nll, 0.0)

    # A scan sums the gradient of an array that all its steps read in that array's dtype.
    dtype, hidden = hidden.dtype, hidden.astype(accum_dtype(hidden.dtype))
    numbers = jnp.arange(len(parts))
    _, (logz, logits) = lax.scan(lambda _, xs: (None, one(hidden, *xs)), None, (numbers, parts))
    logz = jax.nn.logsumexp(logz, axis=0)
    return logz - logits.sum(0), logz


def _parts(table, dim: int, size: int, vocab_block: int):
    """Splits a device's shard of a table into parts [n ...] of at most vocab_block entries over all devices."""
    local_size = table.shape[dim]
    count = num_parts(size, size // local_size, vocab_block)
    shape = (*table.shape[:dim], count, local_size // count, *table.shape[dim + 1 :])
    return jnp.moveaxis(table.reshape(shape), dim, 0)


def num_parts(size: int, shards: int, vocab_block: int) -> int:
    """Returns the number of equal parts of at most vocab_block entries of a sharded vocabulary.

    Raises ValueError if no number of parts fits, or if the parts would be much smaller than vocab_block.
    """
    local_size = size // shards
    counts = (
        n for n in range(1, local_size + 1) if local_size % n == 0 and size // n <= vocab_block
    )
    count = next(counts, None)
    if count is None:
        raise ValueError(
            f"vocab_block is {vocab_block}; the vocabulary has {shards} shards, use at least that"
        )
    if 2 * size // count < min(vocab_block, size):
        smaller = max(n for n in range(1, count) if local_size % n == 0)
        raise ValueError(
            f"vocab_block is {vocab_block}; equal parts of {size} tokens on {shards} devices have {size // count} or "
            f"{size // smaller}, use one of these"
        )
    return count


def _locate(tokens, local_size: int, count: int):
    """Returns (part, index in the gathered part) of tokens, with local_size entries per device."""
    shard, row = tokens // local_size, tokens % local_size
    size = local_size // count
    return row // size, shard * size + row % size
