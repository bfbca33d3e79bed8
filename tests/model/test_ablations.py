"""Tests of layers of grouped-query, window and linear attention against NumPy in float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model.ablations.gdn import gdn
from glm5_jax.model.ablations.gqa import gqa, gqa_heads, rotate_last
from glm5_jax.model.ablations.simple_gdn import simple_gdn
from glm5_jax.model.cache import RecurrentState
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.mla import Queries
from glm5_jax.parallel.mesh import Region
from tests.kernels.implementations import in_tiers
from tests.oracles import ablations as oracle, attention, gated_delta

B, T, D, N, Y, H, R, U, W = 2, 75, 10, 4, 2, 6, 4, 5, 4
# Documents shorter and longer than the convolution, with padding before, between and after them. The first and third
# of row 1 have the same number, with a document of one token between them.
SEGMENTS = np.stack(
    [
        np.repeat([0, 1, 2, 3, 0], [3, 30, 2, 36, 4]),
        np.repeat([5, 6, 5, 0, 7], [20, 1, 40, 3, 11]),
    ]
).astype(np.int32)
KINDS = ("gdn", "simple_gdn")


class LayerConfig(NamedTuple):
    """Config with the fields of `ModelConfig` that these layers read."""

    rms_norm_eps: float = 1e-5
    simple_gdn_beta: float = 0.7
    softmax_scale: float = 0.3


CFG = LayerConfig()


class Context(NamedTuple):
    """Context with the fields of `ForwardContext` that these layers read."""

    segments: jax.Array | None
    key_segments: jax.Array | None
    start: int | jax.Array = 0
    cfg: LayerConfig = CFG
    execution: ExecutionConfig = ExecutionConfig(query_block=16)
    region: Region = Region()


@functools.cache
def problem():
    """Returns (weights of every kind, x [b t d]) in float64, so large that every gate is nonlinear."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (D, N, H + R),
        "k": (D, Y, H + R),
        "v": (D, Y, U),
        "o": (N, U, D),
        "conv_q": (N, H + R, W),
        "conv_k": (Y, H + R, W),
        "conv_v": (Y, U, W),
        "a": (D, N),
        "a_log": (N,),
        "dt_bias": (N,),
        "b": (D, N),
        "gate": (D, N, U),
        "norm": (U,),
    }
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    w["a_log"] -= 1
    return w, rng.standard_normal((B, T, D))


def heads(x):
    """Returns (q, k, v) in NumPy."""
    w, _ = problem()
    return tuple(np.einsum("btd,dnx->btnx", x, w[name]) for name in ("q", "k", "v"))


def attention_of(kind):
    """Returns a function (w, x, context, cache) -> (out [b t n u], cache)."""

    def run(w, x, context, cache=None):
        q, k, v = gqa_heads(w, x)
        if kind == "gdn":
            return gdn(w, x, q, k, v, context, cache)
        return simple_gdn(q, k, v, context, cache)

    return run


def expected(kind, segments=SEGMENTS, form=oracle.recurrent):
    w, x = problem()
    if kind == "gdn":
        return oracle.gdn(w, x, *heads(x), segments, CFG.rms_norm_eps, form)
    return oracle.simple_gdn(*heads(x), CFG.simple_gdn_beta, segments, form)


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_and_parallel_forms_equal_recurrence(kind):
    """Documents cross and fill chunks of 64; NumPy computes the recurrent and the parallel form."""
    w, x = problem()
    with jax.enable_x64(True):
        run = jax.jit(lambda w, x, s: attention_of(kind)(w, x, Context(s, s))[0])
        chunked = run(w, x, SEGMENTS)
        assert chunked.dtype == jnp.float64
    recurrent = expected(kind)
    real = SEGMENTS != 0
    np.testing.assert_allclose(np.asarray(chunked)[real], recurrent[real], atol=1e-10)
    parallel = expected(kind, form=gated_delta.parallel)
    np.testing.assert_allclose(parallel[real], recurrent[real], atol=1e-8)


@pytest.mark.parametrize("kind", in_tiers(["gdn"], ["simple_gdn"]))
def test_row_without_segments_is_one_document(kind):
    w, x = problem()
    with jax.enable_x64(True):
        got = jax.jit(lambda w, x: attention_of(kind)(w, x, Context(None, None))[0])(w, x)
    want = expected(kind, np.ones((B, T), np.int32))
    np.testing.assert_allclose(got, want, atol=1e-10)


def empty_state(kind):
    conv = jnp.zeros((B, W - 1, N, 2 * (H + R) + U), jnp.float64) if kind == "gdn" else None
    return RecurrentState(jnp.zeros((B, N, H + R, U), jnp.float64), conv)


CUTS = (0, 16, 32, *range(33, 38), 53, 69, *range(70, 76))  # single tokens at ends of documents


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_prefill_and_decode_equal_recurrence(kind):
    w, x = problem()
    with jax.enable_x64(True):
        cache, parts = empty_state(kind), []

        @jax.jit
        def run(w, x, segments, written, start, cache):
            return attention_of(kind)(w, x, Context(segments, written, start), cache)

        for first, last in zip(CUTS, CUTS[1:]):
            segments = SEGMENTS[:, first:last]
            written = np.where(np.arange(T) < last, SEGMENTS, 0)
            out, cache = run(w, x[:, first:last], segments, written, jnp.int32(first), cache)
            parts.append(out)
    real = SEGMENTS != 0
    np.testing.assert_allclose(np.concatenate(parts, 1)[real], expected(kind)[real], atol=1e-9)


@pytest.mark.parametrize("window", in_tiers([7], [None]))
def test_grouped_query_attention_equals_oracle(window):
    w, x = problem()
    positions = np.arange(T)[None].repeat(B, 0)
    turns = attention.rope_turns(np.array([0.3, 0.05]), 1.0, positions)
    q, k, v = heads(x)
    q, k = (
        np.concatenate([z[..., :H], attention.rope_interleaved(z[..., H:], turns)], -1)
        for z in (q, k)
    )
    keep = attention.visible_keys(SEGMENTS)
    if window:
        keep = keep & attention.within_window(np.arange(T), np.arange(T), window)
    k, v = (z.repeat(N // Y, axis=2) for z in (k, v))
    out = attention.attend(q, k, v, keep, CFG.softmax_scale)
    largest = np.where(keep[:, None], np.einsum("btnx,bsnx->bnts", q, k), -np.inf).max()

    with jax.enable_x64(True):

        @jax.jit
        def run(w, x, cos, sin, segments):
            q, k, v = gqa_heads(w, x)
            queries = Queries(rotate_last(q, cos, sin), 0, segments)
            keys = rotate_last(k, cos, sin)
            return gqa(w, queries, keys, v, segments, CFG, ExecutionConfig(query_block=16), window)

        got, top = run(w, x, turns.real, turns.imag, SEGMENTS)
    want = np.einsum("btnu,nud->btd", out, w["o"])
    np.testing.assert_allclose(got, want, atol=1e-10)
    np.testing.assert_allclose(top, CFG.softmax_scale * largest, rtol=1e-10)
