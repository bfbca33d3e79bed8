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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5, quant, vocabulary
from glm5_jax.model.block import block
from glm5_jax.model.context import make_context
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.experts import NAMES
from glm5_jax.model.indexer import Selection
from glm5_jax.model.router import route
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import Region
from glm5_jax.parallel.tree import flatten, unflatten
from pallas_kernels.grouped_matmul.xla import swiglu
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
        scale = jnp.asarray(scale)
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
) -> dict[str, np.ndarray]:
    """Returns the scales [l f] or [l e f] of each feed-forward by its path; see `smooth`."""
    scales_of = collections.defaultdict(list)
    for one in feed_forwards(params, cfg, tokens):
        group_of_part = group if one.path.endswith("/experts") else None
        scale = scales(*one.matrices, one.used, one.x, group_of_part)
        scales_of[one.path].append(np.asarray(scale))
    num_experts = cfg.n_routed_experts
    return {
        path: np.stack(scales_of_path).reshape(
            *((-1, num_experts) if path.endswith("/experts") else (-1,)), scales_of_path[0].shape[0]
        )
        for path, scales_of_path in scales_of.items()
    }


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


class FeedForward(NamedTuple):
    """Matrices of a dense feed-forward, of a shared expert or of one routed expert, with its inputs.

    Attributes:
      path: path of the feed-forward without its matrices.
      matrices: gate, up and down.
      x: normed inputs.
      used: inputs that it receives.
    """

    path: str
    matrices: tuple[Array, Array, Array]
    x: Float[Array, "m d"]
    used: Bool[Array, " m"]


def feed_forwards(
    params: PyTree, cfg: ModelConfig, tokens: Int[ArrayLike, "b t"]
) -> Iterator[FeedForward]:
    """Yields each feed-forward of the trunk, in order. The layers run in the forward's blocks.

    One layer's attention and one expert are read at a time, so that the experts of a layer are never in memory together.
    """
    tokens = jnp.asarray(tokens)
    b, t = tokens.shape
    execution, region = ExecutionConfig(), Region()
    weights = WeightGatherer(cfg, region, execution)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    context, _ = make_context(positions, None, None, cfg, execution, region)

    @functools.partial(jax.jit, static_argnames="kind")
    def attend(w, x, selection, kind):
        x, selection, *_ = block(w, x, selection, None, context, kind=kind)
        return x, selection, rms_norm(x, w["mlp_norm"], cfg.rms_norm_eps).reshape(b * t, -1)

    def read(path, at):
        parts = (params[path.split("/")[0]][path.split("/")[1]][name][at] for name in NAMES)
        gate, up, down = (
            quant.fake_quantize(jnp.asarray(w), f"{path}/{name}", cfg.int4_group).astype(cfg.dtype)
            for name, w in zip(NAMES, parts)
        )
        return gate, up, down

    embedding = {"embed": {"weight": jnp.asarray(params["embed"]["weight"][()])}}
    x, selection = vocabulary.embed(embedding, weights, tokens), Selection(None, None)
    everything = jnp.ones(b * t, jnp.float32)
    # With zero weights in its feed-forward, a layer returns that feed-forward's input. The zeros are arguments, because
    # as constants they make XLA:CPU leave some rows unwritten.
    size = cfg.hidden_size, 1
    idle = dict(zip(NAMES, (jnp.zeros(shape, cfg.dtype) for shape in (size, size, size[::-1]))))
    for name, layers in glm5.stacks(cfg):
        rest = {part: w for part, w in params[name].items() if part not in PARTS}
        for index, layer in enumerate(layers):
            w = weights(name, glm5.layer_of(rest, cfg, layers, layer), sliced=True)
            x, selection, normed = attend(w | {"mlp": idle}, x, selection, cfg.layer_kinds[layer])
            total = jnp.zeros(normed.shape, jnp.float32)
            for part in [part for part in PARTS if part in params[name]]:
                path = f"{name}/{part}"
                shares = [(index, everything)]
                if part == "experts":
                    shares = [
                        ((index, e), s) for e, s in enumerate(_shares(w["router"], normed, cfg))
                    ]
                for at, share in shares:
                    matrices = read(path, at)
                    yield FeedForward(path, matrices, normed, share > 0)
                    total = total + _weighted_output(*matrices, share, normed)
            x = x + total.reshape(x.shape).astype(x.dtype)


@functools.partial(jax.jit, static_argnames="cfg")
def _shares(router: PyTree, x: Float[Array, "m d"], cfg: ModelConfig) -> Float[Array, "e m"]:
    """Returns the weight of each expert in the output of each token."""
    routing = route(router, x, cfg)
    chosen = jax.nn.one_hot(routing.expert_ids, cfg.n_routed_experts)
    return jnp.einsum("mae,ma->em", chosen, routing.combine_weights.astype(jnp.float32))


@jax.jit
def _weighted_output(gate, up, down, share, x):
    """Returns float32[m d]: the output of a feed-forward times a weight for each input."""
    return swiglu(x, gate, up, down)[0].astype(jnp.float32) * share[:, None]
