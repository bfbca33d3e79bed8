"""A pytest plugin for `launch/test.sh --coverage`: every module has 75% of its lines covered.

Modules below that are listed and counted in pytest's closing line, and the run fails.
"""

import dataclasses
import pathlib

import coverage
import pytest

FLOOR = 75
TITLE = f"modules under {FLOOR}% line coverage"


@dataclasses.dataclass(frozen=True)
class Module:
    """A module's path, the share of its lines that ran in percent, and the numbers of the others."""

    path: pathlib.Path
    percent: float
    not_run: str


def modules(measured: coverage.Coverage) -> list[Module]:
    """All modules of the packages under measurement, those that nothing imported included."""
    found = []
    for path in sorted(measured.get_data().measured_files()):
        _, statements, _, missing, ranges = measured.analysis2(path)
        percent = 100 * (1 - len(missing) / max(1, len(statements)))
        found.append(Module(pathlib.Path(path).relative_to(pathlib.Path.cwd()), percent, ranges))
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """By now pytest-cov has joined the data of all processes; xdist's workers have none to judge."""
    if hasattr(session.config, "workerinput"):
        return
    measured = coverage.Coverage()
    measured.load()
    low = [module for module in modules(measured) if module.percent < FLOOR]
    if low:
        session.config.pluginmanager.getplugin("terminalreporter").stats[TITLE] = low
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Lists what is below the floor."""
    for module in terminalreporter.stats.get(TITLE, []):
        line = f"{module.path}: {module.percent:.0f}% covered, not run: {module.not_run}"
        terminalreporter.write_line(line, red=True)
