"""The validator: each planted fault is found by the check for it, and the task without faults passes all checks."""

import asyncio
import dataclasses

import pytest

from glm5_jax.agents.writers import RuleWriter, WriterError
from glm5_jax.envs.sandbox import Layer
from glm5_jax.envs.terminal.image import Image
from glm5_jax.envs.terminal.synthesis.judged_checks import CRITERIA, check_rubric, rule_writer
from glm5_jax.envs.terminal.synthesis.reports import Check, ValidationReport, verdict_of
from glm5_jax.envs.terminal.synthesis.sandbox_checks import needed_cuts, search_image
from glm5_jax.envs.terminal.synthesis.sandbox_runs import ScriptedAttempt, TaskRuns
from glm5_jax.envs.terminal.synthesis.static_checks import (
    check_names,
    check_shared_literals,
    check_static,
    check_tests_exist,
)
from glm5_jax.envs.terminal.synthesis.task_source import write_task
from glm5_jax.envs.terminal.synthesis.templates import TEMPLATES, make_task
from glm5_jax.envs.terminal.synthesis.validator import validate
from glm5_jax.envs.terminal.synthesis.verifier_texts import (
    count_assertions,
    expected_literals,
    read_texts,
)
from tests.envs.leftovers import run
from tests.envs.terminal.folders import needs_root
from tests.envs.terminal.synthesis.faults import SANDBOX_FAULTS, STATIC_FAULTS, TEST, write

sandboxed = [pytest.mark.usefixtures("isolation"), needs_root]


def static_failures(folder) -> dict[str, str]:
    """Returns failed checks that need no sandbox, with their details."""
    static, task = check_static(folder)
    checks = [static]
    if task is not None:
        texts = read_texts(task)
        checks += [verdict_of("V01", check_tests_exist(texts)), check_names(texts)]
        checks.append(check_shared_literals(texts))
    return {check.id: check.detail for check in checks if check.status == "fail"}


def test_passes_task_without_faults_statically(tmp_path):
    assert static_failures(write(tmp_path)) == {}


@pytest.mark.parametrize("fault", STATIC_FAULTS)
def test_finds_static_fault(fault, tmp_path):
    check, edit = STATIC_FAULTS[fault]
    failures = static_failures(write(tmp_path, edit))
    assert check in failures, failures


def test_finds_script_that_is_not_executable(tmp_path):
    failures = static_failures(write(tmp_path, executable=("tests/test.sh",)))
    assert failures == {"V01": "solution/solve.sh is not executable (chmod 755)"}


def test_cuts_between_commands_that_do_something():
    lines = ["#!/bin/bash", "set -eu", "cd /app", "sort a > b", "cat b > c", "echo done", ""]
    assert needed_cuts(lines, range(1, 8)) == [4]
    assert needed_cuts(["a > b \\", "  2> c", "d > e"], [1, 2, 3]) == [2]
    assert needed_cuts(["only > this"], [1]) == []


def test_reads_expected_literals_without_those_of_guards(tmp_path):
    tests = "A = {'x': 'granite'}\nB = ['basalt']\n\n\ndef test_a():\n    assert A and 12345 == 1 != 77\n"
    tests += "\n\ndef test_guard():\n    assert B == ['marble']\n"
    folder = write(
        tmp_path,
        lambda files: files.update(
            {
                TEST: tests,
                "task.toml": files["task.toml"].replace(
                    "guard_tests = []", 'guard_tests = ["test_guard"]'
                ),
            }
        ),
    )
    _, task = check_static(folder)
    assert expected_literals(read_texts(task)) == {"granite", "12345"}


def test_reads_literals_of_variables_parameters_and_methods(tmp_path):
    tests = "import pytest\n\n\ndef test_a():\n    want, path = 'granite', 'a/path.txt'\n    want = 'basalt'\n    assert f(path) == want\n"
    tests += "\n\n@pytest.mark.parametrize(('x', 'y'), [(1, 'marble-1')])\ndef test_b(x, y):\n    assert f(x) == y\n"
    tests += "\n\nclass TestC:\n    def test_c(self):\n        self.assertEqual(f(), 'quartz')\n"
    _, task = check_static(write(tmp_path, lambda files: files.update({TEST: tests})))
    assert expected_literals(read_texts(task)) == {"basalt", "marble-1", "quartz"}


