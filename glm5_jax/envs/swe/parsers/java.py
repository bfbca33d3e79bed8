"""Parses the output of Java's test runners: JUnit 5's console launcher, Maven's surefire and Gradle, by their JUnit XML."""

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

_CONSOLE = re.compile(r"\[ +(\d+) tests (found|successful|failed|aborted|skipped) +\]")
_SUREFIRE = re.compile(
    r"(?:\[\w+\] )?Tests run: (\d+), Failures: (\d+), Errors: (\d+), Skipped: (\d+)(, Time elapsed: .*)?"
)
_COMPILE_ERROR = re.compile(r"(?:\[ERROR\] )?(\S+\.java):(?:\[?\d+).*")
_FORK_DIED = re.compile(r".*The forked VM terminated without (?:properly )?saying.*")


def parse_junit5(output: RunOutput) -> RunReport:
    """Parses the files of JUnit 5's console launcher, one for each engine. Identifiers are `package.Class::name`."""
    cases, stated = _xml_cases(output)
    counts: dict[str, int] = {}
    for line in output.lines:
        if match := _CONSOLE.fullmatch(line.strip()):
            counts[match[2]] = counts.get(match[2], 0) + int(match[1])
    totals = None
    if "found" in counts:
        # The summary counts tests in disabled classes, which are in no file, as found and skipped.
        totals = RunTotals(passed=counts.get("successful"), failed=counts.get("failed"))
        check_totals(cases, totals, "the console launcher")
    return build_report(
        cases,
        totals or stated,
        load_errors=_compile_errors(output) if not cases else (),
        is_crashed=not cases and output.is_killed,
    )


def parse_surefire(output: RunOutput) -> RunReport:
    """Parses the files of Maven's surefire or of Gradle, one for each class. Identifiers are `package.Class::name`.

    A test that passes on a rerun has `flakyFailure` only, and passes. A forked JVM that dies leaves no file.
    """
    cases, stated = _xml_cases(output)
    # Lines with a time belong to one class; the last line counts all.
    totals = [
        RunTotals(tests=int(m[1]), failed=int(m[2]) + int(m[3]), skipped=int(m[4]))
        for line in output.lines
        if (m := _SUREFIRE.fullmatch(line)) and not m[5]
    ]
    has_died = any(_FORK_DIED.fullmatch(line) for line in output.lines)
    total = None if has_died else add_totals(totals)
    if total is not None:
        check_totals(cases, total, "surefire")
    return build_report(
        cases,
        None if has_died else total or stated,
        load_errors=_compile_errors(output) if not cases else (),
        is_crashed=has_died or (not cases and output.is_killed),
    )


def _xml_cases(output: RunOutput) -> tuple[list[CaseResult], RunTotals | None]:
    """Returns the tests of all files, and the sum of the counts that they state."""
    cases: list[CaseResult] = []
    totals = None
    for where, data in output.reports.items():
        if not data.strip():
            raise ReportError(f"{where} is empty; the JVM died while it wrote the report")
        report = read_xml_report(data, where)
        totals = add_totals([totals, check_suites(report, where, status_by_outcomes)])
        cases += to_cases(
            report,
            lambda case: make_name(case.attribute("classname"), case.attribute("name")),
            status_by_outcomes,
        )
    return cases, totals


def _compile_errors(output: RunOutput) -> list[str]:
    """Returns the files that the compiler names in errors."""
    if not re.search(r"\berror: |COMPILATION ERROR", output.log):
        return []
    files = [m[1] for line in output.lines if (m := _COMPILE_ERROR.fullmatch(line))]
    return [make_name("javac", name.rpartition("/")[2]) for name in files]
