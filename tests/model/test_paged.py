"""A forward over pages: rows of any length, wherever their pages lie, are the forward over the whole text."""

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

SIZE, PAGES, WIDTH = 4, 40, 6  # slots of a page, pages, pages of a row
SPARSE = dataclasses.replace(
    presets.tiny(), num_hidden_layers=2, index_topk=6, max_position_embeddings=64
)
MODELS = {
    # Without experts, to compile fast.
    "shared index": dataclasses.replace(
        SPARSE, indexer_types=("full", "shared"), first_k_dense_replace=2
    ),
    "sparse": SPARSE,
    "dense": dataclasses.replace(SPARSE, attention="dense"),
}
forward = jax.jit(glm5.forward, static_argnames="cfg")


@functools.cache
def made(name="shared index"):
    """(config, weights, token ids [3 24], their logits in one forward)."""
    cfg = MODELS[name]
    params = glm5.init_params(cfg, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, SIZE * WIDTH))
    return cfg, params, tokens, np.asarray(forward(params, tokens, cfg=cfg).logits)


def empty(cfg, seed, **more):
    """A cache whose rows have their pages anywhere."""
    tables = np.random.default_rng(seed).permutation(PAGES)[: 3 * WIDTH].reshape(3, WIDTH)
    layers = init_cache(cfg, PAGES, SIZE, **more).layers
    return PagedCache(layers, tables.astype(np.int32), np.zeros(3, np.int32))


def fed(cfg, params, tokens, cache, lengths, chunk=8):
    """(logits by row, cache) of rows of tokens up to their lengths, a chunk of each at a time."""
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
        for row, own in enumerate(real):
            logits[row] += list(np.asarray(out.logits)[row, own])
    return [np.array(own) for own in logits], cache


@pytest.mark.parametrize(
    ("name", "chunk"), in_tiers([("shared index", 8)], [(name, 1) for name in MODELS])
)
def test_rows_of_different_lengths_in_chunks_and_token_by_token(name, chunk):
    cfg, params, tokens, whole = made(name)
    lengths = np.array([9, 21, 2], np.int32)
    logits, cache = fed(cfg, params, tokens, empty(cfg, 1), lengths)
    assert np.asarray(cache.lengths).tolist() == lengths.tolist()
    more, cache = fed(cfg, params, tokens, cache, lengths + 3, chunk)
    for row in range(3):
        got = np.concatenate([logits[row], more[row]])
        np.testing.assert_allclose(got, whole[row, : len(got)], atol=2e-5)


def test_pages_lie_anywhere_and_others_are_left_alone():
    cfg, params, tokens, _ = made()
    lengths = np.array([9, 21, 2], np.int32)
    (one, first), (other, second) = (
        fed(cfg, params, tokens, empty(cfg, seed), lengths) for seed in (1, 2)
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
            if pages is not None:  # the index keys of a layer that shares another's index
                assert {p for p in range(PAGES) if np.asarray(pages)[p].any()} == written


def test_rows_share_the_pages_of_a_common_beginning():
    cfg, params, tokens, _ = made()
    tokens = tokens.copy()
    tokens[1, : 2 * SIZE] = tokens[0, : 2 * SIZE]
    alone = np.asarray(forward(params, tokens, cfg=cfg).logits)
    cache = empty(cfg, 3)
    _, cache = fed(cfg, params, tokens, cache, np.array([2 * SIZE, 0, 0], np.int32))
    tables = np.array(cache.tables)
    tables[1, :2] = tables[0, :2]
    lengths = np.array([2 * SIZE, 2 * SIZE, 0], np.int32)
    cache = cache._replace(tables=tables, lengths=lengths)
    logits, _ = fed(cfg, params, tokens, cache, np.array([15, 18, 0], np.int32))
    np.testing.assert_allclose(logits[0], alone[0, 8:15], atol=2e-5)
    np.testing.assert_allclose(logits[1], alone[1, 8:18], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_queries_of_one_row_are_attended_as_in_training(name):
    """A prefill in chunks: 20 queries at a time, of which the last chunk has 2."""
    cfg, params, tokens, whole = made(name)
    cache = empty(cfg, 1)
    cache = cache._replace(tables=cache.tables[1:2], lengths=np.zeros(1, np.int32))
    logits, cache = fed(cfg, params, tokens[1:2], cache, np.array([22]), chunk=20)
    np.testing.assert_allclose(logits[0], whole[1, :22], atol=2e-5)
    more, _ = fed(cfg, params, tokens[1:2], cache, np.array([24]), chunk=1)
    np.testing.assert_allclose(more[0], whole[1, 22:], atol=2e-5)


@pytest.mark.slow
def test_pages_as_a_tpu_holds_them_give_the_same_bits(monkeypatch):
    """In float32 and in bfloat16, of few queries and of many of one row."""
    monkeypatch.setattr(backends, "platform", lambda: "tpu")
    words = {t: init_pages(SPARSE, PAGES, SIZE, t) for t in ("float32", "bfloat16")}
    monkeypatch.undo()
    cfg, params, tokens, _ = made("sparse")
    lengths = np.array([9, 21, 2], np.int32)
    for dtype, layers in words.items():
        assert isinstance(layers[0].latent, WordRows)
        for rows, chunk in ((slice(3), 8), (slice(1, 2), 20)):
            plain = empty(cfg, 1, dtype=dtype)
            plain = plain._replace(tables=plain.tables[rows], lengths=plain.lengths[rows])
            (got, cache), (want, _) = (
                fed(cfg, params, tokens[rows], each, lengths[rows], chunk)
                for each in (plain._replace(layers=layers), plain)
            )
            for a, b in zip(got, want):
                np.testing.assert_array_equal(a, b)
            assert isinstance(cache.layers[0].latent, WordRows)


def test_logits_of_one_token_of_each_row():
    cfg, params, tokens, whole = made()
    only = np.array([[3], [0], [7]], np.int32)
    out = forward(params, tokens[:, :8], cfg=cfg, cache=empty(cfg, 1), logit_positions=only)
    assert out.logits.shape == (3, 1, cfg.vocab_size) and out.hidden.shape[1] == 8
    np.testing.assert_allclose(out.logits[:, 0], whole[np.arange(3), only[:, 0]], atol=2e-5)


def test_what_stands_in_pages_behind_a_row_does_not_matter():
    cfg, params, tokens, whole = made()
    cache = empty(cfg, 1)
    noise = jax.tree.map(lambda x: np.full(x.shape, 7.0, np.float32), cache.layers)
    logits, _ = fed(cfg, params, tokens, cache._replace(layers=noise), np.array([9, 21, 2]))
    for row, own in enumerate(logits):
        np.testing.assert_allclose(own, whole[row, : len(own)], atol=2e-5)


@pytest.mark.slow
def test_drafting_over_pages_is_drafting_over_the_whole_text():
    cfg, params, tokens, _ = made()
    hidden = np.asarray(forward(params, tokens, cfg=cfg).hidden)[:, :-1]
    draft = jax.jit(glm5.forward_mtp, static_argnames="cfg")
    whole = np.asarray(draft(params, hidden, tokens[:, 1:], cfg=cfg).logits)
    cache = empty(cfg, 4, num_layers=1)
    for first in range(0, 20, 5):
        part = slice(first, first + 5)
        out = draft(params, hidden[:, part], tokens[:, 1:][:, part], cfg=cfg, cache=cache)
        cache = out.cache
        np.testing.assert_allclose(out.logits, whole[:, part], atol=2e-5)
    assert np.asarray(cache.lengths).tolist() == [20] * 3
