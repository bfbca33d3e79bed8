"""What a model with `int4_group` computes with: its routed experts as int4 stands for them.

GLM-5 2.4.3 trains SFT this way, so that the exported int4 model is the one that was trained. The one
quantiser is `pallas_kernels.w4a8_matmul.quantize`, here and in checkpoint/hf_int4.py. Groups run along
the dimension that a product sums over: d of gate and up [e d f], f of down [e f d].
"""

import functools
import math

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.core.tree import flatten, found, map_with_path
from pallas_kernels.quantised import Int4
from pallas_kernels.w4a8_matmul.quantize import round_w4, scale_w4

ROUTED = (r"(^|/)experts/(gate|up|down)$",)  # patterns of what becomes int4


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def imitate(w, group: int):
    """float32[... k n] that weights w [... k n] become as int4. Its gradient is straight through: w's."""
    return scale_w4(*round_w4(w, group))


@imitate.defjvp
def _straight_through(group, primals, tangents):
    # Not w + stop_gradient(imitated - w), whose sum rounds.
    return imitate(*primals, group), tangents[0].astype(jnp.float32)


def computed(w, path: str, group: int | None):
    """w [... k n], or what stands for it if it is of routed experts and group is not None."""
    return w if group is None or not found(ROUTED, path) else imitate(w, group)


def settled(params, cfg: ModelConfig):
    """The parameter tree with its experts as int4 stands for them, in the compute dtype.

    The same model without `int4_group` computes with it what cfg does with params.
    """
    if cfg.int4_group is None:
        return params

    def one(path, w):
        return imitate(w, cfg.int4_group).astype(cfg.dtype) if found(ROUTED, path) else w

    return map_with_path(one, params)


def check_shards(cfg: ModelConfig, shapes, shardings) -> None:
    """ValueError if a device's shard of experts would end inside a group (trees of shapes and
    NamedShardings of the parameters)."""
    shapes = flatten(shapes)
    for path, where in flatten(shardings).items():
        if not found(ROUTED, path):
            continue
        leaf, group = shapes[path], cfg.int4_group
        if isinstance(leaf, Int4):
            # Other axes cut between groups alone; the devices of this one compute with what they hold.
            where, group = where.packed, leaf.group
            axes = ("tensor",) if path.endswith("down") else ()
        else:
            entry = where.spec[-2]
            axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        sizes = {axis: where.mesh.shape[axis] for axis in axes}
        rows = leaf.shape[-2] // math.prod(sizes.values())
        if group is not None and rows % group:
            cut = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(
                f"int4 in groups of {group}: mesh axes {cut} cut {path} into shards of {rows} rows, "
                "which are not whole groups; use a group that divides them, or smaller axes"
            )
