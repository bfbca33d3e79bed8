"""Calibrates scales between up- and down-projections that quantise best on text (AWQ, arXiv 2306.00978).

A down-projection reads silu(gate x) * up x. Its channels can be scaled in up and unscaled in down at no cost (GLM-5
section 5: Flex_AWQ_SSZ on the up-down subgraph). A channel that is large on text takes the int8 row's steps from the
others; one with large weights takes those of its group. Scales x_rms**a / w_max**(1 - a) balance the two.

Each matrix uses the exponent a, or no scale, with the smallest error of its product on the text. The scales of up's
columns are absorbed by up's quantisation scales, so that only down is tried.
"""

import collections
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.block import block
from glm5_jax.model.context import make_context
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Selection
from glm5_jax.model.router import route
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import Region
from glm5_jax.parallel.tree import flatten, unflatten
from pallas_kernels.pointwise import rms_norm
from pallas_kernels.quantized_weights import Int8, quantized_einsum
from pallas_kernels.w4a8_matmul import ref as w4a8
from pallas_kernels.w4a8_matmul.quantize import GROUP, quantize_a8, quantize_w4, round_w8

PARTS = ("mlp", "shared", "experts")
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def smooth(
    params: PyTree, cfg: ModelConfig, tokens: Int[ArrayLike, "b t"], group: int = GROUP
) -> PyTree:
    """Returns parameters of the same function, with up and down scaled for `quantise` with this group.

    tokens: text, all of which is read at once. The MTP layer is unchanged, because it only drafts.
    """
    flat = flatten(params)
    for path, scale in smoothing_scales(params, cfg, tokens, group).items():
        up, down = flat[f"{path}/up"], flat[f"{path}/down"]
        flat[f"{path}/up"], flat[f"{path}/down"] = scale_up(up, scale), scale_down(down, scale)
    return unflatten(flat)


@jax.jit
def scale_up(up: Float[Array, "*batch d f"], scale: Float[Array, "*batch f"]) -> Array:
    """Divides the columns of an up-projection by scales."""
    return (up / scale[..., None, :]).astype(up.dtype)


@jax.jit
def scale_down(down: Float[Array, "*batch f d"], scale: Float[Array, "*batch f"]) -> Array:
    """Multiplies the rows of a down-projection by scales."""
    return (down * scale[..., None]).astype(down.dtype)


def smoothing_scales(
    params: PyTree, cfg: ModelConfig, tokens: Int[ArrayLike, "b t"], group: int = GROUP
) -> dict[str, Array]:
    """Returns the scales [l f] or [l e f] of each feed-forward by its path; see `smooth`."""
    scales_of = collections.defaultdict(list)
    for stack, w, x in feed_forwards(params, cfg, tokens):
        for part in [part for part in PARTS if part in w]:
            matrices = [w[part][k] for k in ("gate", "up", "down")]
            if part == "experts":
                ids = route(w["router"], x, cfg).expert_ids
                used = jax.nn.one_hot(ids, cfg.n_routed_experts, dtype=bool).any(1).T
                scale = _expert_scales(*matrices, used, x, group=group)
            else:
                scale = scales(*matrices, jnp.ones(len(x), bool), x, None)
            scales_of[f"{stack}/{part}"].append(scale)
    return {path: jnp.stack(of_layers) for path, of_layers in scales_of.items()}


@functools.partial(jax.jit, static_argnames="group")
def scales(
    gate: Float[Array, "d f"],
    up: Float[Array, "d f"],
    down: Float[Array, "f d"],
    used: Bool[Array, " m"],
    x: Float[Array, "m d"],
    group: int | None,
) -> Float[Array, " f"]:
    """Returns the scales of down's rows; up's columns are divided by them.

    used: inputs x that count. group: rows of a scale in int4; None: int8.
    """
    x = x.astype(jnp.float32) * used[:, None]
    hidden = jax.nn.silu(x @ gate) * (x @ up)
    want = hidden @ down.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(hidden**2, 0) + 1e-12)
    w_max = jnp.max(jnp.abs(down), 1) + 1e-12

    def error(scale):
        """Returns the squared error of the quantised product."""
        rows, w = hidden / scale, down * scale[:, None]
        if group is None:
            q, row_scale = round_w8(w, (0,))
            got = quantized_einsum("md,df->mf", rows, Int8(q, row_scale))
        else:
            q, row_scale = quantize_a8(rows)
            got = w4a8.matmul(q, row_scale[:, None], *quantize_w4(w, group), jnp.float32)
        return jnp.sum((got - want) ** 2)

    tried = [jnp.ones_like(rms)]
    for a in EXPONENTS:
        s = rms**a / w_max ** (1 - a)
        tried.append(s / jnp.exp(jnp.mean(jnp.log(s))))
    tried = jnp.stack(tried)
    return tried[jnp.argmin(jax.lax.map(error, tried))]


@functools.partial(jax.jit, static_argnames="group")
def _expert_scales(gate, up, down, used, x, group: int):
    """Returns `scales` [e f] of experts with weights [e d f], [e f d] and used bool[e m]."""
    return jax.lax.map(lambda expert: scales(*expert, x, group), (gate, up, down, used))


def feed_forwards(
    params: PyTree, cfg: ModelConfig, tokens: Int[ArrayLike, "b t"]
) -> Iterator[tuple[str, dict, Float[Array, "m d"]]]:
    """Yields (stack's name, layer's weights, normed inputs [b*t d] of its feed-forward) for each layer of the trunk.

    The layers are in order and run in the forward's blocks. Of a stack, the weights of one layer are read at a time.
    """
    tokens = jnp.asarray(tokens)
    b, t = tokens.shape
    execution, region = ExecutionConfig(), Region()
    weights = WeightGatherer(cfg, region, execution)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    context, _ = make_context(positions, None, None, cfg, execution, region)

    @functools.partial(jax.jit, static_argnames="kind")
    def step(w, idle, x, selection, kind):
        middle = block(w | idle, x, selection, None, context, kind=kind)[0]
        x, selection, *_ = block(w, x, selection, None, context, kind=kind)
        return x, selection, rms_norm(middle, w["mlp_norm"], cfg.rms_norm_eps)

    embedding = {"embed": {"weight": jnp.asarray(params["embed"]["weight"][()])}}
    x, selection = vocabulary.embed(embedding, weights, tokens), Selection(None, None)
    for name, layers in glm5.stacks(cfg):
        for layer in layers:
            w = weights(name, glm5.layer_of(params[name], cfg, layers, layer), sliced=True)
            # With zero weights in its feed-forward, a layer returns that feed-forward's input. The zeros are arguments,
            # because as constants they make XLA:CPU leave some rows unwritten.
            idle = {part: jax.tree.map(jnp.zeros_like, w[part]) for part in PARTS if part in w}
            x, selection, normed = step(w, idle, x, selection, cfg.layer_kinds[layer])
            yield name, w, normed.reshape(b * t, -1)
