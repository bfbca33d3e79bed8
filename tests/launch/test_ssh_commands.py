"""The script of SSH commands, run by a shell with a fake ssh."""

import os
import shlex
import subprocess

import pytest

from launch import ssh_commands, xla_flags
from tests.contracts.source_tree import ROOT

TINY = f"--experiment={ROOT}/experiments/pretrain.py:tiny"
GLM5 = f"--experiment={ROOT}/experiments/pretrain.py:glm5"
SYSTEM = f"--experiment={ROOT}/tests/launch/small_system.py:tiny"
SSH = '#!/bin/sh\nprintf "%s\\n" "$#" "$1" "$2" >"$OUT/$1"\n'


def test_writes_one_command_per_machine(tmp_path, capsys, monkeypatch):
    """Runs the script with a fake ssh that records its arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    names = ["10.0.0.1", "b.example", "c"]
    flags = [TINY, f"--machines={','.join(names)}", "--workdir=/my run", "--port=7000"]
    flags.append("--experiment.data.sources=[{'kind': 'stdlib'}]")
    assert ssh_commands.main(["ssh_commands", *flags]) == 0
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("ssh ")]) == 3
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    subprocess.run(["bash", "-c", text], env=env, check=True, timeout=60)
    for number, name in enumerate(names):
        count, host, command = (tmp_path / name).read_text().rstrip("\n").split("\n")
        assert (count, host) == ("2", name)
        words = shlex.split(command)
        assert words[:7] == ["cd", str(tmp_path), "&&", "exec", "python3", "-m", "launch.run"]
        assert words[-1] == f"--distributed=10.0.0.1:7000,3,{number}"
        assert "--workdir=/my run" in words
        assert "--experiment.data.sources=[{'kind': 'stdlib'}]" in words
        assert not [word for word in words if word.startswith(("--machines", "--port"))]


def test_joins_xla_flags_of_chip_and_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ssh").write_text('#!/bin/sh\nexec sh -c "$2"\n')
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s" "$XLA_FLAGS"\n')
    for name in ("ssh", "python3"):
        (tmp_path / name).chmod(0o755)
    assert ssh_commands.main(["ssh_commands", TINY, "--machines=a", "--chip=h200"]) == 0
    flag = "--xla_gpu_enable_triton_gemm=true"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XLA_FLAGS": flag}
    script = ["bash", "-c", capsys.readouterr().out]
    done = subprocess.run(
        script, env=env, check=True, timeout=60, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout == f"{xla_flags.format_flags('h200')} {flag}"


def test_one_machine_needs_no_distributed_flag(capsys):
    assert ssh_commands.main(["ssh_commands", TINY, "--machines=a"]) == 0
    assert "--distributed" not in capsys.readouterr().out


def test_brackets_ipv6_addresses_before_port(capsys):
    assert ssh_commands.main(["ssh_commands", TINY, "--machines=[fe80::1],[fe80::2]"]) == 0
    text = capsys.readouterr().out
    assert "ssh fe80::2 " in text and "--distributed=[fe80::1]:8476,2,1" in text


def test_accepts_user_names(capsys):
    assert ssh_commands.main(["ssh_commands", TINY, "--machines=me@a,you@[fe80::2]"]) == 0
    text = capsys.readouterr().out
    assert "ssh me@a " in text and "ssh you@fe80::2 " in text
    assert "--distributed=a:8476,2,1" in text


def test_script_fails_if_one_machine_fails(tmp_path, capsys):
    (tmp_path / "ssh").write_text('#!/bin/sh\n[ "$1" != b ] || exit 75\n')
    (tmp_path / "ssh").chmod(0o755)
    assert ssh_commands.main(["ssh_commands", TINY, "--machines=a,b,c"]) == 0
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", capsys.readouterr().out], env=env, timeout=60)
    assert done.returncode == 75


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([TINY], "--machines is missing; use --machines=NAME,NAME"),
        ([TINY, "--machines=a,,b"], "--machines has ''; give names, IPv4 addresses"),
        ([TINY, "--machines=a;reboot"], "--machines has 'a;reboot'"),
        ([TINY, "--machines=-o,b"], "--machines has '-o'"),
        ([TINY, "--machines=a,b,a"], "names one twice"),
        ([TINY, "--machines=a,b,me@A"], "names one twice"),
        ([TINY, "--machines=a", "--hosts=2"], "--hosts is not for lists of machines"),
        ([GLM5, "--machines=a,b", "--devices=8"], "2 hosts of 8 accelerators: mesh"),
        (
            [GLM5, "--machines=a,b", "--devices=4", "--chip=tpu7x"],
            "2 hosts of 4 accelerators, 2 devices of JAX each: mesh",
        ),
        ([TINY, "--machines=a", "--port=0"], "--port=0"),
        ([TINY, "--machines=a", "--colour=1"], "no field 'colour'; there are --"),
        ([SYSTEM, "--machines=a,b"], "small-system-tiny is not one program that trains"),
    ],
)
def test_reports_mistake_in_one_line(flags, message, capsys):
    assert ssh_commands.main(["ssh_commands", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_prints_help(capsys):
    assert ssh_commands.main(["ssh_commands", "--help"]) == 0
    assert "python -m launch.ssh_commands --experiment=" in capsys.readouterr().out
