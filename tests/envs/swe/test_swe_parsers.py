"""Each parser against the recorded output of the runner, with statuses that the projects have by construction."""

import dataclasses
import re

import pytest

from glm5_jax.envs.swe.parsers import (
    PARSERS,
    ReportError,
    RunOutput,
    exit_code_problem,
    find_parser,
)
from tests.envs.swe.recorded_runs import differences, parse, recorded_output
from tests.envs.swe.runner_projects import PROJECTS

WITH_REPORT = [name for name in PROJECTS if any(recorded_output(name).reports.values())]
COMPLETE = [name for name in WITH_REPORT if not PROJECTS[name].is_crashed]
NO_SKIPS = {"tsc", "check", "catch2", "doctest"}  # their reports have no skipped tests
RECORDED = {project.parser for project in PROJECTS.values()}


@pytest.mark.parametrize("name", PROJECTS)
def test_parses_recorded_run(name):
    report, project = parse(name), PROJECTS[name]
    assert not differences(name, report.statuses)
    assert set(report.load_errors) == set(project.load_errors)
    assert report.is_crashed == project.is_crashed


@pytest.mark.parametrize("name", PROJECTS)
def test_ignores_colours_and_windows_line_ends(name):
    output = recorded_output(name)
    log = "\r\n".join(f"\x1b[31m{line}\x1b[0m" for line in output.log.split("\n"))
    if '{"Time"' in log:  # JSON has no colours
        log = output.log.replace("\n", "\r\n")
    assert not differences(name, parse(name, dataclasses.replace(output, log=log)).statuses)


@pytest.mark.parametrize("name", PROJECTS)
def test_parses_empty_output_of_killed_runner(name):
    report = parse(name, RunOutput(exit_code=137))
    assert not report.statuses
    assert report.totals is None


