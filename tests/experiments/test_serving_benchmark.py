"""Arithmetic of the serving benchmark: bytes of pages, requests that fit, differences with 8-bit pages."""

import dataclasses

import numpy as np
import pytest

from experiments.benchmarks import serving
from glm5_jax.model import glm5
from tests.mesh import cases


@pytest.mark.slow
def test_counts_bytes_of_pages_and_conversations():
    """The bytes are 92 layers of 8 heads of 128, twice; and 78 layers of 512 + 64, and of 128."""
    sizes = [serving.token_bytes(cfg, **kinds) for _, cfg, kinds in serving.caches()]
    latent, latent8, index, index8 = 2 * (512 + 64), 512 + 4 * 4 + 2 * 64, 2 * 128, 128 + 4
    assert sizes == [
        92 * 2 * 8 * 128 * 2,
        78 * latent,
        78 * latent8,
        78 * (latent + index),
        78 * (latent + index8),
        78 * (latent8 + index8),
        78 * latent8 + 21 * index8,
    ]
    room = 141e9 / 32_768
    assert [serving.num_admitted(size) for size in sizes] == [int(room / size) for size in sizes]


@pytest.mark.slow
def test_compares_8_bit_pages_with_forward():
    cfg = dataclasses.replace(cases.config(), eos_token_id=())
    params, tokens = (
        cases.params(cfg),
        np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40)),
    )
    logits = glm5.forward(params, tokens, cfg).logits
    want = np.asarray(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
    batch = {"token_ids": tokens.astype(np.int32)}
    exact, int8, fp8 = (
        np.asarray(serving.log_probs_over_pages(params, batch, cfg=cfg, latent_cache=kind))
        for kind in (None, "int8", "fp8")
    )
    np.testing.assert_allclose(exact, want, atol=1e-4)
    off = [np.median(np.abs(x - want)) for x in (exact, int8, fp8)]
    assert off[0] < 1e-5 < 1e-4 < off[1] < off[2]
