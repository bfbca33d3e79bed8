"""Scales between up- and down-projections that quantise best on text (AWQ, arXiv 2306.00978).

What a down-projection reads is silu(gate x) * up x: its channels can be scaled where up makes them and unscaled
where down reads them, at no cost. (GLM-5 5: Flex_AWQ_SSZ on the up-down subgraph.) A channel that is large on
text takes the int8 row's steps from the others; one whose weights are large takes their group's. Scales
x_rms**a / w_max**(1 - a) weigh the two; each matrix takes the a, or no scale, with the smallest error of its
product on the text. Scales of up's columns are absorbed by up's own scales, so only down is tried.
"""

import collections
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.core.mesh import Region
from glm5_jax.core.tree import flatten, unflatten
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.block import block
from glm5_jax.model.indexer import Selection
from glm5_jax.model.plan import Plan
from glm5_jax.model.router import route
from pallas_kernels.pointwise import rms_norm
from pallas_kernels.quantised import Int8, product
from pallas_kernels.w4a8_matmul import ref as w4a8
from pallas_kernels.w4a8_matmul.quantize import GROUP, quantize_a8, quantize_w4, round_w8

PARTS = ("mlp", "shared", "experts")
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def smooth(params, cfg: ModelConfig, tokens, group: int = GROUP):
    """The parameters of the same function, up and down scaled for `quantise` with this group.

    tokens int[b t]: text, all of which is read at once. The MTP layer stays as it is: it only drafts.
    """
    found = collections.defaultdict(list)
    for stack, w, x in feed_forwards(params, cfg, tokens):
        for part in [part for part in PARTS if part in w]:
            own = [w[part][k] for k in ("gate", "up", "down")]
            if part == "experts":
                ids = route(w["router"], x, cfg).expert_ids
                used = jax.nn.one_hot(ids, cfg.n_routed_experts, dtype=bool).any(1).T
                scale = _of_experts(*own, used, x, group=group)
            else:
                scale = scales(*own, jnp.ones(len(x), bool), x, None)
            found[f"{stack}/{part}"].append(scale)
    flat = flatten(params)
    for path, own in found.items():
        scale, up, down = jnp.stack(own), flat[f"{path}/up"], flat[f"{path}/down"]
        flat[f"{path}/up"] = (up / scale[..., None, :]).astype(up.dtype)
        flat[f"{path}/down"] = (down * scale[..., None]).astype(down.dtype)
    return unflatten(flat)


@functools.partial(jax.jit, static_argnames="group")
def scales(gate, up, down, used, x, group: int | None):
    """float32[f] for down's rows [f d], up's columns being divided by it; x [m d] are the inputs, of which those
    used bool[m] count. group: of int4 weights; None: of int8 ones."""
    x = x.astype(jnp.float32) * used[:, None]
    hidden = jax.nn.silu(x @ gate) * (x @ up)
    want = hidden @ down.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(hidden**2, 0) + 1e-12)
    most = jnp.max(jnp.abs(down), 1) + 1e-12

    def error(scale):
        rows, w = hidden / scale, down * scale[:, None]
        if group is None:
            got = product("md,df->mf", rows, Int8(*round_w8(w, (0,))))
        else:
            q, row_scale = quantize_a8(rows)
            got = w4a8.product(q, row_scale[:, None], *quantize_w4(w, group), jnp.float32)
        return jnp.sum((got - want) ** 2)

    tried = [jnp.ones_like(rms)]
    for a in EXPONENTS:
        s = rms**a / most ** (1 - a)
        tried.append(s / jnp.exp(jnp.mean(jnp.log(s))))
    tried = jnp.stack(tried)
    return tried[jnp.argmin(jax.lax.map(error, tried))]


@functools.partial(jax.jit, static_argnames="group")
def _of_experts(gate, up, down, used, x, group: int):
    """`scales` [e f] of experts with weights [e d f], [e f d] and used bool[e m], one after another."""
    return jax.lax.map(lambda own: scales(*own, x, group), (gate, up, down, used))


def feed_forwards(params, cfg: ModelConfig, tokens) -> Iterator[tuple]:
    """(name of the stack, the layer's weights, normed inputs [b*t d] of its feed-forward) of every layer of the
    trunk in order, from the forward's own blocks."""
    tokens = jnp.asarray(tokens)
    b, t = tokens.shape
    plan, region = Plan(), Region()
    weights = glm5.Weights(cfg, region, plan)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    context, _ = glm5.begin(positions, None, None, cfg, plan, region)

    @functools.partial(jax.jit, static_argnames="kind")
    def step(w, idle, x, selection, kind):
        middle = block(w | idle, x, selection, None, context, kind=kind)[0]
        x, selection, *_ = block(w, x, selection, None, context, kind=kind)
        return x, selection, rms_norm(middle, w["mlp_norm"], cfg.rms_norm_eps)

    x, selection = vocabulary.embed(params, weights, tokens), Selection(None, None)
    layers_of = glm5.unstack(params, cfg)
    for name, layers in glm5.stacks(cfg):
        for layer, w in zip(layers, layers_of[name]):
            w = weights(name, w, sliced=True)
            # Without its second half a layer ends where that would begin. As constants in the program, the
            # zeros would make XLA:CPU leave some rows unwritten.
            idle = {part: jax.tree.map(jnp.zeros_like, w[part]) for part in PARTS if part in w}
            x, selection, normed = step(w, idle, x, selection, cfg.layer_kinds[layer])
            yield name, w, normed.reshape(b * t, -1)
