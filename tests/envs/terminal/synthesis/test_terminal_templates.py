"""Templates: equal seeds give equal bytes, other seeds other tasks, and all load without problems."""

import ast
import tomllib

import pytest

from glm5_jax.envs.terminal import load_task
from glm5_jax.envs.terminal.synthesis.drafts import TOPICS
from glm5_jax.envs.terminal.synthesis.static_checks import (
    check_names,
    check_shared_literals,
    check_static,
    check_tests_exist,
)
from glm5_jax.envs.terminal.synthesis.task_source import (
    FolderExistsError,
    SyntheticTask,
    read_task,
    write_provenance,
    write_task,
)
from glm5_jax.envs.terminal.synthesis.templates import TEMPLATES, make_task, make_tasks
from glm5_jax.envs.terminal.synthesis.verifier_texts import list_tests, read_texts
from tests.envs.terminal.synthesis.faults import SOURCE


def test_makes_a_hundred_different_tasks():
    tasks = [*make_tasks(100)]
    contents = {tuple(task.folder_files().items()) for task in tasks}
    assert len({task.name for task in tasks}) == len(contents) == 100
    assert len(TEMPLATES) == 20 and {task.difficulty for task in tasks} == {1, 2, 3, 4, 5}
    assert {task.topic for task in tasks} <= {*TOPICS}


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_seeds_give_equal_tasks(name):
    assert make_task(name, 3).folder_files() == make_task(name, 3).folder_files()
    assert make_task(name, 3).folder_files() != make_task(name, 4).folder_files()


@pytest.mark.parametrize("name", TEMPLATES)
def test_passes_static_checks(name, tmp_path):
    source = make_task(name, 1)
    folder = write_task(tmp_path / source.name, source.folder_files())
    check, task = check_static(folder)
    assert check.status == "pass", check.detail
    texts = read_texts(task)
    assert check_tests_exist(texts) == []
    for check in (check_names(texts), check_shared_literals(texts)):
        assert check.status == "pass", check.detail


def test_writes_harbor_fields(tmp_path):
    folder = write_task(tmp_path / SOURCE.name, SOURCE.folder_files())
    config = tomllib.loads((folder / "task.toml").read_text())
    assert config["schema_version"] == "1.4" and config["artifacts"] == ["/app"]
    assert config["verifier"]["environment_mode"] == "separate"
    task = load_task(folder)
    assert task.user == "agent" and task.verifier.context == "tests"
    assert task.verifier.dockerfile == folder / "tests/Dockerfile"
    assert list_tests(ast.parse((folder / "tests/test_outputs.py").read_text())) == ["test_sum", "test_largest"]  # fmt: skip


def test_rejects_folder_with_other_content(tmp_path):
    files = SOURCE.folder_files()
    folder = write_task(tmp_path / "task", files)
    write_provenance(folder, {"origin": {"kind": "template"}})
    assert write_task(folder, files) == folder and read_task(folder) == files
    with pytest.raises(FolderExistsError, match="exists with other content"):
        write_task(folder, {**files, "instruction.md": b"Other.\n"})


def test_rejects_unknown_template_and_difficulty():
    with pytest.raises(ValueError, match="template is 'none'; known are log-analysis"):
        make_task("none", 0)
    with pytest.raises(ValueError, match="difficulty is 6; use 1 to 5"):
        SyntheticTask(name="x", topic="", skills=(), difficulty=6, title="", instruction="", files={}, tests="", solution="")  # fmt: skip
