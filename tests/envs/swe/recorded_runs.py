"""Reads the recorded output of the test runners in `reports/`."""

import functools
import json
import pathlib
from collections.abc import Mapping

from glm5_jax.envs.swe.parsers import PARSERS, RunOutput, RunReport
from tests.envs.swe.runner_projects import PROJECTS

REPORTS = pathlib.Path(__file__).parent / "reports"


@functools.cache
def recorded_output(name: str) -> RunOutput:
    """Returns the output of a project's run."""
    row = json.loads((REPORTS / f"{name}.json").read_text("utf-8"))
    reports = {path: text.encode() for path, text in row["reports"].items()}
    return RunOutput(log=row["log"], reports=reports, exit_code=row["exit_code"])


def parse(name: str, output: RunOutput | None = None) -> RunReport:
    """Parses an output with the parser of a project; None: its recorded one."""
    return PARSERS[PROJECTS[name].parser](output or recorded_output(name))


def differences(name: str, statuses: Mapping[str, str]) -> list[str]:
    """Returns the tests of a project that are missing, unknown or of another status."""
    expected = PROJECTS[name].expected
    return sorted(n for n in {*expected, *statuses} if expected.get(n) != statuses.get(n))
