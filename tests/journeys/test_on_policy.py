"""On-policy stages with all their programs as processes train as in one process, and on several hosts."""

import subprocess
import sys

import pytest

from glm5_jax.checkpoint import store
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.runtime.utilization import read_utilization
from tests.conftest import FAST_COMPILE
from tests.contracts.source_tree import ROOT
from tests.experiments.test_engine_placement import TASKS
from tests.journeys import agentic_system, on_policy_system, small_lifecycle
from tests.journeys.on_policy_system import STEPS
from tests.rl.small_stage import all_equal, final_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SPEC = f"--experiment={on_policy_system.__file__}:small"


@pytest.fixture
def env(plain_env):
    """Returns the environment of a run, whose programs compile fast."""
    return plain_env | {"XLA_FLAGS": FAST_COMPILE}


def train(program, workdir, checkpoint, files, env, *flags):
    """Runs the stage to its end, and returns its final weights."""
    words = [SPEC, f"--experiment.checkpoint={checkpoint}", f"--workdir={workdir}", *flags]
    words += [f"--experiment.tasks={[{'file': str(file)} for file in files]}"]
    command = [sys.executable, "-m", program, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return final_weights(workdir, agentic_system.MODEL)


def test_processes_train_weights_of_one_process_over_twenty_steps(env, tmp_path):
    checkpoint = tmp_path / "policy"
    agentic_system.save(checkpoint)
    files = [tmp_path / f"{name}.py" for name in ("words", "math")]
    for file in files:
        file.write_text(TASKS.replace("NAME", file.stem))
    together = train("launch.run", tmp_path / "one", checkpoint, files, env)
    separate = "--experiment.engine_placement=separate"
    apart = train("launch.local", tmp_path / "several", checkpoint, files, env, separate)
    assert all_equal(together, apart)
    assert not all_equal(together, final_weights(checkpoint, agentic_system.MODEL))
    steps, staleness = column(read(tmp_path / "several"), "policy/staleness")
    assert steps == list(range(1, STEPS + 1)) and set(staleness) == {0}
    names = {life.name for life in read_utilization(tmp_path / "several")}
    assert {"engine-0", "gateway", "orchestrator", "words", "math"} <= names


def test_lifecycle_trains_on_several_hosts(env, tmp_path):
    """Every stage trains in two processes, and those of RL have engines, gateway, orchestrator and task service."""
    spec = f"--experiment={small_lifecycle.__file__}:small"
    flags = ["--hosts=2", "--devices=1", f"--workdir={tmp_path / 'life'}"]
    # A random model solves no task of the lifecycle, and without rewards the policy would stay equal to its teacher.
    file = tmp_path / "words.py"
    file.write_text(TASKS.replace("NAME", file.stem))
    tasks = [{"file": str(file), "held_out_fraction": 0.0}]
    flags += [
        f"--experiment.{name}={tasks}" for name in ("rl_reasoning.tasks", "distill.reasoning")
    ]
    command = [sys.executable, "-m", "launch.local", spec, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in small_lifecycle.STAGE_MODULES:
        folder = tmp_path / "life" / stage
        assert store.latest_step(folder) == small_lifecycle.STEPS
        assert (folder / "hosts" / "1").is_dir(), f"one process has trained {stage}"
    losses = column(read(tmp_path / "life" / "distill"), "loss/ref_kl")[1]
    assert len(losses) == small_lifecycle.STEPS and losses[0] != 0
    assert (tmp_path / "life" / "report" / "index.html").exists()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)
    assert again.returncode == 0 and "stage " not in again.stdout, again.stdout + again.stderr
