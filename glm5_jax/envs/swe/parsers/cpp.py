"""Parses the output of C++'s test runners: GoogleTest (XML, JSON, text), CTest (JUnit XML, text), Catch2 and doctest."""

import re
from collections.abc import Sequence

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
    check_totals,
    make_name,
)
from glm5_jax.envs.swe.parsers.xml_report import (
    XmlCase,
    check_suites,
    read_xml_report,
    status_by_outcomes,
    to_cases,
)

_GTEST_BEGIN = re.compile(r"\[==========\] Running (\d+) tests? from .*")
_GTEST_RUN = re.compile(r"\[ RUN      \] (\S+)")
# A test's output without a line end stands before its result.
_GTEST_END = re.compile(r"\[(       OK |  FAILED  |  SKIPPED )\] (\S+?)(?:, where .*)? \(\d+ ms\)$")
_GTEST_WORDS: dict[str, Status] = {"OK": "pass", "FAILED": "fail", "SKIPPED": "skip"}
_GTEST_PASSED = re.compile(r"\[  PASSED  \] (\d+) tests?\.")


def parse_gtest(output: RunOutput) -> RunReport:
    """Parses the files of GoogleTest's binaries, and the log for those that died. Identifiers are `suite::test`.

    GoogleTest writes a file at its end only. Of a binary that died, the log has the results before the test that was
    running, which fails.
    """
    cases: list[CaseResult] = []
    totals = []
    for where, data in output.reports.items():
        if data.strip():
            is_json = data.lstrip().startswith(b"{")
            listed, total = (_gtest_json if is_json else _gtest_xml)(data, where)
            cases += listed
            totals.append(total)
    in_files = {case.name for case in cases}
    running: list[str] = []
    for lines in program_lines(output.lines).values():
        for part in _split_runs(lines):
            listed, unfinished, is_ended = _gtest_text(part)
            # A program that died, or was run without the option, has no file.
            listed = [case for case in listed if case.name not in in_files]
            cases += listed
            totals.append(RunTotals(tests=len(listed)))
            if not is_ended:
                running.append(unfinished or "")
    named = [name for name in running if name]
    cases += [CaseResult(name, "fail") for name in named[:-1]]
    return build_report(
        cases,
        None if running else add_totals(totals),
        crashed_test=named[-1] if named else None,
        is_crashed=bool(running),
    )


def program_lines(lines: Sequence[str]) -> dict[str, list[str]]:
    """Returns the lines of each program by its number in `ctest -V`; lines without a number under an empty key.

    CTest puts a number before each line, because programs may run in parallel.
    """
    programs: dict[str, list[str]] = {}
    for line in lines:
        match = _PREFIX.fullmatch(line)
        programs.setdefault(match[1] if match else "", []).append(match[2] if match else line)
    return programs


def _gtest_xml(data: bytes, where: str) -> tuple[list[CaseResult], RunTotals | None]:
    report = read_xml_report(data, where)
    # The attribute `skipped` is on inner suites only, and tests that are disabled are counted apart.
    totals = check_suites(report, where, _gtest_status, skipped=())
    for suite in report.suites:
        skipped, disabled = suite.count("skipped"), suite.count("disabled")
        listed = sum(_gtest_status(case) == "skip" for case in suite.cases)
        if skipped is not None and disabled is not None and skipped + disabled != listed:
            raise ReportError(
                f"suite {suite.attributes.get('name')!r} of {where} states {skipped} skipped and {disabled} disabled "
                f"tests, and lists {listed}"
            )
    cases = to_cases(
        report,
        lambda case: make_name(case.attribute("classname"), case.attribute("name")),
        _gtest_status,
    )
    return cases, totals


def _gtest_status(case: XmlCase) -> Status:
    is_run = case.attribute("status") == "run" and case.attribute("result") != "skipped"
    return case.status if is_run or case.status == "fail" else "skip"


def _gtest_json(data: bytes, where: str) -> tuple[list[CaseResult], RunTotals]:
    report = read_json_report(data, where)
    cases: list[CaseResult] = []
    for suite in field(report, where, "testsuites", kind=list):
        for test in field(suite, where, "testsuite", kind=list):
            is_run = test.get("status") == "RUN" and test.get("result") != "SKIPPED"
            status = "fail" if test.get("failures") else "pass" if is_run else "skip"
            name = [field(test, where, key, kind=str) for key in ("classname", "name")]
            cases.append(CaseResult(make_name(*name), status))
    totals = RunTotals(
        tests=field(report, where, "tests", kind=int),
        failed=field(report, where, "failures", kind=int),
    )
    check_totals(cases, totals, where)
    return cases, totals


def _split_runs(lines: Sequence[str]) -> list[Sequence[str]]:
    starts = [i for i, line in enumerate(lines) if _GTEST_BEGIN.fullmatch(line)]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], len(lines)])]


