"""What an agent has of a task's sandbox: its commands run as the task's user, in the work folder."""

import time
from collections.abc import Mapping, Sequence

from glm5_jax.envs.sandbox import ExecResult, Sandbox

ROOT = ("root", "0")


async def run_as(
    box: Sandbox,
    user: str,
    command: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    seconds: float,
    stdin: bytes = b"",
) -> ExecResult:
    """A program as any user of the sandbox, by name or number; 126 if there is none such."""
    if user not in ROOT:
        # In the sandbox, whose users these are.
        script = (
            'id -u "$0" >/dev/null || exit 126; home=$(getent passwd "$0" | cut -d: -f6); '
            'HOME=${home:-/} USER=$0 exec setpriv --reuid="$0" --regid="$(id -g "$0")" --init-groups -- "$@"'
        )
        command = ["/bin/sh", "-c", script, user, *command]
    return await box.exec(command, user="root", cwd=cwd, env=env, seconds=seconds, stdin=stdin)


def started_by(script: bytes, path: str) -> list[str]:
    """The command that runs a script at a path, whether or not it may be executed: by its first line, or by bash."""
    first = script.split(b"\n", 1)[0].decode(errors="replace").strip()
    words = first[2:].split(None, 1) if first.startswith("#!") else []
    return [*(words or ["/bin/bash"]), path]


class Shell:
    """The sandbox of a task as its agent sees it, which has it for so many seconds from now on. workdir: where commands
    start and what is graded."""

    def __init__(self, box: Sandbox, user: str, workdir: str, seconds: float):
        self._box, self._user, self.workdir, self._seconds = box, user, workdir, seconds
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Of the agent's time, below 0 once it is over."""
        return self._end - time.monotonic()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a program (a list of its name and arguments) or a shell's text (a string)."""
        return await run_as(
            self._box,
            self._user,
            ["/bin/bash", "-c", command] if isinstance(command, str) else command,
            cwd=cwd or self.workdir,
            env=env or {},
            seconds=self._seconds if seconds is None else seconds,
            stdin=stdin,
        )

    async def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes a file that anyone can read; of the sandbox's root."""
        await self._box.put(path, content, user="root", mode=mode)

    async def put_folder(self, path: str, source) -> None:
        """Copies a folder of the host; it belongs to the sandbox's root."""
        await self._box.put(path, source, user="root", mode=0o755)

    async def get(self, path: str, max_bytes: int) -> bytes:
        """A regular file's content; SandboxFileError."""
        return await self._box.get(path, max_bytes)
