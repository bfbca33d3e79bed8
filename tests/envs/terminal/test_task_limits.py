"""Task folders cannot read files of this machine, nor request more resources than allowed."""

import pathlib
import shutil

import pytest

from glm5_jax.envs.terminal import TaskError, TaskLimits, load_task
from tests.envs.terminal.folders import TOML, make_task


@pytest.mark.parametrize(
    "part",
    ["task.toml", "instruction.md", "tests", "tests/test.sh", "environment", "environment/Dockerfile", "solution",
     "solution/solve.sh"],
)  # fmt: skip
def test_refuses_links_out_of_folder(tmp_path, part):
    folder, outside = make_task(tmp_path), tmp_path / "outside"
    path = folder / part
    shutil.move(path, outside)
    path.symlink_to(outside)
    with pytest.raises(
        TaskError, match=f"task own: {part}.* is a link out of the folder, to {outside}"
    ):
        load_task(folder)
    path.unlink()
    path.symlink_to("/nowhere")
    with pytest.raises(TaskError, match=f"task own: {part}.* is a link that leads nowhere"):
        load_task(folder)


def test_follows_links_within_folder(tmp_path):
    folder = make_task(tmp_path)
    (folder / "instruction.md").rename(folder / "text.md")
    (folder / "instruction.md").symlink_to("text.md")
    (folder / "environment" / "inner").symlink_to("/etc/passwd")  # a link inside the sandbox
    assert load_task(folder).instruction == "Do it.\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'memory = "{"9" * 400}G"', "it must be a size"),
        ('storage = "0.0M"', "it must be a size"),
        ("memory_mb = 1e999", "it must be a number"),
        ("cpus = 1e-9", "environment.cpus = 1e-09: it must be at least 0.01"),
        (f"env = {'[' * 3000}{']' * 3000}", "task.toml: its lists or tables are too deep"),
    ],
)
def test_refuses_values_that_no_sandbox_can_have(tmp_path, text, message):
    with pytest.raises(TaskError) as error:
        load_task(make_task(tmp_path, toml=f"[environment]\n{text}\n"))
    assert message in str(error.value)


def test_refuses_tasks_that_exceed_limits(tmp_path):
    task = load_task(make_task(tmp_path, toml=TOML + "cpus = 4\n"))
    TaskLimits().check(task)
    limits = {"memory_bytes": 1 << 20, "disk_bytes": 1 << 20, "cpus": 2.0}
    for name, limit in limits.items():
        with pytest.raises(
            TaskError, match=rf"task own: it asks for {name}=.* raise that, or leave"
        ):
            TaskLimits(**{name: limit}).check(task)
    with pytest.raises(ValueError, match="cpus is 0"):
        TaskLimits(cpus=0)
    assert pathlib.Path(task.folder).is_absolute()
