"""Problems that the kernels of the indexer's training share; queries of one batch row see nothing."""

import numpy as np

from tests.oracles import indexer_kl as oracle

B, T, S, N, X, I, J = 2, 13, 150, 4, 16, 3, 8
SCALE, START = 0.3, 90


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
