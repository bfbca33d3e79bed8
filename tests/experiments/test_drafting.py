"""The deepened model of the drafting benchmark computes the same function with more layers."""

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.benchmarks.drafting import deepen
from glm5_jax import presets
from glm5_jax.model import glm5


@pytest.mark.slow
def test_deepened_model_computes_same_function():
    model = glm5.Glm5(presets.tiny(), rngs=nnx.Rngs(0))
    deep = deepen(model, 7)
    tokens = np.arange(1, 60, dtype=np.int32)[None]
    ours, theirs = (
        jax.jit(lambda p, x, cfg=m.cfg: glm5.forward(p, x, cfg).logits)(glm5.params_of(m), tokens)
        for m in (model, deep)
    )
    np.testing.assert_allclose(theirs, ours, atol=1e-6)
    weights = glm5.params_of(deep)["dense_layers"]
    assert weights["attn"]["o"].shape[0] == 4 and np.abs(weights["attn"]["q_a"][0]).max() > 0
