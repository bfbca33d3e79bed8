"""Defines the output of a test run, and the report that a parser makes of it.

A parser turns a `RunOutput` (log, report files, exit code) into a `RunReport` (a status per test). It lists the tests
in the runner's order as `CaseResult`s; `build_report` compares them with the runner's own totals, and merges repeated names.

A test that is missing has no status. So there are three words only: pass, fail (errors included) and skip (expected
failures included).
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

Status = Literal["pass", "fail", "skip"]
STATUSES: tuple[Status, ...] = ("pass", "skip", "fail")  # from best to worst

MAX_REPORT_BYTES = 64 << 20
MAX_CASES = 1_000_000
_MAX_SIGNAL = 64

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_TEMPORARY = re.compile(r"/tmp/[A-Za-z0-9._-]+")
# At least 7 digits, because names of data sets such as "ascii 0x1f" are no addresses.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{7,}")
_PORT = re.compile(r"\b(localhost|127\.0\.0\.1):\d+")
_ESCAPED = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"})


class ReportError(ValueError):
    """Raised for a report that is cut off, malformed, or in contradiction to the runner's own totals."""


class CaseResult(NamedTuple):
    """Result of one test in one run.

    Attributes:
      name: identifier, `suite::name`.
      status: pass, fail or skip.
    """

    name: str
    status: Status


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutput:
    """Output of one run of a test command.

    Attributes:
      log: standard output and error.
      reports: content of the report files by name.
      exit_code: exit code of the command; 128 + n or -n after signal n; None: killed at its time limit.
      workdir: work folder, which is removed from paths in names.
    """

    log: str = ""
    reports: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    exit_code: int | None = 0
    workdir: str = "/testbed"

    @property
    def is_killed(self) -> bool:
        """Returns whether a signal or the time limit ended the command."""
        code = self.exit_code
        # A shell adds the number of the signal to 128. PHP ends with 255 after an error of its own.
        return code is None or code < 0 or 128 < code <= 128 + _MAX_SIGNAL

    @property
    def lines(self) -> list[str]:
        """Returns the lines of the log without colours and carriage returns."""
        return clean_text(self.log).split("\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTotals:
    """Counts of a run, as the runner states them; None: it does not state this one.

    Attributes:
      tests: number of tests.
      passed, failed, skipped: number of tests with this status; errors count as failed.
    """

    tests: int | None = None
    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None

    def __add__(self, other: "RunTotals") -> "RunTotals":
        both = {}
        for field in dataclasses.fields(self):
            one, two = getattr(self, field.name), getattr(other, field.name)
            both[field.name] = None if one is None or two is None else one + two
        return RunTotals(**both)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """Statuses of the tests of one run.

    Attributes:
      statuses: status by identifier, in the runner's order.
      load_errors: files, packages and hooks that failed outside of a test.
      crashed_test: test that ran when the runner died; None: it did not die, or the output does not name one.
      is_crashed: whether the runner died before its end.
      totals: counts as the runner states them; None: it states none, as after a crash.
    """

    statuses: Mapping[str, Status]
    load_errors: tuple[str, ...] = ()
    crashed_test: str | None = None
    is_crashed: bool = False
    totals: RunTotals | None = None

    @property
    def has_tests(self) -> bool:
        """Returns whether the run lists a test, besides files that do not load."""
        return any(name not in self.load_errors for name in self.statuses)

    def names(self, status: Status) -> list[str]:
        """Returns the tests with this status."""
        return [name for name, other in self.statuses.items() if other == status]


class ReportParser(Protocol):
    """Parser of the output of one test runner."""

    def __call__(self, output: RunOutput) -> RunReport:
        """Returns the report. Raises ReportError if the output contradicts itself or is cut off."""
        ...


def clean_text(text: str) -> str:
    """Returns a text without terminal colours and carriage returns."""
    return _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def make_name(*parts: str) -> str:
    """Returns the identifier of a test: its parts joined by `::`, on one line, the same in every run."""
    name = "::".join(part.strip() for part in parts if part.strip())
    name = _ANSI.sub("", name).replace("\r\n", "\n").translate(_ESCAPED)
    name = _TEMPORARY.sub("/tmp/X", name)
    return _PORT.sub(r"\1:X", _ADDRESS.sub("0xX", name))


def relative_path(path: str, workdir: str) -> str:
    """Returns a path relative to the work folder; a path outside of it as it is."""
    return path.removeprefix(workdir.rstrip("/") + "/").removeprefix("./")


def worst(one: Status, two: Status) -> Status:
    """Returns the worse of two statuses."""
    return one if STATUSES.index(one) >= STATUSES.index(two) else two


def build_report(
    cases: Sequence[CaseResult],
    totals: RunTotals | None,
    *,
    is_checked: bool = False,
    load_errors: Iterable[str] = (),
    crashed_test: str | None = None,
    is_crashed: bool = False,
) -> RunReport:
    """Returns the report on these results. Raises ReportError if they do not add up to the totals.

    is_checked: whether the caller has compared them, because the totals include more than these results. A test that ran when the runner died fails. A file that does not load fails under its own name, so that it is a
    failure of the run.
    """
    if len(cases) > MAX_CASES:
        raise ReportError(f"{len(cases):,} tests are too many; the limit is {MAX_CASES:,}")
    if totals is not None and not is_checked:
        check_totals(cases, totals)
    load_errors = tuple(dict.fromkeys(load_errors))
    extra = [*load_errors, *([crashed_test] if crashed_test else [])]
    statuses: dict[str, Status] = {}
    for name, status in [*cases, *(CaseResult(name, "fail") for name in extra)]:
        statuses[name] = worst(statuses[name], status) if name in statuses else status
    return RunReport(
        statuses=statuses,
        load_errors=load_errors,
        crashed_test=crashed_test,
        is_crashed=is_crashed or crashed_test is not None,
        totals=totals,
    )


def check_totals(cases: Sequence[CaseResult], totals: RunTotals, where: str = "the runner") -> None:
    """Raises ReportError if the number of results differs from the totals."""
    statuses = [case.status for case in cases]
    counts = {"tests": len(statuses), "passed": statuses.count("pass")}
    counts |= {"failed": statuses.count("fail"), "skipped": statuses.count("skip")}
    for name, count in counts.items():
        expected = getattr(totals, name)
        if expected is not None and expected != count:
            raise ReportError(f"{where} states {name} = {expected}, and its report lists {count}")


def add_totals(totals: Iterable[RunTotals | None]) -> RunTotals | None:
    """Returns the sum of the totals of several runs, without those that are None; None if no other is left."""
    total = None
    for item in totals:
        if item is not None:
            total = item if total is None else total + item
    return total


def exit_code_problem(report: RunReport, exit_code: int | None) -> str | None:
    """Returns why an exit code and a report contradict each other, or None if they agree."""
    failing = report.names("fail")
    if exit_code == 0 and failing:
        return f"the exit code is 0, but {len(failing)} tests fail, such as {failing[0]}"
    if exit_code != 0 and not failing:
        return f"the exit code is {exit_code}, but no test fails"
    return None
