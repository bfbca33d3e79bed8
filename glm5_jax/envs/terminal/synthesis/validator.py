"""Validates a task: the checks V01 to V12 without a model, and V13 and V14 with one.

async with TaskRuns() as runs:
    report = await validate(folder, runs)

The checks run in the order of their cost. After a failure of V01 to V04 the others say nothing, so they are left out.
"""

import pathlib
import time
from collections.abc import Awaitable, Callable, Mapping

from glm5_jax.agents.writers import Writer
from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.terminal.grading import SubmissionError
from glm5_jax.envs.terminal.image import ImageError
from glm5_jax.envs.terminal.synthesis import sandbox_checks as run_checks
from glm5_jax.envs.terminal.synthesis.judged_checks import check_alternative, check_rubric
from glm5_jax.envs.terminal.synthesis.reports import (
    FAIL,
    PASS,
    UNKNOWN,
    Check,
    ValidationReport,
    ValidatorError,
    verdict_of,
)
from glm5_jax.envs.terminal.synthesis.sandbox_runs import TaskRuns
from glm5_jax.envs.terminal.synthesis.static_checks import (
    check_names,
    check_shared_literals,
    check_static,
    check_tests_exist,
)
from glm5_jax.envs.terminal.synthesis.verifier_texts import read_texts


async def validate(
    folder: pathlib.Path,
    runs: TaskRuns,
    *,
    writer: Writer | None = None,
    attacks: Mapping[str, str] | None = None,
) -> ValidationReport:
    """Returns the report on a task folder.

    Args:
      runs: sandboxes.
      writer: model of V13 and V14; None: they are left out.
      attacks: scripts of other attackers by name, for V10.
    """
    checks: list[Check] = []

    async def add(check_id: str, make: Callable[[], Awaitable]) -> tuple:
        """Runs a check, adds it, and returns what it returns in addition."""
        start = time.monotonic()
        try:
            result = await make()
        except (SubmissionError, ImageError) as error:
            result = Check(id=check_id, status=FAIL, detail=str(error))
        except (ValidatorError, SandboxError) as error:
            result = Check(id=check_id, status=UNKNOWN, detail=str(error))
        check, *more = result if isinstance(result, tuple) else (result, None)
        seconds = time.monotonic() - start
        checks.append(Check(id=check.id, status=check.status, detail=check.detail, seconds=seconds))
        return tuple(more)

    def report() -> ValidationReport:
        return ValidationReport(task=folder.name, checks=tuple(checks))

    # The files. The tests need not be readable for V01 to fail.
    start = time.monotonic()
    static, task = check_static(folder)
    texts = None
    if task is not None:
        try:
            texts = read_texts(task)
            problems = check_tests_exist(texts)
        except (ValueError, OSError) as error:
            problems = [str(error)]
        if problems:
            before = [static.detail] if static.status == FAIL else []
            static = verdict_of("V01", [*before, *problems])
    checks.append(
        Check(
            id="V01",
            status=static.status,
            detail=static.detail,
            seconds=time.monotonic() - start,
        )
    )
    if static.status != PASS or task is None or texts is None:
        return report()
    checks += [check_names(texts), check_shared_literals(texts)]
    # The images, the solution, and nothing.
    (images,) = await add("V02", lambda: run_checks.check_builds(runs, task)) or (None,)
    if checks[-1].status != PASS:
        return report()
    (oracle,) = await add("V03", lambda: run_checks.check_oracle(runs, task)) or (None,)
    await add("V04", lambda: run_checks.check_nop(runs, task))
    if any(check.status != PASS for check in checks[-2:]):
        return report()
    # What the tests check.
    await add("V05", lambda: run_checks.check_single_tests(runs, task, texts))
    await add("V06", lambda: run_checks.check_partial_solutions(runs, task, texts))
    await add("V09", lambda: run_checks.check_answers(runs, task, texts, images or ()))
    await add("V10", lambda: run_checks.check_attacks(runs, task, attacks))
    await add("V11", lambda: run_checks.check_stability(runs, task))
    await add("V12", lambda: run_checks.check_limits(runs, task, oracle or ()))
    if writer is not None:
        await add("V13", lambda: check_rubric(writer, texts))
        await add("V14", lambda: check_alternative(writer, runs, task))
    return report()
