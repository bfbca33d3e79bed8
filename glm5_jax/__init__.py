"""GLM-5 in JAX: `import glm5_jax as glm`.

Names load when they are first used, so that flags for jax can still be set after the import.
"""

import importlib
from typing import Any

_HOME = {
    "ModelConfig": "glm5_jax.config",
    "presets": "glm5_jax.presets",
    "make_mesh": "glm5_jax.parallel.mesh",
    "Glm5": "glm5_jax.model.glm5",
    "load_hf": "glm5_jax.checkpoint.hf_import",
    "save_hf": "glm5_jax.checkpoint.hf_export",
    "Tokenizer": "glm5_jax.text.tokenizer",
    "render_chat": "glm5_jax.text.chat",
    "parse_reply": "glm5_jax.text.tool_calls",
    "Engine": "glm5_jax.inference.engine",
    "EngineConfig": "glm5_jax.inference.request",
    "train": "glm5_jax.training.pretraining",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'glm5_jax' has no attribute {name!r}")
    home = importlib.import_module(_HOME[name])
    return home if name == "presets" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
