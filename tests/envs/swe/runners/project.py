"""Project of one test runner, and the statuses of its tests."""

import dataclasses
from collections.abc import Mapping

PASS, FAIL, SKIP = "pass", "fail", "skip"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Project:
    """Project of one test runner.

    Attributes:
      parser: name of the parser.
      files: content by path.
      command: shell command that runs the tests.
      expected: status by identifier.
      is_crashed: whether the runner dies.
      load_errors: expected load errors.
    """

    parser: str
    files: Mapping[str, str]
    command: str
    expected: Mapping[str, str]
    is_crashed: bool = False
    load_errors: tuple[str, ...] = ()


def make_project(
    parser: str, files: Mapping[str, str], command: str, expected: Mapping[str, str], **more
) -> Project:
    """Returns a project from its main fields in order."""
    return Project(parser=parser, files=files, command=command, expected=expected, **more)
