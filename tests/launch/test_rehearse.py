"""Recipes of the full model start on emulated hosts, from the scripts and manifests of the launchers."""

import os
import re
import subprocess
import sys

import pytest

from launch.rehearsal.hosts import missing_support
from tests.contracts.source_tree import ROOT

POD = ["--on=gke", "--image=i", "--claim=c", "--mount=/data"]
V5P = [*POD, "--accelerator=tpu-v5p-slice", "--hosts=256", "--devices=4", "--tpu_topology=8x8x16"]
RECIPES = {
    "pretrain on Slurm": ["pretrain.py:glm5", "--on=slurm", "--hosts=256", "--devices=4"]
    + ["--devices_per_node=4", "--chip=v5p"],
    "sft on Kubernetes": ["sft.py:glm5,mixed", *V5P, "--checkpoint=/data/sparse"],
    "mid-training on machines": ["midtrain.py:glm5,32k", "--on=machines", "--devices=8"]
    + [f"--machines={','.join(f'machine{n}' for n in range(128))}", "--chip=h200"]
    + ["--checkpoint=/data/pretrain"],
    # An engine is one process, and fits the chips of a host only as W4A8 on this one.
    "agentic RL on Kubernetes": ["rl_agentic.py:glm5", *POD, "--accelerator=tpu7x"]
    + ["--checkpoint=/data/sft", "--served_checkpoint=/data/w4a8", "--cluster.engine_devices=4"]
    + ["--cluster.engine_topology=2x2x1", "--cluster.hosts=128", "--cluster.topology=8x8x8"],
}
ROLES = {"agentic RL on Kubernetes": ["engine", "gateway", "orchestrator", *4 * ["task"], "train"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_starts_stops_and_resumes(name, tmp_path):
    if reason := missing_support():
        pytest.skip(reason)
    recipe, *flags = RECIPES[name]
    argv = [f"--experiment=experiments/{recipe}", "--workdir=/data/run", *flags]
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
    names = [line.split()[1] for line in roles.splitlines()[2:] if line]
    assert [name.partition("-")[0] for name in names] == ROLES.get(name, ["train"])
    assert re.fullmatch(r" \d+ s to step 2, \d+ s to stop, \d+ s to the end\n", seconds)
