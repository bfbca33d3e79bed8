"""Tests of the latent cache: its bytes, its writes, and MTP drafting with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.model.cache import init_cache, write
from tests.model import golden as goldens


def num_bytes(cfg, capacity, **kwargs):
    cache = jax.eval_shape(lambda: init_cache(cfg, 1, capacity, **kwargs))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))


def test_counts_cache_bytes_per_token():
    """Each of GLM-5's 78 layers stores 576 latent numbers and 128 of the index key, in bfloat16."""
    latent, index = 2 * (512 + 64), 2 * 128
    assert num_bytes(presets.glm5(), 1) == 78 * (latent + index) == (87.75 + 19.5) * 1024
    assert num_bytes(presets.glm5_2(), 1) == 78 * latent + 21 * index
    assert num_bytes(presets.glm4_7_flash(), 1) == 47 * latent
    dense = dataclasses.replace(presets.glm5(), attention="dense")
    assert num_bytes(dense, 1) == 78 * latent
    assert num_bytes(presets.glm5(), 1, num_layers=1) == latent + index  # the MTP block
    assert num_bytes(presets.glm5(), 100, dtype="float32") == 200 * num_bytes(presets.glm5(), 1)


def test_new_cache_is_empty():
    cache = init_cache(presets.tiny(), 2, 5)
    assert cache.length == 0 and not cache.segments.any()
    assert (
        cache.layers[0].latent.shape == (2, 5, 60) and cache.layers[0].latent.dtype == jnp.float32
    )


@pytest.mark.parametrize("length", [0, 3])
def test_writes_at_length(length):
    buffer = jnp.zeros((2, 6, 3), jnp.bfloat16)
    new = jnp.ones((2, 2, 3))
    got = jax.jit(write)(buffer, new, length)
    assert got.dtype == jnp.bfloat16
    expected = np.zeros((2, 6, 3))
    expected[:, length : length + 2] = 1
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name,sizes", [("hf_tiny_a", (13,) * 3), ("hf_tiny_d", (1,) * 29)])
def test_cached_drafting_equals_full_forward(name, sizes):
    """Drafting runs in chunks and token by token; transformers' arrays were computed without a cache."""
    golden = goldens.load(name)
    expected = golden.arrays["mtp_logits"]
    length = expected.shape[1]
    hidden, following = golden.arrays["final_hidden"][:, :-1], golden.tokens[:, 1:]
    step = jax.jit(glm5.forward_mtp, static_argnums=3)
    cache = init_cache(golden.cfg, 2, length + 3, num_layers=1)
    logits, first = [], 0
    for size in sizes:
        part = slice(first, first + size)
        out = step(golden.params, hidden[:, part], following[:, part], golden.cfg, cache=cache)
        cache, first = out.cache, first + size
        logits.append(out.logits)
    assert cache.length == length
    np.testing.assert_allclose(np.concatenate(logits, 1), expected, atol=8e-4)
