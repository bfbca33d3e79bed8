"""Starts and ends bubblewrap, which makes the namespaces of one sandbox and holds its upper layer."""

import asyncio
import json
import os
import shutil

from glm5_jax.envs.sandbox.config import PATH, SandboxConfig, SandboxError
from glm5_jax.envs.sandbox.entry_process import EntryProcess
from glm5_jax.envs.sandbox.launch_spec import launch_task
from glm5_jax.envs.sandbox.processes import kill

_MESSAGE_BYTES = 4096  # retained from messages of `entry` and bubblewrap
_NO_BWRAP = (
    "untrusted programs are not run without isolation, and bubblewrap (bwrap) is not installed; "
    "on Debian: apt-get install bubblewrap. SandboxConfig(isolation='none') is for trusted programs only"
)
NO_START = (
    "the sandbox did not start: {}. It needs Linux 5.11 or newer with user namespaces "
    "(sysctl user.max_user_namespaces above 0; where they exist kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0), and in a container --privileged"
)


class Bubblewrap:
    """Bubblewrap's outer process, whose mounts hold the upper layer, and the first process of the sandbox.

    Attributes:
      init_pidfd: pidfd of the first process inside; -1: not started.
      monitor_pidfd: pidfd of the outer process; -1: not started.
      is_stopping: whether the sandbox is being stopped, so that `start` must fail.
    """

    def __init__(self):
        self.init_pidfd = self.monitor_pidfd = -1
        self.is_stopping = False
        self._monitor: EntryProcess | None = None

    async def start(self, config: SandboxConfig, owner: int, filter_: bytes) -> None:
        """Starts both processes. Raises SandboxError if that fails.

        - owner: user outside of everything in the sandbox; 0: the caller.
        - filter_: filter of system calls; empty: none.
        """
        bwrap = shutil.which("bwrap", path=PATH)
        if bwrap is None:
            raise SandboxError(_NO_BWRAP)
        info, info_write = os.pipe()
        filter_file = os.memfd_create("filter")
        try:
            os.write(filter_file, filter_)
            os.lseek(filter_file, 0, os.SEEK_SET)
            passed = filter_file if filter_ else None
            self._monitor = EntryProcess(
                launch_task(config, bwrap, owner, info_write, passed),
                stdin=b"",
                output_bytes=_MESSAGE_BYTES,
                descriptors=(info_write, filter_file),
            )
            self.monitor_pidfd = os.pidfd_open(self._monitor.pid)
            await asyncio.wait([self._monitor.first_line], timeout=config.start_timeout_s)
            if self.is_stopping:
                raise SandboxError("the sandbox was stopped while it started")
            if self._monitor.output["stdout"] != b"ready\n":
                message = self._monitor.output["stderr"].decode(errors="replace").strip()
                status = self._monitor.status.removeprefix("failed ")
                late = f"nothing happened within {config.start_timeout_s} s"
                raise SandboxError(NO_START.format(status or message or late))
            # Reported before the sandbox is set up. It is the number, outside, of the first process inside.
            self.init_pidfd = os.pidfd_open(json.loads(os.read(info, _MESSAGE_BYTES))["child-pid"])
        except ProcessLookupError:
            raise SandboxError("the sandbox ended as soon as it was started") from None
        finally:
            for descriptor in (info, info_write, filter_file):
                os.close(descriptor)

    def kill(self) -> None:
        """Kills the sandbox; `close` waits for its end."""
        if self.init_pidfd >= 0:
            kill(self.init_pidfd)  # the kernel then kills everything inside
        elif self._monitor is not None:
            self._monitor.kill()  # the sandbox ends with it

    async def close(self, timeout_s: float) -> list[str]:
        """Waits for the end of a killed sandbox, and returns what is left after `timeout_s` seconds."""
        if self._monitor is None:
            return []
        has_ended = await self._monitor.wait(timeout_s)
        self._monitor.close()
        for descriptor in (self.monitor_pidfd, self.init_pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        return [] if has_ended else [f"process {self._monitor.pid}"]
