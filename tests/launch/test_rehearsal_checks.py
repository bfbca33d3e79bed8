"""The checks of a rehearsal find what would keep a run from starting on its cluster."""

import dataclasses
import pathlib

import pytest

from experiments import distill, rl_agentic, rl_reasoning, serve, sft
from glm5_jax import presets
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.rl.programs.cluster import ClusterConfig
from glm5_jax.rl.programs.on_policy import IN_PROCESS
from glm5_jax.rl.programs.roles import list_roles
from glm5_jax.runtime.placement import Role
from glm5_jax.training.experiment import MeshConfig
from launch import gke, rehearse, run_plan, slurm, ssh_commands
from launch.rehearsal import arithmetic, memory
from launch.rehearsal.arithmetic import ERROR, Cluster
from launch.rehearsal.job import Times
from launch.rehearsal.push_cost import MAX_DURATION_S, push_cost
from tests.contracts.source_tree import ROOT

V5P = Cluster("slurm", "v5p", None)


def texts(findings) -> list[str]:
    """Returns the texts of the errors."""
    return [finding.text for finding in findings if finding.level == ERROR]


def role(**options) -> Role:
    return Role(**{"name": "train", "argv": ["train", "{distributed}"]} | options)


@pytest.mark.parametrize(
    ("options", "chip", "text"),
    [
        ({"devices": 8}, "v5p", "a process has 8 v5p and a host 4"),
        ({"devices": 2, "hosts": 2}, "v5p", "on several hosts it has all 4 of each"),
        ({"argv": ["train"], "devices": 8, "hosts": 2}, "h200", "no {distributed} in its argv"),
    ],
)
def test_finds_role_that_no_host_can_run(options, chip, text):
    [error] = texts(arithmetic.check_hosts([role(**options)], Cluster("slurm", chip, None)))
    assert text in error


@pytest.mark.parametrize(
    ("options", "chip"), [({"devices": 8}, "h200"), ({"devices": 4, "hosts": 2}, "v5p"), ({}, None)]
)
def test_accepts_role_that_fits_its_hosts(options, chip):
    assert not list(arithmetic.check_hosts([role(**options)], Cluster("slurm", chip, None)))


def test_finds_engine_that_needs_two_hosts():
    recipe, command = rl_agentic.glm5(), ["--experiment=rl_agentic.py:glm5"]
    assert not list(arithmetic.check_hosts(list_roles(recipe, command), V5P))
    cluster = dataclasses.replace(recipe.cluster, engine_hosts=1, engine_devices=8)
    roles = list_roles(dataclasses.replace(recipe, cluster=cluster), command)
    findings = [f for f in arithmetic.check_hosts(roles, V5P) if f.level == ERROR]
    assert [(f.role, "must run in 2 processes" in f.text) for f in findings] == [("engine", True)]


def test_agentic_recipe_fits_its_meshes():
    assert not list(arithmetic.check_meshes(rl_agentic.glm5(), V5P))


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ({"hosts": 128}, "does not divide the 512 devices"),
        ({"engine_mesh": MeshConfig(fsdp=1, expert=4)}, "does not divide the 8 devices"),
        ({"ranks": 4}, "cluster.ranks is 4 and the engine's mesh has 8 data-parallel ranks"),
    ],
)
def test_finds_mesh_that_does_not_fit(cluster, text):
    recipe = rl_agentic.glm5()
    config = dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, **cluster))
    [error] = texts(arithmetic.check_meshes(config, V5P))
    assert text in error


@pytest.mark.parametrize(
    ("port", "text"), [(80, "port 80 is for programs of root"), (61_447, "jax's coordinator")]
)
def test_finds_port_that_is_taken(port, text):
    [error] = texts(arithmetic.check_ports([role(port=port)], V5P))
    assert text in error
    assert not list(arithmetic.check_ports([role(port=7000)], V5P))


def test_finds_paths_outside_of_the_volume():
    config = dataclasses.replace(sft.glm5("mixed"), checkpoint="/data/sparse")
    volume = Cluster("gke", "v5p", pathlib.PurePath("/run"))
    [error] = texts(arithmetic.check_folders(config, pathlib.PurePath("/run/sft"), volume))
    assert error.startswith("checkpoint=/data/sparse is not in /run, the only volume of the pods")
    parent = volume._replace(shared_folder=pathlib.PurePath("/"))
    assert not list(arithmetic.check_folders(config, pathlib.PurePath("/run/sft"), parent))
    assert not list(arithmetic.check_folders(config, pathlib.PurePath("/run/sft"), V5P))


