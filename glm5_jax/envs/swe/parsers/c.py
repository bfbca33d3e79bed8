"""Parses the output of C's test runners: Unity (under CTest), check, cmocka and Automake's test harness."""

import re

from glm5_jax.envs.swe.parsers.cpp import ctest_cases, program_lines
from glm5_jax.envs.swe.parsers.report import (
    CaseResult,
    ReportError,
    RunOutput,
    RunReport,
    RunTotals,
    Status,
    add_totals,
    build_report,
    check_totals,
    make_name,
    relative_path,
)
from glm5_jax.envs.swe.parsers.xml_report import (
    check_suites,
    read_xml_report,
    status_by_outcomes,
    to_cases,
    walk_xml,
)

_UNITY = re.compile(r"([^\s:][^:]*\.\w+):\d+:(\w[^:]*):(PASS|FAIL|IGNORE)(?::.*)?")
_UNITY_WORDS: dict[str, Status] = {"PASS": "pass", "FAIL": "fail", "IGNORE": "skip"}
_UNITY_TOTALS = re.compile(r"(\d+) Tests (\d+) Failures (\d+) Ignored ?")
_CRASHED = re.compile(r".*\*\*\*(?:Exception|Timeout).*")


def parse_unity(output: RunOutput) -> RunReport:
    """Parses Unity's text, and CTest's report on the programs. Identifiers are `file.c::test` and `ctest::program`.

    Unity names a test at its end only. So a program that dies leaves out the test that was running and those after it.
    """
    cases: list[CaseResult] = []
    totals: list[RunTotals] = []
    is_short = False
    for lines in program_lines(output.lines).values():
        listed = [case for line in lines if (case := _unity_case(line, output.workdir))]
        counts = [m for line in lines if (m := _UNITY_TOTALS.fullmatch(line))]
        total = add_totals(
            RunTotals(tests=int(m[1]), failed=int(m[2]), skipped=int(m[3])) for m in counts
        )
        if total is not None:
            check_totals(listed, total, "Unity")
            totals.append(total)
        is_short |= bool(listed) and total is None
        cases += listed
    programs_cases = ctest_cases(output)
    is_crashed = is_short or any(_CRASHED.fullmatch(line) for line in output.lines)
    return build_report(
        [*programs_cases, *cases],
        None if is_crashed else add_totals(_plus(totals, programs_cases)),
        is_crashed=is_crashed,
    )


def _plus(totals: list[RunTotals], programs: list[CaseResult]) -> list[RunTotals]:
    """Returns totals with those of the programs, so that all results add up."""
    if not totals and not programs:
        return []
    statuses = [case.status for case in programs]
    more = RunTotals(
        tests=len(statuses), failed=statuses.count("fail"), skipped=statuses.count("skip")
    )
    return [*totals, more]


def _unity_case(line: str, workdir: str) -> CaseResult | None:
    match = _UNITY.fullmatch(line)
    if match is None:
        return None
    # Without the line, which changes with any edit of the file.
    return CaseResult(make_name(relative_path(match[1], workdir), match[2]), _UNITY_WORDS[match[3]])


_CHECK_WORDS: dict[str, Status] = {"success": "pass", "failure": "fail", "error": "fail"}
_CHECK_TOTALS = re.compile(r"\d+%: Checks: (\d+), Failures: (\d+), Errors: (\d+)")


def parse_check(output: RunOutput) -> RunReport:
    """Parses the XML of check (CK_XML_LOG_FILE_NAME). Identifiers are `suite::test`; loops add their iteration."""
    cases: list[CaseResult] = []
    for where, data in output.reports.items():
        if data.strip():
            cases += _check_cases(data, where)
    counts = [m for line in output.lines if (m := _CHECK_TOTALS.fullmatch(line))]
    totals = add_totals(
        RunTotals(tests=int(m[1]), failed=int(m[2]) + int(m[3]), skipped=0) for m in counts
    )
    return build_report(
        cases,
        totals,
        is_crashed=not cases and output.is_killed,
    )


