"""Roles on this machine: the environment of each process, and the command that starts them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from glm5_jax.runtime.placement import Role
from glm5_jax.runtime.supervisor import read_events
from launch import local, xla_flags
from launch.local import LocalMachine, LocalPlacement, this_machine, visibility
from tests.contracts.source_tree import ROOT
from tests.runtime.test_process import ends, is_running

SYSTEM = f"--experiment={ROOT}/tests/launch/small_system.py:tiny"
CORES = sorted(os.sched_getaffinity(0))


def visible_values(
    placement: LocalPlacement, roles: list[Role], variable: str, tmp_path
) -> dict[str, str]:
    """Returns a variable of the environment of each process, by its role and numbers."""
    placement.check(roles)
    values = {}
    for role in roles:
        for index in range(role.count):
            for process in range(role.hosts):
                place = placement.claim(role, index, process, tmp_path / "place")
                place.start(["sh", "-c", f'echo "${variable}"'])
                while place.exit_code() is None:
                    time.sleep(0.01)
                with open(place.log) as log:
                    values[f"{role.name}-{index}.{process}"] = log.read().splitlines()[-1]
    return values


def test_assigns_each_accelerator_to_one_process(tmp_path):
    roles = [
        Role(name="engine", argv=["true"], count=2, devices=2),
        Role(name="train", argv=["true"], hosts=2, devices=1),
        Role(name="orchestrator", argv=["true"]),
    ]
    machine = LocalMachine(platform="cuda", devices=["1", "2", "3", "4", "6", "7"], cores=CORES)
    values = visible_values(LocalPlacement(machine), roles, "CUDA_VISIBLE_DEVICES", tmp_path)
    assert values == {
        "engine-0.0": "1,2",
        "engine-1.0": "3,4",
        "train-0.0": "6",
        "train-0.1": "7",
        "orchestrator-0.0": "",
    }
    platforms = visible_values(LocalPlacement(machine), roles, "JAX_PLATFORMS", tmp_path)
    assert platforms["orchestrator-0.0"] == "cpu"
    assert platforms["train-0.0"] == os.environ["JAX_PLATFORMS"], "as it was"


def test_assigns_cores_to_roles_that_request_them(tmp_path):
    placement = LocalPlacement(LocalMachine(platform="cpu", devices=[], cores=CORES[:1]))
    roles = [Role(name="pinned", argv=["true"], cpus=1), Role(name="free", argv=["true"])]
    placement.check(roles)
    for role, cores in zip(roles, (CORES[:1], CORES)):
        place = placement.claim(role, 0, 0, tmp_path / role.name)
        place.start([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"])
        while place.exit_code() is None:
            time.sleep(0.01)
        assert place.tail(1) == str(cores)


def test_cpu_simulates_devices_of_role(tmp_path):
    placement = LocalPlacement(LocalMachine(platform="cpu", devices=[], cores=CORES))
    role = Role(name="train", argv=["true"], devices=3)
    placement.check([role])
    place = placement.claim(role, 0, 0, tmp_path / "train")
    place.start([sys.executable, "-c", "import jax; print(jax.device_count())"])
    while place.exit_code() is None:
        time.sleep(0.05)
    assert place.tail(1) == "3"


def test_splits_chips_of_tpu_host():
    assert visibility("tpu", ["2", "3"]) == {
        "TPU_VISIBLE_CHIPS": "2,3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    assert visibility("tpu", [])["JAX_PLATFORMS"] == "cpu"


def test_detects_machine_without_jax(tmp_path):
    def detect(names, **environment):
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        machine = this_machine(environment, str(tmp_path))
        assert machine.cores == CORES
        return machine.platform, list(machine.devices)

    assert detect(["null"]) == ("cpu", [])
    assert detect(["vfio/vfio", "vfio/0", "vfio/1"]) == ("tpu", ["0", "1"])
    assert detect(["accel0", "accel10", "accel2"]) == ("tpu", ["0", "2", "10"])
    assert detect([], TPU_VISIBLE_CHIPS="2") == ("tpu", ["2"])
    assert detect([], JAX_PLATFORMS="cpu") == ("cpu", [])
    assert detect(["nvidiactl", "nvidia0", "nvidia1"]) == ("cuda", ["0", "1"])
    assert detect([], CUDA_VISIBLE_DEVICES="GPU-a,GPU-b") == ("cuda", ["GPU-a", "GPU-b"])
    assert detect([], CUDA_VISIBLE_DEVICES="") == ("cuda", [])
    assert detect([], JAX_PLATFORMS="tpu,cpu") == ("tpu", ["0", "2", "10"])


@pytest.mark.parametrize(
    ("files", "chip"),
    [
        (
            {
                "dev/nvidia0": "",
                "proc/driver/nvidia/gpus/0000:1b/information": "Model:  NVIDIA H200\n",
            },
            "h200",
        ),
        (
            {
                "dev/nvidia0": "",
                "proc/driver/nvidia/gpus/0000:1b/information": "Model:  NVIDIA L4\n",
            },
            None,
        ),
        ({"dev/nvidia0": ""}, None),
        (
            {
                "dev/accel0": "",
                "sys/bus/pci/devices/0/vendor": "0x8086\n",
                "sys/bus/pci/devices/0/device": "0x006f\n",
                "sys/bus/pci/devices/1/vendor": "0x1ae0\n",
                "sys/bus/pci/devices/1/device": "0x0042\n",
                "sys/bus/pci/devices/2/vendor": "0x1ae0\n",
                "sys/bus/pci/devices/2/device": "0x0062\n",
            },
            "v5p",
        ),
        ({"dev/accel0": ""}, None),
        ({}, None),
    ],
)
def test_detects_accelerators_without_jax(files, chip, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert this_machine({}, str(tmp_path / "dev"), str(tmp_path)).chip == chip


def test_sets_xla_flags_of_accelerators(tmp_path, monkeypatch):
    roles = [
        Role(name="train", argv=["true"], devices=1),
        Role(
            name="engine",
            argv=["true"],
            devices=1,
            env={"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"},
        ),
        Role(name="orchestrator", argv=["true"]),
    ]
    monkeypatch.setenv("XLA_FLAGS", "--mine=1")
    machine = LocalMachine(platform="cuda", devices=["0", "1"], cores=CORES, chip="h200")
    values = visible_values(LocalPlacement(machine), roles, "XLA_FLAGS", tmp_path)
    assert values == {
        "train-0.0": xla_flags.format_flags("h200", "--mine=1"),
        "engine-0.0": xla_flags.format_flags("h200", "--xla_gpu_enable_triton_gemm=true"),
        "orchestrator-0.0": "--mine=1",
    }
    assert "triton_gemm=false" in values["train-0.0"]
    assert "triton_gemm=false" not in values["engine-0.0"]
    unknown = LocalMachine(platform="cuda", devices=["0", "1"], cores=CORES)
    assert (
        visible_values(LocalPlacement(unknown), roles, "XLA_FLAGS", tmp_path)["train-0.0"]
        == "--mine=1"
    )


@pytest.mark.parametrize(
    ("machine", "role", "message"),
    [
        (
            LocalMachine(platform="cuda", devices=["0", "1"], cores=CORES),
            Role(name="engine", argv=["true"], count=3, devices=1),
            "the roles ask for 3 devices (engine 3), this machine has 2; ask for fewer",
        ),
        (
            LocalMachine(platform="cpu", devices=[], cores=[0, 1]),
            Role(name="engine", argv=["true"], hosts=3, cpus=1),
            "the roles ask for 3 cpus (engine 3), this machine has 2",
        ),
        (
            LocalMachine(platform="tpu", devices=["0", "1", "2", "3"], cores=CORES),
            Role(name="engine", argv=["true"], devices=3),
            "role engine asks for 3 chips; a process of a TPU host has 1, 2, 4 or 8",
        ),
    ],
)
def test_refuses_more_than_machine_has(machine, role, message):
    with pytest.raises(ValueError) as refused:
        LocalPlacement(machine).check([role])
    assert message in str(refused.value)


def launch(tmp_path, *flags: str, **more) -> subprocess.Popen:
    argv = [sys.executable, "-m", "launch.local", SYSTEM, f"--workdir={tmp_path}/run", *flags]
    argv.append(f"--experiment.lives={tmp_path}/lives")
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, **more)


def test_starts_all_roles_and_ends_with_main_role(tmp_path):
    with launch(tmp_path, "--experiment.deaths=1", "--experiment.seconds=0.3") as command:
        out, err = command.communicate(timeout=300)
    assert (command.returncode, err) == (0, "")
    lines = [line.split(" ", 1)[1] for line in out.splitlines()]
    assert "train-0 died was killed by SIGKILL" in lines and "train-0 started (start 2)" in lines
    after = lines[lines.index("train-0 finished") + 1 :]
    assert after[:2] == ["orchestrator-0 stopped", "gateway-0 stopped"]
    assert sorted(after[2:]) == ["engine-0 stopped", "engine-1 stopped"]
    orchestrator = next(
        line for line in lines if line.startswith("orchestrator-0 ready http://127.0.0.1:")
    )
    log = (tmp_path / "run" / "roles" / "train-0.log").read_text()
    flags = [SYSTEM, f"--workdir={tmp_path}/run", "--experiment.deaths=1"]
    assert all(f'"{word}"' in log for word in flags) and "--distributed" not in log
    assert orchestrator and (tmp_path / "lives").read_text() == "life\n" * 2


@pytest.mark.slow
def test_reports_log_of_role_that_dies_too_often(tmp_path):
    with launch(tmp_path, "--experiment.deaths=9", "--experiment.limit=1") as command:
        _, err = command.communicate(timeout=300)
    assert command.returncode == 1
    log = tmp_path / "run" / "roles" / "train-0.log"
    first, second, *_ = err.splitlines()
    assert (
        first
        == f"error: train-0 died 2 times within 600 s; the last time it was killed by SIGKILL; {log} ends:"
    )
    assert second.startswith('{"pid":')


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_all_roles_in_order(tmp_path, number):
    with launch(tmp_path, "--experiment.seconds=600") as command:
        for line in command.stdout:
            if "train-0 ready" in line:
                break
        pids = {event.pid for event in read_events(tmp_path / "run" / "roles")}
        assert len(pids) == 5 and all(map(is_running, pids))
        command.send_signal(number)
        out, err = command.communicate(timeout=300)
    assert (command.returncode, err) == (130, "")
    stopped = [line.split()[1] for line in out.splitlines() if line.endswith("stopped")]
    assert stopped[:3] == ["train-0", "orchestrator-0", "gateway-0"]
    assert out.endswith("stopped; the same command goes on from there\n")
    assert all(map(ends, pids))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no experiment given; try pretrain:tiny"),
        ([SYSTEM.replace("tiny", "huge")], "unknown variant 'huge'; use one of tiny, pod"),
        ([SYSTEM, "--experiment.colour=red"], "--experiment.colour"),
        ([SYSTEM, "--colour=red"], "no field 'colour'; there are --"),
        (
            [SYSTEM, "--hosts=2"],
            "--hosts is for one stage of training; small_system lists its roles",
        ),
        ([SYSTEM, "--devices=2"], "--devices is for one stage of training"),
        (
            [SYSTEM, "--distributed=auto"],
            "--distributed is set for each process here; leave it out",
        ),
        (["--experiment=experiments/pretrain.py:tiny", "--hosts=0"], "--hosts=0"),
        (
            ["--experiment=experiments/evaluate.py:harbor"],
            "evaluate is one program for one host; start it with launch.run",
        ),
    ],
)
def test_reports_mistake_in_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert local.main(["local", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_prints_help(capsys):
    assert local.main(["local", "--help"]) == 0
    assert "python -m launch.local --experiment=" in capsys.readouterr().out
