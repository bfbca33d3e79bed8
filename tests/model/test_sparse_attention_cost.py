"""Tests that attention after selection is linear in the length, and so is the memory of a forward."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from glm5_jax import presets
from glm5_jax.model import attention, glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.flops import count_flops
from pallas_kernels import blocks
from tests.kernels.implementations import in_tiers


@pytest.fixture(autouse=True)
def few_extents(monkeypatch):
    """Uses two lengths of keys instead of sixteen, to compile eight times faster."""
    monkeypatch.setattr(blocks, "EXTENTS", 2)


@pytest.fixture
def scoped(monkeypatch):
    """Adds a scope around `mla`, because selection, which scores all pairs, runs before it."""
    plain = attention.mla

    def mla(*args):
        with jax.named_scope("after_selection"):
            return plain(*args)

    monkeypatch.setattr(attention, "mla", mla)


def after_selection(cfg, t, execution=ExecutionConfig()):
    tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def forward(params, tokens):
        return glm5.forward(params, tokens, cfg, execution=execution).logits

    return count_flops(forward, glm5.abstract_params(cfg), tokens, scope="after_selection")


GATHERED = ExecutionConfig(attention_form="gathered")


@pytest.mark.usefixtures("scoped")
@pytest.mark.parametrize(
    "preset,execution",
    in_tiers(
        [("glm5", GATHERED)],
        [("tiny", ExecutionConfig()), ("small", ExecutionConfig()), ("glm5_2", GATHERED)],
    ),
)
@pytest.mark.parametrize("t", in_tiers([32768], [16384]))
def test_attention_after_selection_is_linear_in_length(preset, execution, t):
    cfg = dataclasses.replace(presets.get(preset), max_position_embeddings=32768)
    n, h, r, u = (
        cfg.num_attention_heads,
        cfg.qk_nope_head_dim,
        cfg.qk_rope_head_dim,
        cfg.v_head_dim,
    )
    c = cfg.kv_lora_rank
    per_query = n * (c * h + cfg.index_topk * 2 * (c + r) + c * u + u * cfg.hidden_size)
    assert after_selection(cfg, t, execution) == 2 * cfg.num_hidden_layers * t * per_query


@pytest.mark.slow
@pytest.mark.usefixtures("scoped")
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_flop_count_detects_dense_mask(form):
    """These forms mask all keys, so their FLOPs quadruple."""
    cfg, execution = presets.glm5(), ExecutionConfig(attention_form=form)
    at_16k, at_32k = (after_selection(cfg, t, execution) for t in (16384, 32768))
    assert at_32k / at_16k > 3


SMALL = dataclasses.replace(
    presets.tiny(),
    num_hidden_layers=1,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    max_position_embeddings=32768,
)


def temporary_bytes(cfg, t, execution=ExecutionConfig()):
    def forward(params, tokens):
        return glm5.forward(params, tokens, cfg, execution=execution).hidden

    tokens = jax.ShapeDtypeStruct((1, t), jnp.int32)
    compiled = jax.jit(forward).lower(glm5.abstract_params(cfg), tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention,lengths",
    [("sparse", (4096, 8192, 16384, 32768)), ("dense", (8192, 16384, 32768))],
)
def test_memory_of_forward_is_linear_in_length(attention, lengths):
    cfg = dataclasses.replace(SMALL, attention=attention)
    used = [temporary_bytes(cfg, t) for t in lengths]
    pairs = zip(zip(lengths, used), zip(lengths[1:], used[1:]))
    slopes = [(b - a) / (end - start) for (start, a), (end, b) in pairs]
    assert max(slopes) < 1.1 * min(slopes), used
