"""Delta rule of a layer: packed documents, a state that continues, heads distributed over a mesh.

Gated DeltaNet and SimpleGDN share it; q, k, v are those of the attention that the layer had. The recurrence
runs over all tokens of a sequence. On a mesh that shards the sequence, devices exchange tokens for heads:
each runs some heads over the full sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glm5_jax.model.cache import RecurrentState
from glm5_jax.model.context import ForwardContext
from pallas_kernels.gated_delta import gated_delta, gated_delta_step
from pallas_kernels.numerics import accum_dtype

L2_EPS = 1e-6  # added to a head's squared length before the root, as in public implementations


def delta_rule(
    q: Float[Array, "b t n h+r"],
    k: Float[Array, "b t y h+r"],
    v: Float[Array, "b t y u"],
    g: Float[Array, "b t n"],
    beta: Float[Array, "b t n"],
    context: ForwardContext,
    cache: RecurrentState | None,
    taps: Float[Array, "n 2*(h+r)+u w"] | None = None,
) -> tuple[Float[Array, "b t n u"], RecurrentState | None]:
    """Returns (output heads, new state).

    Keys and values are repeated for the n / y query heads that they serve; q and k get unit length.

    Args:
      g, beta: log decay and write strength of each head.
      cache: state to continue from; None: an empty state, and none is returned.
      taps: convolution over the inputs, followed by SiLU; None: neither.
    """
    region, (n, x) = context.region, q.shape[2:]
    axes = region.sequence_axes
    if n % region.size(axes):
        raise ValueError(
            f"{n} attention heads do not divide over the mesh axes context * tensor = "
            f"{region.size(axes)}, on which a recurrent layer shares them out; choose a divisor"
        )
    # Heads to devices, then the convolution.
    inputs = jnp.concatenate([q, *(_per_query_head(z, n) for z in (k, v))], axis=-1)
    inputs, g, beta = (region.all_to_all(z, axes, 2, 1) for z in (inputs, g, beta))
    segments = context.key_segments if cache is None else context.segments
    conv = None
    if taps is not None:
        heads = inputs.shape[2]  # of this device
        taps = lax.dynamic_slice_in_dim(taps, region.index(axes) * heads, heads)
        inputs, conv = _convolve(inputs, taps, segments, context, cache)
    # The recurrence: all tokens in training, one step or a prefill with a cache.
    q, k, v = jnp.split(inputs, [x, 2 * x], axis=-1)
    q, k = _unit(q), _unit(k)
    run = functools.partial(
        gated_delta, segments=segments, implementation=context.execution.kernels
    )
    if cache is None:
        return region.all_to_all(run(q, k, v, g, beta)[0], axes, 1, 2), None
    before = jnp.where(_continues(segments, context)[:, None, None, None], cache.state, 0)
    if q.shape[1] == 1:
        is_token = (segments != 0)[..., None]
        g, beta = jnp.where(is_token, g, 0), jnp.where(is_token, beta, 0)
        out, state = gated_delta_step(before, *(z[:, 0] for z in (q, k, v, g, beta)))
        out = jnp.where(is_token[..., None], out[:, None], 0)
    else:
        out, state = run(q, k, v, g, beta, initial_state=before)
    return out, RecurrentState(state.astype(cache.state.dtype), conv)


def _per_query_head(x, n: int):
    """Repeats the heads of x [b t y .] for the query heads that use them, neighbours together."""
    return jnp.repeat(x, n // x.shape[2], axis=2)


def _unit(x):
    """Returns x / |x| over the last dimension."""
    y = x.astype(accum_dtype(x.dtype))
    return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + L2_EPS)).astype(x.dtype)


def _convolve(x, taps, segments, context, cache: RecurrentState | None):
    """Returns (SiLU(convolution), last w - 1 inputs) of x [b t n .] with taps [n . w].

    The convolution covers the last w inputs of the same document.
    """
    b, t = x.shape[:2]
    width = taps.shape[-1]
    segments = jnp.ones((b, t), jnp.int32) if segments is None else segments
    if cache is None:
        past = jnp.zeros((b, width - 1, *x.shape[2:]), x.dtype)
        past_segments = jnp.zeros((b, width - 1), segments.dtype)
    else:
        assert cache.conv is not None, "a layer with taps keeps its last inputs"
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
    """Returns bool[b]: True if the first document of these tokens is the last one in the cache."""
    keys = context.key_segments
    index = jnp.arange(keys.shape[1])
    last = jnp.max(jnp.where((index < context.start) & (keys != 0), index, -1), axis=1)
    known = jnp.take_along_axis(keys, jnp.maximum(last, 0)[:, None], axis=1)[:, 0]
    begins = jnp.argmax(segments != 0, axis=1)[:, None]
    first = jnp.take_along_axis(segments, begins, axis=1)[:, 0]
    return (first == 0) | ((first == known) & (last >= 0))
