"""Parses the output of the test runners of JavaScript and TypeScript: Mocha, Jest, Vitest, node:test and tsc."""

import json
import re
from typing import Any

from glm5_jax.envs.swe.parsers.report import (
    MAX_REPORT_BYTES,
    CaseResult,
    ReportError,
    RunOutput,
    RunReport,
    RunTotals,
    Status,
    add_totals,
    build_report,
    make_name,
    relative_path,
)
from glm5_jax.envs.swe.parsers.xml_report import (
    Suite,
    XmlCase,
    XmlReport,
    check_suites,
    read_xml_report,
    status_by_outcomes,
    to_cases,
)

_HOOK = re.compile(r'"(?:before|after)(?: all| each)" hook')
_JEST_WORDS: dict[str, Status] = {
    "passed": "pass",
    "failed": "fail",
    "pending": "skip",
    "todo": "skip",
    "skipped": "skip",
    "disabled": "skip",
}
_NODE_TOTAL = re.compile(r"\s*(tests|suites|pass|fail|cancelled|skipped|todo) (\d+)\s*")
_TSC_ERROR = re.compile(r"(\S.*?)\(\d+,\d+\): error TS\d+: .*")
_TSC_GLOBAL = re.compile(r"error TS\d+: .*")
_TSC_SOURCE = re.compile(r"(/.*\.[cm]?tsx?)")


