"""A sandbox for tests of its callers: programs run on this machine, with limits, without secrets and isolation."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import tempfile
import time

MAX_OUTPUT = 2**22
MEMORY = 2**30
USER = 61_234  # a user without other processes, so that a limit on processes counts only these
# prlimit sets the limits, because jax's threads forbid code between fork and exec.
LIMITED = ("prlimit", f"--fsize={MAX_OUTPUT}", f"--as={MEMORY}", "--nproc=40")


@dataclasses.dataclass(frozen=True)
class Ran:
    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False


class LocalSandbox:
    """Runs programs on this machine.

    runs: list that gets (argv, stdin) of each program, to see what reached a sandbox; None: not recorded.
    """

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
        with tempfile.TemporaryFile() as stdin_file, tempfile.TemporaryFile() as out:
            stdin_file.write(stdin)
            stdin_file.seek(0)
            as_other = {"user": USER, "group": USER, "extra_groups": []} if os.getuid() == 0 else {}
            process = subprocess.Popen(
                [*LIMITED, *argv],
                stdin=stdin_file,
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
            # Kill before waiting: until then its number cannot belong to another group.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            out.seek(0)
            stdout = out.read()
            return Ran(code, stdout, b"", timed_out, len(stdout) >= MAX_OUTPUT)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
