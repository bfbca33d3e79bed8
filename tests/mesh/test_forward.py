"""Tests of the forward, cached decoding and initial weights on a mesh against one device."""

import functools

import jax
import numpy as np
import pytest

from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_cache
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten
from tests.mesh import cases
from tests.mesh.test_gradients import assert_shards, close

CFG = cases.small()
EXECUTION = ExecutionConfig(query_block=8, gather_block=4)


def inputs():
    """Returns tokens and segments; two rows are left-padded."""
    tokens = cases.batch()["token_ids"]
    segments = np.ones_like(tokens)
    segments[0, :7] = segments[5, :2] = 0
    return tokens, segments


@functools.partial(jax.jit, static_argnames="mesh")
def forward(params, tokens, segments, cache=None, mesh=None):
    return glm5.forward(
        params, tokens, CFG, segment_ids=segments, cache=cache, mesh=mesh, execution=EXECUTION
    )


@functools.cache
def reference():
    return jax.device_get(forward(cases.params(CFG), *inputs()))


def sharded_params(mesh):
    return jax.device_put(cases.params(CFG), glm5.param_shardings(CFG, mesh))


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_forward_on_mesh_equals_one_device():
    mesh = make_mesh(expert=2, context=2, tensor=2)
    out, want = forward(sharded_params(mesh), *inputs(), mesh=mesh), reference()
    assert_close(out.logits, want.logits)
    assert_close(out.hidden, want.hidden)
    np.testing.assert_allclose(out.stats.load, want.stats.load)
    np.testing.assert_allclose(out.stats.max_logit, want.stats.max_logit, rtol=1e-5)


@pytest.mark.slow
def test_prefill_and_decode_on_mesh_equal_full_forward():
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    params, cache = sharded_params(mesh), init_cache(CFG, cases.ROWS, cases.LENGTH)
    tokens, segments = inputs()
    logits = []
    for first, last in ((0, 29), (29, 30), (30, 31), (31, 32)):
        part = slice(first, last)
        out = forward(params, tokens[:, part], segments[:, part], cache, mesh)
        cache = out.cache
        logits.append(out.logits)
    assert int(cache.length) == cases.LENGTH
    latents = jax.tree.leaves(cache.layers[0])[0]
    assert {shard.data.shape[0] for shard in latents.addressable_shards} == {cases.ROWS // 4}
    assert_close(np.concatenate(logits, axis=1), reference().logits)


def test_initial_weights_do_not_depend_on_mesh():
    cfg, mesh = cases.small("dense", index_topk=None), make_mesh(fsdp=2, expert=2, context=2)
    drawn = flatten(glm5.init_params(cfg, jax.random.key(3), mesh=mesh))
    for path, want in flatten(glm5.init_params(cfg, jax.random.key(3))).items():
        assert_shards(path, drawn[path], mesh)
        close(path, drawn[path], want)


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [
        (6, 32, r"batch size 6 does not divide .* data \* fsdp \* expert = 4; use a multiple"),
        (8, 31, r"sequence length 31 does not divide .* context \* tensor = 2"),
    ],
)
def test_rejects_batch_that_mesh_does_not_divide(rows, length, message):
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    with pytest.raises(ValueError, match=message):
        glm5.forward(cases.params(CFG), np.ones((rows, length), np.int32), CFG, mesh=mesh)


@pytest.mark.slow
def test_paged_forward_on_mesh_equals_one_device():
    """Pages are sharded like rows, and a table's numbers index the pages of its row's devices."""
    mesh, size, width = make_mesh(fsdp=2, expert=2, tensor=2), 4, cases.LENGTH // 4
    shards, rows = 4, cases.ROWS // 4
    pages_per_shard = rows * width + 3
    draw = np.random.default_rng(5)
    tables = [
        draw.permutation(pages_per_shard)[: rows * width].reshape(rows, width)
        for _ in range(shards)
    ]
    cache = PagedCache(
        init_cache(CFG, shards * pages_per_shard, size).layers,
        np.concatenate(tables).astype(np.int32),
        np.zeros(cases.ROWS, np.int32),
    )
    tokens, params = cases.batch()["token_ids"], sharded_params(mesh)
    want = forward(cases.params(CFG), tokens, np.ones_like(tokens)).logits
    # Rows have different lengths, so the chunk of a row may be shorter than others.
    lengths, got = np.arange(cases.ROWS) % 3 + 13, [[] for _ in want]
    for _ in range(2):
        first = np.asarray(cache.lengths)
        at = first[:, None] + np.arange(8)
        real = at < lengths[:, None]
        new = np.take_along_axis(tokens, at, 1)
        out = forward(params, new, real.astype(np.int32), cache, mesh)
        cache = out.cache
        for row, mask in enumerate(real):
            got[row] += list(np.asarray(out.logits)[row, mask])
    for row, logits in enumerate(got):
        assert len(logits) == lengths[row]
        assert_close(np.array(logits), want[row, : lengths[row]])