def _check_cases(data: bytes, where: str) -> list[CaseResult]:
    cases: list[CaseResult] = []
    suite, result = "", ""
    fields: dict[str, str] = {}
    tags: list[str] = []

    def start(tag: str, attributes) -> None:
        nonlocal result
        tags.append(tag)
        if tag == "test":
            result = attributes.get("result", "")
            fields.clear()
        elif tag == "suite":
            fields.clear()

    def text(content: str) -> None:
        if tags and tags[-1] in ("title", "id", "fn", "iteration"):
            fields[tags[-1]] = fields.get(tags[-1], "") + content

    def end(tag: str) -> None:
        nonlocal suite
        tags.pop()
        if tag == "title":
            suite = fields["title"]
        elif tag == "test":
            if result not in _CHECK_WORDS:
                raise ReportError(f"{where}: the result {result!r} is not known")
            iteration = fields.get("iteration", "0")
            name = fields.get("id", "") + (f"[{iteration}]" if iteration != "0" else "")
            cases.append(CaseResult(make_name(suite, name), _CHECK_WORDS[result]))

    walk_xml(data, where, start, end, text)
    return cases


def parse_cmocka(output: RunOutput) -> RunReport:
    """Parses the XML of cmocka (CMOCKA_MESSAGE_OUTPUT=XML). Identifiers are `group::test`."""
    cases: list[CaseResult] = []
    totals = None
    for where, data in output.reports.items():
        if data.strip():
            report = read_xml_report(data, where)
            totals = add_totals([totals, check_suites(report, where, status_by_outcomes)])
            cases += to_cases(
                report,
                lambda case: make_name(
                    case.suite.attributes.get("name", "") if case.suite else "",
                    case.attribute("name"),
                ),
                status_by_outcomes,
            )
    return build_report(cases, totals, is_crashed=totals is None and output.is_killed)


_AUTOMAKE_WORDS: dict[str, Status] = {
    "PASS": "pass",
    "XFAIL": "skip",
    "SKIP": "skip",
    "FAIL": "fail",
    "XPASS": "fail",
    "ERROR": "fail",
}
_AUTOMAKE_CASE = re.compile(r"(PASS|XFAIL|SKIP|FAIL|XPASS|ERROR): (\S.*)")
_AUTOMAKE_TOTAL = re.compile(r"# (TOTAL|PASS|XFAIL|SKIP|FAIL|XPASS|ERROR): +(\d+)")
_TRS_RESULT = re.compile(r":test-result: (PASS|XFAIL|SKIP|FAIL|XPASS|ERROR)(?: (.*))?")


def parse_automake(output: RunOutput) -> RunReport:
    """Parses `make check` of Automake: its `.trs` files, or its text. Identifiers are names of programs.

    A program that prints TAP has several results, which follow its name.
    """
    cases: list[CaseResult] = []
    for where, data in output.reports.items():
        program = where.removesuffix(".trs")
        lines = RunOutput(log=data.decode("utf-8", "replace")).lines
        matches = [match for line in lines if (match := _TRS_RESULT.fullmatch(line))]
        if not matches:
            raise ReportError(f"{where} has no line with :test-result:, so the program has no end")
        cases += [
            CaseResult(make_name(program, m[2] or ""), _AUTOMAKE_WORDS[m[1]]) for m in matches
        ]
    counts: dict[str, int] = {}
    listed: list[CaseResult] = []
    for line in output.lines:
        if match := _AUTOMAKE_CASE.fullmatch(line):
            listed.append(CaseResult(make_name(match[2]), _AUTOMAKE_WORDS[match[1]]))
        elif match := _AUTOMAKE_TOTAL.fullmatch(line):
            counts[match[1]] = counts.get(match[1], 0) + int(match[2])
    totals = None
    if "TOTAL" in counts:
        totals = RunTotals(
            tests=counts["TOTAL"],
            passed=counts.get("PASS", 0),
            failed=sum(counts.get(word, 0) for word in ("FAIL", "XPASS", "ERROR")),
            skipped=sum(counts.get(word, 0) for word in ("SKIP", "XFAIL")),
        )
    cases = cases or listed
    is_ended = totals is not None or bool(output.reports)
    return build_report(cases, totals, is_crashed=not is_ended and output.is_killed)
