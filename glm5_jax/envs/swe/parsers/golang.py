"""Parses the output of `go test -json` and, if there is no JSON, of `go test -v`."""

import json
import re
from collections.abc import Iterator

from glm5_jax.envs.swe.parsers.report import (
    CaseResult,
    ReportError,
    RunOutput,
    RunReport,
    RunTotals,
    Status,
    build_report,
    make_name,
)

_ENDS: dict[str, Status] = {"pass": "pass", "fail": "fail", "skip": "skip"}
_BUILD_FAILED = re.compile(r"FAIL\t(\S+) \[(?:build|setup) failed\]")
_RUN = re.compile(r"=== RUN\s+(\S.*)")
_END = re.compile(r"\s*--- (PASS|FAIL|SKIP): (.+) \([\d.]+s\)")
_PACKAGE = re.compile(r"(ok  |FAIL)\t(\S+)\t.*")
_MAX_LINE = 1 << 20


class _Package:
    """Tests of one package: those that started, and those that ended."""

    def __init__(self):
        self.started: list[str] = []
        self.ended: dict[str, Status] = {}
        self.status: Status | None = None

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self.started if name not in self.ended]


def parse_go(output: RunOutput) -> RunReport:
    """Parses the output of `go test`. Identifiers are `package::Test/subtest`.

    - A package that fails without a failing test did not build, or died.
    - Of the tests without an end, the last that started fails. The others have no status.
    """
    lines = [*output.lines]
    for data in output.reports.values():
        lines += data.decode("utf-8", errors="replace").split("\n")
    events = list(_events(lines))
    packages = _read_events(events) if events else _read_text(lines)
    for line in lines:
        if match := _BUILD_FAILED.fullmatch(line):
            packages.setdefault(match[1], _Package()).status = "fail"
    return _report(packages, output)


def _events(lines: list[str]) -> Iterator[dict]:
    """Yields the JSON events. Raises ReportError for one that is cut off."""
    for line in lines:
        if not line.startswith('{"') or len(line) > _MAX_LINE:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            if line.startswith('{"Time"'):
                raise ReportError(f"an event of go test is cut off: {line[:80]}") from None
            continue
        if isinstance(event.get("Action"), str) and isinstance(event.get("Package"), str):
            yield event


def _read_events(events: list[dict]) -> dict[str, _Package]:
    packages: dict[str, _Package] = {}
    for event in events:
        package = packages.setdefault(event["Package"], _Package())
        test, status = event.get("Test"), _ENDS.get(event["Action"])
        if test is None:
            package.status = status or package.status
        elif event["Action"] == "run":
            _start(package, test)
        elif status is not None:
            _end(package, test, status)
    return packages


def _read_text(lines: list[str]) -> dict[str, _Package]:
    packages: dict[str, _Package] = {}
    package = _Package()
    for line in lines:
        if match := _RUN.fullmatch(line):
            _start(package, match[1])
        elif match := _END.fullmatch(line):
            _end(package, match[2], _ENDS[match[1].lower()])
        elif (match := _PACKAGE.fullmatch(line)) and not _BUILD_FAILED.fullmatch(line):
            # Results come before the line that names their package.
            package.status = "pass" if match[1] == "ok  " else "fail"
            packages[match[2]] = _merge(packages.get(match[2]), package)
            package = _Package()
    if package.started:
        packages[""] = package  # the command ended before it named the package
    return packages


def _start(package: _Package, test: str) -> None:
    if test not in package.started[-1:]:
        package.started.append(test)


def _end(package: _Package, test: str, status: Status) -> None:
    previous = package.ended.get(test)
    package.ended[test] = "fail" if "fail" in (previous, status) else status


def _merge(one: _Package | None, two: _Package) -> _Package:
    """Returns the results of a package that was tested twice."""
    if one is None:
        return two
    for test in two.started:
        _start(one, test)
    for test, status in two.ended.items():
        _end(one, test, status)
    one.status = "fail" if "fail" in (one.status, two.status) else two.status
    return one


def _report(packages: dict[str, _Package], output: RunOutput) -> RunReport:
    cases: list[CaseResult] = []
    load_errors: list[str] = []
    crashed: list[str] = []
    for name, package in packages.items():
        missing = package.unfinished
        if package.status == "pass" and missing:
            raise ReportError(f"package {name} passes, but test {missing[0]} has no end")
        cases += [
            CaseResult(make_name(name, test), status) for test, status in package.ended.items()
        ]
        if missing:
            crashed.append(make_name(name, missing[-1]))
        elif package.status == "fail" and "fail" not in package.ended.values():
            load_errors.append(name)
    is_ended = all(package.status for package in packages.values())
    log = output.log
    is_crashed = bool(crashed) or not is_ended or ("panic: " in log and "goroutine " in log)
    # Tests that were running when their package died, one for each package, fail.
    cases += [CaseResult(name, "fail") for name in crashed]
    # Each test that starts is announced, and the tests of a package that dies have no end.
    num_started = sum(len({*package.started, *package.ended}) for package in packages.values())
    return build_report(
        cases,
        RunTotals(tests=num_started) if packages and not is_crashed and is_ended else None,
        load_errors=load_errors,
        crashed_test=crashed[-1] if crashed else None,
        is_crashed=is_crashed and bool(packages),
    )