def test_finds_teachers_of_another_folder():
    volume = Cluster("gke", "v5p", pathlib.PurePath("/run"))
    errors = texts(arithmetic.check_folders(distill.glm5(), pathlib.PurePath("/run"), volume))
    assert errors[0].startswith("teachers.0.checkpoint=workdir/lifecycle_glm5/sft is not in /run")


def test_finds_missing_checkpoint_and_data():
    no_data, no_checkpoint = texts(arithmetic.check_inputs(sft.glm5("mixed")))
    assert no_data.startswith("sft:glm5,mixed has only the small data sets of this repository")
    assert no_checkpoint.startswith("sft:glm5,mixed starts from trained weights; give --experiment")
    chats = (ChatSourceConfig(chats="/data/chats.jsonl"),)
    recipe = sft.glm5("mixed")
    data = dataclasses.replace(recipe.data, sources=chats)
    config = dataclasses.replace(recipe, checkpoint="/data/sparse", data=data)
    assert not list(arithmetic.check_inputs(config))


def test_finds_push_that_exceeds_memory_of_host():
    recipe = rl_agentic.tiny()
    cluster = ClusterConfig(engines=3, engine_memory=1)
    config = dataclasses.replace(recipe, model=presets.glm4_7_flash(), cluster=cluster)
    note, error = arithmetic.check_push(config, V5P)
    assert "GB for each of 3 engines: a trainer's host sends" in note.text
    assert "during a push and has 1 GiB; use transport=storage" in error.text
    assert not list(arithmetic.check_push(dataclasses.replace(config, transport="storage"), V5P))


def test_push_costs_bytes_of_busiest_link():
    """One host trains, and each of four engines has two hosts of four chips."""
    cluster = ClusterConfig(
        engines=4,
        ranks=8,
        engine_hosts=2,
        engine_devices=4,
        engine_mesh=MeshConfig(fsdp=1, expert=-1),
    )
    config = dataclasses.replace(rl_agentic.tiny(), cluster=cluster)
    cost = push_cost(config, "v5p", is_quantised=False)
    weights = config.model.num_parameters
    assert 4 * weights < cost.weight_bytes < 6 * weights  # float32, with the MTP layer
    assert (cost.engine_hosts, cost.offered_bytes) == (2, cost.weight_bytes)
    # Replicated weights are received by both hosts.
    assert 0.5 * cost.weight_bytes < cost.received_bytes < 0.7 * cost.weight_bytes
    assert cost.sent_by_trainer == 2 * cost.received_bytes  # once, and not once per engine
    assert cost.sent_by_engine == pytest.approx(0.75 * cost.received_bytes, abs=1)
    assert cost.duration_s == pytest.approx(cost.sent_by_trainer / 25e9)


def test_push_of_glm5_takes_less_than_minute():
    config = rl_agentic.glm5()
    cost = push_cost(config, "v5p", is_quantised=True)
    assert cost.weight_bytes < 0.6 * config.model.num_parameters
    assert cost.sent_by_trainer < cost.weight_bytes / 100
    assert cost.duration_s < MAX_DURATION_S


def test_engine_memory_counts_weights_and_pages():
    model, options = presets.tiny(), serve.tiny().engine
    mesh = MeshConfig(fsdp=1, expert=-1)
    few, many = (
        memory.engine_memory(
            "engine", model, dataclasses.replace(options, num_pages=n), mesh, "v5p", 4, False
        )
        for n in (64, 128)
    )
    assert few.parts["weights"] == many.parts["weights"]
    assert many.parts["cache"] > 1.5 * few.parts["cache"]
    assert few.temporary_bytes is None and not few.source


@pytest.mark.slow
def test_train_memory_uses_compiled_layout():
    config = rl_reasoning.glm5()
    uses = memory.train_memory(config, "v5p", 1024)
    assert (uses.source, uses.fits) == ("RL v5p", True)
    assert uses.used_bytes > sum(uses.parts.values()) > 9e9


