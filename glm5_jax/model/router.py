"""Sigmoid router with loss-free balancing bias and expert groups (spec: `glm_moe_dsa`, DeepSeek-V3).

The bias affects which experts are chosen, never their weights. It is a buffer that `balance_bias`
updates after each optimiser step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.parallel.mesh import Region
from glm5_jax.parallel.params import Declare
from pallas_kernels.numerics import accum_dtype


class ExpertRouter(nnx.Module):
    """Router matrix and the loss-free balancing bias."""

    def __init__(self, declare: Declare):
        self.weight = declare.normal("weight", "d e")
        self.bias = declare.buffer("bias", "e", jnp.float32)


class Routing(NamedTuple):
    """Expert choice of m tokens.

    Attributes:
      expert_ids: chosen experts int32[m a].
      combine_weights: weights of their outputs, wide[m a].
      probs: sigmoid scores wide[m e], before bias and scaling.
    """

    expert_ids: Int[Array, "m a"]
    combine_weights: Float[Array, "m a"]
    probs: Float[Array, "m e"]


@jax.named_scope("router")
def route(w: PyTree, x: Float[Array, "m d"], cfg: ModelConfig) -> Routing:
    """Chooses the top `num_experts_per_tok` experts of every token by sigmoid(x W) + bias.

    - With n_group > 1 only the topk_group groups with the largest sum of their two best biased scores
      take part. The others are masked with -inf, because 0 would win against negative scores.
    - Scores are computed in `accum_dtype`: a bfloat16 router chooses other experts.
    - Ties go to the lower expert.
    """
    inner = accum_dtype(x.dtype)
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


def expert_load(
    expert_ids: Int[Array, "m a"], valid: Bool[Array, " m"], num_experts: int
) -> Float[Array, " e"]:
    """Returns the tokens per expert, float32[e]. Tokens with valid=False do not count."""
    chosen = jax.nn.one_hot(expert_ids, num_experts, dtype=jnp.float32).sum(-2)
    return jnp.einsum("me,m->e", chosen, valid.astype(jnp.float32))


def sequence_balance(
    probs: Float[Array, "b t e"],
    expert_ids: Int[Array, "b t a"],
    valid: Bool[Array, "b t"],
    region: Region,
    cfg: ModelConfig,
) -> Float[Array, ""]:
    """Returns this device's sum over rows of sum_e f_e P_e, the sequence-level balance loss (DeepSeek-V3).

    - f_e = e / (a T) * count_e, with count_e the choices of expert e.
    - P_e is the mean of the normalised scores.
    - Both cover the T valid tokens of a row, across sequence shards.
    - A balanced row gives 1.
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


def balance_bias(
    bias: Float[Array, "... e"], load: Float[Array, "... e"], rate: float | Float[Array, ""]
) -> Float[Array, "... e"]:
    """Updates the balancing bias of each layer: bias + rate * sign(mean load - load)."""
    error = load.mean(-1, keepdims=True) - load
    return bias + rate * jnp.sign(error).astype(bias.dtype)
