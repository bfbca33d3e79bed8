"""Gives an agent access to a task's sandbox: its commands run as the task's user, in the work folder."""

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
    timeout_s: float,
    stdin: bytes = b"",
) -> ExecResult:
    """Runs a program as any user of the sandbox, by name or number; exit code 126 for an unknown user."""
    if user not in ROOT:
        # Looked up in the sandbox, because the users are defined there.
        script = (
            'id -u "$0" >/dev/null || exit 126; home=$(getent passwd "$0" | cut -d: -f6); '
            'HOME=${home:-/} USER=$0 exec setpriv --reuid="$0" --regid="$(id -g "$0")" --init-groups -- "$@"'
        )
        command = ["/bin/sh", "-c", script, user, *command]
    return await box.exec(command, user="root", cwd=cwd, env=env, timeout_s=timeout_s, stdin=stdin)


def command_for_script(script: bytes, path: str) -> list[str]:
    """Returns the command that runs a script, executable or not: by its first line, or by bash."""
    first = script.split(b"\n", 1)[0].decode(errors="replace").strip()
    words = first[2:].split(None, 1) if first.startswith("#!") else []
    return [*(words or ["/bin/bash"]), path]


class Shell:
    """Access of an agent to a task's sandbox, for a limited time from construction on.

    Args:
      box: sandbox.
      user: name or number of the agent's user.
      workdir: folder in which commands start, and which is graded.
      timeout_s: time limit of the agent, in seconds.
      env: environment variables of all commands; None: none.
    """

    def __init__(
        self,
        box: Sandbox,
        user: str,
        workdir: str,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ):
        self._box, self._user, self.workdir, self._timeout_s = box, user, workdir, timeout_s
        self._env = dict(env or {})
        self._end = time.monotonic() + timeout_s

    @property
    def time_left_s(self) -> float:
        """Returns the agent's remaining time in seconds, below 0 after its end."""
        return self._end - time.monotonic()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a program (a list of its name and arguments) or a shell script (a string)."""
        return await run_as(
            self._box,
            self._user,
            ["/bin/bash", "-c", command] if isinstance(command, str) else command,
            cwd=cwd or self.workdir,
            env={**self._env, **(env or {})},
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            stdin=stdin,
        )

    async def put(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes a file that everybody can read, owned by the sandbox's root."""
        await self._box.put(path, content, user="root", mode=mode)

    async def put_folder(self, path: str, source) -> None:
        """Copies a folder of the host, owned by the sandbox's root."""
        await self._box.put(path, source, user="root", mode=0o755)

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Returns a regular file's content. Raises SandboxFileError."""
        return await self._box.get(path, max_bytes)
