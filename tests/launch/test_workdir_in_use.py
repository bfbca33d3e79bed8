"""Tests that two commands cannot write results into one workdir."""

import pytest

from glm5_jax.runtime.folder_lock import FolderLock
from launch import run


@pytest.mark.parametrize("experiment", ["evaluate:questions", "synthesise:templates"])
def test_refuses_workdir_of_running_command(experiment, tmp_path, capsys):
    workdir = tmp_path / "results"
    with FolderLock(workdir):
        assert run.main(["run", experiment, f"--workdir={workdir}"]) == 2
    error = capsys.readouterr().err
    assert f"{workdir} is in use by process" in error and "give another --workdir" in error
    assert [path.name for path in workdir.iterdir()] == [".lock"]


def test_names_workdir_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run.main(["run", "evaluate:questions", f"--workdir={tmp_path / 'file'}"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
