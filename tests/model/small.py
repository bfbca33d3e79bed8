"""Config of the smallest model that decodes, for tests of text, scores and drafts."""

import dataclasses

from glm5_jax import presets
from glm5_jax.config import ModelConfig


def one_layer(**changes) -> ModelConfig:
    """Returns a config of one dense layer of width 16 without end tokens; changes: other fields."""
    base = dataclasses.replace(
        presets.tiny(),
        hidden_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        intermediate_size=24,
        n_routed_experts=4,
        index_topk=None,
        attention="dense",
        eos_token_id=(),
        pad_token_id=None,
    )
    return dataclasses.replace(base, **changes)
