"""A sandbox for tests of what uses one: programs run here, with limits and without secrets, and without walls."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import tempfile
import time

MOST_OUTPUT = 2**22
MEMORY = 2**30
USER = 61_234  # of nobody else, so that a limit on its processes counts only these
# By a program: what runs between fork and exec is refused where jax has threads.
LIMITED = ("prlimit", f"--fsize={MOST_OUTPUT}", f"--as={MEMORY}", "--nproc=40")


@dataclasses.dataclass(frozen=True)
class Ran:
    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False


class LocalSandbox:
    """runs: the standard inputs of all that ran, to see what reached a sandbox."""

    def __init__(self, runs: list | None = None):
        self._runs = [] if runs is None else runs

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace):
        return None

    async def exec(self, argv, *, timeout_s, stdin=b""):
        self._runs.append((argv, stdin))
        return await asyncio.to_thread(self._run, argv, timeout_s, stdin)

    def _run(self, argv, timeout_s, stdin):
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
            given.write(stdin)
            given.seek(0)
            as_other = {"user": USER, "group": USER, "extra_groups": []} if os.getuid() == 0 else {}
            process = subprocess.Popen(
                [*LIMITED, *argv],
                stdin=given,
                stdout=out,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
                **as_other,
            )
            end = time.monotonic() + timeout_s
            while not _has_ended(process.pid) and time.monotonic() < end:
                time.sleep(0.005)
            timed_out = not _has_ended(process.pid)
            # Before it is waited for: until then its number cannot belong to another group.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            out.seek(0)
            stdout = out.read()
            return Ran(code, stdout, b"", timed_out, len(stdout) >= MOST_OUTPUT)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
