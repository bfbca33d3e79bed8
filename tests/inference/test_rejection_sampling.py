"""Tests that rejection sampling gives the model's distribution for any distribution of drafts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.inference.rejection_sampling import rejection_sample
from tests.inference.draft_problem import is_plausible


def test_samples_distribution_of_model():
    """Compares texts of three tokens with the model's exact distribution. Model and drafts are two Markov chains, and
    tokens after a rejection are sampled from the model.
    """
    total, v = 100_000, 3
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.full(v, 0.6), size=v).astype(np.float32) for _ in range(2))
    p[0, 1], p[1, 2] = 0, 0  # drafts with probability 0 in the model
    p /= p.sum(1, keepdims=True)

    def text(key):
        keys = jax.random.split(key, 6)

        def draw(key, probs):
            return jax.random.categorical(key, jnp.log(probs))

        first = draw(keys[0], q[0])
        drafts = jnp.stack([first, draw(keys[1], q[first])])
        probs = jnp.stack([p[0], jnp.asarray(p)[drafts[0]], jnp.asarray(p)[drafts[1]]])
        draft_probs = jnp.stack([q[0], jnp.asarray(q)[drafts[0]]])
        tokens, count = rejection_sample(keys[2], drafts[None], draft_probs[None], probs[None])
        out, last = [], 0
        for i in range(3):
            last = jnp.where(i < count[0], tokens[0, i], draw(keys[3 + i], jnp.asarray(p)[last]))
            out.append(last)
        return jnp.stack(out), count[0]

    p, q = jnp.asarray(p), jnp.asarray(q)
    texts, count = jax.jit(jax.vmap(text))(jax.random.split(jax.random.key(1), total))
    assert set(np.unique(count)) == {1, 2, 3}
    code = np.asarray(texts) @ v ** np.arange(3)[::-1]
    exact = np.array(
        [p[0, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(v), repeat=3)]
    )
    counts = np.bincount(code, minlength=v**3)
    assert is_plausible(counts, exact, total)
    assert not is_plausible(
        counts, 0.97 * exact + 0.03 / v**3, total
    )  # detects a mixture with 3% noise