@pytest.mark.slow
def test_finds_pages_of_engine_that_exceed_the_chips():
    config = dataclasses.replace(
        rl_reasoning.glm5(),
        engine_placement=IN_PROCESS,
        engine=EngineConfig(max_num_seqs=512, prefill_chunk=8192),
    )
    roles = [role(devices=4, hosts=256)]
    levels = {
        uses.program: finding.level for uses, finding in arithmetic.check_memory(config, roles, V5P)
    }
    assert levels == {"train step": "note", "engine on these devices": ERROR}


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        (slurm, ["--hosts=2"]),
        (gke, ["--hosts=2", "--image=i", "--claim=c", "--accelerator=nvidia-h200-141gb"]),
        (ssh_commands, ["--machines=a,b"]),
    ],
)
def test_launchers_refuse_hosts_for_stage_of_one_process(launcher, flags, capsys):
    argv = [f"--experiment={ROOT}/experiments/rl_reasoning.py:tiny", "--workdir=/run"]
    assert launcher.main([launcher.__name__, *argv, "--devices=4", *flags]) == 2
    assert "2 hosts: rl_reasoning:tiny trains in 1 process" in capsys.readouterr().err


POD = ["--image=i", "--claim=c", "--accelerator=nvidia-h200-141gb", "--devices=8"]
PRETRAIN = [f"--experiment={ROOT}/experiments/pretrain.py:tiny", *POD]


def test_job_set_mounts_parent_of_workdir():
    argv = ["gke", *PRETRAIN, "--workdir=/data/run", "--mount=/data"]
    _, manifest = gke.generate(argv, gke.define())
    [job] = manifest["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["volumeMounts"][0] == {"name": "workdir", "mountPath": "/data"}


def test_job_set_refuses_mount_without_workdir(capsys):
    assert gke.main(["gke", *PRETRAIN, "--workdir=/data/run", "--mount=/other"]) == 2
    assert "--workdir=/data/run is not in --mount=/other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on=mesos"], "--on=mesos is not a launcher; use one of slurm, gke, machines"),
        (["--on=gke", "--devices=8", "--mesh.fsdp=-1", "--mesh.expert=1"], "--image is not given"),
        (["--devices=8", "--hosts=3"], "3 hosts of 8 accelerators"),
    ],
)
def test_rehearsal_refuses_invalid_arguments(flags, message, capsys):
    argv = ["rehearse", f"--experiment={ROOT}/experiments/pretrain.py:glm5", "--check_only"]
    assert rehearse.main([*argv, "--workdir=/run", *flags]) == 2
    assert message in capsys.readouterr().err


def test_rehearsed_arguments_have_fewer_hosts():
    argv = ["rehearse", f"--experiment={ROOT}/experiments/pretrain.py:glm5", "--hosts=16"]
    argv += ["--experiment.mesh.fsdp=-1", "--experiment.mesh.expert=1"]
    argv += ["--devices=4", "--workdir=/run", "--max_processes=4"]
    values = rehearse.define(slurm)
    plan, _ = slurm.generate(argv, values)
    reduced = rehearse.reduced_argv(argv, plan, values, pathlib.Path("/small"))
    small, _ = slurm.generate(reduced, rehearse.define(slurm))
    assert (plan.roles[0].hosts, small.roles[0].hosts) == (16, 4)
    assert (plan.workdir, small.workdir) == (pathlib.Path("/run"), pathlib.Path("/small"))
    rehearse.check_commands(plan, small)
    other = small._replace(roles=(dataclasses.replace(small.roles[0], argv=["x"]),))
    with pytest.raises(rehearse.RehearsalFailed, match="other commands for train"):
        rehearse.check_commands(plan, other)


def test_table_of_times_has_processes_and_bytes_of_roles():
    roles = (role(hosts=4, devices=4, main=True), role(name="gateway", port=8000))
    plan = run_plan.RunPlan("run", roles, pathlib.Path("/run"))
    small = plan._replace(roles=(dataclasses.replace(roles[0], hosts=2), roles[1]))
    started, times = {"train": 2, "gateway": 1}, Times(30.4, 5, 40)
    table = rehearse.format_times(plan, small, started, times, {"train": 46 * 10**9})
    assert "| train | 4 | 2 | 16 | 8 | 46.0 | no |\n| gateway | 1 | 1 | 0 | 0 |  | yes |" in table
    assert table.endswith("rehearsed: 30 s to step 2, 5 s to stop, 40 s to the end")
