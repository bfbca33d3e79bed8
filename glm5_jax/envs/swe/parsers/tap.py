"""Parses the Test Anything Protocol, as node:test, tape, tap and Perl's tests print it."""

import dataclasses
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
    check_totals,
    make_name,
    relative_path,
)

_LINE = re.compile(r"(not )?ok\b(?: +(\d+))?(?: +(?:- )?(.*?))?\s*")
_DIRECTIVE = re.compile(r"(.*?)\s+#\s*(skip|todo)\b.*", re.IGNORECASE)
_PLAN = re.compile(r"1\.\.(\d+)(?:\s*#.*)?")
_FOOTER = re.compile(r"# (tests|pass|fail|cancelled|skipped|todo) +(\d+)")
_SUBTEST = re.compile(r"# Subtest: (.*)")
_VERSION = re.compile(r"TAP version \d+")


@dataclasses.dataclass
class _Result:
    """Line of one test, with the tests below it."""

    name: str
    status: Status
    children: list[CaseResult]
    is_suite: bool = False


@dataclasses.dataclass
class _Level:
    """Tests of one level of indentation, and its plan (None: not yet read)."""

    results: list[_Result] = dataclasses.field(default_factory=list)
    plan: int | None = None

    def check(self) -> None:
        """Raises ReportError if more tests are listed than planned."""
        if self.plan is not None and len(self.results) > self.plan:
            raise ReportError(
                f"the plan of TAP is 1..{self.plan}, and it lists {len(self.results)}"
            )

    def cases(self) -> Iterator[CaseResult]:
        """Yields the tests of the level and of those below it; suites are left out."""
        for result in self.results:
            for child in result.children:
                yield CaseResult(make_name(f"{result.name} > {child.name}"), child.status)
            if not result.is_suite:
                yield CaseResult(make_name(result.name), result.status)


def parse_tap(output: RunOutput) -> RunReport:
    """Parses TAP in a report file or the log. Names of sub-tests are joined by ` > `; a suite of node:test is no test.

    The number of tests must equal the plan, and node's own counts at the end.
    """
    streams = [_read_stream(lines, output.workdir) for lines in _split_streams(output)]
    cases = [case for stream in streams for case in stream.levels[0].cases()]
    broken = [stream for stream in streams if stream.is_short]
    # Levels that are still open belong to the test that was running.
    cases += [case for s in broken for k in sorted(s.levels) if k for case in s.levels[k].cases()]
    if broken and output.exit_code == 0:
        raise ReportError("TAP ends before its plan, although the exit code is 0")
    totals = [total for stream in streams if (total := stream.totals()) is not None]
    if totals and not broken:
        check_totals(cases, add_totals(totals) or RunTotals(), "node:test")
    plans = [stream.levels[0].plan for stream in streams]
    is_planned = not broken and None not in plans
    return build_report(
        cases,
        (add_totals(totals) or RunTotals(tests=len(cases))) if is_planned else None,
        crashed_test=broken[-1].running if broken else None,
        is_crashed=bool(broken) and bool(cases or broken[-1].running),
    )


def _split_streams(output: RunOutput) -> Iterator[list[str]]:
    """Yields the lines of each TAP stream: of each report file, or of the log from each version line."""
    if output.reports:
        for data in output.reports.values():
            yield RunOutput(log=data.decode("utf-8", "replace")).lines
        return
    lines = output.lines
    starts = [i for i, line in enumerate(lines) if _VERSION.fullmatch(line)] or [0]
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        yield lines[start:end]


def _read_stream(lines: list[str], workdir: str) -> "_Stream":
    stream = _Stream(workdir)
    for line in lines:
        stream.read(line)
    for level in stream.levels.values():
        level.check()
    return stream


class _Stream:
    """State of reading one TAP stream."""

    def __init__(self, workdir: str):
        self.workdir = workdir
        self.levels: dict[int, _Level] = {0: _Level()}
        self.footer: dict[str, int] = {}
        self.open: dict[int, str] = {}  # tests that were announced, by indentation
        self.yaml_indent: int | None = None
        self.is_bailed = False

    def read(self, line: str) -> None:
        """Reads one line."""
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        if self.yaml_indent is not None:
            self._read_yaml(text.rstrip(), indent)
        elif text.rstrip() == "---":
            self.yaml_indent = indent
        elif indent == 0 and (match := _FOOTER.fullmatch(text)):
            self.footer[match[1]] = int(match[2])
        elif match := _SUBTEST.fullmatch(text):
            self.open[indent] = match[1]
        elif match := _PLAN.fullmatch(text):
            self.levels.setdefault(indent, _Level()).plan = int(match[1])
        elif text.startswith("Bail out!"):
            self.is_bailed = True
        elif match := _LINE.fullmatch(text):
            self._read_result(match, indent)

    def _read_yaml(self, text: str, indent: int) -> None:
        """Reads a line of details; lines of a test's output in them are indented further."""
        if indent != self.yaml_indent:
            return
        if text == "...":
            self.yaml_indent = None
        elif text == "type: 'suite'":
            level = self.levels[max(k for k in self.levels if k <= indent)]
            level.results[-1].is_suite = True

    def _read_result(self, match: re.Match, indent: int) -> None:
        text, status = match[3] or "", "fail" if match[1] else "pass"
        if directive := _DIRECTIVE.fullmatch(text):
            text, status = directive[1], "skip"
        # Deeper levels have ended, and are the children of this test.
        children: list[CaseResult] = []
        for deeper in sorted(k for k in self.levels if k > indent):
            level = self.levels.pop(deeper)
            level.check()
            children += level.cases()
        # A file without tests, or that does not load, is a test with the name of its path.
        name = relative_path(re.sub(r"\\([#\\])", r"\1", text), self.workdir)
        name = name or f"test {match[2]}"
        self.levels.setdefault(indent, _Level()).results.append(_Result(name, status, children))
        self.open = {k: name for k, name in self.open.items() if k < indent}

    @property
    def running(self) -> str | None:
        """Returns the test that was announced and has no result."""
        return make_name(" > ".join(self.open[k] for k in sorted(self.open))) or None

    @property
    def is_short(self) -> bool:
        """Returns whether the stream ends before its plan. An empty stream is not."""
        top = self.levels[0]
        is_empty = not top.results and top.plan is None and not self.open
        return self.is_bailed or (not is_empty and len(top.results) != top.plan)

    def totals(self) -> RunTotals | None:
        """Returns node's counts at the end; None if there are none."""
        if "tests" not in self.footer:
            return None
        failed = self.footer.get("fail", 0) + self.footer.get("cancelled", 0)
        # tape counts tests and passes only, with assertions as tests.
        is_node = "skipped" in self.footer
        skipped = self.footer["skipped"] + self.footer.get("todo", 0) if is_node else None
        return RunTotals(
            tests=self.footer["tests"], failed=failed if is_node else None, skipped=skipped
        )
