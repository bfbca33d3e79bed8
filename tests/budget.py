"""Pytest plugin that checks the CPU time of the default tier against its budget.

`budget.json` has CPU seconds for each directory of tests, for ten minutes on two cores. A run fails and lists the
slowest tests if a directory exceeds its budget by half, or if one test's call exceeds the limit of a call by half. The
limit is higher for a call that compiles a program or starts one, which imports JAX again. Tests marked slow, aot or
device do not count.

It measures CPU seconds of the process and its children, because wall time varies on a shared machine. On a machine that
is slower than the reference machine they are scaled by the time of a fixed piece of work.

    --durations-json=FILE   also writes the scaled seconds of every test to FILE, for `durations.json`
"""

import collections
import dataclasses
import json
import pathlib
import resource
import time
import zlib

import pytest

FOLDER = pathlib.Path(__file__).parent
TIERS = ("slow", "aot", "device")
TOLERANCE = 1.5
# Lowering and compiling. A program from the compilation cache has both events.
COMPILATION = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
LISTED = 10  # slowest tests of a directory
CHILD_S = 0.5  # a call with more CPU seconds of children has started a program


@dataclasses.dataclass(kw_only=True, frozen=True)
class Budget:
    """Contents of `budget.json`.

    Attributes:
      directories: CPU seconds of the default tests of each directory, "tests/NAME"; "tests" means the files in it.
      call_s: limit of one test's call, in CPU seconds.
      compiling_call_s: the same for a call that compiles a JAX program or starts other programs.
      calibration_s: CPU seconds of `calibrate` on the reference machine.
      coverage_factor: slowdown of tests by the measurement of line coverage.
    """

    directories: dict[str, float]
    call_s: float
    compiling_call_s: float
    calibration_s: float
    coverage_factor: float

    @classmethod
    def read(cls) -> "Budget":
        return cls(**json.loads((FOLDER / "budget.json").read_text()))


@dataclasses.dataclass(kw_only=True)
class Spent:
    """Time of one test: scaled CPU seconds of all phases and of its call, and whether the call compiled."""

    total_s: float = 0.0
    call_s: float = 0.0
    has_compiled: bool = False


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its finished children."""
    return _used(resource.RUSAGE_SELF) + _used(resource.RUSAGE_CHILDREN)


def _used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def calibrate() -> float:
    """Returns the CPU seconds of a fixed piece of work in Python and C, the minimum of three runs."""
    data = bytes(range(256)) * 16_000

    def once() -> float:
        start = time.process_time()
        zlib.compress(data, 6)
        sorted((i * 7919) % 100_003 for i in range(600_000))
        return time.process_time() - start

    return min(once() for _ in range(3))


def violations(spent: dict[str, Spent], budget: Budget, factor: float = 1.0) -> list[str]:
    """Returns one line per directory or test over budget; spent: {test id: time}."""
    lines = []
    by_directory = collections.defaultdict(list)
    for test, one in spent.items():
        folders = test.split("::")[0].split("/")[:-1]
        by_directory["/".join(folders[:2])].append((one.total_s, test))
    for directory, tests in sorted(by_directory.items()):
        total = sum(seconds for seconds, _ in tests)
        allowed = budget.directories.get(directory, budget.call_s)
        if total <= TOLERANCE * factor * allowed:
            continue
        lines.append(f"{directory}: {total:.0f} CPU seconds of {allowed:.0f}; the slowest:")
        lines += [
            f"  {seconds:6.1f}  {test}" for seconds, test in sorted(tests)[: -LISTED - 1 : -1]
        ]
    for test, one in spent.items():
        allowed = budget.compiling_call_s if one.has_compiled else budget.call_s
        if one.call_s > TOLERANCE * factor * allowed:
            lines.append(
                f"{test}: its call took {one.call_s:.1f} CPU seconds of {allowed:.0f}; make it faster or mark it slow"
            )
    return lines


def pytest_addoption(parser):
    parser.addoption("--durations-json", type=pathlib.Path, help="write every test's CPU seconds")


def pytest_configure(config):
    config.pluginmanager.register(Measure(), "budget-measure")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Judge(config), "budget-judge")


class Measure:
    """Adds the time of each phase to its report, in the process that runs the test."""

    def __init__(self):
        self._scale = self._start = 1.0
        self._compilations = self._before = 0
        self._children = 0.0

    def pytest_collection_finish(self):
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(self._hear)
        # Compilation does not speed up as much as the calibration's work, so a fast machine is no reason for more seconds.
        self._scale = min(1.0, Budget.read().calibration_s / calibrate())

    def _hear(self, event, duration, **_):
        self._compilations += event in COMPILATION

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        self._mark()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        seconds = self._scale * (cpu_seconds() - self._start)
        has_started = _used(resource.RUSAGE_CHILDREN) - self._children > CHILD_S
        report.budget = [seconds, self._compilations > self._before or has_started]
        self._mark()
        return report

    def _mark(self):
        self._start, self._before = cpu_seconds(), self._compilations
        self._children = _used(resource.RUSAGE_CHILDREN)


class Judge:
    """Sums the times and checks the budget, in the process that reports."""

    def __init__(self, config):
        self._config = config
        self._spent = collections.defaultdict(Spent)
        self._all = collections.defaultdict(float)
        self._lines = []

    def pytest_runtest_logreport(self, report):
        seconds, has_compiled = getattr(report, "budget", (0.0, False))
        self._all[report.nodeid] += seconds
        if any(tier in report.keywords for tier in TIERS):
            return
        one = self._spent[report.nodeid]
        one.total_s += seconds
        if report.when == "call":
            one.call_s, one.has_compiled = seconds, has_compiled

    def pytest_sessionfinish(self, session):
        if path := self._config.option.durations_json:
            durations = {test: round(seconds, 2) for test, seconds in sorted(self._all.items())}
            path.write_text(json.dumps(durations, indent=0) + "\n")
        budget = Budget.read()
        is_covered = bool(self._config.pluginmanager.getplugin("_cov"))
        self._lines = violations(self._spent, budget, budget.coverage_factor if is_covered else 1.0)
        if self._lines and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self._lines:
            terminalreporter.section("over budget (tests/budget.json)", red=True)
            for line in self._lines:
                terminalreporter.write_line(line)
