"""What a layer calls instead of MLA: grouped queries, and linear attention on the projections it has."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.model.ablations.gdn import gdn
from glm5_jax.model.ablations.gqa import gqa, gqa_heads, rotate_last
from glm5_jax.model.ablations.simple_gdn import simple_gdn
from glm5_jax.model.cache import KeyValues, State, write
from glm5_jax.model.mla import Queries, expand
from pallas_kernels.mla_prologue import mla_prologue
from pallas_kernels.numerics import wide


class Alternative(NamedTuple):
    """y [b t d]; the layer's cache, or None; max_logit wide[], 0 where there are no logits."""

    y: jax.Array
    cache: KeyValues | State | None
    max_logit: jax.Array


def grouped(w, x, cache: KeyValues | None, context, window: int | None) -> Alternative:
    """Grouped-query attention over this device's queries x [b t d] and everyone's keys."""
    region = context.region
    q, k, v = gqa_heads(w, x)
    q, k = (rotate_last(z, context.cos, context.sin) for z in (q, k))
    if cache is not None:
        cache = KeyValues(write(cache.k, k, context.start), write(cache.v, v, context.start))
        k, v = cache
    else:
        k, v = map(region.whole_sequence, (k, v))
    queries = Queries(q, context.start, context.segments)
    y, top = gqa(w, queries, k, v, context.key_segments, context.cfg, context.plan, window)
    return Alternative(y, cache, top)


def linear(w, gates, x, cache: State | None, context) -> Alternative:
    """Gated DeltaNet with the weights `gates`, or SimpleGDN without any, on the heads of w."""
    if context.cfg.projections == "gqa":
        q, k, v = gqa_heads(w, x)
    else:
        cos = jnp.ones_like(context.cos)  # a rotation by nothing
        eps = context.cfg.latent_norm_eps
        made = mla_prologue(x, w, cos, jnp.zeros_like(cos), eps=eps, implementation="ref")
        q, (k, v) = made.q, expand(w, made.latent)
    if gates is None:
        out, cache = simple_gdn(q, k, v, context, cache)
    else:
        out, cache = gdn(gates, x, q, k, v, context, cache)
    y = jnp.einsum("btnu,nud->btd", out, w["o"])
    y = y + w["o_bias"] if "o_bias" in w else y
    return Alternative(y, cache, jnp.zeros((), wide(y.dtype)))
