"""The gated delta rule step by step with its gradients, in NumPy float64."""

import numpy as np


def gated_delta(q, k, v, g, beta, state):
    """(out [t u], final state [u h]) of one head: q, k [t h], v [t u], g, beta [t], state S [u h].

    S_t = exp(g_t) S_(t-1) (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T,  out_t = S_t q_t
    """
    states = _states(k, v, g, beta, state)
    return np.stack([s @ x for s, x in zip(states[1:], q, strict=True)]), states[-1]


def parallel(q, k, v, g, beta):
    """out [t u] of `gated_delta` from state 0 without a recurrence: one triangular system of all t.

    S_t = sum_(i <= t) exp(g_(i+1) + ... + g_t) w_i k_i^T with w_t = beta_t (v_t - exp(g_t) S_(t-1) k_t).
    """
    total = np.cumsum(g)
    decay = np.exp(total[:, None] - total)
    system = np.eye(len(k)) + np.tril(beta[:, None] * decay * (k @ k.T), -1)
    written = np.linalg.solve(system, beta[:, None] * v)
    return np.tril(decay * (q @ k.T)) @ written


def _states(k, v, g, beta, state):
    states = [state]
    for t in range(len(k)):
        forget = np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t])
        states.append(np.exp(g[t]) * states[-1] @ forget + beta[t] * np.outer(v[t], k[t]))
    return states


def gradients(q, k, v, g, beta, state, dout, dfinal):
    """Dict of the gradients of sum(out dout) + sum(final state dfinal), by the names of the arguments."""
    states = _states(k, v, g, beta, state)
    d = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    d = {name: np.zeros(x.shape) for name, x in d.items()}
    ds = dfinal.copy()
    for t in reversed(range(len(k))):
        before, after = states[t], states[t + 1]
        d["q"][t] = after.T @ dout[t]
        ds = ds + np.outer(dout[t], q[t])
        kk, gate = np.outer(k[t], k[t]), np.exp(g[t])
        forget = np.eye(k.shape[1]) - beta[t] * kk
        d["g"][t] = gate * np.sum(ds * (before @ forget))
        d_forget = gate * before.T @ ds
        d["beta"][t] = -np.sum(d_forget * kk) + v[t] @ ds @ k[t]
        d["k"][t] = -beta[t] * (d_forget + d_forget.T) @ k[t] + beta[t] * ds.T @ v[t]
        d["v"][t] = beta[t] * ds @ k[t]
        ds = gate * ds @ forget.T
    return d | {"state": ds}
