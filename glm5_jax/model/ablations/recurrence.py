"""The delta rule as a layer runs it: packed documents, a state that continues, heads shared out on a mesh.

What Gated DeltaNet and SimpleGDN have in common; q, k, v are those of the attention that the layer had.
The recurrence goes over all tokens of a sequence, so on a mesh whose sequence is cut the devices exchange
tokens for heads: each runs its own heads over the whole sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.model.cache import State
from pallas_kernels.gated_delta import gated_delta, gated_delta_step
from pallas_kernels.numerics import wide

L2_EPS = 1e-6  # under the root of a head's squared length; that of the public implementations


def delta_rule(q, k, v, g, beta, context, cache: State | None, taps=None):
    """(out [b t n u], State or None) of q [b t n h+r], k [b t y h+r], v [b t y u] and g, beta [b t n].

    Keys and values are repeated for the n / y query heads that they serve; q and k get unit length. taps
    [n 2(h+r)+u w] are convolved over the inputs and followed by SiLU (None: neither). context:
    `block.Context`; cache: the state to go on from, which is returned moved on.
    """
    region, (n, x) = context.region, q.shape[2:]
    axes = region.sequence_axes
    if n % region.size(axes):
        raise ValueError(
            f"{n} attention heads do not divide over the mesh axes context * tensor = "
            f"{region.size(axes)}, on which a recurrent layer shares them out; choose a divisor"
        )
    inputs = jnp.concatenate([q, *(_per_query_head(z, n) for z in (k, v))], axis=-1)
    inputs, g, beta = (region.all_to_all(z, axes, 2, 1) for z in (inputs, g, beta))
    segments = context.key_segments if cache is None else context.segments
    conv = None
    if taps is not None:
        own = inputs.shape[2]
        taps = lax.dynamic_slice_in_dim(taps, region.index(axes) * own, own)
        inputs, conv = _convolved(inputs, taps, segments, context, cache)
    q, k, v = jnp.split(inputs, [x, 2 * x], axis=-1)
    q, k = _unit(q), _unit(k)
    run = functools.partial(gated_delta, segments=segments, implementation=context.plan.kernels)
    if cache is None:
        return region.all_to_all(run(q, k, v, g, beta)[0], axes, 1, 2), None
    before = jnp.where(_continues(segments, context)[:, None, None, None], cache.state, 0)
    if q.shape[1] == 1:
        here = (segments != 0)[..., None]
        g, beta = jnp.where(here, g, 0), jnp.where(here, beta, 0)
        out, state = gated_delta_step(before, *(z[:, 0] for z in (q, k, v, g, beta)))
        out = jnp.where(here[..., None], out[:, None], 0)
    else:
        out, state = run(q, k, v, g, beta, initial_state=before)
    return out, State(state.astype(cache.state.dtype), conv)


def _per_query_head(x, n: int):
    """[b t y .] with every head as often as query heads use it, neighbours together."""
    return jnp.repeat(x, n // x.shape[2], axis=2)


def _unit(x):
    """x / |x| over the last dimension."""
    y = x.astype(wide(x.dtype))
    return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + L2_EPS)).astype(x.dtype)


def _convolved(x, taps, segments, context, cache: State | None):
    """(SiLU of x [b t n .] convolved with taps [n . w] over its own document's last w, the next w - 1
    inputs to remember)."""
    b, t = x.shape[:2]
    width = taps.shape[-1]
    segments = jnp.ones((b, t), jnp.int32) if segments is None else segments
    if cache is None:
        past = jnp.zeros((b, width - 1, *x.shape[2:]), x.dtype)
        past_segments = jnp.zeros((b, width - 1), segments.dtype)
    else:
        past = cache.conv
        padded = jnp.pad(context.key_segments, ((0, 0), (width - 1, 0)))
        past_segments = lax.dynamic_slice_in_dim(padded, context.start, width - 1, axis=1)
    joined = jnp.concatenate([past, x], axis=1)
    joined_segments = jnp.concatenate([past_segments, segments], axis=1)
    total, same = x * taps[..., -1], jnp.ones((b, t), bool)
    for back in range(1, width):
        at = slice(width - 1 - back, width - 1 - back + t)
        same = same & (joined_segments[:, at] == segments)
        total += jnp.where(same[..., None, None], joined[:, at], 0) * taps[..., -1 - back]
    return jax.nn.silu(total), joined[:, t:]


def _continues(segments, context):
    """bool[b]: whether the first document among these tokens is the one that the cache ends with."""
    keys = context.key_segments
    index = jnp.arange(keys.shape[1])
    last = jnp.max(jnp.where((index < context.start) & (keys != 0), index, -1), axis=1)
    known = jnp.take_along_axis(keys, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    begins = jnp.argmax(segments != 0, axis=1)[:, None]
    first = jnp.take_along_axis(segments, begins, axis=1)[:, 0]
    return (first == 0) | ((first == known) & (last >= 0))
