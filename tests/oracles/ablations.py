"""The paper's alternatives to MLA in NumPy float64: heads of grouped-query attention and linear attention.

Source: Gated Delta Networks (arXiv 2412.06464, section 3.4 and equation 10); GLM-5 2.1.2 for SimpleGDN.
Weights by their names in glm5_jax/model/ablations, one layer's; heads are an axis.
"""

import numpy as np

from tests.oracles import attention, gated_delta


def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


def unit(x):
    """x / |x| over the last dimension."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def documents(segments):
    """Returns the indices of each document of a row of segment ids; 0 is padding."""
    changes = np.flatnonzero(np.diff(segments)) + 1
    return [at for at in np.split(np.arange(len(segments)), changes) if segments[at[0]]]


def convolve(x, taps):
    """Causal convolution of x [t .] with taps [. w] per channel, zeros before the first."""
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for back in range(min(t + 1, taps.shape[-1])):
            out[t] += taps[:, -1 - back] * x[t - back]
    return out


def linear(q, k, v, g, beta, segments, form, taps=None):
    """[b t n u] of the delta rule over q [b t n h], k [b t y h], v [b t y u], g, beta [b t n].

    form: a function (q, k, v, g, beta) -> out of one head of one document. taps: (of q, of k, of v), each
    [heads . w].
    """
    b, t, n, _ = q.shape
    out = np.zeros((b, t, n, v.shape[-1]))
    for row in range(b):
        for at in documents(segments[row]):
            for head in range(n):
                group = head * k.shape[2] // n
                parts = [q[row, at, head], k[row, at, group], v[row, at, group]]
                if taps is not None:
                    head_taps = (taps[0][head], taps[1][group], taps[2][group])
                    parts = [silu(convolve(x, w)) for x, w in zip(parts, head_taps, strict=True)]
                query, key, value = unit(parts[0]), unit(parts[1]), parts[2]
                gates = g[row, at, head], beta[row, at, head]
                out[row, at, head] = form(query, key, value, *gates)
    return out


def recurrent(q, k, v, g, beta):
    """The delta rule step by step from state 0."""
    return gated_delta.gated_delta(q, k, v, g, beta, np.zeros((v.shape[1], k.shape[1])))[0]


def gdn(w, x, q, k, v, segments, eps, form=recurrent):
    """[b t n u] of Gated DeltaNet on the layer's normed input x [b t d] and its heads without RoPE."""
    beta = sigmoid(x @ w["b"])
    g = -np.exp(w["a_log"]) * np.log1p(np.exp(x @ w["a"] + w["dt_bias"]))
    taps = (w["conv_q"], w["conv_k"], w["conv_v"])
    out = linear(q, k, v, g, beta, segments, form, taps)
    return attention.rms_norm(out, w["norm"], eps) * silu(np.einsum("btd,dnu->btnu", x, w["gate"]))


def simple_gdn(q, k, v, beta, segments, form=recurrent):
    """[b t n u] of the delta rule on an attention's heads without RoPE; beta is one number."""
    g = np.zeros(q.shape[:3])
    return linear(q, k, v, g, g + beta, segments, form)
