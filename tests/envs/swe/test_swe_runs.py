import asyncio

import pytest

from glm5_jax.envs.sandbox import HOST, Sandbox
from glm5_jax.envs.swe.layers import SweLimits
from glm5_jax.envs.swe.parsers.generated import ParserRunError
from glm5_jax.envs.swe.runs import (
    RebuildError,
    RunCommands,
    RunResult,
    rebuild,
    run_parser,
    run_tests,
)

TAP = "printf '1..2\\nok 1 - a\\nnot ok 2 - b\\n'"


def _commands(*test_cmds: str, rebuild_cmds: tuple[str, ...] = (), parser: str = "tap"):
    return RunCommands(rebuild_cmds=rebuild_cmds, test_cmds=test_cmds, log_parser=parser)


def _run(
    commands: RunCommands, timeout_s: float = 30, after: str = "true"
) -> tuple[RunResult, str]:
    """Runs tests in a sandbox, then a command of root; returns the result and the command's output."""

    async def run():
        async with Sandbox(SweLimits().sandbox(HOST)) as box:
            result = await run_tests(box, commands, timeout_s)
            done = await box.exec(["/bin/sh", "-c", after], user="root")
            return result, done.stdout.decode()

    return asyncio.run(run())


def test_reports_statuses_and_first_exit_code(isolation):
    result, _ = _run(_commands(f"{TAP}; exit 3", "exit 4"))

    assert result.report is not None
    assert list(result.report.statuses.values()) == ["pass", "fail"]
    assert result.exit_code == 3


def test_ends_processes_before_it_reads_reports(isolation):
    command = f"(trap '' TERM HUP; setsid sleep 1000) & setsid sleep 1001 & {TAP}; exit 1"

    _, commands = _run(_commands(command), after="cat /proc/[0-9]*/cmdline")

    assert "100" not in commands


def test_reads_no_links_in_results(isolation):
    forged = "<testsuite tests='1'><testcase classname='a' name='b'/></testsuite>"
    command = (
        f'echo "{forged}" > /tmp/x.xml; ln -s /tmp/x.xml /results/junit.xml; ln /tmp/x.xml /results/hard.xml; '
        "ln /results/hard.xml /results/again.xml"
    )

    result, _ = _run(_commands(command, parser="pytest"))

    assert result.report is None or not result.report.has_tests


def test_empties_results_before_each_run(isolation):
    async def run():
        async with Sandbox(SweLimits().sandbox(HOST)) as box:
            await box.exec(
                "mkdir -m 777 /results && echo x > /results/junit.xml", user="root", cwd="/"
            )
            return await run_tests(box, _commands("ls /results", parser="pytest"), 30)

    assert asyncio.run(run()).log == ""


def test_has_no_exit_code_after_time_limit(isolation):
    result, _ = _run(_commands("echo started; sleep 1000", "echo second"), timeout_s=0.3)

    assert (result.exit_code, result.log) == (None, "started\n")


def test_explains_reports_that_contradict_themselves(isolation):
    result, _ = _run(_commands("echo '1..3'; echo 'ok 1 - a'; echo '# tests 3'"))

    assert result.report is None or result.report.is_crashed


def test_raises_if_rebuild_fails(isolation):
    async def run():
        async with Sandbox(SweLimits().sandbox(HOST)) as box:
            await rebuild(box, _commands(rebuild_cmds=("true", "echo missing header; exit 2")), 30)

    with pytest.raises(RebuildError, match="ended with 2:\nmissing header"):
        asyncio.run(run())


def test_runs_generated_parser_in_sandbox(isolation):
    source = "import sys; print(len(sys.stdin.read()))"

    assert asyncio.run(run_parser(source, b"12345")) == b"5\n"
    with pytest.raises(ParserRunError, match="(?s)exit code 1: .*ZeroDivisionError"):
        asyncio.run(run_parser("1 / 0", b""))


@pytest.mark.slow
def test_ends_generated_parser_that_loops(isolation):
    with pytest.raises(ParserRunError, match="no end within 10 s"):
        asyncio.run(run_parser("while True: pass", b""))
