"""Checkpoints of the small model, in place of those that a recipe starts from."""

import dataclasses
import pathlib
from typing import Any

import jax

from experiments import quantise
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from launch.rehearsal.arithmetic import is_quantised, stages_of

GROUP = 32  # inputs of an expert of the small model that share a scale


def write(config: Any, model: ModelConfig, folder: pathlib.Path) -> tuple[str | None, str | None]:
    """Writes random weights of the small model, and the same quantised if the recipe serves them.

    Returns the folders of both; None: the recipe names no such checkpoint. config: the recipe's config; model: the small
    model of its stages. Raises ValueError if the model cannot be quantised.
    """
    stages = [stage for _, stage in stages_of(config)]
    has_checkpoint = any(one.checkpoint is not None for one in stages or [config])
    if not has_checkpoint and not any(getattr(stage, "teachers", ()) for stage in stages):
        return None, None
    checkpoint, served = folder / "checkpoint", folder / "served"
    _save(model, checkpoint)
    if not any(
        getattr(stage, "has_engine_processes", False) and is_quantised(stage) for stage in stages
    ):
        return str(checkpoint), str(checkpoint)
    if quantise.main([str(checkpoint), str(served), "--plain", f"--group={GROUP}"]):
        raise ValueError(f"{checkpoint} could not be quantised")
    return str(checkpoint), str(served)


def _save(model: ModelConfig, folder: pathlib.Path) -> None:
    tokenizer = Tokenizer.default()
    ids = {"eos_token_id": tokenizer.eos_ids, "pad_token_id": tokenizer.pad_id}
    model = dataclasses.replace(model, int4_group=None, **ids)
    save_hf(glm5.init_params(model, jax.random.key(0)), folder, cfg=model, tokenizer=tokenizer)
