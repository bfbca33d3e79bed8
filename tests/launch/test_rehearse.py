"""Recipes of the full model start on emulated hosts, from the scripts and manifests of the launchers."""

import os
import re
import subprocess
import sys

import pytest

from launch import rehearse
from launch.rehearsal.hosts import missing_support
from tests.contracts.source_tree import ROOT

POD = ["--on=gke", "--image=i", "--claim=c", "--mount=/data"]
V5P = ["--hosts=256", "--devices=4"]
LAUNCHERS = {
    "slurm": ["--on=slurm", "--devices_per_node=4", "--chip=v5p", *V5P],
    "gke": [*POD, "--accelerator=tpu-v5p-slice", "--tpu_topology=8x8x16", *V5P],
    "machines": ["--on=machines", f"--machines={','.join(f'machine{n}' for n in range(128))}"]
    + ["--chip=h200", "--devices=8"],
}
TEXTS = ["--data.sources=[{'kind': 'jsonl', 'path': '/data/texts/*.jsonl'}]"]
CHATS = ["--data.sources=[{'chats': '/data/chats/*.jsonl'}]"]
EARLIER = ["--checkpoint=/data/earlier"]
# Flags of each recipe that is one stage of training.
STAGES = {
    "pretrain:glm5": TEXTS,
    "midtrain:glm5,32k": TEXTS + EARLIER,
    "midtrain:glm5,128k": TEXTS + EARLIER,
    "midtrain:glm5,200k": TEXTS + EARLIER,
    "dsa_warmup:glm5": TEXTS + EARLIER,
    "dsa_sparse:glm5": TEXTS + EARLIER,
    "sft:glm5,mixed": CHATS + EARLIER,
}
# Flags of each recipe of several programs, and of the server. Their numbers of hosts are in their configs.
SYSTEMS_ON = {
    "slurm": ["--on=slurm", "--devices_per_node=4", "--chip=v5p"],
    "gke": [*POD, "--accelerator=tpu-v5p-slice"],
}
ENGINES = EARLIER + ["--served_checkpoint=/data/w4a8", "--requires_data=false"]
ORIGINS = ("sft", "reasoning", "agentic", "general")
TEACHERS = [{"checkpoint": f"/data/{origin}", "origin": origin} for origin in ORIGINS]
PREFILL = ["--prefill.replicas=2", "--prefill.hosts=8", "--prefill.devices=4"]
PREFILL += ["--prefill.topology=2x4x4", "--prefill.mesh.fsdp=1", "--prefill.mesh.expert=-1"]
SYSTEMS = {
    "rl_agentic:glm5": ENGINES,
    "rl_reasoning:glm5": ENGINES,
    "rl_general:glm5": [*ENGINES, "--judge=http://judge:8000"],
    "distill:glm5": [*ENGINES, f"--teachers={TEACHERS}"],
    "serve:glm5": ["--checkpoint=/data/glm5", "--server.trusted_network=True", *PREFILL],
}
# The rehearsals of the slow tier: each program on one launcher. Stages of one role that are not among them start as these
# do. Every recipe is checked at its size on every launcher.
RUNS = [
    ("pretrain:glm5", "slurm"),
    ("sft:glm5,mixed", "gke"),
    ("midtrain:glm5,200k", "slurm"),
    ("serve:glm5", "slurm"),
    ("rl_agentic:glm5", "gke"),
    ("rl_reasoning:glm5", "slurm"),
    ("rl_general:glm5", "gke"),
    ("distill:glm5", "slurm"),
]
PROGRAMS = {"engine", "gateway", "orchestrator", "task", "train"}


def flags_of(recipe: str, launcher: str) -> list[str]:
    """Returns the flags of a rehearsal of a recipe on a launcher."""
    if recipe in STAGES:
        return [*LAUNCHERS[launcher], *STAGES[recipe]]
    return [*SYSTEMS_ON[launcher], *SYSTEMS[recipe]]


def roles_of(recipe: str) -> set[str]:
    """Returns the names of a recipe's roles, without numbers."""
    if recipe in STAGES:
        return {"train"}
    return {"decode", "prefill"} if recipe == "serve:glm5" else PROGRAMS


CHECKS = [(name, on) for name in STAGES for on in ("slurm", "gke")]
CHECKS += [("pretrain:glm5", "machines"), *((name, on) for name in SYSTEMS for on in SYSTEMS_ON)]


@pytest.mark.parametrize(
    ("recipe", "launcher"),
    [one if one in RUNS[:2] else pytest.param(*one, marks=pytest.mark.slow) for one in CHECKS],
)
def test_recipe_passes_checks_at_its_size(recipe, launcher, capsys):
    argv = [recipe, "--workdir=/data/run", *flags_of(recipe, launcher)]
    assert rehearse.main(["rehearse", *argv, "--check_only"]) == 0, capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "launcher"), RUNS)
def test_recipe_starts_stops_and_resumes(recipe, launcher, tmp_path):
    if reason := missing_support():
        pytest.skip(reason)
    argv = [recipe, "--workdir=/data/run", *flags_of(recipe, launcher)]
    # Without the number of devices that tests have.
    xla_flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    done = subprocess.run(
        [sys.executable, "-m", "launch.rehearse", *argv, f"--folder={tmp_path}/rehearsal"],
        cwd=ROOT,
        # pallas_kernels.compat.disable_mesh_program_cache says why there is no cache.
        env=os.environ | {"XLA_FLAGS": xla_flags, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    roles, _, seconds = done.stdout.rpartition("| role | processes |")[2].partition("rehearsed:")
    names = {line.split()[1].partition("-")[0] for line in roles.splitlines()[2:] if line}
    assert names == roles_of(recipe)
    assert re.fullmatch(r" \d+ s to (step 2|a reply), \d+ s to stop, \d+ s to the end\n", seconds)
