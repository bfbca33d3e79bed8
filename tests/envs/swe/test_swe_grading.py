import asyncio

import pytest

from glm5_jax.envs.sandbox import Sandbox
from glm5_jax.envs.swe.builder import RuleBuilder
from glm5_jax.envs.swe.file_tree import TreeFile, put_tree, remove_files, text_file, with_changes
from glm5_jax.envs.swe.grading import SweGrader
from glm5_jax.envs.swe.instance import InstanceError
from glm5_jax.envs.swe.layers import LayerStore, SweLimits
from glm5_jax.envs.swe.recipes import WORKDIR
from glm5_jax.envs.swe.validation import make_instance
from tests.envs.swe.tiny_project import (
    BASE,
    BUGGY,
    FAIL_TO_PASS,
    FIXED,
    NEW_TESTS,
    PASS_TO_PASS,
    draft_of,
    make_tiny_change,
)


@pytest.fixture(scope="module")
def grader(tiny, builder) -> SweGrader:
    return SweGrader(tiny.instance, tiny.built.layer, builder.store.limits)


async def _grade_files(grader: SweGrader, files: dict[str, TreeFile | None]):
    """Grades a sandbox in which an agent changed files."""
    async with Sandbox(SweLimits().sandbox(grader.layer.layer)) as box:
        await remove_files(box, WORKDIR, [path for path, file in files.items() if file is None])
        await put_tree(box, WORKDIR, {path: file for path, file in files.items() if file})
        return await grader.grade_sandbox(box)


def test_makes_valid_instance(tiny):
    assert tiny.invalid_reason is None
    assert tiny.instance.FAIL_TO_PASS == FAIL_TO_PASS
    assert tiny.instance.PASS_TO_PASS == PASS_TO_PASS
    assert tiny.instance.runs == {"base": 2, "test": 1, "gold": 5}
    assert {name: report.reward for name, report in tiny.gradings.items()} == {
        "gold": 1.0,
        "empty": 0.0,
        "last_hunk": 0.0,
    }


def test_records_launch_of_project(tiny):
    record = tiny.built.record

    assert record.completed and record.organize_completed
    assert record.test_status == dict.fromkeys(PASS_TO_PASS, "pass")
    assert record.language == "python"
    assert tiny.instance.environment.layer == tiny.built.layer.digest


def test_reports_tests_of_partial_attempt(tiny):
    report = tiny.gradings["last_hunk"]

    assert report.F2P.success == FAIL_TO_PASS[:1]
    assert report.F2P.failure == FAIL_TO_PASS[1:]
    assert report.P2P.success == PASS_TO_PASS
    assert report.canary_ok and report.exit_code == 1


def test_grades_honest_attempt_1_with_new_tests_and_settings(grader):
    report = asyncio.run(
        _grade_files(
            grader,
            {
                "calc/__init__.py": text_file("from calc.core import *\n"),
                "calc/core.py": text_file(FIXED.replace("\n", "\r\n").rstrip()),
                "calc/table.bin": TreeFile(0o100644, bytes(range(256)) * 1000),
                "calc/unused.py": None,
                "pyproject.toml": text_file('[project]\nname = "calc"\nversion = "2"\n'),
                "conftest.py": text_file("import calc\n"),
                "tests/test_mine.py": text_file("def test_mine():\n    assert True\n"),
                "build/x.o": text_file("x"),
            },
        )
    )

    assert report.reward == 1.0, report


def test_rejects_patch_that_does_not_apply(grader, tiny):
    report = asyncio.run(grader.grade_patch(tiny.instance.patch.replace("a - b", "a / b")))

    assert (report.reward, report.patch_applied) == (0.0, False)


def test_reports_changes_that_are_not_graded(grader):
    submission = asyncio.run(
        grader.submission(
            {
                "calc/new.py": text_file("x"),
                "tests/test_calc.py": None,
                "sitecustomize.py": text_file("x"),
                "pyproject.toml": text_file("[tool.pytest.ini_options]\naddopts = '-k none'\n"),
                "README.md": text_file("x"),
            }
        )
    )

    assert set(submission.files) == {"calc/new.py"}
    assert set(submission.dropped) == {
        "tests/test_calc.py",
        "sitecustomize.py",
        "pyproject.toml",
        "README.md",
    }


def test_refuses_instance_without_lists(tiny):
    with pytest.raises(InstanceError, match="FAIL_TO_PASS is empty"):
        SweGrader(draft_of(asyncio.run(make_tiny_change())), tiny.built.layer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        FIXED.replace("return a + b", "return b + a"),
        FIXED.replace("return a + b", "return sum((a, b))").replace("2 * x", "x + x"),
        FIXED.rstrip("\n"),
        FIXED.replace("\n", "\r\n"),
        FIXED + "\n\ndef test_helper():\n    return 1\n",
        FIXED.replace("return a + b", "return a - -b"),
        FIXED.replace("return 2 * x", "return x << 1"),
        '"""Adds."""\n' + FIXED,
        "from __future__ import annotations\n" + FIXED,
        FIXED.replace("def add(a, b)", "def add(a: int, b: int = 0) -> int"),
    ],
)
def test_grades_other_solutions_1(grader, text):
    assert text != BUGGY
    assert asyncio.run(_grade_files(grader, {"calc/__init__.py": text_file(text)})).reward == 1.0


BREAKING = FIXED.replace("return x + 1\n", "return x\n")
HANGING = FIXED.replace("return a + b", "while True: pass")
OLD = "import calc\n\n\ndef test_old():\n    assert calc.step_3(1) == 4\n"
# Fails in every second run of an instance's lifetime, as of a folder that runs share.
FLAKY = (
    "import pathlib, calc\n\n\ndef test_flaky():\n    place = pathlib.Path('/tmp/home/seen')\n"
    "    is_first = not place.exists()\n    place.touch()\n    assert calc.add(1, 2) == 3 and is_first\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, tests, reason",
    [
        (BREAKING, NEW_TESTS, "the gold patch breaks 1 tests, such as tests.test_calc::test_step"),
        (FIXED, OLD, "no test goes from fail to pass"),
        (FIXED, FLAKY, "1 of 3 tests are flaky, such as tests.test_more::test_flaky"),
        (HANGING, NEW_TESTS, "had no end within the time limit"),
        ("import missing\n" + FIXED, NEW_TESTS, "a gold run has no result"),
        (BUGGY, NEW_TESTS, "the change has no code"),
        (FIXED, None, "the change has no test"),
    ],
)
def test_rejects_change(builder, code, tests, reason):
    files = {"calc/__init__.py": text_file(code)}
    files |= {"tests/test_more.py": text_file(tests)} if tests else {}
    quick = RuleBuilder(LayerStore(builder.store.folder, SweLimits(test_timeout_s=10)))

    async def make():
        change = await make_tiny_change(with_changes(BASE, files))
        return await make_instance(draft_of(change), change, quick)

    assert reason in asyncio.run(make()).invalid_reason


@pytest.mark.slow
def test_leaves_nothing_after_many_gradings(grader, tiny, nothing_left):
    for _ in range(20):
        assert asyncio.run(grader.grade_patch(tiny.instance.patch)).reward == 1.0
