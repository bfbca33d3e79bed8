"""Reads XML test reports with expat, without entities and within limits.

A report comes from the program under test. So declarations of document types are refused: without one there are no
entities beyond XML's five, and nothing expands. Bytes that are no UTF-8 and control characters, which programs print
into `<system-out>`, are replaced before the parser reads them.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from xml.parsers import expat

from glm5_jax.envs.swe.parsers.report import (
    MAX_REPORT_BYTES,
    CaseResult,
    ReportError,
    RunTotals,
    Status,
    add_totals,
)

_MAX_DEPTH = 100
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_REFERENCE = re.compile(r"&#(?:x0*(?:[0-8bBcCeEfF]|1[0-9a-fA-F])|0*(?:[0-8]|1[124-9]|2\d|3[01]));")
_DECLARATION = re.compile(r"\A\s*<\?xml[^>]*\?>")
_FAILED = ("failure", "error")


@dataclasses.dataclass(eq=False)
class Suite:
    """`<testsuite>` or `<testsuites>` element.

    Attributes:
      attributes: attributes of the element.
      parent: suite that contains it; None: it is the root.
      cases: tests of the suite and of those inside it.
    """

    attributes: Mapping[str, str]
    parent: "Suite | None"
    cases: list["XmlCase"] = dataclasses.field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Returns the names of the suites from the root to this one."""
        above = self.parent.names if self.parent else []
        return [*above, self.attributes.get("name", "")]

    @property
    def is_outermost(self) -> bool:
        """Returns whether the suite states a number of tests, and none around it does."""
        above = self.parent
        while above is not None and "tests" not in above.attributes:
            above = above.parent
        return "tests" in self.attributes and above is None

    def count(self, *attributes: str) -> int | None:
        """Returns the sum of counts in attributes; None if there is none of them."""
        texts = [self.attributes[name] for name in attributes if name in self.attributes]
        if not all(text.isascii() and text.isdigit() for text in texts):
            raise ReportError(
                f"a count of suite {self.attributes.get('name')!r} is no number: {texts}"
            )
        return sum(map(int, texts)) if texts else None


@dataclasses.dataclass(eq=False)
class XmlCase:
    """`<testcase>` element.

    Attributes:
      attributes: attributes of the element.
      suite: suite that contains it.
      outcomes: (name, attributes) of the elements in it, such as `failure`.
    """

    attributes: Mapping[str, str]
    suite: Suite | None
    outcomes: list[tuple[str, Mapping[str, str]]] = dataclasses.field(default_factory=list)

    def attribute(self, name: str) -> str:
        """Returns an attribute; empty if the element lacks it."""
        return self.attributes.get(name, "")

    @property
    def status(self) -> Status:
        """Returns the status by the elements in this one."""
        tags = {tag for tag, _ in self.outcomes}
        if tags & set(_FAILED):
            return "fail"
        return "skip" if "skipped" in tags else "pass"


@dataclasses.dataclass(eq=False)
class XmlReport:
    """Content of an XML report.

    Attributes:
      suites, cases: elements in the order of the file.
      comments: text of the comments.
    """

    suites: list[Suite] = dataclasses.field(default_factory=list)
    cases: list[XmlCase] = dataclasses.field(default_factory=list)
    comments: list[str] = dataclasses.field(default_factory=list)


def walk_xml(
    data: bytes,
    where: str,
    start: Callable[[str, Mapping[str, str]], None],
    end: Callable[[str], None],
    text: Callable[[str], None] | None = None,
    comment: Callable[[str], None] | None = None,
) -> None:
    """Calls the functions for each part of an XML file, in order. Raises ReportError that names the file."""
    if len(data) > MAX_REPORT_BYTES:
        raise ReportError(f"{where} has more than {MAX_REPORT_BYTES:,} bytes")
    content = data.decode("utf-8", errors="replace").removeprefix("\ufeff")
    # The declared encoding is dropped with the declaration, because the text is encoded again.
    content = _REFERENCE.sub("?", _CONTROL.sub("?", _DECLARATION.sub("", content)))
    depth = 0

    def enter(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise ReportError(
                f"{where} has elements {depth} levels deep; the limit is {_MAX_DEPTH}"
            )
        start(tag, attributes)

    def leave(tag: str) -> None:
        nonlocal depth
        depth -= 1
        end(tag)

    def refuse_doctype(*_) -> None:
        raise ReportError(f"{where} declares a document type, which no test runner does")

    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = enter, leave
    parser.CharacterDataHandler, parser.CommentHandler = text, comment
    parser.StartDoctypeDeclHandler = refuse_doctype
    try:
        parser.Parse(content.encode("utf-8"), True)
    except expat.ExpatError as error:
        raise ReportError(f"{where} is cut off or no XML: {error}") from None


def read_xml_report(data: bytes, where: str) -> XmlReport:
    """Reads the suites and tests of a JUnit-like report. Raises ReportError if it is cut off or malformed."""
    report = XmlReport()
    suite: Suite | None = None
    case: XmlCase | None = None
    depth = case_depth = 0

    def start(tag: str, attributes: Mapping[str, str]) -> None:
        nonlocal suite, case, depth, case_depth
        depth += 1
        if tag == "testcase" and case is None:
            case, case_depth = XmlCase(attributes, suite), depth
            report.cases.append(case)
            above = suite
            while above is not None:
                above.cases.append(case)
                above = above.parent
        elif case is not None:
            if depth == case_depth + 1:
                case.outcomes.append((tag, attributes))
        elif tag in ("testsuite", "testsuites"):
            suite = Suite(attributes, suite)
            report.suites.append(suite)

    def end(tag: str) -> None:
        nonlocal suite, case, depth
        if case is not None and depth == case_depth:
            case = None
        elif case is None and tag in ("testsuite", "testsuites") and suite is not None:
            suite = suite.parent
        depth -= 1

    walk_xml(data, where, start, end, comment=report.comments.append)
    return report


def check_suites(
    report: XmlReport,
    where: str,
    status: Callable[[XmlCase], Status],
    *,
    failed: tuple[str, ...] = ("failures", "errors"),
    skipped: tuple[str, ...] = ("skipped",),
) -> RunTotals | None:
    """Returns the counts that the outermost suites state; None if they state none.

    Raises ReportError if a suite's own counts differ from the tests in it.

    failed, skipped: attributes whose sum is the number of such tests.
    """
    for suite in report.suites:
        statuses = [status(case) for case in suite.cases]
        expected = {"tests": (suite.count("tests"), len(statuses))}
        expected["failed"] = (suite.count(*failed), statuses.count("fail"))
        expected["skipped"] = (suite.count(*skipped), statuses.count("skip"))
        for name, (count, listed) in expected.items():
            if count is not None and count != listed:
                raise ReportError(
                    f"suite {suite.attributes.get('name', '')!r} of {where} states {name} = {count}, and lists {listed}"
                )
    outer = [suite for suite in report.suites if suite.is_outermost]
    return add_totals(
        RunTotals(tests=s.count("tests"), failed=s.count(*failed), skipped=s.count(*skipped))
        for s in outer
    )


def to_cases(
    report: XmlReport, name: Callable[[XmlCase], str], status: Callable[[XmlCase], Status]
) -> list[CaseResult]:
    """Returns the tests of a report."""
    return [CaseResult(name(case), status(case)) for case in report.cases]


def status_by_outcomes(case: XmlCase) -> Status:
    """Returns the status of a test by its `failure`, `error` and `skipped` elements."""
    return case.status
