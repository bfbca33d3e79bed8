"""Removes what killed processes left, and no folder in use."""

import contextlib
import os
import pathlib
import subprocess
import tempfile

import pytest

from glm5_jax.envs.sandbox import orphans


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """Folder of temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead_pid():
    """Number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_names_identify_owner(dead_pid):
    prefix, space, pid, began, _ = orphans.name_prefix().split("-")
    assert int(pid) == os.getpid()
    with subprocess.Popen(["sleep", "60"]) as other, contextlib.ExitStack() as stack:
        stack.callback(other.kill)
        # The 22nd field of proc_pid_stat(5); the second field has no space in this process.
        ticks = pathlib.Path(f"/proc/{other.pid}/stat").read_text().split()[21]
        left = {
            f"{prefix}-{space}-{dead_pid}-{began}-layer-x": True,
            f"{prefix}-{space}-{dead_pid}-{began}-0": True,
            f"{prefix}-{space}-{pid}-{int(began) - 1}-0": True,  # the number was assigned again
            f"{prefix}-{space}-{pid}-{began}-0": False,
            f"{prefix}-{space}-{other.pid}-{ticks}-0": False,
            f"{prefix}-1-{dead_pid}-{began}-0": False,  # of another process namespace
            f"{prefix}-{space}-{dead_pid}-{began}": False,
            f"{prefix}-{space}-x-{began}-0": False,
            f"other-{space}-{dead_pid}-{began}-0": False,
            prefix: False,
        }
        assert orphans.find_orphans(left) == [name for name, is_left in left.items() if is_left]


def test_removes_only_folders_of_dead_processes(temporary_folder, dead_pid, caplog):
    folder = orphans.make_folder("layer")
    assert folder.parent == temporary_folder
    dead = orphans.name_prefix().replace(f"-{os.getpid()}-", f"-{dead_pid}-")
    for name in ("layer-a/closed/x", "layer-b", "tools-c"):
        (temporary_folder / f"{dead}{name}").mkdir(parents=True)
    (temporary_folder / f"{dead}layer-a" / "closed").chmod(0)
    (temporary_folder / "layer-a").mkdir()
    (temporary_folder / f"{dead}file").write_text("")
    (temporary_folder / f"{dead}link").symlink_to(temporary_folder / "layer-a")
    orphans.sweep_folders({os.getuid() + 1})
    assert len(list(temporary_folder.iterdir())) == 7
    orphans.sweep_folders({os.getuid()})
    assert {path.name for path in temporary_folder.iterdir()} == {
        folder.name,
        "layer-a",
        f"{dead}file",
        f"{dead}link",
    }
    assert caplog.text == ""


def test_reports_folder_that_cannot_be_removed(temporary_folder, dead_pid, monkeypatch, caplog):
    name = orphans.name_prefix().replace(f"-{os.getpid()}-", f"-{dead_pid}-") + "layer-a"
    (temporary_folder / name).mkdir()

    def refuse(folder):
        raise PermissionError(f"{folder} is immutable")

    monkeypatch.setattr(orphans, "remove_folder", refuse)
    orphans.sweep_folders({os.getuid()})
    assert f"{name} is left from a killed process" in caplog.text
