"""Tests that `auto` selects the kernels of a chip in the model's compiled programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_cache, init_pages
from pallas_kernels import backends
from pallas_kernels.cross_entropy import linear_cross_entropy
from tests.kernels.offline import compile_for, form_of

pytestmark = pytest.mark.aot

LENGTH = 1024  # twice the number of selected keys
ALWAYS = {"grouped_matmul", "grouped_matmul_dw", "cross_entropy"}
TRAINED = {
    ("v5p", "dense"): {"flash_mla_forward", "flash_mla_backward"},
    ("v5p", "sparse"): {
        "lightning_indexer",
        "sparse_flash_attention",
        "sparse_flash_attention_backward",
    },
    ("h200", "dense"): {
        "flash_mla_attend",
        "flash_mla_sum_for_queries",
        "flash_mla_sum_for_keys",
    },
    ("h200", "sparse"): {
        "score_keys",
        "select_rows",
        "sparse_attend",
        "sparse_score",
        "sparse_spread",
        "sparse_collect",
    },
}
DECODED = {
    ("v5p", "dense"): {"mla_prologue", "flash_mla_forward", "grouped_matmul"},
    ("v5p", "sparse"): {
        "mla_prologue",
        "lightning_indexer",
        "sparse_flash_attention",
        "grouped_matmul",
    },
    ("h200", "dense"): {"mla_project", "flash_mla_attend_wide", "grouped_matmul"},
    ("h200", "sparse"): {
        "mla_project",
        "score_keys",
        "select_rows",
        "sparse_attend",
        "grouped_matmul",
    },
}


def config(attention: str):
    return dataclasses.replace(presets.small(), num_hidden_layers=2, attention=attention)


def params_of(cfg):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), glm5.abstract_params(cfg)
    )


def kernels(text: str) -> set[str]:
    """Returns the names of the Pallas kernels in the text of a program compiled for a TPU or GPU."""
    of_tpu = re.findall(r'%(\w+?)[.\d]* = [^\n]*custom_call_target="tpu_custom_call"', text)
    of_gpu = re.findall(r'custom_call_target="mosaic_gpu[^\n]*?op_name="[^"]*/(\w+)/[^/"]*"', text)
    return {name.removeprefix("jvp_").removesuffix("_") for name in of_tpu + of_gpu}


@pytest.mark.parametrize(("chip", "attention"), TRAINED)
def test_training_uses_kernels_of_chip(chip, attention):
    cfg = config(attention)

    def loss(params, tokens):
        hidden = glm5.forward(params, tokens, cfg).hidden
        rows = hidden.reshape(-1, hidden.shape[-1])
        return linear_cross_entropy(rows, params["lm_head"]["weight"], tokens.reshape(-1), 512)[
            0
        ].sum()

    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    names = kernels(compile_for(chip, jax.grad(loss), params_of(cfg), tokens).as_text())
    assert names >= TRAINED[chip, attention] | ALWAYS


@pytest.mark.parametrize(("chip", "attention"), DECODED)
def test_decoding_uses_kernels_of_chip(chip, attention):
    cfg = config(attention)
    cache = jax.eval_shape(lambda: init_cache(cfg, 8, LENGTH, jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32)

    def advance(params, tokens, cache):
        return glm5.forward(params, tokens, cfg, cache=cache).logits

    names = kernels(compile_for(chip, advance, params_of(cfg), tokens, cache).as_text())
    assert names >= DECODED[chip, attention]


@pytest.mark.parametrize("chip", ["v5p", "h200"])
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
def test_paged_decoding_copies_no_pages(chip, kind, monkeypatch):
    """The kernels read pages in place, so no temporary is as large as a layer's pages."""
    widths = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
    }
    cfg, count = dataclasses.replace(config("sparse"), **widths), 1024
    monkeypatch.setattr(backends, "platform", lambda: form_of(chip))
    layers = jax.eval_shape(
        lambda: init_pages(cfg, count, 64, "bfloat16", index_cache=kind, latent_cache=kind)
    )
    monkeypatch.undo()
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = PagedCache(layers, int32((8, LENGTH // 64)), int32((8,)))

    def advance(params, tokens, cache):
        out = glm5.forward(params, tokens, cfg, cache=cache)
        return out.logits, out.cache

    compiled = compile_for(chip, advance, params_of(cfg), int32((8, 1)), cache, donate=2)
    assert kernels(compiled.as_text()) >= DECODED[chip, "sparse"]
    pages = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers[0]))
    assert compiled.memory_analysis().temp_size_in_bytes < pages / 3
