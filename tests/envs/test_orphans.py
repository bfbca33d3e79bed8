"""What a killed process left on the machine is told from what is in use, and goes."""

import contextlib
import os
import pathlib
import subprocess
import tempfile

import pytest

from glm5_jax.envs.sandbox import orphans


@pytest.fixture
def top(tmp_path, monkeypatch):
    """The folder for temporary ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_names_say_whose_they_are(gone):
    prefix, space, pid, began, _ = orphans.name_prefix().split("-")
    assert int(pid) == os.getpid()
    with subprocess.Popen(["sleep", "60"]) as other, contextlib.ExitStack() as stack:
        stack.callback(other.kill)
        # The 22nd field of proc_pid_stat(5), which has no space in its second here.
        ticks = pathlib.Path(f"/proc/{other.pid}/stat").read_text().split()[21]
        left = {
            f"{prefix}-{space}-{gone}-{began}-layer-x": True,
            f"{prefix}-{space}-{gone}-{began}-0": True,
            f"{prefix}-{space}-{pid}-{int(began) - 1}-0": True,  # the number was given out again
            f"{prefix}-{space}-{pid}-{began}-0": False,
            f"{prefix}-{space}-{other.pid}-{ticks}-0": False,
            f"{prefix}-1-{gone}-{began}-0": False,  # of another namespace of processes
            f"{prefix}-{space}-{gone}-{began}": False,
            f"{prefix}-{space}-x-{began}-0": False,
            f"other-{space}-{gone}-{began}-0": False,
            prefix: False,
        }
        assert orphans.find_orphans(left) == [name for name, is_left in left.items() if is_left]


def test_folders_of_the_dead_are_swept_and_others_are_left(top, gone, caplog):
    own = orphans.make_folder("layer")
    assert own.parent == top
    dead = orphans.name_prefix().replace(f"-{os.getpid()}-", f"-{gone}-")
    for name in ("layer-a/closed/x", "layer-b", "tools-c"):
        (top / f"{dead}{name}").mkdir(parents=True)
    (top / f"{dead}layer-a" / "closed").chmod(0)
    (top / "layer-a").mkdir()
    (top / f"{dead}file").write_text("")
    (top / f"{dead}link").symlink_to(top / "layer-a")
    orphans.sweep_folders({os.getuid() + 1})
    assert len(list(top.iterdir())) == 7
    orphans.sweep_folders({os.getuid()})
    assert {path.name for path in top.iterdir()} == {
        own.name,
        "layer-a",
        f"{dead}file",
        f"{dead}link",
    }
    assert caplog.text == ""


def test_what_cannot_be_swept_is_told(top, gone, monkeypatch, caplog):
    name = orphans.name_prefix().replace(f"-{os.getpid()}-", f"-{gone}-") + "layer-a"
    (top / name).mkdir()

    def refused(folder):
        raise PermissionError(f"{folder} is immutable")

    monkeypatch.setattr(orphans, "remove_folder", refused)
    orphans.sweep_folders({os.getuid()})
    assert f"{name} is left from a killed process" in caplog.text
