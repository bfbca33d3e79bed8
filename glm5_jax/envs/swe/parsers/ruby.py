"""Parses the output of Ruby's test runners: RSpec (JSON), minitest and test-unit (text of -v)."""

import re

from glm5_jax.envs.swe.parsers.javascript import field, read_json_report
from glm5_jax.envs.swe.parsers.report import (
    CaseResult,
    ReportError,
    RunOutput,
    RunReport,
    RunTotals,
    Status,
    add_totals,
    build_report,
    make_name,
)

_RSPEC_WORDS: dict[str, Status] = {"passed": "pass", "failed": "fail", "pending": "skip"}
_OUTSIDE = re.compile(
    r"^An error occurred (?:while loading|in) (\S+?)\.?(?: - Did you mean\?)?$", re.MULTILINE
)


def parse_rspec(output: RunOutput) -> RunReport:
    """Parses RSpec's JSON report. Identifiers are `file::full description`.

    Files that do not load are errors outside of examples; their number must equal RSpec's.
    """
    cases: list[CaseResult] = []
    broken: list[str] = []
    totals = RunTotals(tests=0, passed=0, failed=0, skipped=0)
    reports = {name: data for name, data in output.reports.items() if data.strip()}
    for where, data in reports.items():
        report = read_json_report(data, where)
        for example in field(report, where, "examples", kind=list):
            word = field(example, where, "status", kind=str)
            if word not in _RSPEC_WORDS:
                raise ReportError(f"{where}: the status {word!r} is not known")
            file = field(example, where, "file_path", kind=str).removeprefix("./")
            text = field(example, where, "full_description", kind=str)
            cases.append(CaseResult(make_name(file, text), _RSPEC_WORDS[word]))
        names = ("example_count", "failure_count", "pending_count")
        num_tests, num_failed, num_pending = (
            field(report, where, "summary", name, kind=int) for name in names
        )
        totals += RunTotals(
            tests=num_tests,
            passed=num_tests - num_failed - num_pending,
            failed=num_failed,
            skipped=num_pending,
        )
        num_outside = report["summary"].get("errors_outside_of_examples_count", 0)
        broken += _outside_errors(report, num_outside, where)
    return build_report(
        cases,
        totals if reports else None,
        load_errors=broken,
        is_crashed=not reports and output.is_killed,
    )


def _outside_errors(report: dict, count: int, where: str) -> list[str]:
    """Returns the files of errors outside of examples, each once; "rspec" for an error that names none."""
    text = "\n".join(str(message) for message in report.get("messages", []))
    files = [make_name(file.removeprefix("./")) for file in _OUTSIDE.findall(text)]
    if len(files) > count:
        raise ReportError(
            f"{where} states {count} errors outside of examples, and lists {len(files)}"
        )
    return [*files, *["rspec"] * (count > len(files))]


_RESULTS: dict[str, Status] = {".": "pass", "F": "fail", "E": "fail", "S": "skip"}
_MINI_CASE = re.compile(r"(\S[^#]*#.+) = \d+\.\d+ s = ([.FES])")
_MINI_END = re.compile(r"\b\d+\.\d+ s = ([.FES])$")
_MINI_TOTALS = re.compile(
    r"(\d+) (?:runs|tests), \d+ assertions, (\d+) failures, (\d+) errors, (\d+) skips"
)


def parse_minitest(output: RunOutput) -> RunReport:
    """Parses the text of minitest with -v. Identifiers are `Class#name`.

    A test's own output can stand between its name and its result.
    """
    cases: list[CaseResult] = []
    totals = []
    running: str | None = None
    for line in output.lines:
        if match := _MINI_CASE.fullmatch(line):
            cases.append(CaseResult(make_name(match[1]), _RESULTS[match[2]]))
            running = None
        elif running is not None and (match := _MINI_END.search(line)):
            cases.append(CaseResult(running, _RESULTS[match[1]]))
            running = None
        elif name := _minitest_started(line):
            running = name
        elif match := _MINI_TOTALS.fullmatch(line):
            tests, failures, errors, skips = map(int, match.groups())
            totals.append(RunTotals(tests=tests, failed=failures + errors, skipped=skips))
            running = None
    is_crashed = running is not None or (not totals and output.is_killed)
    return build_report(
        cases,
        None if is_crashed else add_totals(totals),
        crashed_test=running,
        is_crashed=is_crashed,
    )


def _minitest_started(line: str) -> str | None:
    """Returns the test that a line announces before its result, or None."""
    class_name, mark, rest = line.partition("#test_")
    name, equals, _ = rest.partition(" = ")
    return make_name(f"{class_name}#test_{name}") if class_name and mark and equals else None


_UNIT_RESULTS: dict[str, Status] = {
    ".": "pass",
    "F": "fail",
    "E": "fail",
    "P": "skip",
    "O": "skip",
    "N": "skip",
}
_UNIT_CLASS = re.compile(r"( *)([A-Z]\w*(?:::\w+)*|\S.*): ")
_UNIT_START = re.compile(r"( +)(test.*?):\t+(.*)")
_UNIT_TIME = re.compile(r"(.*?): \(\d+\.\d+\)")
_RULE = re.compile(r"={20,}")
_UNIT_TOTALS = re.compile(
    r"(\d+) tests, \d+ assertions, (\d+) failures, (\d+) errors, (\d+) pendings, (\d+) omissions, \d+ notifications"
)


def parse_test_unit(output: RunOutput) -> RunReport:
    """Parses the text of test-unit with -v. Identifiers are `Class#name`, and `Class::group#name` of groups.

    The letter of the result can come after the test's own output, and details stand before the time that ends it.
    """
    cases: list[CaseResult] = []
    totals = []
    groups: list[tuple[int, str]] = []  # open classes with their indentation
    running: str | None = None
    letter = ""
    lines = output.lines
    for line, following in zip(lines, [*lines[1:], ""]):
        if match := _UNIT_TOTALS.fullmatch(line):
            tests, failures, errors, pendings, omissions = map(int, match.groups())
            totals.append(
                RunTotals(tests=tests, failed=failures + errors, skipped=pendings + omissions)
            )
            continue
        if match := _UNIT_START.fullmatch(line):
            groups = [(n, name) for n, name in groups if n < len(match[1])]
            running = make_name("::".join(name for _, name in groups) + "#" + match[2])
            line, letter = match[3], ""
        elif running is None:
            if match := _UNIT_CLASS.fullmatch(line):
                groups = [(n, name) for n, name in groups if n < len(match[1])]
                groups.append((len(match[1]), match[2]))
            continue
        end = _UNIT_TIME.fullmatch(line)
        text = end[1] if end else line
        # The letter stands before the time, or before the rule over the details.
        if not letter and text[-1:] in _UNIT_RESULTS and (end or _RULE.fullmatch(following)):
            letter = text[-1:]
        if end and letter:
            cases.append(CaseResult(running, _UNIT_RESULTS[letter]))
            running = None
    is_crashed = running is not None or (not totals and output.is_killed)
    return build_report(
        cases,
        None if is_crashed else add_totals(totals),
        crashed_test=running,
        is_crashed=is_crashed,
    )
