"""Parses the output of Python's test runners: pytest (JUnit XML, text of -v and -rA) and unittest (text of -v)."""

import re
from collections.abc import Iterator

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
from glm5_jax.envs.swe.parsers.xml_report import (
    check_suites,
    read_xml_report,
    status_by_outcomes,
    to_cases,
)

_WORDS: dict[str, Status] = {
    "PASSED": "pass",
    "XPASS": "pass",
    "FAILED": "fail",
    "ERROR": "fail",
    "SKIPPED": "skip",
    "XFAIL": "skip",
}
_WORD = "|".join(_WORDS)
_NODE = r"[^\s:]+\.py::.+?"
_VERBOSE = re.compile(rf"({_NODE}) ({_WORD})(?: \(.*\))?(?: +\[ *\d+%\])?\s*")
_PARALLEL = re.compile(rf"\[gw\d+\] \[ *\d+%\] ({_WORD}) ({_NODE})\s*")
_STARTED = re.compile(rf"({_NODE}) (?:Fatal Python error: .*)?")
# A parameter may hold " - " too, so an identifier with brackets ends at the first bracket before " - " or the line's end.
_SUMMARY = re.compile(rf"({_WORD}) ([^\s:]+\.py(?:::[^\[\n]*?(?:\[.*?\])?)?)(?: - .*)?")
_HEADER = re.compile(r"=+ short test summary info =+")
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|xfailed|xpassed|errors?)\b")
_TOTALS = re.compile(r"=* ?((?:\d+ [a-z]+(?:, )?)+|no tests ran) in [\d.]+s.*")


def parse_pytest(output: RunOutput) -> RunReport:
    """Parses JUnit XML of pytest, or its text if there is none.

    Identifiers are `package.module.Class::name[parameters]`. A test whose tear-down fails, fails.
    """
    reports = {name: data for name, data in output.reports.items() if data}
    if not reports:
        return _parse_pytest_text(output)
    cases: list[CaseResult] = []
    load_errors = []
    totals = None
    for where, data in reports.items():
        report = read_xml_report(data, where)
        totals = add_totals([totals, check_suites(report, where, status_by_outcomes)])
        # A module that cannot be collected is a test without a class.
        broken = [c for c in report.cases if not c.attribute("classname") and c.status == "fail"]
        load_errors += [make_name(case.attribute("name")) for case in broken]
        cases += to_cases(
            report,
            lambda case: make_name(case.attribute("classname"), case.attribute("name")),
            status_by_outcomes,
        )
    return build_report(cases, totals, load_errors=load_errors)


def _parse_pytest_text(output: RunOutput) -> RunReport:
    lines = output.lines
    verbose = [case for line in lines if (case := _verbose_case(line))]
    summary = list(_summary_cases(lines))
    load_errors = [name for name, _ in summary if "::" not in name]
    cases = verbose or [case for case in summary if "::" in case.name]
    totals = [_pytest_totals(match[1]) for line in lines if (match := _TOTALS.fullmatch(line))]
    total = add_totals(totals)
    _check_pytest_text(cases, len(load_errors), total, has_skips=bool(verbose))
    running = _running(lines) if not totals else None
    return build_report(
        cases,
        total,
        is_checked=True,
        load_errors=load_errors,
        crashed_test=running,
        is_crashed=not totals and output.is_killed,
    )


def _check_pytest_text(
    cases, num_load_errors: int, totals: RunTotals | None, has_skips: bool
) -> None:
    """Raises ReportError if the lines of tests do not add up to the last line of the run."""
    if totals is None or not cases:
        return
    statuses = [case.status for case in cases]
    counts = {
        "passed": (totals.passed, statuses.count("pass")),
        "failed": (totals.failed, statuses.count("fail") + num_load_errors),
    }
    if has_skips:  # the summary merges skipped tests of one line
        counts["skipped"] = (totals.skipped, statuses.count("skip"))
    for name, (expected, count) in counts.items():
        if expected != count:
            raise ReportError(f"pytest states {name} = {expected}, and its log lists {count}")


def _verbose_case(line: str) -> CaseResult | None:
    if match := _VERBOSE.fullmatch(line):
        return CaseResult(_node_name(match[1]), _WORDS[match[2]])
    if match := _PARALLEL.fullmatch(line):
        return CaseResult(_node_name(match[2]), _WORDS[match[1]])
    return None


def _summary_cases(lines: list[str]) -> Iterator[CaseResult]:
    # Tests can print such lines too, but only before the last header.
    headers = [i for i, line in enumerate(lines) if _HEADER.fullmatch(line)]
    for line in lines[headers[-1] :] if headers else []:
        if match := _SUMMARY.fullmatch(line):
            yield CaseResult(_node_name(match[2]), _WORDS[match[1]])


