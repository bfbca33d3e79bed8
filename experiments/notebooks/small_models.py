"""Trains and measures the small models of the notebooks, in about a minute on two CPU cores."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from experiments import pretrain
from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.config import ModelConfig
from glm5_jax.data.loader import held_out_batches
from glm5_jax.data.mixture import AnySourceConfig, DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig, train

SHAKESPEARE = (SourceConfig(kind="shakespeare"),)


def small_model(**changes) -> ModelConfig:
    """Returns the `tiny` preset with two layers, the second with experts, no MTP and dense attention.

    changes: other fields.
    """
    small = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "attention": "dense"}
    return dataclasses.replace(presets.tiny(), **small | changes)


def short_stage(
    model: ModelConfig,
    *,
    steps: int,
    sources: Sequence[AnySourceConfig] = SHAKESPEARE,
    length: int = 128,
    rows: int = 8,
    peak: float = 5e-3,
    **changes,
) -> ExperimentConfig:
    """Returns a stage of training on rows of text or chats that saves its end only.

    Args:
      length, rows: tokens of a row, and rows of a batch.
      peak: highest learning rate.
      changes: other fields.
    """
    base = pretrain.tiny()
    is_text = all(isinstance(source, SourceConfig) for source in sources)
    config = dataclasses.replace(
        base,
        name="notebook",
        model=model,
        data=DataConfig(
            sources=tuple(sources),
            sequence_length=length,
            packing="concat" if is_text else "best_fit",
        ),
        batch=pretrain.constant_batch(rows * length),
        schedule=dataclasses.replace(base.schedule, peak=peak, total_steps=steps),
        step=dataclasses.replace(base.step, mtp_steps=model.num_nextn_predict_layers),
        sample=base.sample if is_text else SampleConfig(),  # its prompts are text, not chats
        train=TrainConfig(eval_interval=0, sample_interval=0, save_interval=steps, keep=1),
    )
    return dataclasses.replace(config, **changes)


def train_model(
    config: ExperimentConfig, workdir: str | os.PathLike
) -> tuple[glm5.Glm5, Tokenizer]:
    """Trains a model, unless the workdir has it already. Returns it and its tokenizer."""
    with contextlib.redirect_stderr(sys.stdout):  # one output of the cell, in order
        train(config, workdir)
    return models.load_model(workdir), models.load_tokenizer(workdir)


def held_out_text(tokenizer: Tokenizer, rows: int, length: int) -> Int[np.ndarray, "rows length"]:
    """Returns rows of the part of Shakespeare that `short_stage` does not train on."""
    data = DataConfig(sources=SHAKESPEARE, sequence_length=length)
    batches = held_out_batches(data, SHAKESPEARE[0], tokenizer, rows, max_rows=rows)
    return next(batches)["token_ids"]


@functools.partial(jax.jit, static_argnames="cfg")
def token_losses(
    params: PyTree, tokens: Int[Array, "b t"], cfg: ModelConfig
) -> Float[Array, "b t-1"]:
    """Returns the loss of each token after the first, in nats."""
    log_probs = jax.nn.log_softmax(glm5.forward(params, tokens, cfg).logits[:, :-1])
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]


@functools.partial(jax.jit, static_argnames="steps")
def lowest_losses(
    params: PyTree, tokens: Int[Array, " t"], steps: int = 2000
) -> Float[Array, " t"]:
    """Returns the lowest loss of each token, in nats, that any hidden state gives with the final norm and the head.

    Adapters change hidden states only, so that no adapter gets below it. steps: steps of gradient descent.
    """
    head = params["final_norm"][:, None] * params["lm_head"]["weight"]

    def lowest(token):
        def loss(state):
            state = state * jax.lax.rsqrt(jnp.mean(state**2))
            return -jax.nn.log_softmax(state @ head)[token]

        def descend(state, _):
            value, gradient = jax.value_and_grad(loss)(state)
            return state - 0.3 * jnp.linalg.norm(state) * gradient, value

        return jax.lax.scan(descend, head[:, token], length=steps)[1].min()

    return jax.lax.map(lowest, tokens, batch_size=64)
