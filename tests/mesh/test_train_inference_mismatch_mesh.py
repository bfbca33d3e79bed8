"""Tests of the mismatch report on a mesh, where queries and experts are sharded."""

import jax
import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.trainers.train_inference_mismatch import compare_choices
from tests.mesh import cases
from tests.mesh.test_engine_mesh import CFG, engine


@pytest.mark.slow
def test_mismatch_on_mesh_is_zero_until_router_changes():
    """The model has two groups of experts, and its last layer shares the previous one's selection."""
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    params = jax.device_put(cases.params(CFG), glm5.param_shardings(CFG, mesh))
    mesh_engine = engine(mesh, cfg=CFG)
    prompt = np.random.default_rng(0).integers(0, CFG.vocab_size, 20).tolist()
    [reply] = mesh_engine.generate([prompt], Sampling(max_tokens=8))
    logp = [np.nan] * len(prompt) + reply.logprobs
    record = TokenRecord(token_ids=prompt + reply.ids, loss_mask=~np.isnan(logp), rollout_logp=logp)
    report = compare_choices(params, [record], mesh_engine, CFG, mesh=mesh)
    assert report.keys.layer.tolist() == [0, 1] and report.experts.layer.tolist() == [1, 2]
    assert report.metrics["mismatch/layer"] == -1
    assert max(report.logp.max(), report.recorded.max()) < 1e-5
    router = dict(params["moe_layers"]["router"])
    router["bias"] = router["bias"].at[1, 0].add(1.0)
    other = params | {"moe_layers": params["moe_layers"] | {"router": router}}
    mesh_engine.update_weights(other, 1)
    report = compare_choices(params, [record], mesh_engine, CFG, mesh=mesh)
    assert report.metrics["mismatch/layer"] == 2 and report.metrics["mismatch/gap"] > 0.05
    assert (report.keys.match_rate == 1).all() and report.experts.match_rate[
        0
    ] == 1 > report.experts.match_rate[1]
