"""Conversion of a trained model of full attention to other kinds of attention in chosen layers.

    full -> window      the same weights
    full -> simple_gdn  the same weights: q, k, v and o serve the delta rule
    full -> gdn         the same weights plus new ones, which start neutrally (`NEUTRAL`)

Existing weights are shared with the input, not copied. (GLM-5 2.1.2; the paper then trains for 190B tokens.)
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PyTree

from glm5_jax.config import RECURRENT_KINDS, ModelConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten, unflatten


def _last_tap(shape):
    """Returns the taps of an identity convolution: 1 on the token itself, 0 on earlier ones."""
    return jnp.zeros(shape).at[..., -1].set(1)


# Share of the state that decays per token. Not in the paper; the smallest initial value of public code.
SLOW = 0.001

# New weights of Gated DeltaNet.
# - Taps pass tokens unchanged.
# - Gates do not depend on the token yet: half of what a key recalls is replaced (beta = sigmoid(0)), and
#   a thousandth of the state decays (a_log = 0).
# - SiLU has no neutral argument except 0: a converted layer outputs zero until its output gate is trained.
NEUTRAL = {
    "conv_q": _last_tap,
    "conv_k": _last_tap,
    "conv_v": _last_tap,
    "a": jnp.zeros,
    "a_log": jnp.zeros,
    "dt_bias": lambda shape: jnp.full(shape, math.log(math.expm1(SLOW))),
    "b": jnp.zeros,
    "gate": jnp.zeros,
    "norm": jnp.ones,
}


def convert(
    params: PyTree, cfg: ModelConfig, kinds: Sequence[str]
) -> tuple[dict[str, Any], ModelConfig]:
    """Returns (params, config) of the model with the attention `kinds`, one of `config.LAYER_KINDS` per layer.

    - params: weights of a model of full or windowed attention. Its indexers, which were trained for full
      layers only, are dropped.
    - New weights have the dtype of the embedding. The caller puts them on a mesh (`glm5.param_shardings`).

    Raises ValueError if the model already has recurrent layers, or if kinds do not fit it.
    """
    target, old = convert_config(cfg, kinds), flatten(params)
    shared = {path: old[path] for path in flatten(glm5.abstract_params(target)) if path in old}
    dtype = old["embed/weight"].dtype
    return add_missing_weights(unflatten(shared), target, jax.random.key(0), dtype=dtype), target


def convert_config(cfg: ModelConfig, kinds: Sequence[str]) -> ModelConfig:
    """Returns the config with the attention `kinds` in its layers. Raises ValueError as `convert` does."""
    recurrent = sorted(set(cfg.layer_kinds) & set(RECURRENT_KINDS))
    if recurrent:
        raise ValueError(
            f"the model has {', '.join(recurrent)} layers; convert one of full attention instead"
        )
    return dataclasses.replace(
        cfg,
        layer_attention=tuple(kinds),
        attention="dense",
        index_topk=None,
        indexer_types=None,
    )


def add_missing_weights(
    params: PyTree,
    cfg: ModelConfig,
    key: Array,
    *,
    dtype="float32",
    mesh: Mesh | AbstractMesh | None = None,
) -> PyTree:
    """Adds the weights that a model of this config has and params lack.

    New weights existing the values of `glm5.init_params`; those of Gated DeltaNet start at `NEUTRAL`.
    """
    existing = flatten(params)
    missing = [path for path in flatten(glm5.abstract_params(cfg)) if path not in existing]
    if not missing:
        return params

    new = flatten(glm5.init_params(cfg, key, dtype, mesh, missing))
    for path in missing:
        neutral = NEUTRAL.get(path.split("/")[-1]) if "/gdn/" in path else None
        if neutral:
            value = neutral(new[path].shape).astype(dtype)
            new[path] = jax.device_put(value, new[path].sharding)
    return unflatten({path: (existing | new)[path] for path in flatten(glm5.abstract_params(cfg))})
