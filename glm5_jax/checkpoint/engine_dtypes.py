"""Dtypes in which engines hold weights, and in which trainers send them."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5, quant
from glm5_jax.model.lora import is_adapter
from glm5_jax.parallel import tree


def transfer_dtypes(cfg: ModelConfig, dtype: DTypeLike | None = None) -> dict[str, np.dtype]:
    """Returns {path: dtype in which that weight is transferred}.

    It is the dtype to which an engine of cfg would cast the weight, so that no weight is cast twice. dtype: replaces
    that of cfg. Weights that the engine needs in float32 stay so: routers, adapters, and experts that become int4.
    """
    narrow, wide = jnp.dtype(cfg.dtype if dtype is None else dtype), np.dtype(np.float32)
    return {
        path: wide if _is_wide(path, cfg) else narrow
        for path in tree.flatten(glm5.abstract_params(cfg))
    }


def accepted_dtypes(path: str, cfg: ModelConfig) -> tuple[str, ...]:
    """Returns the names of the dtypes in which an engine of cfg accepts a plain weight."""
    narrow = jnp.dtype(cfg.dtype).name
    return ("float32",) if _is_wide(path, cfg) else tuple({narrow: 0, "float32": 0})


def _is_wide(path: str, cfg: ModelConfig) -> bool:
    routed = cfg.int4_group is not None and tree.matches_any(quant.ROUTED, path)
    return "router/" in path or routed or is_adapter(path)
