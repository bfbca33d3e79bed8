"""Classifies tests by their statuses in three arms of runs, and decides whether an instance is valid.

The arms are the base tree, the base tree with the test patch, and the tree with test patch and gold patch. "None" is
the status of a test that a run does not list.

| class | base | test | gold |
|---|---|---|---|
| F2P | any | fail | pass |
| N2P | none, fail, skip | none | pass |
| LOST | pass | none | pass |
| P2P | any | pass | pass |
| P2F | pass in base or test | | fail |
| FLAKY | any | any | runs disagree |

F2P and N2P are the evidence that the tests check the patch. LOST tests vanish when a program dies or does not compile.
They say nothing about the patch, but must pass. "Post minus pre" counts them as evidence, which is why a base arm is
run (SWE-bench and SWE-bench-Live have none; Multi-SWE-bench has one).
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from glm5_jax.envs.swe.parsers.report import RunReport, Status

Transition = Literal["F2P", "N2P", "LOST", "P2P", "P2F", "FLAKY"]
MAX_FLAKY_SHARE = 0.05

_LOAD_FAILURE = re.compile(
    r"\berror: |\bfatal error\b|: undefined: |cannot find symbol|COMPILATION ERROR|\[build failed\]"
    r"|(?:Import|ModuleNotFound|Syntax|Name|Load)Error\b|Cannot find module|error TS\d+|does not provide an export"
    r"|PHP (?:Fatal|Parse) error|Segmentation fault|SegFault|\bpanic: |core dumped|Subprocess aborted|ReferenceError: \S+ is not defined"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arms:
    """Reports of the runs of one instance.

    Attributes:
      base: run of the base tree.
      test: run of the base tree with the test patch.
      gold: runs with test patch and gold patch: repeated, shuffled, in a fresh sandbox, and with less CPU.
      test_log: log of build and run of the test arm.
    """

    base: RunReport
    test: RunReport
    gold: Sequence[RunReport]
    test_log: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification:
    """Classes of the tests of an instance.

    Attributes:
      classes: class by test; tests without a class, such as those that fail in all arms, are left out.
      may_skip: P2P tests that some gold runs skip, so that an attempt may skip them too.
      invalid_reason: why the instance is invalid; None: it is valid.
      counts: number of tests by (base, test, gold) status, with "none" for a missing test and "flaky" for gold runs that
        disagree.
    """

    classes: Mapping[str, Transition]
    may_skip: frozenset[str]
    invalid_reason: str | None
    counts: Mapping[tuple[str, str, str], int]

    def tests(self, *transitions: Transition) -> list[str]:
        """Returns the tests of these classes, sorted."""
        return sorted(name for name, kind in self.classes.items() if kind in transitions)

    @property
    def fail_to_pass(self) -> list[str]:
        """Returns FAIL_TO_PASS of the instance file: F2P and N2P."""
        return self.tests("F2P", "N2P")

    @property
    def pass_to_pass(self) -> list[str]:
        """Returns PASS_TO_PASS of the instance file: P2P and LOST."""
        return self.tests("P2P", "LOST")


def classify(arms: Arms, max_flaky_share: float = MAX_FLAKY_SHARE) -> Classification:
    """Classifies the tests of all arms, and decides whether the instance is valid.

    A runner that dies without naming the test that was running is held to have died at the first test of the base arm
    that has no result. Raises ValueError if there is no gold run.
    """
    if not arms.gold:
        raise ValueError("there is no gold run; run the gold patch at least once")
    base = arms.base.statuses
    test = attribute_crash(arms.test, base)
    golds = [attribute_crash(run, base) for run in arms.gold]
    classes: dict[str, Transition] = {}
    may_skip = set()
    counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for name in dict.fromkeys(name for run in (base, test, *golds) for name in run):
        gold: list[Status | None] = [run.get(name) for run in golds]
        status, can_skip = merge_gold(gold, test.get(name))
        counts[(base.get(name) or "none", test.get(name) or "none", status or "none")] += 1
        if kind := transition(base.get(name), test.get(name), status):
            classes[name] = kind
        if can_skip and classes.get(name) == "P2P":
            may_skip.add(name)
    reason = _invalid_reason(arms, classes, test, max_flaky_share)
    return Classification(
        classes=classes, may_skip=frozenset(may_skip), invalid_reason=reason, counts=dict(counts)
    )


def merge_gold(
    gold: Sequence[Status | None], test: Status | None
) -> tuple[Status | Literal["flaky"] | None, bool]:
    """Returns the status that all gold runs agree on, or "flaky"; and whether some of them skip a test that passes.

    Passing and skipping is no disagreement for a test that passes before the gold patch too.
    """
    if len(set(gold)) == 1:
        return gold[0], False
    if set(gold) == {"pass", "skip"} and test == "pass":
        return "pass", True
    return "flaky", False


def transition(
    base: Status | None, test: Status | None, gold: Status | Literal["flaky"] | None
) -> Transition | None:
    """Returns the class of one test, or None if it has none."""
    if gold == "flaky":
        return "FLAKY"
    if gold == "fail" and "pass" in (base, test):
        return "P2F"
    if gold != "pass":
        return None
    if test is None:
        return "LOST" if base == "pass" else "N2P"
    if test == "fail":
        return "F2P"
    return "P2P" if test == "pass" else None


def attribute_crash(report: RunReport, order: Sequence[str] | Mapping) -> dict[str, Status]:
    """Returns the statuses of a run, with the test that a program died at as failed.

    order: tests of a run that ended, in its order. Where the output does not name the test, it is the first one without
    a result in the last suite that lost its end; later tests keep no status. A suite without any result names no test,
    because its output was still in a buffer.
    """
    statuses = dict(report.statuses)
    if not report.is_crashed or report.crashed_test is not None:
        return statuses
    suites = [_suite(name) for name in statuses]
    for suite in dict.fromkeys(reversed(suites)):
        members = [name for name in order if _suite(name) == suite]
        missing = [name for name in members if name not in statuses]
        # A suite that lost tests at its end is the one that died.
        if missing and members.index(missing[0]) == len(members) - len(missing):
            return {**statuses, missing[0]: "fail"}
    return statuses


def _suite(name: str) -> str:
    return name.rpartition("::")[0] or name.partition("#")[0]


def has_load_failure(report: RunReport, log: str) -> bool:
    """Returns whether a run shows an error of a compiler, an import or a crash, which explains missing tests."""
    return report.is_crashed or bool(report.load_errors) or bool(_LOAD_FAILURE.search(log))


def _invalid_reason(
    arms: Arms,
    classes: Mapping[str, Transition],
    test: Mapping[str, Status],
    max_flaky_share: float,
) -> str | None:
    """Returns the first reason why the instance is invalid, or None."""
    kinds = collections.Counter(classes.values())
    flaky = [name for name, kind in classes.items() if kind == "FLAKY"]
    num_tests = max(1, *(len(run.statuses) for run in arms.gold))
    if not arms.base.has_tests:
        return "the base arm has no result, so the environment does not work"
    if not all(run.has_tests for run in arms.gold):
        return "a gold run has no result"
    if kinds["P2F"]:
        name = next(name for name, kind in classes.items() if kind == "P2F")
        return f"the gold patch breaks {kinds['P2F']} tests, such as {name}"
    if len(flaky) > max_flaky_share * num_tests:
        return f"{len(flaky)} of {num_tests} tests are flaky, such as {flaky[0]}"
    if not kinds["F2P"] and not kinds["N2P"]:
        if any(test.get(name) != "pass" for name in flaky):
            return "the only tests that the gold patch may fix are flaky"
        return "no test goes from fail to pass"
    if not kinds["F2P"] and not has_load_failure(arms.test, arms.test_log):
        return (
            "all tests that the gold patch fixes are new, and the test arm shows no error of a compiler, an import or a "
            "crash, so the parser may have missed them"
        )
    return None
