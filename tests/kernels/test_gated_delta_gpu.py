"""Tests of the pieces of the gated delta rule on Hopper: keys, values, heads, a ring of chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import chunk as chunks, gated_delta, gpu
from tests.kernels.implementations import interpreted
from tests.kernels.offline import compile_for
from tests.oracles import gated_delta as oracle

NAMES = ("q", "k", "v", "g", "beta")


@pytest.mark.slow
def test_splits_keys_values_and_chunks(monkeypatch):
    """Keys have two pieces and values two groups, neither full; a ring of two holds three chunks.

    XLA computes its part of the backward per head.
    """
    monkeypatch.setattr(gpu, "CHUNKS_PER_STEP", 3)
    b, t, n, h, u = 1, 150, 2, 70, 130
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((b, t, n, size)) for name, size in zip("qkv", (h, h, u))}
    for name in "qk":
        arrays[name] /= np.linalg.norm(arrays[name], axis=-1, keepdims=True)
    args = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    args["g"] = -np.exp(2 * rng.standard_normal((b, t, n)) - 2).astype(np.float32)
    args["beta"] = (2 * rng.random((b, t, n))).astype(np.float32)
    state = rng.standard_normal((b, n, h, u)).astype(np.float32)
    dout = np.asarray(jnp.asarray(rng.standard_normal((b, t, n, u)), jnp.bfloat16))
    dfinal = rng.standard_normal((b, n, h, u)).astype(np.float32)

    @jax.jit
    def run(args, state):
        def forward(args, state):
            named = dict(initial_state=state, implementation=interpreted("gpu"))
            return gated_delta(**args, **named)

        (out, final), pull = jax.vjp(forward, args, state)
        return out, final, *pull((jnp.asarray(dout), dfinal))

    out, final, grads, dstate = run(args, state)
    for i in range(n):
        of = [np.float64(args[name][0, :, i]) for name in NAMES]
        start = np.float64(state[0, i]).T
        wanted, end = oracle.gated_delta(*of, start)
        d = oracle.gradients(*of, start, np.float64(dout[0, :, i]), np.float64(dfinal[0, i]).T)
        np.testing.assert_allclose(np.float64(out[0, :, i]), wanted, rtol=2**-8, atol=1e-3)
        np.testing.assert_allclose(final[0, i], end.T, atol=5e-5)
        for name, ours in grads.items():
            error = np.abs(np.float64(ours[0, :, i]) - d[name]).max() / np.abs(d[name]).max()
            assert error < (2**-8 if name in "qkv" else 5e-5), (name, error)
        error = np.abs(dstate[0, i] - d["state"].T).max() / np.abs(d["state"]).max()
        assert error < 5e-5


@pytest.mark.parametrize(
    ("h", "dtype", "reason"),
    [(192, jnp.bfloat16, None), (200, jnp.bfloat16, "keys of 200"), (64, jnp.float16, "float16")],
)
def test_gated_delta_names_unsupported_input(h, dtype, reason):
    q, v = (jax.ShapeDtypeStruct((1, 2, 64, x), dtype) for x in (h, 256))
    message = gpu.unsupported_reason(q, q, v, None, None, None, 64)
    assert message == reason or reason in message


@pytest.mark.aot
def test_xla_retains_both_bfloat16_parts():
    """XLA for GPUs would remove a cast to bfloat16 and back, and with it the second part of a number."""
    product = functools.partial(chunks.batched_matmul, "ab", chunks.BF16Parts(2, 2, gpu.split_bf16))
    x = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
    text = compile_for("h200", product, x, x).as_text()
    assert text.count("reduce-precision(") >= 4
