"""The 744B train step on 1,024 chips that are not there: it lowers, and its parts fit by their shapes."""

import dataclasses
import functools
import re

import pytest

from glm5_jax import presets
from glm5_jax.data.mixture import DataConfig
from glm5_jax.rl.algorithm.losses import PolicyLoss
from glm5_jax.training.experiment import ExperimentConfig, MeshConfig
from glm5_jax.training.step import StepConfig
from launch import run
from launch.aot import programs as pod

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
        step=StepConfig(token_chunk=1024, vocab_block=40_960, query_block=64),
    )


@functools.cache
def lowered(make):
    config = make()
    mesh = pod.abstract_mesh(dataclasses.asdict(config.mesh))
    return config, mesh, pod.lower_step(config, mesh)


def slow(make):
    return pytest.param(make, marks=pytest.mark.slow)


LAYOUTS = pytest.mark.parametrize("make", [pretraining, slow(long_context)])


def warm_up():
    """Dense attention over 200K tokens cut in 64, of which the indexers alone learn."""
    return run.load("experiments/dsa_warmup.py:glm5")[1]


def adaptation():
    """Sparse attention over 200K tokens cut in sixteen, and its indexers' loss."""
    return run.load("experiments/dsa_sparse.py:glm5")[1]


def fine_tuning():
    """The same with experts as int4."""
    return run.load("experiments/sft.py:glm5,mixed")[1]


def reinforcement():
    """Attempts of up to 68K tokens, cut in sixteen; Adam's moments of all that learns."""
    return run.load("experiments/rl_reasoning.py:glm5")[1]


STAGES = [long_context, warm_up, adaptation, fine_tuning, reinforcement]


@pytest.mark.slow
@pytest.mark.parametrize("make", [pretraining, *STAGES])
def test_the_step_lowers_for_a_thousand_tpus(make):
    config, mesh, step = lowered(make)
    assert mesh.size == CHIPS
    assert config.model.num_stored_parameters == PARAMETERS
    text = step.lowered.as_text()
    assert f"mhlo.num_partitions = {CHIPS}" in text
    assert "ragged_all_to_all" in text, "rows do not travel between the experts' devices"
    assert f"tensor<{config.first_batch_rows}x{config.row_length}xi32>" in text
    assert "approx" not in text.lower(), "what is selected depends on how long the row is"


@pytest.mark.slow
def test_a_step_of_reinforcement_reads_what_was_sampled():
    config, _, step = lowered(reinforcement)
    assert step.arguments["batch"].keys() > {*PolicyLoss.streams}
    text = step.lowered.as_text()
    arguments = text[text.index("@main(") : text.index("->", text.index("@main("))]
    # What nothing reads is no argument: beside the streams only what all stages read.
    read = arguments.count(f"tensor<{config.rows}x{config.length}xf32>")
    assert read == len(PolicyLoss.streams) + len(("loss_mask", "ce_weight"))


@pytest.mark.slow
def test_bytes_per_device_of_reinforcement():
    """Two moments of what gradients move: not the indexers, the MTP layer and the router's bias."""
    _, _, step = lowered(reinforcement)
    weights = pod.bytes_on_device(step.arguments["params"])
    params = sum(weights.values())
    # Rows are cut in sixteen: what does not divide by expert * context = 1,024 is held by 16 devices, the
    # tables of the vocabulary first of all.
    assert 4 * PARAMETERS / CHIPS <= params < 1.08 * 4 * PARAMETERS / CHIPS
    still = re.compile("indexer/|^mtp/|router/bias$")
    moving = sum(size for path, size in weights.items() if not still.search(path))
    optimizer = sum(pod.bytes_on_device(step.arguments["optimizer"]).values())
    assert optimizer - 2 * moving == 4, "beside the moments there is the number of steps"
    batch = sum(pod.bytes_on_device(step.arguments["batch"]).values())
    assert batch < 1e6
    assert params + optimizer + batch < 9 * GIB


@LAYOUTS
def test_bytes_per_device(make):
    """Weights and momentum in float32, moments of the few AdamW weights: next to nothing is held
    twice."""
    _, _, step = lowered(make)
    params = sum(pod.bytes_on_device(step.arguments["params"]).values())
    optimizer = sum(pod.bytes_on_device(step.arguments["optimizer"]).values())
    batch = sum(pod.bytes_on_device(step.arguments["batch"]).values())
    whole = 4 * PARAMETERS / CHIPS
    assert whole <= params < 1.05 * whole
    # 154,880 words do not divide by expert * context = 512: there `context` holds copies of the
    # embedding, the head and their second moments.
    assert params < optimizer < 1.04 * params
    assert batch < 1e6
    assert params + optimizer + batch < 6 * GIB


@pytest.mark.slow
def test_the_largest_batch_of_the_ramp_keeps_no_more_than_the_first():
    """Four times as many rows, in four microbatches."""
    config, mesh, step = lowered(pretraining)
    ramp = dataclasses.replace(config.batch, start=config.batch.end)
    last = pod.lower_step(dataclasses.replace(config, batch=ramp), mesh)
    assert last.rows == 4 * step.rows
    assert 0 < last.saved_activation_bytes <= step.saved_activation_bytes


@LAYOUTS
def test_nothing_above_a_gibibyte_is_replicated(make):
    config, mesh, step = lowered(make)
    arguments = step.arguments
    assert max(pod.replicated_bytes(arguments).values()) < 0.01 * GIB
    assert max(pod.bytes_on_device(arguments).values()) < GIB
    # While they are used, one layer's and a part of the tables'.
    used = pod.gathered_bytes(config.model, mesh, config.step.vocab_block)
    assert max(used.values()) < 0.5 * GIB
    assert pod.gathered_bytes(config.model, mesh)["embed/weight"] > GIB
    always = pod.gathered_bytes(config.model, mesh, config.step.vocab_block, pregathered=[""])
    assert always["embed/weight"] > GIB
    experts = "moe_layers/experts/up"
    assert always[experts] == config.model.num_moe_layers * used[experts]
