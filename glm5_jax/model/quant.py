"""Training with int4 experts: the forward of a model with `int4_group` uses fake-quantised weights.

GLM-5 2.4.3 trains SFT this way, so that the exported int4 model is the one that was trained. The
only quantiser is `pallas_kernels.w4a8_matmul.quantize`, here and in checkpoint/hf_int4.py. Groups run
along the dimension that a product sums over: d of gate and up [e d f], f of down [e f d].
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.parallel.tree import flatten, map_with_path, matches_any
from pallas_kernels.quantized_weights import Fp8, Int4
from pallas_kernels.w4a8_matmul.quantize import round_w4, scale_w4

ROUTED = (r"(^|/)experts/(gate|up|down)$",)  # patterns of the weights that become int4
FEED_FORWARD = (r"/(gate|up|down)$",)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def quantize_dequantize(w: Float[Array, "... k n"], group: int) -> Float[Array, "... k n"]:
    """Rounds weights to int4 and back to float32. The gradient is straight-through.

    group: rows of k that share a scale.
    """
    return scale_w4(*round_w4(w, group))


@quantize_dequantize.defjvp
def _straight_through(group, primals, tangents):
    # The usual w + stop_gradient(rounded - w) would round once more in its sum.
    return quantize_dequantize(*primals, group), tangents[0].astype(jnp.float32)


def fake_quantize(
    w: Float[Array, "... k n"], path: str, group: int | None
) -> Float[Array, "... k n"]:
    """Returns w after an int4 round trip if its path is that of a routed expert, else w itself.

    group: rows of k that share a scale; None: nothing is quantised.
    """
    return w if group is None or not matches_any(ROUTED, path) else quantize_dequantize(w, group)


def with_int4_experts(params: PyTree, cfg: ModelConfig) -> PyTree:
    """Returns the parameters with fake-quantised experts in the compute dtype.

    A config with `int4_group=None` computes with them what cfg computes with params.
    """
    if cfg.int4_group is None:
        return params

    def one(path, w):
        return (
            quantize_dequantize(w, cfg.int4_group).astype(cfg.dtype)
            if matches_any(ROUTED, path)
            else w
        )

    return map_with_path(one, params)


def check_shards(cfg: ModelConfig, shapes: PyTree, shardings: PyTree) -> None:
    """Raises ValueError if a device's shard ends inside a group of int4 experts, or of width inside a block of FP8.

    shapes, shardings: trees of shapes and NamedShardings of the parameters.
    """
    shapes = flatten(shapes)
    for path, sharding in flatten(shardings).items():
        leaf, group = shapes[path], cfg.int4_group
        if isinstance(leaf, Fp8):
            _check_fp8_shards(path, leaf, sharding.values)
            continue
        if not matches_any(ROUTED, path):
            continue
        if isinstance(leaf, Int4):
            # Only `tensor` may split inside a group: other axes shard between groups.
            sharding, group = sharding.packed, leaf.group
            axes = ("tensor",) if path.endswith("down") else ()
        else:
            entry = sharding.spec[-2]
            axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        sizes = {axis: sharding.mesh.shape[axis] for axis in axes}
        rows = leaf.shape[-2] // math.prod(sizes.values())
        if group is not None and rows % group:
            axis_sizes = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(
                f"int4 in groups of {group}: mesh axes {axis_sizes} cut {path} into shards of {rows} rows, "
                "which are not whole groups; use a group that divides them, or smaller axes"
            )


def _check_fp8_shards(path: str, leaf: Fp8, sharding: NamedSharding) -> None:
    """Raises ValueError if the axis `tensor`, which always divides the width of a feed-forward, would cut a block."""
    size = sharding.mesh.shape["tensor"]
    if size == 1 or not matches_any(FEED_FORWARD, path):
        return
    dim = -2 if path.endswith("down") else -1
    entry = sharding.spec[dim]
    if "tensor" not in (entry if isinstance(entry, tuple) else (entry,)):
        raise ValueError(
            f"FP8 in blocks of {leaf.group}: mesh axis tensor={size} cuts the width {leaf.shape[dim]} of {path} inside a "
            "block; use a smaller axis"
        )
