"""The mixture of experts of a layer: routing, routed experts, the shared expert, and its balance statistics."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from glm5_jax.model.context import ForwardContext
from glm5_jax.model.expert_dispatch import routed_experts
from glm5_jax.model.mlp import mlp
from glm5_jax.model.router import Routing, expert_load, route, sequence_balance


class MoeOutput(NamedTuple):
    """Result of the experts.

    Attributes:
      y: output of routed and shared experts.
      load, balance, routing: as in `LayerStats`.
    """

    y: Float[Array, "b t d"]
    load: Float[Array, " e"]
    balance: Float[Array, ""]
    routing: Routing | None


def moe(w: PyTree, x: Float[Array, "b t d"], context: ForwardContext) -> MoeOutput:
    """Applies routed and shared experts to x."""
    cfg, region = context.cfg, context.region
    b, t, d = x.shape
    # Route.
    routing = route(w["router"], x.reshape(-1, d), cfg)
    valid = jnp.ones((b, t), bool) if context.segments is None else context.segments != 0
    load = expert_load(routing.expert_ids, valid.reshape(-1), cfg.n_routed_experts)
    routing = jax.tree.map(lambda a: a.reshape(b, t, -1), routing)
    ids, weights, probs = routing
    balance = sequence_balance(probs, ids, valid, region, cfg)
    # Padding is sent to no expert: equal tokens would all go to one expert.
    expert_ids = jnp.where(valid[..., None], ids, cfg.n_routed_experts)
    y = _run_experts(w["experts"], x, expert_ids, weights, context)
    if "shared" in w:
        y = y + mlp(w["shared"], x, region)
    return MoeOutput(y, load, balance, routing if context.capture_choices else None)


def _run_experts(w, x, expert_ids, weights, context: ForwardContext) -> Float[Array, "b t d"]:
    """Runs the routed experts. The axis `tensor` has the same tokens there, each device a part of the width."""
    region, execution = context.region, context.execution
    tokens = (x, expert_ids, weights)
    if region.shard_sequence:
        tokens = tuple(region.all_gather(a, ("tensor",), 1) for a in tokens)
    rows, row_ids, row_weights = (a.reshape(-1, a.shape[-1]) for a in tokens)
    y = routed_experts(
        w,
        rows,
        row_ids,
        row_weights,
        region,
        execution.token_chunk,
        execution.kernels,
        execution.expert_slices,
    )
    y = y.reshape(x.shape[0], -1, x.shape[2])
    if region.shard_sequence:
        return region.psum_scatter(y, ("tensor",), 1)
    return region.psum(y, ("tensor",))
