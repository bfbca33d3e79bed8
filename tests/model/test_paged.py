"""Tests that a forward over pages equals the forward over the full text."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_cache, init_pages
from pallas_kernels import backends
from pallas_kernels.sparse_flash_attention import WordRows
from tests.kernels.implementations import in_tiers

SIZE, PAGES, WIDTH = 4, 40, 6  # slots per page, number of pages, pages per row
SPARSE = dataclasses.replace(
    presets.tiny(), num_hidden_layers=2, index_topk=6, max_position_embeddings=64
)
MODELS = {
    # No experts, to compile fast.
    "shared index": dataclasses.replace(
        SPARSE, indexer_types=("full", "shared"), first_k_dense_replace=2
    ),
    "sparse": SPARSE,
    "dense": dataclasses.replace(SPARSE, attention="dense"),
}
forward = jax.jit(glm5.forward, static_argnames="cfg")


@functools.cache
def problem(name="shared index"):
    """Returns (config, weights, token ids [3 24], their logits in one forward)."""
    cfg = MODELS[name]
    params = glm5.init_params(cfg, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, SIZE * WIDTH))
    return cfg, params, tokens, np.asarray(forward(params, tokens, cfg=cfg).logits)


def empty_cache(cfg, seed, **more):
    """Returns an empty cache with random pages."""
    tables = np.random.default_rng(seed).permutation(PAGES)[: 3 * WIDTH].reshape(3, WIDTH)
    layers = init_cache(cfg, PAGES, SIZE, **more).layers
    return PagedCache(layers, tables.astype(np.int32), np.zeros(3, np.int32))


def feed(cfg, params, tokens, cache, lengths, chunk=8):
    """Runs rows of tokens up to their lengths in chunks. Returns (logits by row, cache)."""
    logits = [[] for _ in tokens]
    while (np.asarray(cache.lengths) < lengths).any():
        first = np.asarray(cache.lengths)
        at = first[:, None] + np.arange(chunk)
        real = at < lengths[:, None]
        new = np.take_along_axis(tokens, np.minimum(at, tokens.shape[1] - 1), 1)
        out = forward(
            params, np.where(real, new, 0), cfg=cfg, segment_ids=real.astype(np.int32), cache=cache
        )
        cache = out.cache
        for row, is_real in enumerate(real):
            logits[row] += list(np.asarray(out.logits)[row, is_real])
    return [np.array(row) for row in logits], cache


@pytest.mark.parametrize(
    ("name", "chunk"), in_tiers([("shared index", 8)], [(name, 1) for name in MODELS])
)
def test_forward_over_pages_equals_full_forward(name, chunk):
    cfg, params, tokens, full_logits = problem(name)
    lengths = np.array([9, 21, 2], np.int32)
    logits, cache = feed(cfg, params, tokens, empty_cache(cfg, 1), lengths)
    assert np.asarray(cache.lengths).tolist() == lengths.tolist()
    more, cache = feed(cfg, params, tokens, cache, lengths + 3, chunk)
    for row in range(3):
        got = np.concatenate([logits[row], more[row]])
        np.testing.assert_allclose(got, full_logits[row, : len(got)], atol=2e-5)


def test_page_numbers_do_not_matter():
    cfg, params, tokens, _ = problem()
    lengths = np.array([9, 21, 2], np.int32)
    (one, first), (other, second) = (
        feed(cfg, params, tokens, empty_cache(cfg, seed), lengths) for seed in (1, 2)
    )
    for a, b in zip(one, other):
        np.testing.assert_array_equal(a, b)
    for layer in first.layers:
        for pages in layer:
            written = {
                int(page)
                for table, length in zip(first.tables, lengths)
                for page in table[: -(-length // SIZE)]
            }
            if pages is not None:  # layers with a shared index have no index keys
                assert {p for p in range(PAGES) if np.asarray(pages)[p].any()} == written


def test_rows_share_prefix_pages():
    cfg, params, tokens, _ = problem()
    tokens = tokens.copy()
    tokens[1, : 2 * SIZE] = tokens[0, : 2 * SIZE]
    unshared_logits = np.asarray(forward(params, tokens, cfg=cfg).logits)
    cache = empty_cache(cfg, 3)
    _, cache = feed(cfg, params, tokens, cache, np.array([2 * SIZE, 0, 0], np.int32))
    tables = np.array(cache.tables)
    tables[1, :2] = tables[0, :2]
    lengths = np.array([2 * SIZE, 2 * SIZE, 0], np.int32)
    cache = cache._replace(tables=tables, lengths=lengths)
    logits, _ = feed(cfg, params, tokens, cache, np.array([15, 18, 0], np.int32))
    np.testing.assert_allclose(logits[0], unshared_logits[0, 8:15], atol=2e-5)
    np.testing.assert_allclose(logits[1], unshared_logits[1, 8:18], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_prefill_of_one_row_in_long_chunks(name):
    """A prefill in chunks of 20 has a last chunk of 2."""
    cfg, params, tokens, full_logits = problem(name)
    cache = empty_cache(cfg, 1)
    cache = cache._replace(tables=cache.tables[1:2], lengths=np.zeros(1, np.int32))
    logits, cache = feed(cfg, params, tokens[1:2], cache, np.array([22]), chunk=20)
    np.testing.assert_allclose(logits[0], full_logits[1, :22], atol=2e-5)
    more, _ = feed(cfg, params, tokens[1:2], cache, np.array([24]), chunk=1)
    np.testing.assert_allclose(more[0], full_logits[1, 22:], atol=2e-5)


@pytest.mark.slow
def test_tpu_page_layout_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(backends, "platform", lambda: "tpu")
    words = {t: init_pages(SPARSE, PAGES, SIZE, t) for t in ("float32", "bfloat16")}
    monkeypatch.undo()
    cfg, params, tokens, _ = problem("sparse")
    lengths = np.array([9, 21, 2], np.int32)
    for dtype, layers in words.items():
        assert isinstance(layers[0].latent, WordRows)
        for rows, chunk in ((slice(3), 8), (slice(1, 2), 20)):
            plain = empty_cache(cfg, 1, dtype=dtype)
            plain = plain._replace(tables=plain.tables[rows], lengths=plain.lengths[rows])
            (got, cache), (want, _) = (
                feed(cfg, params, tokens[rows], each, lengths[rows], chunk)
                for each in (plain._replace(layers=layers), plain)
            )
            for a, b in zip(got, want):
                np.testing.assert_array_equal(a, b)
            assert isinstance(cache.layers[0].latent, WordRows)


def test_computes_logits_of_one_token_per_row():
    cfg, params, tokens, full_logits = problem()
    only = np.array([[3], [0], [7]], np.int32)
    out = forward(params, tokens[:, :8], cfg=cfg, cache=empty_cache(cfg, 1), logit_positions=only)
    assert out.logits.shape == (3, 1, cfg.vocab_size) and out.hidden.shape[1] == 8
    np.testing.assert_allclose(out.logits[:, 0], full_logits[np.arange(3), only[:, 0]], atol=2e-5)


def test_ignores_page_contents_after_row():
    cfg, params, tokens, full_logits = problem()
    cache = empty_cache(cfg, 1)
    noise = jax.tree.map(lambda x: np.full(x.shape, 7.0, np.float32), cache.layers)
    logits, _ = feed(cfg, params, tokens, cache._replace(layers=noise), np.array([9, 21, 2]))
    for row, got in enumerate(logits):
        np.testing.assert_allclose(got, full_logits[row, : len(got)], atol=2e-5)


@pytest.mark.slow
def test_drafting_over_pages_equals_full_drafting():
    cfg, params, tokens, _ = problem()
    hidden = np.asarray(forward(params, tokens, cfg=cfg).hidden)[:, :-1]
    draft = jax.jit(glm5.forward_mtp, static_argnames="cfg")
    full_logits = np.asarray(draft(params, hidden, tokens[:, 1:], cfg=cfg).logits)
    cache = empty_cache(cfg, 4, num_layers=1)
    for first in range(0, 20, 5):
        part = slice(first, first + 5)
        out = draft(params, hidden[:, part], tokens[:, 1:][:, part], cfg=cfg, cache=cache)
        cache = out.cache
        np.testing.assert_allclose(out.logits, full_logits[:, part], atol=2e-5)
    assert np.asarray(cache.lengths).tolist() == [20] * 3
