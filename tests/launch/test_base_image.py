"""Root file systems of base images: their packages, settings of this machine, and errors of one line."""

import asyncio
import os
import pathlib
import shutil

import pytest

from glm5_jax.envs.terminal import BuildConfig, Nop, Oracle, TrialRunner, load_task
from launch import base_image
from tests.envs.terminal.folders import TOML, make_task

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="files of other users are root's to make")

TARGETS = """\
http://mirror.example/debian/ bookworm main Debian
http://mirror.example/debian/ bookworm contrib Debian
http://mirror.example/debian/ bookworm-updates main Debian
http://mirror.example/security/ bookworm-security main Debian
http://mirror.example/debian/ trixie main Debian
http://other.example/ bookworm stable Someone else
"""

PIP = """\
:env:.timeout='180'
global.cert='/etc/certificates.crt'
global.extra-index='https://packages.example/simple file:///srv/packages'
global.timeout='60'
install.constraint='/etc/constraints.txt'
freeze.timeout='9'
"""

# A replacement of mmdebstrap that succeeds.
BOOTSTRAP = """#!/bin/sh
for word; do case $word in */base.partial) folder=$word ;; esac; done
echo "I: running apt-get update..." >&2
mkdir -p "$folder/etc" "$folder/usr/bin" "$folder/usr/lib/python3.11"
echo 'PRETTY_NAME="A small system"' > "$folder/etc/os-release"
touch "$folder/usr/bin/python3.11" "$folder/usr/lib/python3.11/EXTERNALLY-MANAGED"
ln -s /run/none "$folder/etc/resolv.conf"
echo "I: success in 0.1 seconds" >&2
"""
FAILURE = """#!/bin/sh
for word; do case $word in */base.partial) mkdir "$word" ;; esac; done
echo "I: running apt-get update..." >&2
echo "W: GPG error: noble InRelease: NO_PUBKEY 87" >&2
echo "E: apt-get update failed" >&2
exit 25
"""


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """Returns a function that replaces mmdebstrap by a script."""

    def put(text: str) -> None:
        program = tmp_path / "bin/mmdebstrap"
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return put


def test_takes_only_sources_of_running_system():
    assert base_image.source_lines(TARGETS, "bookworm") == [
        "deb http://mirror.example/debian/ bookworm main contrib",
        "deb http://mirror.example/debian/ bookworm-updates main",
        "deb http://mirror.example/security/ bookworm-security main",
    ]
    assert base_image.source_lines("", "bookworm") == []


def test_keeps_pip_settings_without_local_paths():
    assert base_image.pip_settings(PIP) == {
        "timeout": "180",
        "extra-index": "https://packages.example/simple",
    }


def test_adds_certificates_that_root_does_not_trust(tmp_path):
    old, new = (
        f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n" for text in ("a", "b")
    )
    root, bundle = tmp_path / "root", tmp_path / "bundle.crt"
    bundle.write_text(old + new)
    assert base_image.add_certificates(root, bundle) == 0
    (root / base_image.BUNDLE).parent.mkdir(parents=True)
    (root / base_image.BUNDLE).write_text(old)
    assert base_image.add_certificates(root, bundle) == 1
    [file] = (root / "usr/local/share/ca-certificates").iterdir()
    assert file.read_text() == new


@needs_root
@pytest.mark.parametrize("image", sorted(base_image.IMAGES))
def test_makes_root_file_system(tmp_path, bootstrap, capsys, image):
    bootstrap(BOOTSTRAP)
    root = tmp_path / "base"
    code = base_image.main([str(root), f"--image={image}", "--suite=bookworm", "--mirror=URL"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "A small system, python3.11, " in out and f'"{root}"' in out and image in out
    resolver = root / "etc/resolv.conf"
    assert not resolver.is_symlink() and resolver.read_text() == ""
    assert (root / "usr/sbin/policy-rc.d").stat().st_mode & 0o777 == 0o755
    assert f"cert = /{base_image.BUNDLE}\n" in (root / "etc/pip.conf").read_text()
    is_marked = (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").exists()
    assert is_marked != base_image.IMAGES[image].is_python
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "bin"]


@needs_root
def test_leaves_nothing_if_packages_are_missing(tmp_path, bootstrap, capsys):
    bootstrap(FAILURE)
    assert base_image.main([str(tmp_path / "base"), "--suite=noble"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: mmdebstrap failed: W: GPG error: noble InRelease: NO_PUBKEY 87")
    assert error.endswith("install the package of its keyring, or give --keyring=FILE")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], "exists; give a new folder"),
        (["none/base"], "no folder "),
        (["new", "--image=nginx"], "invalid choice: 'nginx'"),
        ([], "the following arguments are required: root; see python -m launch.base_image --help"),
    ],
)
def test_refuses_arguments_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert base_image.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


@needs_root
def test_refuses_mirror_without_suite(tmp_path, bootstrap, capsys):
    bootstrap(BOOTSTRAP)
    assert base_image.main([str(tmp_path / "base"), "--mirror=URL"]) == 2
    assert "--mirror is given without --suite; give both" in capsys.readouterr().err


def test_refuses_machine_that_cannot_build(tmp_path, monkeypatch):
    root = tmp_path / "base"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(ValueError, match="it needs root"):
        base_image.check_machine(root)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with monkeypatch.context() as context:
        context.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match="mmdebstrap is not installed; on Debian: apt-get"):
            base_image.check_machine(root)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    usage = shutil.disk_usage(tmp_path)._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="has 5 MiB free; 2048 MiB are needed"):
        base_image.check_machine(root)


DOCKERFILE = """FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip
RUN ln -s /usr/bin/python3 /usr/bin/python
RUN pip3 install --no-cache-dir --break-system-packages pytest==8.4.1
WORKDIR /workspace
"""
TESTS = """
import subprocess

def test_answer():
    assert open("/workspace/answer").read() == "python3\\n"
    assert subprocess.run(["git", "--version"]).returncode == 0
"""


@pytest.mark.slow
@needs_root
@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed")
def test_tasks_build_over_real_root_file_system(tmp_path, capsys):
    """Packages come from this machine's sources of apt and pip."""
    root = tmp_path / "base"
    assert base_image.main([str(root)]) == 0, capsys.readouterr().err
    solve = "readlink /usr/bin/python | xargs basename > /workspace/answer\n"
    toml = TOML.replace("256", "2048")  # MB of disk
    task = load_task(
        make_task(tmp_path, dockerfile=DOCKERFILE, tests=TESTS, solve=solve, toml=toml)
    )
    images = {"ghcr.io/laude-institute/t-bench/ubuntu-24-04": str(root)}

    async def rewards():
        async with TrialRunner(images, build=BuildConfig(network=True)) as trials:
            return [await trials.run(task, agent) for agent in (Oracle(), Nop())]

    oracle, nop = asyncio.run(rewards())
    assert (oracle.reward, nop.reward) == (1, 0), (oracle, nop)
    assert not pathlib.Path(root, "usr/bin/python").exists()
