"""Rebuilds a project and runs its tests in a sandbox, and reads the reports on the trusted side.

Commands run as the agent's user. Reports are read only after all processes of that user are gone, from a folder that root
made empty, as regular files with one link.
"""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence

from glm5_jax.envs.sandbox import ExecResult, Sandbox, SandboxConfig, SandboxError, SandboxFileError
from glm5_jax.envs.swe.parsers import ReportError, RunOutput, RunReport, find_parser
from glm5_jax.envs.swe.parsers.generated import (
    MAX_OUTPUT_BYTES,
    MEMORY_BYTES,
    TIME_LIMIT_S,
    ParserRunError,
    parse_generated,
)
from glm5_jax.envs.swe.parsers.report import MAX_REPORT_BYTES
from glm5_jax.envs.swe.recipes.plan import RESULTS, WORKDIR

MAX_REPORTS = 2000
MAX_LOG_BYTES = 16 << 20
# Nothing of the caller's environment reaches the tests.
ENVIRONMENT = {
    "HOME": "/tmp/home",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "CI": "true",
    "SOURCE_DATE_EPOCH": "946684800",
    "CTEST_PARALLEL_LEVEL": "1",
}


class RebuildError(RuntimeError):
    """Raised if a command that rebuilds a project fails; the text is the end of its log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommands:
    """Commands to rebuild and test a project.

    Attributes:
      rebuild_cmds, test_cmds: commands of the shell.
      log_parser: name of a built-in parser, or "generated".
      log_parser_source: source of a generated parser; None: a built-in one.
      variables: environment variables.
    """

    rebuild_cmds: tuple[str, ...]
    test_cmds: tuple[str, ...]
    log_parser: str
    log_parser_source: str | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of one run of the tests.

    Attributes:
      report: statuses of the tests; None: the reports contradict themselves, or are cut off.
      problem: why there is no report; None: there is one.
      exit_code: exit code of the first command that failed, else 0; None: killed at the time limit.
      log: output of the commands.
      seconds: duration, in seconds.
      out_of_memory: whether processes were killed for lack of memory.
    """

    report: RunReport | None
    problem: str | None
    exit_code: int | None
    log: str
    seconds: float
    out_of_memory: bool = False


async def rebuild(box: Sandbox, commands: RunCommands, timeout_s: float) -> str:
    """Rebuilds a project and returns the log. Raises RebuildError if a command fails."""
    logs = []
    for command in commands.rebuild_cmds:
        done = await _run(box, command, commands.variables, timeout_s)
        logs.append(_log_of(done))
        if done.code:
            why = "took too long" if done.timed_out else f"ended with {done.code}"
            raise RebuildError(f"{command!r:.100} {why}:\n{''.join(logs)[-4000:]}")
    await _end_processes(box)
    return "".join(logs)


async def run_tests(box: Sandbox, commands: RunCommands, timeout_s: float) -> RunResult:
    """Runs the tests once and returns the result. Raises SandboxError if the sandbox fails."""
    reset = f"rm -rf {RESULTS} && mkdir -m 1777 {RESULTS} && mkdir -p -m 1777 /tmp/home"
    await box.exec(reset, user="root", cwd="/")
    start, exit_code, logs, out_of_memory = time.monotonic(), 0, [], False
    for command in commands.test_cmds:
        left = max(0.1, timeout_s - (time.monotonic() - start))
        done = await _run(box, command, commands.variables, left)
        logs.append(_log_of(done))
        out_of_memory |= done.out_of_memory
        exit_code = None if done.timed_out else exit_code or done.code
        if done.timed_out:
            break
    seconds = time.monotonic() - start
    await _end_processes(box)
    log = "".join(logs)
    try:
        output = RunOutput(
            log=log, reports=await _read_reports(box), exit_code=exit_code, workdir=WORKDIR
        )
        report, problem = await _parse(commands, output), None
    except (ReportError, ParserRunError, SandboxFileError) as error:
        report, problem = None, str(error)
    return RunResult(
        report=report,
        problem=problem,
        exit_code=exit_code,
        log=log,
        seconds=seconds,
        out_of_memory=out_of_memory,
    )


async def run_parser(source: str, data: bytes) -> bytes:
    """Runs a generated parser in a sandbox of its own. Raises ParserRunError."""
    config = SandboxConfig(
        timeout_s=TIME_LIMIT_S, memory_bytes=MEMORY_BYTES, output_bytes=MAX_OUTPUT_BYTES
    )
    async with Sandbox(config) as box:
        done = await box.exec(["python3", "-I", "-c", source], stdin=data)
    if done.timed_out:
        raise ParserRunError(f"the parser had no end within {TIME_LIMIT_S:g} s")
    if done.code or done.truncated:
        end = done.stderr.decode(errors="replace")[-300:]
        raise ParserRunError(f"the parser ended with exit code {done.code}: {end}")
    return done.stdout


async def _run(
    box: Sandbox, command: str, variables: Mapping[str, str], timeout_s: float
) -> ExecResult:
    return await box.exec(
        ["/bin/sh", "-c", f"exec 2>&1; {command}"],
        cwd=WORKDIR,
        env={**ENVIRONMENT, **variables},
        timeout_s=timeout_s,
    )


def _log_of(done: ExecResult) -> str:
    data = done.stdout + (b"\n" + done.stdout_end if done.truncated else b"")
    return data[-MAX_LOG_BYTES:].decode("utf-8", "replace")


async def _end_processes(box: Sandbox) -> None:
    """Ends what the agent's user left running. Raises SandboxError if something is left."""
    # Again, because a process may have forked meanwhile.
    for _ in range(20):
        await box.exec(["/bin/sh", "-c", "kill -KILL -1"], cwd="/")
        listed = await box.exec(_LIST_PROCESSES, user="root", cwd="/")
        if not listed.stdout.strip():
            return
    raise SandboxError(f"processes do not end: {listed.stdout.decode(errors='replace')[:200]}")


# Prints the numbers of processes of other users than root that are no zombies.
_LIST_PROCESSES = [
    "/bin/sh",
    "-c",
    'for s in /proc/[0-9]*/status; do awk \'/^State/{z=$2} /^Uid/{u=$2} END{if (u!="" && u!=0 && z!="Z") print FILENAME}\' '
    '"$s" 2>/dev/null; done',
]


async def _read_reports(box: Sandbox) -> dict[str, bytes]:
    """Returns the report files by name. Raises SandboxFileError for a file that is too large."""
    find = ["find", RESULTS, "-maxdepth", "1", "-type", "f", "-links", "1", "-printf", "%f\\0"]
    listed = await box.exec(find, user="root", cwd="/")
    names: Sequence[str] = sorted(os.fsdecode(listed.stdout).split("\0")[:-1])
    if len(names) > MAX_REPORTS:
        raise ReportError(f"there are {len(names)} report files; the limit is {MAX_REPORTS}")
    return {name: await box.get(f"{RESULTS}/{name}", MAX_REPORT_BYTES) for name in names}


async def _parse(commands: RunCommands, output: RunOutput) -> RunReport:
    if commands.log_parser == "generated":
        return await parse_generated(commands.log_parser_source or "", output, run_parser)
    return find_parser(commands.log_parser)(output)
