"""Tests that every stage runs the same attention function `mla`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model import attention, glm5
from glm5_jax.model.cache import init_cache
from glm5_jax.model.generate import generate
from glm5_jax.training.gradients import Rates, gradient_function, loss_function
from glm5_jax.training.step_config import StepConfig
from tests.model import golden as goldens

# No other test has this length, so no layer was traced before `mla` is broken.
CFG = dataclasses.replace(presets.tiny(), max_position_embeddings=999)
PARAMS = glm5.abstract_params(CFG)
TOKENS = jax.ShapeDtypeStruct((2, 64), jnp.int32)
ONE = jax.ShapeDtypeStruct((2, 1), jnp.int32)
HIDDEN = jax.ShapeDtypeStruct((2, 64, CFG.hidden_size), jnp.float32)
BATCH = {k: TOKENS for k in ("token_ids", "segment_ids", "positions")}
BATCH |= {k: jax.ShapeDtypeStruct((2, 64), jnp.float32) for k in ("loss_mask", "ce_weight")}
RATES = Rates(*(jax.ShapeDtypeStruct((), jnp.float32),) * 2)


def cache(**kwargs):
    return jax.eval_shape(lambda: init_cache(CFG, 2, 70, **kwargs))


def forward(params, tokens, cache=None):
    return glm5.forward(params, tokens, CFG, cache=cache)


def draft(params, hidden, following, cache=None):
    return glm5.forward_mtp(params, hidden, following, CFG, cache=cache)


STAGES = {
    "log-probs": (forward, PARAMS, TOKENS),
    "training loss": (loss_function(CFG, StepConfig()), PARAMS, BATCH, RATES),
    "training gradients": (gradient_function(CFG, StepConfig()), PARAMS, BATCH, RATES),
    "prefill": (forward, PARAMS, TOKENS, cache()),
    "decoding": (forward, PARAMS, ONE, cache()),
    "drafting": (draft, PARAMS, HIDDEN, TOKENS),
    "drafting with a cache": (draft, PARAMS, HIDDEN, TOKENS, cache(num_layers=1)),
}


class Broken(Exception):
    pass


@pytest.fixture
def broken_mla(monkeypatch):
    def mla(*args):
        raise Broken

    monkeypatch.setattr(attention, "mla", mla)


@pytest.mark.usefixtures("broken_mla")
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_calls_mla(stage):
    function, *args = STAGES[stage]
    with pytest.raises(Broken):
        jax.eval_shape(lambda *a: function(*a), *args)


@pytest.mark.usefixtures("broken_mla")
def test_generation_calls_mla():
    golden = goldens.load("hf_tiny_d")
    cfg = dataclasses.replace(golden.cfg, max_position_embeddings=999)
    with pytest.raises(Broken):
        generate(golden.params, np.ones((1, 3), np.int32), cfg, 1)