def test_finds_answers_in_names_and_links_of_image(tmp_path):
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv/flag-granite").touch()
    (tmp_path / "srv/link").symlink_to("/none/basalt")
    image = Image(layer=Layer((tmp_path,), False), workdir=None, env={})
    assert search_image(image, ["granite", "basalt", "marble"]) == {
        "granite": "srv/flag-granite",
        "basalt": "srv/link",
    }


def test_counts_assertions():
    text = "import pytest\n\n\ndef test():\n    assert 1\n    with pytest.raises(OSError):\n        assert 0\n"
    assert count_assertions(text) == 3 and count_assertions("not python(") == 0


def test_reports_problems_and_json():
    report = ValidationReport(
        task="t",
        checks=(Check(id="V01", status="pass"), Check(id="V03", status="fail", detail="x")),
    )
    assert not report.is_green and report.problems == ["V03 oracle: x"]
    assert report.as_dict()["checks"]["V03_oracle"]["ok"] is False
    unknown = ValidationReport(task="t", checks=(Check(id="V02", status="unknown"),))
    assert not unknown.is_green and unknown.as_dict()["checks"]["V02_builds"]["ok"] is None


def test_judges_by_rubric(tmp_path):
    _, task = check_static(write(tmp_path))
    texts = read_texts(task)
    assert asyncio.run(check_rubric(rule_writer(), texts)).status == "pass"
    short = dataclasses.replace(texts, instruction="Do it.", environment="")
    check = asyncio.run(check_rubric(rule_writer(), short))
    assert check.status == "fail" and "natural_statement" in check.detail

    def fails(data):
        good = {name: {"answer": "pass", "reason": ""} for name in CRITERIA}
        return {**good, "typos": {"answer": "fail", "reason": "teh"}}

    check = asyncio.run(check_rubric(RuleWriter({"rubric": fails}), texts))
    assert (check.status, check.detail) == ("fail", "typos: teh")
    assert asyncio.run(check_rubric(RuleWriter({}), texts)).status == "unknown"
    assert issubclass(WriterError, RuntimeError)


async def report_of(folder, **more):
    async with TaskRuns() as runs:
        return await validate(folder, runs, **more)


class TestInSandboxes:
    pytestmark = sandboxed

    def test_stops_after_static_checks(self, tmp_path):
        folder = write(tmp_path, STATIC_FAULTS["root agent"][1])
        report = run(report_of(folder))
        assert [check.id for check in report.checks] == ["V01"] and not report.is_green

    def test_grades_solution_and_empty_attempt(self, tmp_path):
        async def rewards():
            async with TaskRuns() as runs:
                task = check_static(write(tmp_path))[1]
                attempts = (ScriptedAttempt(), ScriptedAttempt(script="true\n"))
                return [(await runs.run(task, attempt)).verdict.reward for attempt in attempts]

        assert run(rewards()) == [1.0, 0.0]

    @pytest.mark.slow
    def test_passes_task_without_faults(self, tmp_path):
        report = run(report_of(write(tmp_path), writer=rule_writer()))
        assert report.is_green, report.problems
        assert [check.id for check in report.checks] == [
            *("V01", "V07", "V08", "V02", "V03", "V04", "V05", "V06", "V09", "V10", "V11", "V12", "V13", "V14")
        ]  # fmt: skip

    @pytest.mark.slow
    @pytest.mark.parametrize("fault", SANDBOX_FAULTS)
    def test_finds_fault(self, fault, tmp_path):
        checks, edit = SANDBOX_FAULTS[fault]
        report = run(report_of(write(tmp_path, edit)))
        assert any(report.status(check) == "fail" for check in checks), report.as_text()

    @pytest.mark.slow
    @pytest.mark.parametrize("template", TEMPLATES)
    def test_passes_task_of_template(self, template, tmp_path):
        source = make_task(template, seed=0)

        async def report():
            async with TaskRuns() as runs:
                return await validate(
                    write_task(tmp_path / source.name, source.folder_files()), runs
                )

        assert run(report()).problems == []
