"""Parses the output of PHPUnit: JUnit XML, and its text for the test that ran when PHP died."""

import re

from glm5_jax.envs.swe.parsers.report import (
    CaseResult,
    ReportError,
    RunOutput,
    RunReport,
    RunTotals,
    add_totals,
    build_report,
    check_totals,
    make_name,
)
from glm5_jax.envs.swe.parsers.xml_report import (
    check_suites,
    read_xml_report,
    status_by_outcomes,
    to_cases,
)

_TOTALS = re.compile(r"Tests: (\d+), Assertions: \d+(.*?)\.?")
_ALL_PASS = re.compile(r"OK \((\d+) tests?, \d+ assertions?\)")
_COUNT = re.compile(r"(Errors|Failures|Skipped|Incomplete): (\d+)")
_DEBUG = re.compile(r"Test '(.+)' (started|ended)")


def parse_phpunit(output: RunOutput) -> RunReport:
    """Parses PHPUnit's JUnit XML. Identifiers are `Name\\Space\\Class::method with data set "x"`.

    A test with a warning, such as one on a deprecated assertion, passes, as PHPUnit's exit code says. PHP that dies
    leaves an empty file. Then the log of --debug names the test that was running.
    """
    reports = {name: data for name, data in output.reports.items() if data.strip()}
    if not reports:
        running = _running(output.lines)
        is_crashed = running is not None or any(not data for data in output.reports.values())
        return build_report([], None, crashed_test=running, is_crashed=is_crashed)
    cases: list[CaseResult] = []
    stated = None
    for where, data in reports.items():
        report = read_xml_report(data, where)
        stated = add_totals([stated, check_suites(report, where, status_by_outcomes)])
        cases += to_cases(
            report,
            lambda c: make_name(
                c.attribute("class") or c.attribute("classname"), c.attribute("name")
            ),
            status_by_outcomes,
        )
    totals = add_totals(total for line in output.lines if (total := _totals(line)))
    if totals is not None:
        check_totals(cases, totals, "PHPUnit")
    return build_report(cases, totals or stated)


def _totals(line: str) -> RunTotals | None:
    """Returns the counts in the last line of a run; None for any other line."""
    if match := _ALL_PASS.fullmatch(line):
        return RunTotals(tests=int(match[1]), failed=0, skipped=0)
    if not (match := _TOTALS.fullmatch(line)):
        return None
    counts = {name: int(number) for name, number in _COUNT.findall(match[2])}
    failed = sum(counts.get(name, 0) for name in ("Errors", "Failures"))
    skipped = sum(counts.get(name, 0) for name in ("Skipped", "Incomplete"))
    return RunTotals(tests=int(match[1]), failed=failed, skipped=skipped)


def _running(lines: list[str]) -> str | None:
    matches = [match for line in lines if (match := _DEBUG.fullmatch(line))]
    if not matches or matches[-1][2] == "ended":
        return None
    name = matches[-1][1]
    if "::" not in name:
        raise ReportError(f"PHPUnit names a test {name!r}, without a class")
    # The values of a data set follow its name in parentheses, which JUnit XML leaves out.
    return make_name(re.sub(r'( with data set (?:#\d+|".*?")) \(.*\)$', r"\1", name))
