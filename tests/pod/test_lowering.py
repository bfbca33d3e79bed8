"""The 744B train step on 1,024 chips that are not there: it lowers, and its parts fit by their shapes."""

import dataclasses
import functools

import pytest

from glm5_jax import presets
from glm5_jax.data.mixture import DataConfig
from glm5_jax.training.experiment import ExperimentConfig, MeshConfig
from glm5_jax.training.step import StepConfig
from launch import compile as pod, run

GIB = 2**30
CHIPS = 1024
PARAMETERS = 753_864_139_008


def pretraining():
    """The experiment as it stands: dense attention, 4096 rows of 4096 tokens, fsdp 16, expert 64."""
    return run.load("experiments/pretrain.py:glm5")[1]


def long_context():
    """Sparse attention over 128K tokens, cut in eight."""
    return ExperimentConfig(
        name="long context",
        model=presets.glm5(),
        mesh=MeshConfig(fsdp=2, expert=64, context=8),
        data=DataConfig(sequence_length=131_072),
        step=StepConfig(token_chunk=1024, query_block=64),
    )


@functools.cache
def lowered(make):
    config = make()
    mesh = pod.abstract_mesh(dataclasses.asdict(config.mesh))
    return config, mesh, pod.lower_step(config, mesh)


LAYOUTS = pytest.mark.parametrize("make", [pretraining, long_context])


def warm_up():
    """Dense attention over 200K tokens cut in 64, of which the indexers alone learn."""
    return run.load("experiments/dsa_warmup.py:glm5")[1]


def adaptation():
    """Sparse attention over 200K tokens cut in eight, and its indexers' loss."""
    return run.load("experiments/dsa_sparse.py:glm5")[1]


def fine_tuning():
    """The same with experts as int4."""
    return run.load("experiments/sft.py:glm5,mixed")[1]


@pytest.mark.parametrize("make", [pretraining, long_context, warm_up, adaptation, fine_tuning])
def test_the_step_lowers_for_a_thousand_tpus(make):
    config, mesh, step = lowered(make)
    assert mesh.size == CHIPS
    assert config.model.num_stored_parameters == PARAMETERS
    text = step.lowered.as_text()
    assert f"mhlo.num_partitions = {CHIPS}" in text
    assert "ragged_all_to_all" in text, "rows do not travel between the experts' devices"
    batch = f"tensor<{config.batch.start // config.data.sequence_length}x"
    assert f"{batch}{config.data.sequence_length}xi32>" in text


@LAYOUTS
def test_bytes_per_device(make):
    """Weights and momentum in float32, moments of the few AdamW weights: next to nothing is held
    twice."""
    _, _, step = lowered(make)
    params = sum(pod.bytes_on_device(step.state["params"]).values())
    optimizer = sum(pod.bytes_on_device(step.state["optimizer"]).values())
    batch = sum(pod.bytes_on_device(step.batch).values())
    whole = 4 * PARAMETERS / CHIPS
    assert whole <= params < 1.05 * whole
    # 154,880 words do not divide by expert * context = 512: there `context` holds copies of the
    # embedding, the head and their second moments.
    assert params < optimizer < 1.04 * params
    assert batch < 1e6
    assert params + optimizer + batch < 6 * GIB


@LAYOUTS
def test_nothing_above_a_gibibyte_is_replicated(make):
    config, mesh, step = lowered(make)
    arguments = {**step.state, "batch": step.batch}
    assert max(pod.replicated(arguments).values()) < 0.01 * GIB
    assert max(pod.bytes_on_device(arguments).values()) < GIB
    # While they are used: the tables are whole on every device, in bfloat16, and nothing else.
    used = pod.gathered(config.model, mesh)
    tables = {"embed/weight", "lm_head/weight"}
    assert {path for path, size in used.items() if size > GIB} == tables
    assert max(size for path, size in used.items() if path not in tables) < 0.25 * GIB
