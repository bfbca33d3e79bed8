"""Sigmoid router with loss-free balancing bias and expert groups (spec: `glm_moe_dsa`, DeepSeek-V3).

The bias chooses experts and never weighs them; it is a buffer that `balance_bias` moves after each
optimiser step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pallas_kernels.numerics import wide


class Router(nnx.Module):
    """Router matrix and the loss-free balancing bias."""

    def __init__(self, declare):
        self.weight = declare.normal("weight", "d e")
        self.bias = declare.buffer("bias", "e", jnp.float32)


class Routing(NamedTuple):
    """expert_ids int32[m a]; combine_weights wide[m a]; probs wide[m e], before bias and scaling."""

    expert_ids: jax.Array
    combine_weights: jax.Array
    probs: jax.Array


@jax.named_scope("router")
def route(w, x, cfg) -> Routing:
    """Experts of every token x [m d]: the top `num_experts_per_tok` of sigmoid(x W) + bias.

    With n_group > 1 only the topk_group groups with the largest sum of their two best biased scores
    take part; the others are masked with -inf (0 would win against negative scores). Computed wide:
    a bfloat16 router picks other experts. Ties go to the lower expert.
    """
    inner = wide(x.dtype)
    probs = jax.nn.sigmoid(x.astype(inner) @ w["weight"].astype(inner))
    choice = lax.stop_gradient(probs) + w["bias"].astype(inner)
    if cfg.n_group > 1:
        grouped = choice.reshape(-1, cfg.n_group, cfg.n_routed_experts // cfg.n_group)
        group_score = lax.top_k(grouped, 2)[0].sum(-1)
        _, best = lax.top_k(group_score, cfg.topk_group)
        allowed = jax.nn.one_hot(best, cfg.n_group, dtype=bool).any(-2)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, expert_ids = lax.top_k(choice, cfg.num_experts_per_tok)
    weights = jnp.take_along_axis(probs, expert_ids, axis=-1)
    if cfg.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(expert_ids, weights * cfg.routed_scaling_factor, probs)


def expert_load(expert_ids, valid, num_experts: int):
    """Tokens per expert, float32[e], of ids [m a]; tokens with valid [m] false do not count."""
    chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.float32).sum(-2)
    return jnp.einsum("me,m->e", chosen, valid.astype(jnp.float32))


def sequence_balance(probs, expert_ids, valid, region, cfg):
    """Sum over this device's rows of sum_e f_e P_e, the sequence-level balance loss (DeepSeek-V3).

    probs [b t e], expert_ids [b t a], valid bool[b t]; f_e = e / (a T) * count_e, P_e the mean of the
    normalised scores over the T valid tokens of a row, across sequence shards. 1 for a row that is
    balanced.
    """
    valid = valid.astype(probs.dtype)
    share = probs / probs.sum(-1, keepdims=True)
    chosen = jax.nn.one_hot(expert_ids, cfg.n_routed_experts, dtype=probs.dtype).sum(-2)
    axes = region.sequence_axes
    tokens = jnp.maximum(region.psum(valid.sum(-1), axes), 1)[:, None]
    count = region.psum(jnp.einsum("bte,bt->be", chosen, valid), axes)
    mean = region.psum(jnp.einsum("bte,bt->be", share, valid), axes) / tokens
    frequency = count * cfg.n_routed_experts / (cfg.num_experts_per_tok * tokens)
    return jnp.sum(lax.stop_gradient(frequency) * mean)


def balance_bias(bias, load, rate):
    """Loss-free balancing: bias + rate * sign(mean load - load), per layer; bias, load [... e]."""
    error = load.mean(-1, keepdims=True) - load
    return bias + rate * jnp.sign(error).astype(bias.dtype)
