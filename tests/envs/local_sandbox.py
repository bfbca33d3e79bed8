"""A sandbox for tests of what uses one: programs run here, with limits and without secrets, and without walls."""

import asyncio
import dataclasses
import os
import resource
import signal
import subprocess
import tempfile

MOST_OUTPUT = 2**22
MEMORY = 2**30
USER = 61_234  # of nobody else, so that a limit on its processes counts only these


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

    async def exec(self, argv, *, seconds, stdin=b""):
        self._runs.append((argv, stdin))
        return await asyncio.to_thread(self._run, argv, seconds, stdin)

    def _run(self, argv, seconds, stdin):
        as_root = os.getuid() == 0
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                start_new_session=True,
                preexec_fn=_limit,
                **({"user": USER, "group": USER, "extra_groups": []} if as_root else {}),
            )
            timed_out = False
            try:
                process.communicate(stdin, timeout=seconds)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                # Also when it ended: what it started may go on.
                with_group = process.pid
                try:
                    os.killpg(with_group, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()
            out.seek(0), err.seek(0)
            stdout = out.read()
            truncated = len(stdout) >= MOST_OUTPUT
            return Ran(process.returncode, stdout, err.read(), timed_out, truncated)


def _limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_OUTPUT, MOST_OUTPUT))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))
