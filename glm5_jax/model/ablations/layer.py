"""Attention of layers without MLA: grouped queries, and linear attention on the layer's projections."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from glm5_jax.model.ablations.gdn import gdn
from glm5_jax.model.ablations.gqa import gqa, gqa_heads, rotate_last
from glm5_jax.model.ablations.simple_gdn import simple_gdn
from glm5_jax.model.cache import KeyValues, RecurrentState, write
from glm5_jax.model.context import ForwardContext
from glm5_jax.model.mla import Queries, expand
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.numerics import accum_dtype


class Alternative(NamedTuple):
    """Result of an attention that replaces MLA.

    Attributes:
      y: output of the layer.
      cache: new cache of the layer; None in training.
      max_logit: largest logit in `accum_dtype`; 0 where there are no logits.
    """

    y: Float[Array, "b t d"]
    cache: KeyValues | RecurrentState | None
    max_logit: Float[Array, ""]


def grouped_query_attention(
    w: PyTree,
    x: Float[Array, "b t d"],
    cache: KeyValues | None,
    context: ForwardContext,
    window: int | None,
) -> Alternative:
    """Runs grouped-query attention over this device's queries and all devices' keys.

    window: as for `flash_mla`.
    """
    region = context.region
    q, k, v = gqa_heads(w, x)
    q, k = (rotate_last(z, context.cos, context.sin) for z in (q, k))
    if cache is not None:
        cache = KeyValues(write(cache.k, k, context.start), write(cache.v, v, context.start))
        k, v = cache
    else:
        k, v = map(region.gather_sequence, (k, v))
    queries = Queries(q, context.start, context.segments)
    y, top = gqa(w, queries, k, v, context.key_segments, context.cfg, context.execution, window)
    return Alternative(y, cache, top)


def linear_attention(
    w: PyTree,
    gates: PyTree | None,
    x: Float[Array, "b t d"],
    cache: RecurrentState | None,
    context: ForwardContext,
) -> Alternative:
    """Runs linear attention on the heads of w: Gated DeltaNet with the weights `gates`, SimpleGDN without."""
    if context.cfg.projections == "gqa":
        q, k, v = gqa_heads(w, x)
    else:
        cos = jnp.ones_like(context.cos)  # with sin 0: no rotation
        eps = context.cfg.latent_norm_eps
        heads = mla_prologue(x, w, cos, jnp.zeros_like(cos), eps=eps, implementation="xla")
        q, (k, v) = heads.q, expand(w, heads.latent)
    if gates is None:
        out, cache = simple_gdn(q, k, v, context, cache)
    else:
        out, cache = gdn(gates, x, q, k, v, context, cache)
    y = jnp.einsum("btnu,nud->btd", out, w["o"])
    y = y + w["o_bias"] if "o_bias" in w else y
    return Alternative(y, cache, jnp.zeros((), accum_dtype(y.dtype)))
