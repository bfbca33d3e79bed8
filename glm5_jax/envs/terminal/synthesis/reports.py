"""Defines the result of a check of a task, and the report of all its checks."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

PASS, FAIL, UNKNOWN, NOT_APPLICABLE = "pass", "fail", "unknown", "not_applicable"
NAMES = {
    "V01": "static",
    "V02": "builds",
    "V03": "oracle",
    "V04": "nop",
    "V05": "single_tests",
    "V06": "partial_solutions",
    "V07": "named_in_instruction",
    "V08": "no_shared_literals",
    "V09": "no_answer_in_image",
    "V10": "attacks",
    "V11": "stable_verdict",
    "V12": "limits",
    "V13": "rubric",
    "V14": "alternative_solution",
}


class ValidatorError(RuntimeError):
    """Raised if a check cannot be made on this machine, which says nothing about the task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Result of a check.

    Attributes:
      id: V01 to V14.
      status: PASS, FAIL, UNKNOWN (the machine failed) or NOT_APPLICABLE.
      detail: reason, or what was measured.
      seconds: duration of the check, in seconds.
    """

    id: str
    status: str
    detail: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """Results of the checks of one task, in order.

    Attributes:
      task: name of the task.
      checks: results; a check that was left out after a failure is not among them.
    """

    task: str
    checks: tuple[Check, ...]

    @property
    def is_green(self) -> bool:
        """Returns whether no check failed, and none could not be made."""
        return all(check.status in (PASS, NOT_APPLICABLE) for check in self.checks)

    @property
    def problems(self) -> list[str]:
        """Returns a line for each check that is not passed."""
        return [
            f"{check.id} {NAMES[check.id]}: {check.detail}"
            for check in self.checks
            if check.status in (FAIL, UNKNOWN)
        ]

    def status(self, check_id: str) -> str | None:
        """Returns the status of a check; None if it was not made."""
        return next((check.status for check in self.checks if check.id == check_id), None)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values, with a key such as "V03_oracle" for each check."""
        checks = {
            f"{check.id}_{NAMES[check.id]}": {
                "ok": {PASS: True, FAIL: False}.get(check.status),
                "status": check.status,
                "detail": check.detail,
                "seconds": round(check.seconds, 2),
            }
            for check in self.checks
        }
        return {"task_id": self.task, "ok": self.is_green, "checks": checks}

    def as_text(self) -> str:
        """Returns the report as text for a model."""
        return json.dumps(self.as_dict(), indent=1)


def verdict_of(check_id: str, problems: Iterable[str], detail: str = "") -> Check:
    """Returns a failed check with the problems, or a passed one with the detail."""
    problems = list(problems)
    if problems:
        return Check(id=check_id, status=FAIL, detail="; ".join(problems))
    return Check(id=check_id, status=PASS, detail=detail)
