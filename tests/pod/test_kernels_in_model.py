"""What `auto` picks for the whole model on a chip that is not there: its programs hold the kernels."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.model.cache import init_cache
from pallas_kernels.cross_entropy import linear_cross_entropy
from tests.kernels.offline import compile_for

pytestmark = pytest.mark.aot

LENGTH = 1024  # twice what is selected
TRAINED = {
    "dense": {"flash_mla_forward", "flash_mla_backward"},
    "sparse": {"lightning_indexer", "sparse_flash_attention", "sparse_flash_attention_backward"},
}
ALWAYS = {"grouped_matmul", "grouped_matmul_dw", "cross_entropy"}


def config(attention: str):
    return dataclasses.replace(presets.small(), num_hidden_layers=2, attention=attention)


def params_of(cfg):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), glm5.abstract(cfg))


def kernels(compiled) -> set[str]:
    """Names of the Pallas kernels in a program compiled for a TPU."""
    calls = re.findall(
        r'%(\w+?)[.\d]* = [^\n]*custom_call_target="tpu_custom_call"', compiled.as_text()
    )
    return {name.removeprefix("jvp_").removesuffix("_") for name in calls}


@pytest.mark.parametrize("attention", TRAINED)
def test_training(attention):
    cfg = config(attention)

    def loss(params, tokens):
        hidden = glm5.forward(params, tokens, cfg).hidden
        rows = hidden.reshape(-1, hidden.shape[-1])
        return linear_cross_entropy(rows, params["lm_head"]["weight"], tokens.reshape(-1), 512)[
            0
        ].sum()

    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    found = kernels(compile_for("v5p", jax.grad(loss), params_of(cfg), tokens))
    print(found)
    assert found >= TRAINED[attention] | ALWAYS


@pytest.mark.parametrize("attention", TRAINED)
def test_decoding(attention):
    cfg = config(attention)
    cache = jax.eval_shape(lambda: init_cache(cfg, 8, LENGTH, jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32)

    def advance(params, tokens, cache):
        return glm5.forward(params, tokens, cfg, cache=cache).logits

    found = kernels(compile_for("v5p", advance, params_of(cfg), tokens, cache))
    print(found)
    assert found >= {"mla_prologue", "grouped_matmul"}
