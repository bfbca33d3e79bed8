"""Tests of the sums of gradients over microbatches and devices, with objectives of known gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.parallel.mesh import Region, make_mesh
from glm5_jax.training.accumulation import PREGATHERED, accumulate_gradients, check_vocab_block
from glm5_jax.training.gradients import gradient_function
from glm5_jax.training.loss import LossParts
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.step import make_step
from glm5_jax.training.step_config import StepConfig
from tests.mesh import cases

CFG = cases.config("sparse", dtype="bfloat16")
PATH, SHAPE = "embed/weight", (CFG.vocab_size, CFG.hidden_size)


def loss_parts(max_logit=0.0) -> LossParts:
    none = dict.fromkeys(LossParts._fields, jnp.float32(0))
    return LossParts(**none | {"max_logit": jnp.float32(max_logit), "parts": {}, "stats": {}})


def gradient(sizes, mode, region=Region(), reduce_dtype=None, number=0, weight=jnp.ones(SHAPE)):
    """Returns the gradient of microbatches whose gradients are the sizes, or 1 on all devices but the first."""

    def objective(params, size, execution):
        scale = region.size(("fsdp",)) * jnp.where(number == 0, size, 1.0)
        return scale * jnp.sum(params["embed"]["weight"].astype(jnp.float32)), loss_parts()

    execution = ExecutionConfig(reduce_dtype=reduce_dtype)
    _, _, gradients = accumulate_gradients(
        objective,
        {PATH: weight},
        {},
        jnp.asarray(sizes, jnp.float32),
        cfg=CFG,
        execution=execution,
        region=region,
        mode=mode,
    )
    return gradients[PATH]


@pytest.mark.parametrize("mode", PREGATHERED)
def test_sums_microbatches_in_float32(mode):
    """256 + 1 is 256 in bfloat16, the dtype of pregathered weights."""
    np.testing.assert_array_equal(gradient([256, *[1] * 60], mode), np.full(SHAPE, 316))


@pytest.mark.parametrize(("reduce_dtype", "exact"), [(None, False), ("float32", True)])
def test_sums_devices_in_reduce_dtype(reduce_dtype, exact):
    """The sum is 256 plus seven ones."""
    mesh = make_mesh(fsdp=8)
    region, spec = Region.of(mesh), P(None, "fsdp")

    def local(weight):
        number = region.index(("fsdp",))
        return gradient([256], "local", region, reduce_dtype, number, weight)

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    total = np.asarray(jax.jit(run)(jnp.ones(SHAPE)))
    np.testing.assert_allclose(total, np.full(SHAPE, 263), rtol=0.03)
    assert np.all(total == 263) == exact


@pytest.mark.parametrize("largest", [[-8, -9], [-8, 3]])
def test_max_logit_covers_all_microbatches(largest):
    def objective(params, logit, execution):
        return jnp.sum(params["embed"]["weight"]), loss_parts(logit)

    args = {PATH: jnp.ones(SHAPE)}, {}, jnp.asarray(largest, jnp.float32)
    options = dict(cfg=CFG, execution=ExecutionConfig(), region=Region(), mode="sharded")
    assert accumulate_gradients(objective, *args, **options)[1].max_logit == max(largest)


def test_rejects_too_small_vocab_block():
    mesh = make_mesh(expert=8)
    check_vocab_block(CFG, 8, "sharded", mesh)
    check_vocab_block(CFG, 1, "local", mesh)
    with pytest.raises(ValueError, match="vocab_block is 4; the vocabulary has 8 shards"):
        gradient_function(CFG, StepConfig(vocab_block=4), mesh)


def test_rejects_batch_smaller_than_mesh():
    run = gradient_function(CFG, StepConfig(rows_per_device=1), make_mesh(fsdp=8))
    half = {key: rows[:4] for key, rows in cases.batch().items()}
    with pytest.raises(ValueError, match="batch size 4 does not divide over the mesh axes"):
        jax.eval_shape(run, glm5.abstract_params(CFG), half, cases.RATES)


def test_rejects_freezing_all_weights():
    with pytest.raises(ValueError, match=r"frozen is \('',\), which freezes all weights"):
        make_step(CFG, StepConfig(), OptimizerConfig(frozen=("",)), lambda step: 1e-3)
