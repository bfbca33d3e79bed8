"""Inputs for tests of the kernels that train the indexer; some queries of a batch row see no key."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles import indexer_kl as oracle

B, T, S, N, X, I, J = 2, 13, 150, 4, 16, 3, 8
SCALE, START = 0.3, 90
TRAINED = ("idx_q", "idx_w", "idx_k")
OUTPUTS = ("loss", "kl", "d_idx_q", "d_idx_w", "d_idx_k")


def problem(seed: int = 0, key_heads: int = N, t: int = T, s: int = S) -> dict[str, np.ndarray]:
    """Returns float32 arrays by the argument names of the public functions; some weights are zero."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "idx_q": normal(B, t, I, J),
        "idx_w": normal(B, t, I),
        "idx_k": normal(B, s, J),
        "q": normal(B, t, N, X),
        "k": normal(B, s, key_heads, X),
        "weight": (rng.random((B, t)) * (rng.random((B, t)) > 0.2)).astype(np.float32),
    }


# Documents of unequal length with padding in front and between; they do not ascend in the second row.
SEGMENTS = np.stack(
    [np.repeat([0, 1, 2, 0, 3], [7, 80, 6, 4, 53]), np.repeat([4, 9, 0, 2, 5], [60, 33, 3, 40, 14])]
).astype(np.int32)


def keep(start: int, segments=None, t: int = T, s: int = S) -> np.ndarray:
    """Returns bool [b t s], True for the keys that each query sees."""
    mask = np.broadcast_to(np.arange(s) <= start + np.arange(t)[:, None], (B, t, s))
    if segments is None:
        return mask
    q_segments = segments[:, start : start + t]
    return mask & (q_segments[:, :, None] == segments[:, None]) & (q_segments != 0)[..., None]


def spread(k, heads: int = N):
    """Repeats keys [b s m x] for every query head: [b s n x]."""
    return np.repeat(k, heads // k.shape[2], axis=2)


def expected(inputs, mask, scale=SCALE) -> dict[str, np.ndarray]:
    """Returns the oracle's outputs in float64."""
    wide = {name: x.astype(np.float64) for name, x in inputs.items()}
    k = spread(wide.pop("k"))
    return oracle.indexer_kl(k=k, keep=mask, scale=scale, **wide)


def log_sum_exp(inputs, mask, scale=SCALE):
    """Returns the attention's log-sum-exp, float32 [b t n]."""
    q, k = (inputs[name].astype(np.float64) for name in "qk")
    return oracle.log_sum_exp(q, spread(k), mask, scale).astype(np.float32)


def with_gradients(call, inputs) -> dict[str, np.ndarray]:
    """Returns (loss, kl) = call(inputs) and the gradients of TRAINED, by the oracle's names."""
    run = jax.value_and_grad(lambda trained: call(inputs | trained), has_aux=True)
    (loss, kl), gradients = jax.jit(run)({name: inputs[name] for name in TRAINED})
    return {"loss": loss, "kl": kl} | {f"d_{name}": g for name, g in gradients.items()}


def assert_equal(got, want, names=OUTPUTS):
    for name in names:
        np.testing.assert_allclose(got[name], want[name], atol=2e-5, err_msg=name)


def target_gradients(call, inputs, lse):
    """Returns the gradients of (loss, kl) = call(inputs, lse) by the target's inputs q, k and lse and by the weight."""

    def loss(q, k, lse, weight):
        loss, kl = call(inputs | {"q": q, "k": k, "weight": weight}, lse)
        return loss + jnp.sum(kl)

    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(inputs["q"], inputs["k"], lse, inputs["weight"])


def in_bfloat16(inputs):
    """Returns (the inputs in bfloat16 except the weights, the same rounded numbers in float32)."""
    wide = ("idx_w", "weight")
    low = {n: x if n in wide else jnp.asarray(x, jnp.bfloat16) for n, x in inputs.items()}
    return low, {name: np.asarray(x, np.float32) for name, x in low.items()}


def assert_summed_in_float32(low, want, got, again):
    """Checks that two results in bfloat16 are equal and near the oracle's."""
    np.testing.assert_allclose(got["kl"], want["kl"], atol=2e-5)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], again[name])
    for name in TRAINED:
        ours, theirs = np.asarray(got[f"d_{name}"], np.float64), want[f"d_{name}"]
        assert got[f"d_{name}"].dtype == low[name].dtype
        assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max(), name
