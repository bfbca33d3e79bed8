"""Tests with a separate image see only the artifacts; health checks of environments."""

import asyncio

import pytest

from glm5_jax.envs.sandbox import ExecResult
from glm5_jax.envs.terminal import Nop, Oracle, TrialRunner, load_task
from glm5_jax.envs.terminal.health import wait_until_healthy
from glm5_jax.envs.terminal.image import ImageError
from glm5_jax.envs.terminal.task import HealthCheck
from tests.envs.leftovers import run
from tests.envs.terminal.folders import PYTEST, make_task, needs_root

TOML = """
schema_version = "1.4"
artifacts = ["/app/out"]
[verifier]
timeout_sec = 30.0
[agent]
timeout_sec = 30.0
[environment]
memory_mb = 512
storage_mb = 256
[environment.healthcheck]
command = "test -e /app/ready"
interval_sec = 0
retries = 2
"""
IMAGE = "FROM debian:bookworm-slim\nWORKDIR /app\nRUN echo secret > /app/ready\n"
VERIFIER = "FROM debian:bookworm-slim\nWORKDIR /work\nCOPY . /tests/\nRUN echo mark > /mark\n"
TESTS = """import pathlib


def test_answer():
    assert pathlib.Path("/app/out/answer").read_text() == "done\\n"


def test_surroundings():
    assert pathlib.Path("/mark").read_text() == "mark\\n" and not pathlib.Path("/app/ready").exists()
    assert not pathlib.Path("/app/other").exists()
"""
SOLVE = "mkdir -p /app/out; echo done > /app/out/answer; echo x > /app/other\n"


class Steps:
    """Sandbox whose commands exit with these codes."""

    def __init__(self, *codes: int):
        self.codes = list(codes)

    async def exec(self, command, **more) -> ExecResult:
        return ExecResult(code=self.codes.pop(0), stdout=b"", stderr=b"down")


def wait(check: HealthCheck, *codes: int) -> list[float]:
    """Returns the waits between checks, with a fake clock."""
    times: list[float] = []

    async def sleep(seconds):
        times.append(seconds)

    asyncio.run(wait_until_healthy(Steps(*codes), check, clock=lambda: sum(times), sleep=sleep))
    return times


def test_waits_until_check_succeeds():
    assert wait(HealthCheck(command="x"), 0) == []
    assert wait(HealthCheck(command="x", interval_s=2.0), 1, 1, 0) == [2.0, 2.0]


def test_fails_after_all_retries():
    with pytest.raises(ImageError, match="'x' failed 3 times in a row, with exit code 7: down"):
        wait(HealthCheck(command="x"), 1, 1, 7)


def test_ignores_failures_in_start_period():
    check = HealthCheck(command="x", start_period_s=4.0, start_interval_s=1.0, interval_s=9.0, retries=1)  # fmt: skip
    assert wait(check, 1, 1, 1, 1, 0) == [1.0] * 4
    with pytest.raises(ImageError, match="failed 1 times"):
        wait(check, 1, 1, 1, 1, 1)


@needs_root
@pytest.mark.usefixtures("isolation")
def test_grades_artifacts_in_image_of_tests(tmp_path):
    files = {"toml": TOML, "dockerfile": IMAGE, "tests/Dockerfile": VERIFIER}
    task = load_task(make_task(tmp_path, test=PYTEST, tests=TESTS, solve=SOLVE, **files))

    async def results():
        async with TrialRunner() as trials:
            return [await trials.run(task, agent) for agent in (Oracle(), Nop())]

    solved, empty = run(results())
    assert (solved.reward, empty.reward) == (1.0, 0.0), solved.error or solved.log


@pytest.mark.slow
@needs_root
@pytest.mark.usefixtures("isolation")
def test_gives_no_reward_without_health(tmp_path):
    task = load_task(make_task(tmp_path, toml=TOML, test=PYTEST, tests=TESTS, solve=SOLVE))

    async def result():
        async with TrialRunner() as trials:
            return await trials.run(task, Oracle())

    trial = run(result())
    assert trial.reward is None and "environment.healthcheck" in trial.error
