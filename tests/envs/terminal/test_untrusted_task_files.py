"""Untrusted files in task folders: pipes, links to files of the machine, and gigabytes."""

import os
import tracemalloc

import pytest

from glm5_jax.envs.terminal import TaskError, load_task
from glm5_jax.envs.terminal.build import digest_of
from glm5_jax.envs.terminal.forms import forgeable_forms
from tests.envs.terminal.folders import make_task


def make_large(path, size=64 << 20):
    """Makes a file of zeros that takes no room on disk."""
    with open(path, "wb") as file:
        file.truncate(size)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md"])
def test_refuses_pipe_without_waiting(tmp_path, name):
    folder = make_task(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(TaskError, match=f"{name}( is not a regular file)?"):
        load_task(folder)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md"])
def test_refuses_large_text(tmp_path, name):
    folder = make_task(tmp_path)
    make_large(folder / name)
    with pytest.raises(TaskError, match=f"task own: {name} has more than 1,048,576 bytes"):
        load_task(folder)


def test_holds_no_large_file_in_memory(tmp_path):
    folder = make_task(tmp_path)
    make_large(folder / "tests" / "data.bin")
    (folder / "tests" / "link.sh").symlink_to("/dev/zero")
    os.mkfifo(folder / "tests" / "pipe.py")
    task = load_task(folder)
    tracemalloc.start()
    try:
        assert isinstance(forgeable_forms(task), list) and len(digest_of(folder / "tests")) == 64
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
