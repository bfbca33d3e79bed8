"""Folders that are copied into a sandbox: exact, and not held in memory."""

import os
import tracemalloc

import pytest

from tests.envs.test_sandbox import in_box

pytestmark = pytest.mark.usefixtures("isolation", "nothing_left")
MIB = 1 << 20


def test_copies_large_files_without_holding_them(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "small").write_bytes(b"x" * 10)
    with open(folder / "large", "wb") as file:
        file.truncate(64 * MIB)
        file.write(b"begins")
    tracemalloc.start()

    async def work(box):
        await box.put("/app/folder", folder)
        await box.put("/app/file", folder / "large", mode=0o600)
        return await box.exec("stat -c '%s %a' folder/* file; head -c 6 folder/large")

    try:
        result = in_box(work)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.stdout == b"67108864 644\n10 644\n67108864 600\nbegins"
    assert peak < 16 * MIB


def test_names_pipe_in_copied_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe")

    async def work(box):
        with pytest.raises(ValueError, match="pipe is neither a file, a folder nor a link"):
            await box.put("/app/folder", tmp_path / "folder")
        return await box.exec("ls")

    assert in_box(work).stdout == b""
