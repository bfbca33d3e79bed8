"""Tests the folder lock: one process at a time, released when it dies, and only a warning without locks."""

import errno
import fcntl
import logging
import os
import subprocess
import sys

import pytest

from glm5_jax.runtime.folder_lock import FolderInUse, FolderLock

HOLDER = """
import sys, time
from glm5_jax.runtime.folder_lock import FolderLock
lock = FolderLock(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_holds_folder_until_release(tmp_path):
    folder = tmp_path / "new" / "folder"
    with FolderLock(folder):
        with pytest.raises(FolderInUse, match=f"{folder} is in use by process {os.getpid()} of .*"):
            FolderLock(folder)
        FolderLock(tmp_path).release()
    FolderLock(folder).release()


def test_ends_lock_of_killed_process(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "held\n"
            with pytest.raises(FolderInUse, match=f"in use by process {child.pid} .* --workdir"):
                FolderLock(tmp_path)
        finally:
            child.kill()
        child.wait()
        FolderLock(tmp_path).release()


def test_warns_where_file_system_has_no_locks(tmp_path, monkeypatch, caplog):
    def raise_unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", raise_unsupported)
    with caplog.at_level(logging.WARNING), FolderLock(tmp_path):
        assert "has no locks" in caplog.text


def test_rejects_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        FolderLock(tmp_path / "file")


def test_removes_only_unused_folder_that_it_created(tmp_path):
    for name, written in (("new", False), ("used", True)):
        folder = tmp_path / name
        with FolderLock(folder) as lock:
            if written:
                (folder / "result").touch()
            lock.remove_unused_folder()
        assert folder.exists() == written
    with FolderLock(tmp_path / "used") as lock:
        (tmp_path / "used" / "result").unlink()
        lock.remove_unused_folder()
    assert (tmp_path / "used").exists()
