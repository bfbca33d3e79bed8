"""Tests of 8-bit pages: their bytes, and a forward over them against the NumPy model."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.model.cache import FETCHING_QUERIES, PagedCache, init_pages
from pallas_kernels import backends
from tests.kernels.implementations import in_tiers
from tests.model import golden as goldens
from tests.oracles import glm5 as oracle

PAGE = 4
forward = jax.jit(glm5.forward, static_argnames="cfg")


def num_bytes(cfg, **kinds):
    """Returns the bytes of one token in the pages of all layers."""
    pages = jax.eval_shape(lambda: init_pages(cfg, 3, 64, **kinds))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    return size / (3 * 64)


@pytest.mark.parametrize("kind", in_tiers(["fp8"], ["int8"]))
def test_counts_bytes_of_8_bit_pages(kind):
    """Like DeepSeek's, a latent takes 656 bytes (512 values, 4 scales, 64 bfloat16), an index key 132."""
    cfg, latent, index = presets.glm5(), 512 + 4 * 4 + 2 * 64, 128 + 4
    both = {"index_cache": kind, "latent_cache": kind}
    assert num_bytes(cfg, **both) == 78 * (latent + index) == 61_464
    assert num_bytes(presets.glm5_2(), **both) == 78 * latent + 21 * index == 53_940
    assert num_bytes(cfg, index_cache=kind) == 78 * (1152 + index) == 100_152
    assert num_bytes(cfg, latent_cache=kind) == 78 * (latent + 256)
    assert num_bytes(presets.glm4_7_flash(), latent_cache=kind) == 47 * latent
    assert num_bytes(cfg, num_layers=1, **both) == latent + index  # the MTP layer
    assert num_bytes(cfg) == 109_824


def test_pads_tpu_rows_to_full_lanes(monkeypatch):
    """Otherwise XLA would change the layout of all pages at every call."""
    monkeypatch.setattr(backends, "platform", lambda: "tpu")
    assert num_bytes(presets.glm5(), latent_cache="fp8") == 78 * (1024 + 256)
    assert num_bytes(presets.glm5()) == 78 * (1536 + 256)
    assert num_bytes(presets.glm5(), dtype="float32") == 78 * (2560 + 512)


@pytest.mark.parametrize(
    ("changes", "kinds", "words"),
    [
        ({}, {"latent_cache": "int4"}, "latent_cache is 'int4'; use int8, fp8 or None"),
        ({}, {"index_cache": "bf16"}, "index_cache is 'bf16'; use int8, fp8 or None"),
        ({"attention": "dense"}, {"index_cache": "fp8"}, "the model has no indexer; use None"),
        ({"dtype": "float64"}, {"latent_cache": "fp8"}, "for float64; use bfloat16 or float32"),
    ],
)
def test_rejects_unsupported_page_kinds(changes, kinds, words):
    with pytest.raises(ValueError, match=words):
        init_pages(dataclasses.replace(presets.tiny(), **changes), 1, 1, **kinds)


@functools.cache
def oracle_logits(name, **kinds):
    """Returns the oracle's logits [b t v] with caches of these kinds."""
    config, weights = oracle.load(goldens.FOLDER / name)
    tokens = goldens.load(name).tokens
    return oracle.forward(weights, config | kinds, tokens)["logits"]


def assert_near(got, want, plain):
    """Checks logits against the oracle's, and that 8 bits change the oracle's.

    Values halfway between two may be rounded to either, which changes logits much less than 8 bits do.
    """
    effect = np.abs(want - plain).max(-1)
    assert effect.max() > 1e-3
    off = np.abs(got - want).max(-1)
    assert np.median(off) < 2e-5 and off.max() < effect.max() / 5


def logits_of(golden, kinds, chunk):
    """Returns logits [b t v] of a golden's rows over pages, computed in chunks of a row."""
    t = golden.tokens.shape[1]
    tables = np.random.default_rng(0).permutation(-(-t // PAGE)).astype(np.int32)[None]
    rows = []
    for row in golden.tokens:
        layers = init_pages(golden.cfg, tables.size, PAGE, **kinds)
        cache, logits = PagedCache(layers, tables, np.zeros(1, np.int32)), []
        for first in range(0, t, chunk):
            out = forward(
                golden.params, row[None, first : first + chunk], cfg=golden.cfg, cache=cache
            )
            cache = out.cache
            logits.append(np.asarray(out.logits[0]))
        rows.append(np.concatenate(logits))
    return np.stack(rows)


CASES = {
    "shared indices": ("hf_tiny_b", {"index_cache": "int8", "latent_cache": "fp8"}, (22, 4)),
    "shared indices, kinds swapped": (
        "hf_tiny_b",
        {"index_cache": "fp8", "latent_cache": "int8"},
        (22, 4),
    ),
    "dense": ("hf_tiny_d", {"latent_cache": "int8"}, (30, 5)),
}


@pytest.mark.parametrize(
    ("case", "has_many_queries"),
    in_tiers(
        [("dense", False)], [("dense", True), *itertools.product([*CASES][:2], [True, False])]
    ),
)
def test_forward_over_8_bit_pages_equals_oracle(case, has_many_queries):
    """The pages of many queries are gathered first, those of few are not."""
    name, kinds, (many, few) = CASES[case]
    assert few <= FETCHING_QUERIES < many
    got = logits_of(goldens.load(name), kinds, many if has_many_queries else few)
    assert_near(got, oracle_logits(name, **kinds), oracle_logits(name))


def test_drafting_over_8_bit_pages_equals_oracle():
    golden, kinds = goldens.load("hf_tiny_a"), {"index_cache": "fp8", "latent_cache": "int8"}
    config, weights = oracle.load(goldens.FOLDER / "hf_tiny_a")
    hidden = golden.arrays["final_hidden"]
    want, plain = (
        oracle.mtp(weights, config | caches, golden.tokens, hidden)[0]["logits"]
        for caches in (kinds, {})
    )
    layers = init_pages(golden.cfg, 20, PAGE, num_layers=1, **kinds)
    tables = np.random.default_rng(0).permutation(20).reshape(2, 10).astype(np.int32)
    cache, got = PagedCache(layers, tables, np.zeros(2, np.int32)), []
    draft = jax.jit(glm5.forward_mtp, static_argnums=3)
    for first in range(0, 39, 13):
        after = slice(first + 1, first + 14)
        # The oracle's positions begin at 1, and other rotations would round differently.
        places = np.tile(np.arange(first + 1, first + 14, dtype=np.int32), (2, 1))
        args = golden.params, hidden[:, first : first + 13], golden.tokens[:, after], golden.cfg
        out = draft(*args, positions=places, cache=cache)
        cache = out.cache
        got.append(np.asarray(out.logits))
    assert_near(np.concatenate(got, axis=1), want, plain)