def read_json_report(data: bytes, where: str) -> Any:
    """Returns the object in a JSON report. Raises ReportError if it is cut off or too large."""
    if len(data) > MAX_REPORT_BYTES:
        raise ReportError(f"{where} has more than {MAX_REPORT_BYTES:,} bytes")
    try:
        value = json.loads(data.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{where} is cut off or no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ReportError(f"{where} is no JSON object")
    return value


def field(value: Any, where: str, *path: str, kind: type) -> Any:
    """Returns a field of nested objects. Raises ReportError if it is absent or of another type."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ReportError(
            f"{where}: {'.'.join(path)} is {value!r:.60}; it must be a {kind.__name__}"
        )
    return value


def parse_mocha(output: RunOutput) -> RunReport:
    """Parses Mocha's JSON report. Identifiers are full titles.

    A hook that fails is a failure under its own title, hides the tests after it, and is not in the counts of tests.
    """
    cases: list[CaseResult] = []
    hooks: list[str] = []
    totals = RunTotals(tests=0, passed=0, failed=0, skipped=0)
    for where, data in _present(output).items():
        report = read_json_report(data, where)
        lists: list[tuple[str, Status]] = [
            ("passes", "pass"),
            ("failures", "fail"),
            ("pending", "skip"),
        ]
        counts = {}
        num_hooks = 0
        for name, status in lists:
            items = field(report, where, name, kind=list)
            titles = [make_name(field(item, where, "fullTitle", kind=str)) for item in items]
            broken = [title for title in titles if status == "fail" and _HOOK.search(title)]
            num_hooks += len(broken)
            hooks += broken
            cases += [CaseResult(title, status) for title in titles if title not in broken]
            counts[name] = field(report, where, "stats", name, kind=int)
        num_tests = field(report, where, "stats", "tests", kind=int)
        # A test that failed in a hook of its own counts as a test, though it is listed under the hook.
        listed = len(field(report, where, "tests", kind=list))
        if num_tests != listed:
            raise ReportError(f"{where} states stats.tests = {num_tests}, and lists {listed}")
        totals += RunTotals(
            passed=counts["passes"],
            failed=counts["failures"] - num_hooks,
            skipped=counts["pending"],
        )
    # A missing report means that Mocha stopped before its end.
    is_ended = bool(_present(output))
    return build_report(
        cases,
        totals if is_ended else None,
        load_errors=hooks,
        is_crashed=not is_ended and output.is_killed,
    )


def parse_jest(output: RunOutput) -> RunReport:
    """Parses Jest's JSON report. Identifiers are `file::full name`; a file that does not load fails."""
    cases: list[CaseResult] = []
    broken: list[str] = []
    totals = RunTotals(tests=0, passed=0, failed=0, skipped=0)
    for where, data in _present(output).items():
        report = read_json_report(data, where)
        for suite in field(report, where, "testResults", kind=list):
            file = relative_path(field(suite, where, "name", kind=str), output.workdir)
            results = field(suite, where, "assertionResults", kind=list)
            if not results and suite.get("status") == "failed":
                broken.append(make_name(file))
            for result in results:
                word = field(result, where, "status", kind=str)
                if word not in _JEST_WORDS:
                    raise ReportError(f"{where}: the status {word!r} is not known")
                name = make_name(file, field(result, where, "fullName", kind=str))
                cases.append(CaseResult(name, _JEST_WORDS[word]))
        count = {
            name: field(report, where, f"num{name}Tests", kind=int)
            for name in ("Total", "Passed", "Failed", "Pending", "Todo")
        }
        totals += RunTotals(
            tests=count["Total"],
            passed=count["Passed"],
            failed=count["Failed"],
            skipped=count["Pending"] + count["Todo"],
        )
    is_ended = bool(_present(output))
    return build_report(
        cases,
        totals if is_ended else None,
        load_errors=broken,
        is_crashed=not is_ended and output.is_killed,
    )


def parse_vitest(output: RunOutput) -> RunReport:
    """Parses Vitest's JUnit XML. Identifiers are `file::suite > test`; a file that does not load fails."""
    cases: list[CaseResult] = []
    broken: list[str] = []
    totals = None
    for where, data in _present(output).items():
        report = read_xml_report(data, where)
        totals = add_totals([totals, check_suites(report, where, status_by_outcomes)])
        loads = [c for c in report.cases if c.attribute("name") == c.attribute("classname")]
        broken += [make_name(case.attribute("name")) for case in loads]
        for case in report.cases:
            parts = [case.attribute("classname"), case.attribute("name")]
            cases.append(CaseResult(make_name(*dict.fromkeys(parts)), case.status))
    is_crashed = not _present(output) and output.is_killed
    return build_report(cases, totals, load_errors=broken, is_crashed=is_crashed)


def parse_node_test(output: RunOutput) -> RunReport:
    """Parses JUnit XML of node:test. Identifiers are the names of suites and test, joined by ` > `.

    A test with sub-tests is a suite in this report, so it has no status.
    """
    cases: list[CaseResult] = []
    for where, data in _present(output).items():
        report = read_xml_report(data, where)
        listed = to_cases(report, lambda case: _node_name(case, output.workdir), _node_status)
        _check_node_totals(report, listed, where)
        cases += listed
    is_ended = bool(_present(output))
    totals = RunTotals(tests=len(cases)) if is_ended else None
    return build_report(cases, totals, is_crashed=not is_ended and output.is_killed)


def _node_name(case: XmlCase, workdir: str) -> str:
    suites = case.suite.names[1:] if case.suite else []
    # A file without tests, or that does not load, is a test with the name of its path.
    return make_name(" > ".join([*suites, relative_path(case.attribute("name"), workdir)]))


def _node_status(case: XmlCase) -> Status:
    # A test to do may fail.
    return "skip" if any(tag == "skipped" for tag, _ in case.outcomes) else case.status


def _check_node_totals(report: XmlReport, cases: list[CaseResult], where: str) -> None:
    """Raises ReportError if the counts in comments at the end of the file do not fit.

    They include the tests with sub-tests, which the file shows as suites.
    """
    matches = [match for text in report.comments if (match := _NODE_TOTAL.fullmatch(text))]
    counts = {match[1]: int(match[2]) for match in matches}
    if "tests" not in counts:
        raise ReportError(f"{where} has no counts at its end")
    suites: list[Suite] = report.suites[1:]
    parents = len(suites) - counts.get("suites", 0)
    failing = [suite for suite in suites if any(_node_status(c) == "fail" for c in suite.cases)]
    listed = {word: sum(c.status == word for c in cases) for word in ("pass", "fail", "skip")}
    expected = {
        "tests": (len(cases) + parents, len(cases) + parents),
        "fail": (listed["fail"], listed["fail"] + len(failing)),
        "pass": (listed["pass"], listed["pass"] + parents),
    }
    for name, (low, high) in expected.items():
        count = counts.get(name, 0) + (counts.get("cancelled", 0) if name == "fail" else 0)
        if not low <= count <= high:
            raise ReportError(
                f"{where} states {name} = {count}, and lists {low} to {high}; the report in TAP is complete"
            )


def parse_tsc(output: RunOutput) -> RunReport:
    """Parses the text of `tsc --noEmit --listFiles`: a pseudo-test `tsc::file` for each source file of the project.

    Declarations and files of node_modules are left out.
    """
    failing: list[str] = []
    listed: list[str] = []
    global_errors: list[str] = []
    for line in output.lines:
        if match := _TSC_ERROR.fullmatch(line):
            failing.append(relative_path(match[1], output.workdir))
        elif _TSC_GLOBAL.fullmatch(line):
            global_errors.append("tsc::noEmit")
        elif match := _TSC_SOURCE.fullmatch(line):
            listed.append(relative_path(match[1], output.workdir))
    is_clean = not failing and not global_errors
    if not output.is_killed and is_clean != (output.exit_code == 0):
        raise ReportError(f"tsc ends with {output.exit_code}, and lists {len(failing)} errors")
    files = [file for file in dict.fromkeys(listed) if _is_source(file)]
    names = dict.fromkeys([*files, *failing])
    cases = [CaseResult(make_name("tsc", n), "fail" if n in failing else "pass") for n in names]
    return build_report(
        cases,
        None,
        load_errors=global_errors,
        is_crashed=output.is_killed,
    )


def _is_source(path: str) -> bool:
    is_inside = not path.startswith("/") and "node_modules" not in path.split("/")
    return is_inside and not re.search(r"\.d\.[cm]?ts$", path)


def _present(output: RunOutput) -> dict[str, bytes]:
    """Returns the report files that are not empty."""
    return {name: data for name, data in output.reports.items() if data.strip()}