@pytest.mark.parametrize("name", COMPLETE)
def test_rejects_cut_report(name):
    output = recorded_output(name)
    for path, data in output.reports.items():
        for size in (len(data) // 2, len(data) - len(data.rstrip()) - 12):
            cut = {**output.reports, path: data[:size]}
            with pytest.raises(ReportError, match=re.escape(path)):
                parse(name, dataclasses.replace(output, reports=cut, log=""))


TEXT = [
    name for name in PROJECTS if not recorded_output(name).reports and len(parse(name).statuses) > 1
]


@pytest.mark.parametrize("name", TEXT)
def test_distinguishes_cut_log_from_complete_one(name):
    output = recorded_output(name)
    start = output.log[: len(output.log) // 2]
    try:
        report = parse(name, dataclasses.replace(output, log=start, exit_code=None))
    except ReportError:
        return
    assert report.is_crashed or report.totals is None


# A count that the runner states, and the same with another number.
CHANGED_TOTALS = {
    "pytest": ("junit.xml", 'failures="3"', 'failures="2"'),
    "pytest-verbose": ("log", "9 passed", "8 passed"),
    "pytest-summary": ("log", "3 failed", "4 failed"),
    "unittest": ("log", "Ran 7 tests", "Ran 8 tests"),
    "node_test": ("node.xml", "tests 8", "tests 9"),
    "node_test-tap": ("log", "# fail 2", "# fail 3"),
    "mocha": ("mocha.json", '"passes": 2', '"passes": 3'),
    "jest": ("jest.json", '"numFailedTests":2', '"numFailedTests":1'),
    "vitest": ("vitest.xml", 'tests="7"', 'tests="8"'),
    "tsc": ("log", "error TS", "warning TS"),
    "phpunit": ("phpunit.xml", 'skipped="2"', 'skipped="1"'),
    "rspec": ("rspec.json", '"failure_count":3', '"failure_count":2'),
    "minitest": ("log", "1 errors", "2 errors"),
    "test_unit": ("log", "7 tests", "8 tests"),
    "gtest": ("t.xml", 'failures="2"', 'failures="0"'),
    "gtest-json": ("t.json", '"failures": 2', '"failures": 1'),
    "gtest-text": ("log", "PASSED  ] 3", "PASSED  ] 4"),
    "ctest": ("ctest.xml", 'failures="2"', 'failures="3"'),
    "unity": ("log", "3 Tests 1 Failures", "4 Tests 1 Failures"),
    "junit5": ("TEST-junit-jupiter.xml", 'errors="1"', 'errors="0"'),
    "surefire": (
        "log",
        "Tests run: 4, Failures: 1, Errors: 1",
        "Tests run: 4, Failures: 2, Errors: 1",
    ),
    "cmocka": ("cmocka.xml", 'failures="1"', 'failures="2"'),
    "check": ("log", "Checks: 5", "Checks: 6"),
    "doctest": ("doctest.xml", 'failures="2"', 'failures="0"'),
}


@pytest.mark.parametrize("name", CHANGED_TOTALS)
def test_rejects_results_that_differ_from_runners_totals(name):
    output = recorded_output(name)
    where, old, new = CHANGED_TOTALS[name]
    if where == "log":
        assert old in output.log
        changed = dataclasses.replace(output, log=output.log.replace(old, new))
    else:
        data = output.reports[where].decode()
        assert old in data
        reports = {**output.reports, where: data.replace(old, new).encode()}
        changed = dataclasses.replace(output, reports=reports)
    with pytest.raises(ReportError):
        parse(name, changed)


@pytest.mark.parametrize(
    "name",
    [
        "pytest-verbose",
        "unittest",
        "go",
        "go-text",
        "node_test-tap",
        "minitest",
        "test_unit",
        "gtest-text",
    ],
)
def test_merges_two_runs_in_one_log(name):
    output = recorded_output(name)
    log = output.log[max(0, output.log.find("TAP version")) :].rstrip()
    twice = dataclasses.replace(output, log=f"{log}\n{log}\n")
    assert not differences(name, parse(name, twice).statuses)


def _first_line(output: RunOutput) -> RunOutput:
    reports = {name: data.split(b"\n")[0][:200] for name, data in output.reports.items()}
    return dataclasses.replace(output, log=output.log.split("\n")[0], reports=reports)


SWAPPED = {"pass": "fail", "fail": "pass", "skip": "skip"}
MUTATIONS = {
    "swaps pass and fail": lambda s: {name: SWAPPED[status] for name, status in s.items()},
    "drops skip": lambda s: {name: status for name, status in s.items() if status != "skip"},
    "ignores failures": lambda s: {name: "pass" for name in s},
    "drops failures": lambda s: {name: status for name, status in s.items() if status != "fail"},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("parser", sorted(RECORDED))
def test_recorded_runs_catch_mutated_parser(parser, mutation):
    if mutation == "drops skip" and parser in NO_SKIPS:
        return
    names = [name for name, project in PROJECTS.items() if project.parser == parser]
    assert any(differences(name, MUTATIONS[mutation](parse(name).statuses)) for name in names)


@pytest.mark.parametrize("parser", sorted(RECORDED))
def test_recorded_runs_catch_parser_of_first_line(parser):
    names = [name for name, p in PROJECTS.items() if p.parser == parser and p.expected]
    for name in names:
        try:
            report = parse(name, _first_line(recorded_output(name)))
        except ReportError:
            continue
        assert differences(name, report.statuses)


def test_every_parser_with_runner_has_recorded_run():
    # Automake and Gradle are not installed; their vectors are in test_swe_parser_vectors.py.
    assert set(PARSERS) - RECORDED == {"automake", "gradle"}


@pytest.mark.parametrize("name", PROJECTS)
def test_exit_code_agrees_with_report(name):
    # A runner that finds no test, or stops before its first one, says so by its exit code only.
    report, exit_code = parse(name), recorded_output(name).exit_code
    if PROJECTS[name].expected and not PROJECTS[name].is_crashed:
        assert exit_code_problem(report, exit_code) is None
    assert exit_code_problem(report, 0 if report.names("fail") else 1) is not None


def test_finds_parser_by_name():
    assert find_parser("pytest") is PARSERS["pytest"]
    with pytest.raises(ValueError, match="log_parser is 'nose'; use one of automake, "):
        find_parser("nose")
