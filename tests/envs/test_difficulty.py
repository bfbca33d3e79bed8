"""Keeps tasks that the student rarely solves and the teacher solves."""

import json

import pytest

from glm5_jax.envs.reasoning.difficulty import DifficultyConfig, Verdicts, keep_hard, read_verdicts
from glm5_jax.rl.types import Task

MESSAGES = ({"role": "user", "content": "?"},)
# Passes of 8 tries, by student and teacher.
PASSES = {
    "never": (0, 0),
    "rarely": (0, 1),
    "edge": (2, 8),
    "easy": (3, 8),
    "solved": (8, 8),
    "odd": (3, 0),
}
TASKS = [
    Task(id=name, kind="math" if len(name) < 5 else "science", messages=MESSAGES) for name in PASSES
]
STUDENT, TEACHER = ({name: Verdicts(p[i], 8) for name, p in PASSES.items()} for i in (0, 1))


def test_keeps_hard_solvable_tasks_and_reports_rest():
    tasks, report = keep_hard(TASKS, STUDENT, TEACHER)
    assert [task.id for task in tasks] == list(report.retained) == ["rarely", "edge"]
    assert report.too_easy == ("easy", "solved", "odd")
    assert report.unsolved == ("never",)
    assert [line.split() for line in str(report).splitlines()] == [
        ["retained", "too_easy", "unsolved"],
        ["math", "1", "2", "0"],
        ["science", "1", "1", "1"],
    ]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (DifficultyConfig(max_student_pass_rate=0.0), ["rarely"]),
        (DifficultyConfig(max_student_pass_rate=0.375), ["rarely", "edge", "easy"]),
        (DifficultyConfig(min_teacher_pass_rate=0.125), ["edge"]),
        (DifficultyConfig(max_student_pass_rate=1.0), ["rarely", "edge", "easy", "solved"]),
    ],
)
def test_uses_thresholds_of_config(config, names):
    assert [task.id for task in keep_hard(TASKS, STUDENT, TEACHER, config)[0]] == names


def test_adds_verdicts_of_one_task(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    lines = [("a", 1, 4), ("b", 0, 8), ("a", 2, 4)]
    path.write_text(
        "\n".join(json.dumps(dict(zip(("task", "passes", "tries"), v))) + "\n" for v in lines)
    )
    verdicts = read_verdicts(path)
    assert verdicts == {"a": (3, 8), "b": (0, 8)}
    assert [verdicts[name].rate for name in "ab"] == [0.375, 0.0]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '{"task": "a", "passes": 1}',
        '{"task": "a", "passes": 2, "tries": 1}',
        '{"task": "a", "passes": -1, "tries": 1}',
        '{"task": "a", "passes": 0, "tries": 0}',
        '{"task": "a", "passes": 0.5, "tries": 1}',
        '{"task": "a", "passes": true, "tries": 1}',
        '{"task": 7, "passes": 1, "tries": 1}',
    ],
)
def test_names_invalid_verdict(tmp_path, line):
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"task": "a", "passes": 1, "tries": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match="verdicts.jsonl:2 is no verdict"):
        read_verdicts(path)


def test_names_unknown_tasks():
    more = {**STUDENT, **{f"new-{i}": Verdicts(1, 8) for i in range(7)}}
    with pytest.raises(
        ValueError, match="the student has verdicts on unknown tasks: new-0, .* new-4 and 2 more"
    ):
        keep_hard(TASKS, more, TEACHER)
    less = {name: TEACHER[name] for name in PASSES if name != "edge"}
    with pytest.raises(ValueError, match="the teacher tried tasks less than 1 times: edge$"):
        keep_hard(TASKS, STUDENT, less)
    with pytest.raises(
        ValueError,
        match="the student tried tasks less than 9 times: easy, edge, never, odd, rarely",
    ):
        keep_hard(TASKS, STUDENT, TEACHER, DifficultyConfig(min_tries=9))
    eight = DifficultyConfig(min_tries=8)
    assert keep_hard(TASKS, STUDENT, TEACHER, eight) == keep_hard(TASKS, STUDENT, TEACHER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_student_pass_rate", 1.5),
        ("max_student_pass_rate", -0.1),
        ("min_teacher_pass_rate", 1.0),
        ("min_tries", 0),
    ],
)
def test_names_threshold_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        DifficultyConfig(**{field: value})
