"""The small form of a recipe keeps its kinds, and changes sizes only."""

import dataclasses
import math

import pytest

from experiments import serve
from experiments.serve import PrefillConfig
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.parallel.mesh import AXES, Region
from glm5_jax.training.experiment import MeshConfig
from launch import command_line, rehearsal
from launch.rehearsal.substitution import (
    Rehearsal,
    differences,
    read_rehearsal,
    small_form,
    small_mesh,
    small_topology,
    tiny_variant,
)
from tests.contracts.source_tree import ROOT

OPTIONS = Rehearsal(
    max_processes=2, devices=8, engine_devices=8, steps=4, checkpoint="/c", served_checkpoint="/s"
)


def load(spec: str, **changes):
    """Returns the recipe with these fields, and its small form."""
    variant = spec.partition(":")[2]
    module, recipe = command_line.load(f"{ROOT}/experiments/{spec}")
    config = dataclasses.replace(recipe, **changes)
    small = small_form(config, module.get_config(tiny_variant(variant)), OPTIONS)
    return config, small


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (MeshConfig(fsdp=16, expert=64), {"fsdp": 2, "expert": 4}),
        (MeshConfig(fsdp=1, expert=64, context=16), {"expert": 4, "context": 2}),
        (MeshConfig(fsdp=8, expert=64, context=2), {"fsdp": 2, "expert": 2, "context": 2}),
        (MeshConfig(fsdp=-1, expert=2), {"fsdp": 4, "expert": 2}),
        (MeshConfig(fsdp=1), {"fsdp": 8}),
    ],
)
def test_small_mesh_keeps_large_axes(mesh, expected):
    small = dataclasses.asdict(small_mesh(mesh, 8))
    assert {axis: size for axis, size in small.items() if size > 1} == expected


@pytest.mark.parametrize("count", [1, 2, 3, 6, 12, 16])
def test_small_mesh_uses_all_devices(count):
    mesh = small_mesh(MeshConfig(fsdp=4, expert=8, context=2), count)
    assert math.prod(dataclasses.asdict(mesh).values()) == count


def test_small_topology_has_as_many_dimensions():
    assert small_topology("8x8x16", 8) == "8x1x1"
    assert small_topology("", 8) == ""


def test_tiny_variant_has_same_kind():
    assert tiny_variant("glm5,32k") == "tiny,32k"
    assert tiny_variant("glm5") == "tiny"


@pytest.mark.parametrize(
    "spec", ["pretrain.py:glm5", "midtrain.py:glm5,32k", "dsa_warmup.py:glm5", "sft.py:glm5,mixed"]
)
def test_small_stage_fits_its_devices(spec):
    config, small = load(spec)
    sizes = [getattr(small.mesh, axis) for axis in AXES]
    small.check_rows(Region(**dict(zip(AXES, sizes))))
    small.model.check_length(small.row_length)
    assert small.steps == 4
    assert small.optimizer == config.optimizer
    assert small.step.remat == config.step.remat
    assert small.model.attention == config.model.attention
    assert bool(small.model.int4_group) == bool(config.model.int4_group)


def test_small_stage_reads_checkpoint_of_rehearsal():
    _, small = load("sft.py:glm5,mixed", checkpoint="/data/sparse")
    assert small.checkpoint == "/c"
    assert load("sft.py:glm5,mixed")[1].checkpoint is None


def test_small_stage_reads_shipped_data():
    config, _ = load("sft.py:glm5,mixed")
    sources = (ChatSourceConfig(chats="/data/chats.jsonl"),)
    data = dataclasses.replace(config.data, sources=sources)
    config, small = load("sft.py:glm5,mixed", data=data)
    assert config.data.has_user_files and not small.data.has_user_files
    small.check_data()
    assert "data.sources" in [name for name, _, _ in differences(config, small)]


def test_small_agentic_run_has_fewer_processes():
    config, small = load("rl_agentic.py:glm5", checkpoint="/data/sft", served_checkpoint="/data/w4")
    assert (small.cluster.engines, small.cluster.hosts) == (2, 2)
    assert (small.checkpoint, small.served_checkpoint) == ("/c", "/s")
    assert [share.name for share in small.tasks] == [share.name for share in config.tasks]
    assert {share.tasks.size for share in small.tasks} == {200}
    assert small.transport == config.transport
    assert small.engine.num_speculative_tokens == config.engine.num_speculative_tokens
    assert small.cluster.devices == config.cluster.devices
    names = [name for name, _, _ in differences(config, small)]
    assert "cluster.engines" in names and "length" in names
    assert not {"seed", "policy", "transport"} & set(names)


def test_small_server_has_fewer_hosts():
    config, small = load("serve.py:glm5", checkpoint="/data/glm5")
    assert config.hosts > small.hosts == 2 and config.devices == small.devices
    assert (small.checkpoint, small.warm) == ("/c", False)
    assert math.prod(dataclasses.asdict(small.mesh).values()) == OPTIONS.engine_devices
    assert math.prod(map(int, small.topology.split("x"))) == small.hosts * small.devices


def test_command_line_applies_rehearsal(tmp_path, monkeypatch):
    argv = ["run", f"--experiment={ROOT}/experiments/pretrain.py:glm5", "--workdir=/data"]
    real = command_line.parse(argv)
    OPTIONS.write(tmp_path / "rehearsal.json")
    monkeypatch.setenv(rehearsal.VARIABLE, str(tmp_path / "rehearsal.json"))
    assert read_rehearsal() == OPTIONS
    small = command_line.parse(argv)
    assert small.workdir == real.workdir
    assert (real.config.data.sequence_length, small.config.data.sequence_length) == (4096, 128)


def test_server_with_separate_prefill_keeps_both_meshes():
    prefill = PrefillConfig(
        replicas=4, hosts=8, devices=4, topology="2x4x4", mesh=MeshConfig(fsdp=1, expert=-1)
    )
    config, small = load("serve.py:glm5", prefill=prefill, checkpoint="/data")
    assert small.prefill == PrefillConfig(
        replicas=2, hosts=2, devices=4, topology="8x1x1", mesh=MeshConfig(fsdp=1, expert=8)
    )
    assert (small.mesh.expert, small.server.prefill_min_tokens) == (8, 1)
    decode, engines = serve.roles(config, ["--experiment=x", "--workdir=w"])
    assert (decode.name, decode.count, engines.name, engines.count) == ("decode", 1, "prefill", 4)
    assert "--experiment.server.prefill_urls={prefill.urls}" in decode.argv
    assert "--experiment.only_prefills=True" in engines.argv and engines.port == decode.port + 1
    assert "--workdir=w" not in (*decode.argv, *engines.argv)
    with pytest.raises(ValueError, match="prefill.replicas is -1"):
        PrefillConfig(replicas=-1)
