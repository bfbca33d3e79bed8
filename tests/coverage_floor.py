"""Pytest plugin for `launch/test.sh --coverage`, which requires that each module has 75% of its lines covered.

Pytest lists the other modules and counts them in its last line, and the run fails.
"""

import dataclasses
import pathlib

import coverage
import pytest

FLOOR = 75
TITLE = f"modules under {FLOOR}% line coverage"


@dataclasses.dataclass(frozen=True)
class Module:
    """Path of a module, percentage of its lines that ran, and numbers of the other lines."""

    path: pathlib.Path
    percent: float
    not_run: str


def modules(measured: coverage.Coverage) -> list[Module]:
    """Returns all modules of the measured packages, including those that nothing imported."""
    results = []
    for path in sorted(measured.get_data().measured_files()):
        _, statements, _, missing, ranges = measured.analysis2(path)
        percent = 100 * (1 - len(missing) / max(1, len(statements)))
        results.append(Module(pathlib.Path(path).relative_to(pathlib.Path.cwd()), percent, ranges))
    return results


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Reads the data of all processes, which pytest-cov has combined; does nothing in xdist's workers."""
    if hasattr(session.config, "workerinput"):
        return
    measured = coverage.Coverage()
    measured.load()
    low = [module for module in modules(measured) if module.percent < FLOOR]
    if low:
        session.config.pluginmanager.getplugin("terminalreporter").stats[TITLE] = low
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Lists the modules below the floor."""
    for module in terminalreporter.stats.get(TITLE, []):
        line = f"{module.path}: {module.percent:.0f}% covered, not run: {module.not_run}"
        terminalreporter.write_line(line, red=True)
