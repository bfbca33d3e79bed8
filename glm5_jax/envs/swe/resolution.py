"""Decides by SWE-bench's rule whether an attempt resolves an instance."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from glm5_jax.envs.swe.instance import ListReport
from glm5_jax.envs.swe.parsers.report import RunReport, Status

ResolvedStatus = Literal["RESOLVED_FULL", "RESOLVED_PARTIAL", "RESOLVED_NO"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolution:
    """Result of an attempt by the two lists of tests.

    Attributes:
      fail_to_pass, pass_to_pass: tests of each list.
    """

    fail_to_pass: ListReport
    pass_to_pass: ListReport

    @property
    def status(self) -> ResolvedStatus:
        """Returns SWE-bench's word: partial if some of FAIL_TO_PASS and all of PASS_TO_PASS pass."""
        if self.pass_to_pass.share < 1 or self.fail_to_pass.share == 0:
            return "RESOLVED_NO"
        return "RESOLVED_FULL" if self.fail_to_pass.share == 1 else "RESOLVED_PARTIAL"

    @property
    def is_resolved(self) -> bool:
        """Returns whether all tests of both lists pass."""
        return self.status == "RESOLVED_FULL"

    @property
    def partial_credit(self) -> float:
        """Returns the mean of both shares; it is logged, and is no reward."""
        return (self.fail_to_pass.share + self.pass_to_pass.share) / 2


def resolve(
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    report: RunReport | Mapping[str, Status],
    may_skip: Collection[str] = (),
) -> Resolution:
    """Returns the result of an attempt.

    Expected failures, skipped tests and missing tests do not pass. may_skip: tests of PASS_TO_PASS that may be skipped,
    because gold runs skipped them too. Raises ValueError if FAIL_TO_PASS is empty, since nothing would be checked.
    """
    if not fail_to_pass:
        raise ValueError("FAIL_TO_PASS is empty; the instance checks nothing, so leave it out")
    statuses = report.statuses if isinstance(report, RunReport) else report

    def outcomes(names: Sequence[str], can_skip: Collection[str]) -> ListReport:
        passed = [
            name
            for name in names
            if statuses.get(name) == "pass" or (name in can_skip and statuses.get(name) == "skip")
        ]
        passing = set(passed)
        failed = [name for name in names if name not in passing]
        return ListReport(success=tuple(passed), failure=tuple(failed))

    return Resolution(
        fail_to_pass=outcomes(fail_to_pass, ()),
        pass_to_pass=outcomes(pass_to_pass, may_skip),
    )
