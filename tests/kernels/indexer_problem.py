"""Problems that the kernels of the indexer's training share; queries of one batch row see nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles import indexer_kl as oracle

B, T, S, N, X, I, J = 2, 13, 150, 4, 16, 3, 8
SCALE, START = 0.3, 90
TRAINED = ("idx_q", "idx_w", "idx_k")
OUTPUTS = ("loss", "kl", "d_idx_q", "d_idx_w", "d_idx_k")


def problem(seed: int = 0, key_heads: int = N, t: int = T, s: int = S) -> dict[str, np.ndarray]:
    """float32 arrays by the names of the public functions, the weights with zeros."""
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
    """bool [b t s]: which keys each query sees."""
    mask = np.broadcast_to(np.arange(s) <= start + np.arange(t)[:, None], (B, t, s))
    if segments is None:
        return mask
    own = segments[:, start : start + t]
    return mask & (own[:, :, None] == segments[:, None]) & (own != 0)[..., None]


def spread(k, heads: int = N):
    """Keys [b s m x] for every head of queries: [b s n x]."""
    return np.repeat(k, heads // k.shape[2], axis=2)


def expected(given, mask, scale=SCALE) -> dict[str, np.ndarray]:
    """The oracle's answer in float64."""
    wide = {name: x.astype(np.float64) for name, x in given.items()}
    k = spread(wide.pop("k"))
    return oracle.indexer_kl(k=k, keep=mask, scale=scale, **wide)


def log_sum_exp(given, mask, scale=SCALE):
    """float32 [b t n], as the attention would hand it over."""
    q, k = (given[name].astype(np.float64) for name in "qk")
    return oracle.log_sum_exp(q, spread(k), mask, scale).astype(np.float32)


def pulled(call, given) -> dict[str, np.ndarray]:
    """Returns call(given) = (loss, kl) with the gradients of TRAINED, by the oracle's names."""
    run = jax.value_and_grad(lambda trained: call(given | trained), has_aux=True)
    (loss, kl), gradients = jax.jit(run)({name: given[name] for name in TRAINED})
    return {"loss": loss, "kl": kl} | {f"d_{name}": g for name, g in gradients.items()}


def assert_equal(got, want, names=OUTPUTS):
    for name in names:
        np.testing.assert_allclose(got[name], want[name], atol=2e-5, err_msg=name)


def target_gradients(call, given, lse):
    """Returns the gradients of call(given, lse) = (loss, kl) by what the target is made of, and by the weight."""

    def loss(q, k, lse, weight):
        loss, kl = call(given | {"q": q, "k": k, "weight": weight}, lse)
        return loss + jnp.sum(kl)

    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(given["q"], given["k"], lse, given["weight"])


def in_bfloat16(given):
    """Returns (the problem in bfloat16 but for the weights, the same rounded numbers in float32)."""
    wide = ("idx_w", "weight")
    low = {n: x if n in wide else jnp.asarray(x, jnp.bfloat16) for n, x in given.items()}
    return low, {name: np.asarray(x, np.float32) for name, x in low.items()}


def assert_summed_wide(low, want, got, again):
    """Checks two equal results of a problem in bfloat16 against the oracle's."""
    np.testing.assert_allclose(got["kl"], want["kl"], atol=2e-5)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], again[name])
    for name in TRAINED:
        ours, theirs = np.asarray(got[f"d_{name}"], np.float64), want[f"d_{name}"]
        assert got[f"d_{name}"].dtype == low[name].dtype
        assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max(), name