def _gtest_text(lines: Sequence[str]) -> tuple[list[CaseResult], str | None, bool]:
    """Returns the results of one run, the test that was running at its end, and whether the run has an end."""
    cases: list[CaseResult] = []
    running: str | None = None
    for line in lines:
        if match := _GTEST_RUN.fullmatch(line):
            running = _gtest_name(match[1])
        elif running and (match := _GTEST_END.search(line)) and running == _gtest_name(match[2]):
            cases.append(CaseResult(running, _GTEST_WORDS[match[1].strip()]))
            running = None
    ends = [int(match[1]) for line in lines if (match := _GTEST_PASSED.fullmatch(line))]
    begin = _GTEST_BEGIN.fullmatch(lines[0])
    if ends and begin:
        # Tests of this run may print the report of another run of GoogleTest, whose end comes first.
        totals = RunTotals(tests=int(begin[1]), passed=ends[-1])
        check_totals(cases, totals, "GoogleTest")
    return cases, running, bool(ends)


def _gtest_name(name: str) -> str:
    suite, _, test = name.partition(".")
    return make_name(suite, test)


_PREFIX = re.compile(r"(\d+): (.*)")
_CTEST_WORDS: dict[str, Status] = {"run": "pass", "fail": "fail", "disabled": "skip"}
_CTEST_LINE = re.compile(r" *\d+/(\d+) Test +#\d+: (.+?) \.*(.*?) +\d+\.\d+ sec")
_CTEST_TOTALS = re.compile(r"\d+% tests passed, (\d+) tests failed out of (\d+)")


def parse_ctest(output: RunOutput) -> RunReport:
    """Parses CTest's JUnit XML, or its text. Identifiers are `ctest::name`; each test is a program."""
    cases = ctest_cases(output)
    # Programs that are disabled are in no count.
    counts = [int(m[1]) for line in output.lines if (m := _CTEST_TOTALS.fullmatch(line))]
    totals = add_totals(RunTotals(failed=count) for count in counts)
    is_crashed = not counts and not output.reports and output.is_killed
    return build_report(cases, totals, is_crashed=is_crashed)


def ctest_cases(output: RunOutput) -> list[CaseResult]:
    """Returns the programs that CTest ran."""
    cases: list[CaseResult] = []
    for where, data in output.reports.items():
        report = read_xml_report(data, where)
        for suite in report.suites:
            words = [case.attribute("status") for case in suite.cases]
            stated = {"tests": len(words), "failures": words.count("fail")}
            stated |= {"disabled": words.count("disabled"), "skipped": words.count("notrun")}
            for name, count in stated.items():
                if suite.count(name) not in (None, count):
                    raise ReportError(f"{where} states {name} = {suite.count(name)}, not {count}")
        cases += to_cases(report, lambda c: make_name("ctest", c.attribute("name")), _ctest_status)
    if cases or output.reports:
        return cases
    for line in output.lines:
        if match := _CTEST_LINE.fullmatch(line):
            cases.append(CaseResult(make_name("ctest", match[2]), _ctest_text_status(match[3])))
    return cases


def _ctest_status(case: XmlCase) -> Status:
    word = case.attribute("status")
    if word == "notrun":
        # A program that does not exist is a failure; one that skips itself says by which rule.
        messages = [attributes.get("message", "") for _, attributes in case.outcomes]
        return "skip" if any(text.startswith("SKIP_") for text in messages) else "fail"
    if word not in _CTEST_WORDS:
        raise ReportError(f"CTest's status {word!r} is not known")
    return _CTEST_WORDS[word]


def _ctest_text_status(text: str) -> Status:
    text = text.strip()
    if text == "Passed":
        return "pass"
    return "skip" if text in ("***Skipped", "***Not Run (Disabled)") else "fail"


def parse_catch2(output: RunOutput) -> RunReport:
    """Parses JUnit XML of Catch2 or doctest. Identifiers are `suite::name`.

    Their `tests` counts assertions, so only the numbers of failures that are stated and listed are compared.
    """
    cases: list[CaseResult] = []
    for where, data in output.reports.items():
        if not data.strip():
            continue
        report = read_xml_report(data, where)
        for suite in report.suites:
            stated = suite.count("failures", "errors")
            outcomes = [tag for case in suite.cases for tag, _ in case.outcomes]
            listed = sum(tag in ("failure", "error") for tag in outcomes)
            if stated is not None and stated != listed:
                raise ReportError(f"{where} states {stated} failures, and lists {listed}")
        cases += to_cases(report, _catch2_name, status_by_outcomes)
    is_ended = bool(cases)
    return build_report(cases, None, is_crashed=not is_ended and output.is_killed)


def _catch2_name(case: XmlCase) -> str:
    # Catch2 puts sections into the name after slashes; the class is the program or the fixture.
    classname = case.attribute("classname").removesuffix(".global")
    return make_name(classname, case.attribute("name"))
