"""Tests the two start scripts: their environment, their errors, and that README begins with them."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.contracts.source_tree import ROOT, files, read

COMMANDS = ("bash launch/quickstart.sh", "bash launch/test.sh")
FAKES = {
    "does not start": "exit 127",
    "is python3.9": f'exec {sys.executable} -c "import sys; sys.version_info = (3, 9); '
    'exec(sys.stdin.read())"',
    "apt-get install python3.99-venv": f'exec {sys.executable} -c "import sys; '
    "sys.version_info = (3, 99); sys.modules['ensurepip'] = None; exec(sys.stdin.read())\"",
}


def bash(script: str, **env) -> subprocess.CompletedProcess:
    """Runs a script with launch/environment.sh sourced."""
    script = f'set -euo pipefail\nsource "{ROOT}/launch/environment.sh"\n{script}'
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={**os.environ, **env}
    )


def fake(path: pathlib.Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("reason", FAKES)
def test_names_unusable_interpreter_with_reason(tmp_path, reason):
    fake(tmp_path / "python3.99", FAKES[reason])
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bash("find_python python3.99", PATH=path, PYENV_ROOT=str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path}/python3.99" in done.stderr
    assert reason in done.stderr


def test_takes_first_working_interpreter(tmp_path):
    fake(tmp_path / "shims" / "python3.99", FAKES["does not start"])
    pyenv = tmp_path / "versions" / "3.99.1" / "bin" / "python3.99"
    fake(pyenv, f'exec {sys.executable} "$@"')
    path = f"{tmp_path}/shims:{os.environ['PATH']}"
    done = bash("find_python nosuch python3.99", PATH=path, PYENV_ROOT=str(tmp_path))
    assert done.stdout.strip() == str(pyenv)


@pytest.fixture
def installed_repository(tmp_path) -> pathlib.Path:
    """A repository whose environment claims to hold the locks; its pip would fail."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    fake(tmp_path / ".venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    for lock in (tmp_path / "launch" / "requirements").glob("*.txt"):
        shutil.copy(lock, tmp_path / ".venv")
    return tmp_path


def set_up(repository: pathlib.Path) -> subprocess.CompletedProcess:
    script = f'source "{repository}/launch/environment.sh"; pip_install() {{ echo pip; exit 7; }}\n'
    return bash(f'{script}set_up test; echo "$VENV"')


def test_second_start_installs_nothing(installed_repository):
    assert set_up(installed_repository).stdout == f"{installed_repository}/.venv\n"


def test_environment_has_command_that_runs_from_any_folder(installed_repository, tmp_path):
    set_up(installed_repository)
    (tmp_path / "launch.py").write_text("raise SystemExit('imported from the folder of the call')")
    command = [installed_repository / ".venv" / "bin" / "glm5", "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "glm5 serve FOLDER" in done.stdout


def test_installs_changed_lock(installed_repository):
    with open(installed_repository / "launch" / "requirements" / "py311-run.txt", "a") as lock:
        lock.write("more==1\n")
    shutil.copy(lock.name, installed_repository / "launch" / "requirements" / "py312-run.txt")
    done = set_up(installed_repository)
    assert done.returncode == 7
    assert re.search(r"Installing \d+ packages into \.venv", done.stdout)


# With old package lists, installing fails until they are updated.
OLD_LISTS = '[ "$1" = update ] && : >"$0.lists"; [ -e "$0.lists" ] || exit 100'
ALL = "bubblewrap git iproute2"


@pytest.mark.parametrize(
    ("apt_get", "present", "calls"),
    [
        ("exit 0", [], [f"install -qq -y {ALL}"]),
        ("exit 0", ["git"], ["install -qq -y bubblewrap iproute2"]),
        ("exit 0", ["git", "bwrap", "ip"], []),
        (OLD_LISTS, [], [f"install -qq -y {ALL}", "update -qq", f"install -qq -y {ALL}"]),
    ],
    ids=["none", "git", "all", "old lists"],
)
def test_installs_missing_packages_as_root(tmp_path, apt_get, present, calls):
    done, called = with_packages(tmp_path, 0, apt_get, present)
    assert called == calls
    names = calls[0].removeprefix("install -qq -y ") if calls else ""
    assert done.stdout == (f"Installing Debian packages: {names}\n" if calls else "")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("user", "apt_get", "calls"),
    [(1000, "exit 0", 0), (0, None, 0), (0, "exit 100", 2)],
    ids=["no root", "no Debian", "no package"],
)
def test_names_packages_that_cannot_be_installed(tmp_path, user, apt_get, calls):
    done, called = with_packages(tmp_path, user, apt_get, [])
    assert len(called) == calls  # an installation, then an update before the second try
    assert bool(done.stdout) == bool(calls)  # no message about an installation that is not tried
    assert f"apt-get install {ALL}\n" in done.stderr


def with_packages(folder, user, apt_get, present):
    """Returns (output of add_packages, its calls of apt-get) where PATH holds only these programs."""
    calls = folder / "calls"
    calls.touch()
    fake(folder / "id", f"echo {user}")
    for name in present:
        fake(folder / name, "exit 1")
    if apt_get is not None:
        fake(folder / "apt-get", f'echo "$*" >>{calls}\n{apt_get}')
    done = bash(f'PATH="{folder}"; add_packages')
    assert done.returncode == 0
    return done, calls.read_text().splitlines()


def test_test_script_explains_itself():
    command = ["bash", str(ROOT / "launch" / "test.sh")]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--python=PYTHON" in done.stdout
    done = subprocess.run([*command, "fast"], capture_output=True, text=True)
    assert done.returncode == 2 and "unknown argument: fast" in done.stderr


@pytest.mark.parametrize("path", [p for p in files() if p.suffix == ".sh" or p.parts[0] == ".ci"])
def test_scripts_parse_and_are_executable(path):
    assert os.access(ROOT / path, os.X_OK) or "Sourced by" in read(path)
    subprocess.run(["bash", "-n", str(ROOT / path)], check=True)


def test_readme_begins_with_commands_and_names_existing_programs():
    blocks = re.findall(r"(?ms)^```(?:bash|sh|shell|console)\n(.*?)^```", read(ROOT / "README.md"))
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if line]
    assert tuple(commands[:2]) == COMMANDS
    modules = {m[1] for line in commands for m in re.finditer(r"python -m (\S+)", line)}
    assert not [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").is_file()]
