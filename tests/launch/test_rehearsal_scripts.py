"""A rehearsal reads nodes, steps and pods from the launchers' output, and applies the rules of their schedulers."""

import copy
import signal
import subprocess
import sys
import time

import pytest
import yaml

from glm5_jax.runtime.placement import EXIT_RESTART
from launch.rehearsal.arithmetic import check_addresses, count_servers
from launch.rehearsal.hosts import missing_support
from launch.rehearsal.job_set_run import FAILED, JobSetRun, expand_variables, list_pods
from launch.rehearsal.slurm_job import parse_script
from launch.rehearsal.srun import task_environment
from tests.contracts.source_tree import ROOT

FOLDER = ROOT / "tests" / "goldens" / "manifests"


def job_set(name: str = "system.yaml") -> dict:
    return yaml.safe_load((FOLDER / name).read_text())


def test_parses_nodes_of_slurm_script():
    script = parse_script((FOLDER / "system.sbatch").read_text())
    assert script.nodes == {
        "nodes": ["cpu-node-0"],
        "nodes_engine": ["engine-node-0", "engine-node-1"],
        "nodes_train": ["train-node-0", "train-node-1"],
    }


def test_parses_steps_of_slurm_script():
    steps = {s.name: s for s in parse_script((FOLDER / "system.sbatch").read_text()).steps}
    assert list(steps) == ["engine-0", "engine-1", "gateway-0", "orchestrator-0", "train-0"]
    assert [name for name, step in steps.items() if step.is_main] == ["train-0"]
    assert steps["train-0"].nodes == ("train-node-0", "train-node-1")
    assert steps["engine-1"].options["output"] == "/my run/roles/engine-1.log"
    assert steps["gateway-0"].command[-2:] == (
        "http://engine-node-0:7000,http://engine-node-1:7001",
        'cost=$5 `a` "b" it\'s',
    )
    assert steps["train-0"].command[1] == "WANDB_MODE=off line"


@pytest.mark.parametrize("text", ["", "#SBATCH --nodes=2\n"])
def test_refuses_other_script(text):
    with pytest.raises(ValueError, match="write it with launch/slurm.py"):
        parse_script(text)


def test_parses_pods_of_job_set():
    pods = {pod.name: pod for pod in list_pods(job_set())}
    assert list(pods)[:3] == [
        "small-system-pod-engine-0-0",
        "small-system-pod-engine-1-0",
        "small-system-pod-gateway-0-0",
    ]
    engine = pods["small-system-pod-engine-1-0"]
    assert engine.command[-1] == "number=1"
    assert (engine.devices, engine.memory_gib, engine.port) == (4, 64, 7000)
    assert (engine.health_path, engine.restarts_on_failure) == ("/health", True)
    trainer = pods["small-system-pod-train-0-1"]
    assert trainer.command[-1] == "small-system-pod-train-0-0.small-system-pod:8476,2,1"
    assert (trainer.restarts_on_failure, trainer.uncounted_codes) == (False, (EXIT_RESTART,))


def test_pods_of_job_set_know_each_other():
    pods = list_pods(job_set())
    commands = {pod.name: pod.command for pod in pods}
    servers = count_servers([(pod.domain, pod.port) for pod in pods if pod.port])
    assert not list(check_addresses(commands, servers))
    del servers["small-system-pod-engine-1-0.small-system-pod:7000"]
    [finding] = check_addresses(commands, servers)
    assert finding.role == "small-system-pod-gateway-0-0"
    assert "engine-1-0.small-system-pod:7000, where no role listens" in finding.text


def test_finds_two_servers_at_one_address():
    [finding] = check_addresses({}, count_servers([("a", 80), ("b", 80), ("a", 80)]))
    assert finding.text == "2 servers listen at a:80"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("$(A)-$(B)", "1-$(B)"), ("$$(A)", "$(A)"), ("$A", "$A"), ("a$$", "a$")],
)
def test_expands_variables_as_kubernetes(text, expected):
    assert expand_variables(text, {"A": "1"}) == expected


def test_tasks_have_variables_of_slurm():
    environment = task_environment(["a", "b"], 1)
    assert environment["SLURM_STEP_NODELIST"] == "a,b"
    assert (environment["SLURM_NTASKS"], environment["SLURM_PROCID"]) == ("2", "1")
    assert environment["SLURM_STEP_NUM_NODES"] == "2"


class OneHost:
    """Runs the commands of all hosts on this machine."""

    def command(self, name, argv):
        return list(argv)


def small_set(script: str, *, hosts: int = 2, max_restarts: int = 1) -> dict:
    """Returns the JobSet of a trainer whose pods run a Python script, without servers."""
    manifest = job_set("training.yaml")
    [job] = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    spec["completions"] = spec["parallelism"] = hosts
    [container] = spec["template"]["spec"]["containers"]
    container["command"] = [sys.executable, "-c", script, "$(JOB_COMPLETION_INDEX)"]
    manifest["spec"]["failurePolicy"]["maxRestarts"] = max_restarts
    return manifest


def run_until_end(run: JobSetRun) -> int:
    deadline = time.monotonic() + 60
    while (code := run.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return code


def make_run(manifest, folder) -> JobSetRun:
    run = JobSetRun(manifest, OneHost(), folder, {"train": 4})
    run.start()
    return run


def test_job_set_ends_with_its_targets(tmp_path):
    run = make_run(small_set("import os; print(os.environ['JAX_NUM_CPU_DEVICES'])"), tmp_path)
    assert run_until_end(run) == 0
    assert not run.deaths
    assert [path.read_text() for path in sorted(tmp_path.glob("*.log"))] == ["4\n", "4\n"]


def test_job_set_with_server_stays_ended(tmp_path):
    manifest = small_set("pass")
    [job] = manifest["spec"]["replicatedJobs"]
    server = copy.deepcopy(job) | {"name": "server"}
    [container] = server["template"]["spec"]["template"]["spec"]["containers"]
    container["command"] = [sys.executable, "-c", "import signal; signal.pause()"]
    manifest["spec"]["replicatedJobs"] = [server, job]
    run = JobSetRun(manifest, OneHost(), tmp_path, {"train": 4, "server": 0})
    run.start()
    assert run_until_end(run) == 0
    assert run.poll() == 0 and not run.deaths


def test_job_set_fails_after_its_restarts(tmp_path):
    run = make_run(small_set("import sys; sys.exit(2 * int(sys.argv[1]))"), tmp_path)
    assert run_until_end(run) == FAILED
    assert [(death.program[-4:], death.code) for death in run.deaths] == [("-0-1", 2)] * 2


SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("code", "num_problems"), [(EXIT_RESTART, 0), (1, 2)])
def test_job_set_reports_pods_that_do_not_save(code, num_problems, tmp_path):
    run = make_run(small_set(SAVES.format(code=code)), tmp_path)
    assert run.poll() is None
    while [path.read_text() for path in tmp_path.glob("*.log")] != ["ready\n"] * 2:
        time.sleep(0.02)
    run.request_stop()
    run_until_end(run)
    assert len(run.stop_problems()) == num_problems


def test_sigterm_ends_programs_in_namespaces():
    if reason := missing_support():
        pytest.skip(reason)
    inside = "import signal; print('inside', flush=True); signal.pause()"
    code = (
        f"from launch.rehearsal.hosts import enter_namespaces as enter; enter(['-c', {inside!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout.readline() == b"inside\n"
        program.terminate()
        # The end of the output: no process of the namespaces has it open any more.
        assert program.stdout.read() == b""
        assert program.wait() == 128 + signal.SIGKILL
