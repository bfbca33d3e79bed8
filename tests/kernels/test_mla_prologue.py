"""Tests of projections, norms, rotation and cache write before attention, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from pallas_kernels import backends, compat
from pallas_kernels.mla_prologue import mla_prologue
from tests.kernels.implementations import (
    implementation_names,
    over_implementations,
    over_pallas_forms,
    race_checked,
)
from tests.oracles import attention as oracle

D, Q, N, H, R, C, ROWS = 256, 128, 2, 96, 32, 128, 96
EPS = 1e-2  # large enough to change results
SLOTS = np.array([[5, 6, 7], [31, 32, 33], [-1, 64, 95]], np.int32)


@functools.cache
def problem(biases=True, shape=SLOTS.shape):
    rng = np.random.default_rng(0)
    (b, t), f = shape, np.float32
    w = {
        "q_a": rng.standard_normal((D, Q)) * D**-0.5,
        "q_b": rng.standard_normal((Q, N, H + R)) * Q**-0.5,
        "kv_a": rng.standard_normal((D, C + R)) * D**-0.5,
        "q_a_norm": rng.standard_normal(Q),
        "kv_a_norm": rng.standard_normal(C),
    }
    if biases:
        w |= {"q_a_bias": rng.standard_normal(Q), "kv_a_bias": rng.standard_normal(C + R)}
    angles = rng.uniform(-3, 3, (b, t, R // 2))
    x = rng.standard_normal((b, t, D))
    cache = rng.standard_normal((ROWS, C + R))
    turns = 1.25 * np.exp(1j * angles)
    arrays = (x, w, turns.real, turns.imag, cache)
    return jax.tree.map(lambda a: a.astype(f), arrays), turns


def expected(x, w, turns, cache, slots):
    """Returns (c_q, q, latent, cache) in float64."""
    x, cache = x.astype(np.float64), cache.astype(np.float64)
    w = {k: v.astype(np.float64) for k, v in w.items()}
    c_q = oracle.rms_norm(x @ w["q_a"] + w.get("q_a_bias", 0), w["q_a_norm"], EPS)
    q = np.einsum("btq,qnx->btnx", c_q, w["q_b"])
    q = np.concatenate([q[..., :H], oracle.rope_interleaved(q[..., H:], turns)], axis=-1)
    kv = x @ w["kv_a"] + w.get("kv_a_bias", 0)
    c_kv = oracle.rms_norm(kv[..., :C], w["kv_a_norm"], EPS)
    latent = np.concatenate([c_kv, oracle.rope_interleaved(kv[..., C:], turns)], axis=-1)
    for where in np.ndindex(*slots.shape):
        if slots[where] >= 0:
            cache[slots[where]] = latent[where]
    return c_q, q, latent, cache


@functools.partial(jax.jit, static_argnames="implementation")
def run(x, w, cos, sin, cache=None, slots=None, implementation="xla"):
    return mla_prologue(
        x, w, cos, sin, eps=EPS, cache=cache, slots=slots, implementation=implementation
    )


@over_implementations("mla_prologue")
def test_prologue_equals_oracle(implementation, biases=True):
    (x, w, cos, sin, cache), turns = problem(biases)
    got = run(x, w, cos, sin, cache, SLOTS, implementation)
    for ours, theirs in zip(got, expected(x, w, turns, cache, SLOTS), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    others = np.setdiff1d(np.arange(ROWS), SLOTS)
    np.testing.assert_array_equal(np.asarray(got.cache)[others], cache[others])


@over_implementations("mla_prologue", slow="tpu gpu")
def test_prologue_without_biases_equals_oracle(implementation):
    test_prologue_equals_oracle(implementation, biases=False)


@over_implementations("mla_prologue", slow="tpu gpu")
def test_prologue_without_cache_equals_oracle(implementation):
    (x, w, cos, sin, cache), turns = problem()
    got = run(x, w, cos, sin, implementation=implementation)
    assert got.cache is None
    for ours, theirs in zip(got[:3], expected(x, w, turns, cache, SLOTS)[:3], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
@over_implementations("mla_prologue")
def test_prologue_in_bfloat16_is_near_oracle(implementation):
    (x, w, cos, sin, cache), turns = problem()
    half = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (x, w, cos, sin, cache))
    rounded = jax.tree.map(lambda a: np.asarray(a, np.float64), half)
    theirs = expected(*rounded[:2], rounded[2] + 1j * rounded[3], rounded[4], SLOTS)
    for ours, exact in zip(run(*half, SLOTS, implementation), theirs, strict=True):
        assert ours.dtype == jnp.bfloat16
        ours = np.asarray(ours, np.float64)
        assert np.abs(ours - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.skipif("tpu" not in implementation_names("mla_prologue"), reason="has no form for TPU")
def test_token_blocks_share_cache_tile(monkeypatch):
    """Tiles of 8 cache rows straddle blocks of 16 tokens, because the first of 40 tokens is at row 5."""
    from pallas_kernels.mla_prologue import tpu

    monkeypatch.setattr(tpu, "TOKENS", 16)
    slots = 5 + np.arange(40, dtype=np.int32)[None]
    (x, w, cos, sin, cache), turns = problem(shape=slots.shape)
    got = run(x, w, cos, sin, cache, slots, backends.make_interpreted("tpu"))
    np.testing.assert_allclose(got.cache, expected(x, w, turns, cache, slots)[3], atol=2e-5)


@pytest.mark.slow
@over_pallas_forms("mla_prologue")
def test_prologue_has_no_races_and_repeats_bits(name):
    (x, w, cos, sin, cache), _ = problem()
    first = jax.block_until_ready(run(x, w, cos, sin, cache, SLOTS, race_checked(name)))
    assert not compat.has_races(name)
    second = run(x, w, cos, sin, cache, SLOTS, race_checked(name))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@over_implementations("mla_prologue", several_devices=True, slow="xla tpu")
def test_shards_sequences_and_cache(implementation):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    (x, w, cos, sin, _), turns = problem(shape=(8, 2))
    cache = np.zeros((8 * 16, C + R), np.float32)
    slots = np.tile(np.array([3, 4], np.int32), (8, 1))
    cut = P("data")
    local = jax.shard_map(
        functools.partial(run, implementation=implementation),
        mesh=mesh,
        in_specs=(cut, P(), cut, cut, cut, cut),
        out_specs=cut,
        check_vma=False,
    )
    got = jax.jit(local)(x, w, cos, sin, cache, slots)
    rows = slots + 16 * np.arange(8)[:, None]
    for ours, theirs in zip(got, expected(x, w, turns, cache, rows), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
@over_implementations("mla_prologue")
def test_prologue_vmaps(implementation):
    (x, w, cos, sin, _), turns = problem()
    one = functools.partial(run, implementation=implementation)
    got = jax.vmap(lambda x, cos, sin: one(x[None], w, cos[None], sin[None])[:3])(x, cos, sin)
    cache = np.zeros((ROWS, C + R), np.float32)
    for ours, theirs in zip(got, expected(x, w, turns, cache, SLOTS)[:3], strict=True):
        np.testing.assert_allclose(ours[:, 0], theirs, atol=2e-5)


def test_xla_form_has_gradients():
    (x, w, cos, sin, _), _ = problem()
    value = jax.grad(lambda x: sum(jnp.sum(a**2) for a in run(x, w, cos, sin)[:3]))(x)
    assert np.isfinite(value).all() and np.abs(value).max() > 0.1


def test_rejects_cache_without_slots():
    (x, w, cos, sin, cache), _ = problem()
    with pytest.raises(ValueError, match="cache and slots belong together"):
        mla_prologue(x, w, cos, sin, eps=EPS, cache=cache)


@over_pallas_forms("mla_prologue")
def test_pallas_forms_reject_odd_latent(name):
    (x, w, cos, sin, _), _ = problem()
    odd = w | {"kv_a_norm": w["kv_a_norm"][:-2], "kv_a": w["kv_a"][:, :-2]}
    with pytest.raises(ValueError, match="latent 126"):
        mla_prologue(x, odd, cos, sin, eps=EPS, implementation=backends.make_interpreted(name))
