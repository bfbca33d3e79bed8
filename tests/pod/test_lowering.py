"""Tests that the 744B train step lowers for 1,024 chips, and of its bytes per device by shapes."""

import dataclasses
import functools
import re

import pytest

from glm5_jax import presets
from glm5_jax.data.mixture import DataConfig
from glm5_jax.rl.algorithm.losses import PolicyLoss
from glm5_jax.training.experiment import MeshConfig
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.step_config import StepConfig
from launch import command_line
from launch.aot import programs as pod

GIB = 2**30
CHIPS = 1024
PARAMETERS = 753_864_139_008


def pretraining():
    """Returns the experiment: dense attention, 4096 rows of 4096 tokens, fsdp 16, expert 64."""
    return command_line.load("experiments/pretrain.py:glm5")[1]


def long_context():
    """Returns a config of sparse attention over 128K tokens, sharded over eight devices."""
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


@pytest.fixture(params=[pretraining, slow(long_context)], ids=lambda make: make.__name__)
def layout(request):
    """Returns (config, mesh, lowered step) of a layout."""
    return lowered(request.param)


def dsa_warmup():
    """Returns the experiment: dense attention over 200K tokens sharded over 64, trained indexers."""
    return command_line.load("experiments/dsa_warmup.py:glm5")[1]


def dsa_sparse():
    """Returns the experiment: sparse attention over 200K tokens sharded over 16, with the indexers' loss."""
    return command_line.load("experiments/dsa_sparse.py:glm5")[1]


def sft():
    """Returns the experiment: like dsa_sparse, with int4 experts."""
    return command_line.load("experiments/sft.py:glm5,mixed")[1]


def rl():
    """Returns the experiment: rollouts of up to 68K tokens sharded over 16, trained with Adam."""
    return command_line.load("experiments/rl_reasoning.py:glm5")[1]


STAGES = [long_context, dsa_warmup, dsa_sparse, sft, rl]


@pytest.mark.slow
@pytest.mark.parametrize("make", [pretraining, *STAGES])
def test_step_lowers_for_1024_tpus(make):
    config, mesh, step = lowered(make)
    assert mesh.size == CHIPS
    assert config.model.num_stored_parameters == PARAMETERS
    text = step.lowered.as_text()
    assert f"mhlo.num_partitions = {CHIPS}" in text
    assert "ragged_all_to_all" in text, "the experts' devices do not exchange rows"
    assert f"tensor<{config.first_batch_rows}x{config.row_length}xi32>" in text
    assert "approx" not in text.lower(), "the selection is approximate"


@pytest.mark.slow
def test_rl_step_reads_rollout_streams():
    config, _, step = lowered(rl)
    assert step.arguments["batch"].keys() > {*PolicyLoss.streams}
    text = step.lowered.as_text()
    arguments = text[text.index("@main(") : text.index("->", text.index("@main("))]
    # Unused arrays are no arguments. Besides the streams there are those that all stages read.
    read = arguments.count(f"tensor<{config.rows}x{config.length}xf32>")
    assert read == len(PolicyLoss.streams) + len(("loss_mask", "ce_weight"))


@pytest.mark.slow
def test_counts_bytes_per_device_of_rl():
    """All weights have two moments, except the indexers, the MTP layer and the router's bias."""
    _, _, step = lowered(rl)
    weights = pod.bytes_on_device(step.arguments["params"])
    params = sum(weights.values())
    # With context=16, weights that expert * context = 1,024 does not divide, mainly the vocabulary's tables, have
    # 16 copies.
    assert 4 * PARAMETERS / CHIPS <= params < 1.08 * 4 * PARAMETERS / CHIPS
    frozen = re.compile("indexer/|^mtp/|router/bias$")
    trained = sum(size for path, size in weights.items() if not frozen.search(path))
    optimizer = sum(pod.bytes_on_device(step.arguments["optimizer"]).values())
    assert optimizer - 2 * trained == 4, "besides the moments there is the step count"
    batch = sum(pod.bytes_on_device(step.arguments["batch"]).values())
    assert batch < 1e6
    assert params + optimizer + batch < 9 * GIB


def test_counts_bytes_per_device(layout):
    """A device holds weights and momentum in float32 and moments of the few AdamW weights, almost without copies."""
    _, _, step = layout
    params = sum(pod.bytes_on_device(step.arguments["params"]).values())
    optimizer = sum(pod.bytes_on_device(step.arguments["optimizer"]).values())
    batch = sum(pod.bytes_on_device(step.arguments["batch"]).values())
    even_share = 4 * PARAMETERS / CHIPS
    assert even_share <= params < 1.05 * even_share
    # expert * context = 512 does not divide 154,880 words, so `context` holds copies of the embedding, the head and
    # their second moments.
    assert params < optimizer < 1.04 * params
    assert batch < 1e6
    assert params + optimizer + batch < 6 * GIB


@pytest.mark.slow
def test_largest_batch_saves_no_more_activations():
    config, mesh, step = lowered(pretraining)
    ramp = dataclasses.replace(config.batch, start=config.batch.end)
    last = pod.lower_step(dataclasses.replace(config, batch=ramp), mesh)
    assert last.rows == 4 * step.rows
    assert 0 < last.saved_activation_bytes <= step.saved_activation_bytes


def test_replicates_nothing_above_a_gibibyte(layout):
    config, mesh, step = layout
    arguments = step.arguments
    assert max(pod.replicated_bytes(arguments).values()) < 0.01 * GIB
    assert max(pod.bytes_on_device(arguments).values()) < GIB
    # One layer's weights and a part of the tables are gathered at a time.
    used = pod.gathered_bytes(config.model, mesh, config.step.vocab_block)
    assert max(used.values()) < 0.5 * GIB
    assert pod.gathered_bytes(config.model, mesh)["embed/weight"] > GIB
    always = pod.gathered_bytes(config.model, mesh, config.step.vocab_block, pregathered=[""])
    assert always["embed/weight"] > GIB
    experts = "moe_layers/experts/up"
    assert always[experts] == config.model.num_moe_layers * used[experts]
