"""Engine and learner on a mesh, where each device has its own queries and experts, select the same too."""

import jax
import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.trainers.train_inference_mismatch import compare
from tests.mesh import cases
from tests.mesh.test_engine_mesh import CFG, engine


@pytest.mark.slow
def test_an_agreement_on_a_mesh_and_a_fault_there():
    """In a model of two groups of experts whose last layer attends by the selection of the one before."""
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    params = jax.device_put(cases.params(CFG), glm5.param_shardings(CFG, mesh))
    made = engine(mesh, cfg=CFG)
    prompt = np.random.default_rng(0).integers(0, CFG.vocab_size, 20).tolist()
    [reply] = made.generate([prompt], Sampling(max_tokens=8))
    logp = [np.nan] * len(prompt) + reply.logprobs
    record = TokenRecord(token_ids=prompt + reply.ids, loss_mask=~np.isnan(logp), rollout_logp=logp)
    found = compare(params, [record], made, CFG, mesh=mesh)
    assert found.keys.layer.tolist() == [0, 1] and found.experts.layer.tolist() == [1, 2]
    assert found.metrics["agreement/layer"] == -1
    assert max(found.logp.max(), found.recorded.max()) < 1e-5
    router = dict(params["moe_layers"]["router"])
    router["bias"] = router["bias"].at[1, 0].add(1.0)
    other = params | {"moe_layers": params["moe_layers"] | {"router": router}}
    made.update_weights(other, 1)
    found = compare(params, [record], made, CFG, mesh=mesh)
    assert found.metrics["agreement/layer"] == 2 and found.metrics["agreement/gap"] > 0.05
    assert (found.keys.same == 1).all() and found.experts.same[0] == 1 > found.experts.same[1]