def _running(lines: list[str]) -> str | None:
    """Returns the test that had started and not ended when the log ended."""
    for line in reversed(lines):
        if _verbose_case(line):
            return None
        if match := _STARTED.fullmatch(line):
            return _node_name(match[1])
    return None


def _node_name(node: str) -> str:
    """Returns the identifier in the form of JUnit XML: `a/b.py::C::test[x]` becomes `a.b.C::test[x]`."""
    path, *rest = node.split("::", 1)
    module = path.removesuffix(".py").replace("/", ".")
    if not rest:
        return make_name(module)
    head, bracket, parameters = rest[0].partition("[")
    *classes, name = head.split("::")
    return make_name(".".join([module, *classes]), name + bracket + parameters)


def _pytest_totals(text: str) -> RunTotals:
    counts = {word.removesuffix("s"): int(number) for number, word in _COUNT.findall(text)}
    return RunTotals(
        passed=counts.get("passed", 0) + counts.get("xpas", counts.get("xpassed", 0)),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0) + counts.get("xfailed", 0),
    )


_UNIT_WORDS: dict[str, Status] = {
    "ok": "pass",
    "FAIL": "fail",
    "ERROR": "fail",
    "unexpected success": "fail",
    "expected failure": "skip",
}
_UNIT_TEST = re.compile(r"\s*(\w+) \(([\w.]+)\)(.*)")
_UNIT_END = re.compile(
    r"(.*?)(?:(ok|FAIL|ERROR|expected failure|unexpected success)|skipped .*)\s*"
)
_FIXTURES = ("setUpClass", "tearDownClass", "setUpModule", "tearDownModule")
_RAN = re.compile(r"Ran (\d+) tests? in [\d.]+s")
_UNIT_TOTALS = re.compile(r"(?:OK|FAILED)(?: \((.*)\))?|NO TESTS RAN.*")


def parse_unittest(output: RunOutput) -> RunReport:
    """Parses the text of `python -m unittest -v`. Identifiers are `module.Class::name`.

    The first line of a docstring stands between the name and the result. A sub-test that fails, fails its test, whose
    line then has no result.
    """
    cases: list[CaseResult] = []
    load_errors: list[str] = []
    totals: list[RunTotals] = []
    current: str | None = None
    num_ran, first_case, first_error = 0, 0, 0
    for line in output.lines:
        if match := _RAN.fullmatch(line):
            num_ran, current = int(match[1]), None
        elif match := _UNIT_TOTALS.fullmatch(line):
            totals.append(_unittest_totals(num_ran, match[1] or ""))
            _check_unittest(cases[first_case:], len(load_errors) - first_error, totals[-1])
            first_case, first_error = len(cases), len(load_errors)
        elif line.startswith(("ERROR: ", "FAIL: ", "UNEXPECTED SUCCESS: ", "=====")):
            current = None
        else:
            result = line
            if match := _UNIT_TEST.match(line):
                current, result = _unittest_name(match[1], match[2]), match[3]
            if current is None or (end := _UNIT_END.fullmatch(result)) is None:
                continue
            # Without a name on the line, only the docstring or the result itself can stand there.
            if match is None and not (end[1].endswith("... ") or not end[1]):
                continue
            status = _UNIT_WORDS.get(end[2] or "", "skip")
            if current.startswith(_FIXTURES):
                load_errors.append(current)
            else:
                cases.append(CaseResult(current, status))
            current = None
    is_crashed = not totals and (output.is_killed or current is not None)
    return build_report(
        cases,
        add_totals(totals),
        is_checked=True,
        load_errors=load_errors,
        crashed_test=current if is_crashed else None,
        is_crashed=is_crashed,
    )


def _unittest_name(name: str, where: str) -> str:
    if name in _FIXTURES:
        return f"{name} ({where})"
    # Python 3.11 and newer repeat the name of the test after its class.
    return make_name(where.removesuffix(f".{name}"), name)


def _unittest_totals(num_ran: int, text: str) -> RunTotals:
    counts = {name: int(number) for name, number in re.findall(r"([a-z ]+)=(\d+)", text)}
    counts = {name.strip(): number for name, number in counts.items()}
    failed = ("failures", "errors", "unexpected successes")
    skipped = ("skipped", "expected failures")
    return RunTotals(
        tests=num_ran,
        failed=sum(counts.get(name, 0) for name in failed),
        skipped=sum(counts.get(name, 0) for name in skipped),
    )


def _check_unittest(cases: list[CaseResult], num_load_errors: int, totals: RunTotals) -> None:
    """Raises ReportError if the lines of tests do not add up to the last lines of their run."""
    names = {case.name for case in cases}
    counts = {"failed": sum(case.status == "fail" for case in cases) + num_load_errors}
    counts["skipped"] = sum(case.status == "skip" for case in cases)
    counts["tests"] = len(names)
    for name, count in counts.items():
        expected = getattr(totals, name)
        if expected != count:
            raise ReportError(f"unittest states {name} = {expected}, and its log lists {count}")
