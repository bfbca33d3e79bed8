"""Runs the three arms of an instance, and makes the instance of what they show.

| arm | tree | runs |
|---|---|---|
| base | without patches | those of the builder |
| test | test patch and auxiliary patch | 1 |
| gold | and the gold patch | 3 in one sandbox, 1 in another order and 1 with half a processor in fresh ones |

A build that fails lets no test run, so that programs of an older build say nothing.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from glm5_jax.envs.sandbox import Layer, Sandbox
from glm5_jax.envs.swe.builder import BuildError, BuiltProject, commands_of
from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.layers import SweLimits
from glm5_jax.envs.swe.parsers.report import build_report
from glm5_jax.envs.swe.patches import PatchError, PatchParts
from glm5_jax.envs.swe.recipes import WORKDIR, ProjectPlan
from glm5_jax.envs.swe.runs import RebuildError, RunResult, rebuild, run_tests
from glm5_jax.envs.swe.sources import apply_patch
from glm5_jax.envs.swe.transitions import Arms, Classification, classify

GOLD_RUNS = 3
SLOW_CPUS = 0.5
MIN_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmRuns:
    """Runs of the three arms.

    Attributes:
      arms: their reports.
      seconds: durations by arm, `base`, `test` and `gold_median`, in seconds.
    """

    arms: Arms
    seconds: Mapping[str, float]


async def run_arms(built: BuiltProject, parts: PatchParts, limits: SweLimits) -> ArmRuns:
    """Runs all arms. Raises PatchError for a patch that does not apply, BuildError if gold does not build or end."""
    base = built.runs[0].report
    assert base is not None  # the builder refuses projects without a report
    test = await _run_test_arm(built, parts, limits)
    gold = await run_gold_arm(built, parts, limits)
    seconds = {
        "base": built.runs[0].seconds,
        "test": test.seconds,
        "gold_median": statistics.median(run.seconds for run in gold[:GOLD_RUNS]),
    }
    arms = Arms(
        base=base,
        test=test.report or build_report([], None),
        gold=[run.report for run in gold if run.report is not None],
        test_log=test.log,
    )
    return ArmRuns(arms=arms, seconds={name: round(s, 3) for name, s in seconds.items()})


def time_limit(seconds: Mapping[str, float]) -> float:
    """Returns the time limit of an attempt's tests, in seconds, from the times of the arms."""
    # A bug can make tests slow, and an attempt that does not fix it is no attempt to gain by a time-out.
    return max(MIN_TIMEOUT_S, 4 * seconds.get("gold_median", 0.0), 1.5 * seconds.get("test", 0.0))


def fill_instance(
    draft: SweInstance, built: BuiltProject, runs: ArmRuns
) -> tuple[SweInstance, Classification]:
    """Returns an instance with environment, commands and lists of tests, and the classes of its tests.

    draft: instance with its texts and patches.
    """
    classes = classify(runs.arms)
    instance = msgspec.structs.replace(
        draft,
        environment=built.environment,
        rebuild_cmds=built.plan.rebuild_cmds,
        test_cmds=built.plan.test_cmds,
        log_parser=built.plan.log_parser,
        log_parser_source=built.plan.log_parser_source,
        per_test_cmd=built.plan.per_test_cmd,
        FAIL_TO_PASS=tuple(classes.fail_to_pass),
        PASS_TO_PASS=tuple(classes.pass_to_pass),
        NEW_TO_PASS=tuple(classes.tests("N2P")),
        LOST=tuple(classes.tests("LOST")),
        MAY_SKIP=tuple(sorted(classes.may_skip)),
        runs={"base": len(built.runs), "test": 1, "gold": len(runs.arms.gold)},
        seconds=dict(runs.seconds),
    )
    return instance, classes


async def _run_test_arm(built: BuiltProject, parts: PatchParts, limits: SweLimits) -> RunResult:
    async with _patched(built, [parts.test, parts.aux], limits) as box:
        try:
            log = await rebuild(box, built.commands, limits.build_timeout_s)
        except RebuildError as error:
            empty = build_report([], None)
            return RunResult(report=empty, problem=None, exit_code=1, log=str(error), seconds=0.0)
        run = await run_tests(box, built.commands, limits.test_timeout_s)
        return dataclasses.replace(run, log=log + run.log)


async def run_gold_arm(
    built: BuiltProject, parts: PatchParts, limits: SweLimits
) -> list[RunResult]:
    """Returns the runs in one sandbox, then the shuffled one, then the slow one.

    Raises PatchError for a patch that does not apply, BuildError if the tree does not build or a run has no end.
    """
    async with _patched(built, [parts.test, parts.aux, parts.code], limits) as box:
        try:
            await rebuild(box, built.commands, limits.build_timeout_s)
        except RebuildError as error:
            raise BuildError(f"the gold patch does not build: {error}") from None
        layer = await box.snapshot()
        try:
            runs = []
            for _ in range(GOLD_RUNS):
                runs.append(_checked(await run_tests(box, built.commands, limits.test_timeout_s)))
            runs.append(await _run_fresh(layer, built.plan, limits, shuffled=True))
            runs.append(await _run_fresh(layer, built.plan, limits, cpus=SLOW_CPUS))
        finally:
            layer.remove()
    return runs


async def _run_fresh(
    layer: Layer, plan: ProjectPlan, limits: SweLimits, *, shuffled: bool = False, **changes: float
) -> RunResult:
    async with Sandbox(limits.sandbox(layer, **changes)) as box:
        commands = commands_of(plan, shuffled=shuffled)
        return _checked(await run_tests(box, commands, limits.test_timeout_s))


def _checked(run: RunResult) -> RunResult:
    """Returns a gold run. Raises BuildError if it did not end, or has no report."""
    if run.exit_code is None:
        raise BuildError("a gold run had no end within the time limit; raise test_timeout_s")
    if run.report is None:
        raise BuildError(f"a gold run has no report: {run.problem}")
    return run


@contextlib.asynccontextmanager
async def _patched(
    built: BuiltProject, patches: Sequence[str], limits: SweLimits
) -> AsyncIterator[Sandbox]:
    """Yields a sandbox over the project's layer with patches applied. Raises PatchError for one that does not apply."""
    async with Sandbox(limits.sandbox(built.layer.layer)) as box:
        for text in patches:
            if text and not await apply_patch(box, text, WORKDIR):
                raise PatchError(f"a patch does not apply to the base tree: {text[:200]!r}")
        yield box
