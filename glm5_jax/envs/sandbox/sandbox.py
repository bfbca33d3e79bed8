"""Runs the sandbox: bubblewrap over an overlay in a user namespace, entered from outside for each command."""

import asyncio
import dataclasses
import logging
import os
import pathlib
import shutil
import signal
import stat
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

from glm5_jax.envs.sandbox import orphans, seccomp, transfer
from glm5_jax.envs.sandbox.bubblewrap import NO_START, Bubblewrap
from glm5_jax.envs.sandbox.cgroups import Groups
from glm5_jax.envs.sandbox.config import (
    OWNER,
    PATH,
    ExecResult,
    Layer,
    RightsPolicy,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
)
from glm5_jax.envs.sandbox.entry_process import EntryProcess
from glm5_jax.envs.sandbox.launch_spec import (
    AGENT,
    HOMES,
    HOST_SETTINGS,
    ROOT_CAPABILITIES,
)
from glm5_jax.envs.sandbox.limits import describe_limits, rlimits, warn_of_missing_limits
from glm5_jax.envs.sandbox.processes import has_ended, shield_until_done, wait_for_end

log = logging.getLogger(__name__)

_TRANSFER_TIMEOUT_S = 60.0  # suffices for half a gigabyte on a busy machine
_SNAPSHOT_TIMEOUT_S = 600.0  # suffices for gigabytes of packages
_END_TIMEOUT_S = 10.0  # until killed processes are gone; large ones release their memory first
_LOSS_WAIT_S = 0.2  # until a sandbox that lost a command by SIGKILL is gone too
_NOTE = "\x1f"  # begins the note in the report of a command, as in `entry.supervise`
_MAX_ARGUMENT_BYTES = 1 << 17  # Linux's limit
_MAX_PATH_BYTES = 1 << 12  # Linux's limit


class Sandbox:
    """Sandbox with its own file system, users, processes and, without `network`, an empty network; a context manager.

    Its methods raise SandboxError if the sandbox fails. When cancelled, they first finish or undo everything that
    they began. If something cannot be removed at the end of an `async with`, that is logged and does not invalidate
    results.

    Attributes:
      config: limits.
      limits: resource -> how it is limited; texts with "not" say what is not limited on this machine, and are logged.
    """

    def __init__(self, config: SandboxConfig | None = None):
        self.config = config or SandboxConfig()
        self.limits: dict[str, str] = {}
        self._isolated = self.config.isolation != "none"
        self._owner = OWNER if self._isolated and os.getuid() == 0 else 0
        self._users = {os.getuid(), self._owner or os.getuid()}  # owners of its folders
        self._filter = seccomp.build_filter() if self._isolated else b""
        self._groups: Groups | None = None
        self._bubblewrap = Bubblewrap()
        self._folder: pathlib.Path | None = None  # used instead of all that without isolation
        self._children: set[EntryProcess] = set()
        self._running = False
        self._stopping: asyncio.Task | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        try:
            await self.stop()
        except SandboxError as failure:
            log.error("%s", failure)

    async def start(self) -> None:
        """Starts the sandbox. Raises SandboxError if that fails, and ValueError if it was started before."""
        if self._running or self._stopping is not None:
            raise ValueError("a sandbox can be started only once; make a new one")
        try:
            self._groups = Groups(
                memory_bytes=self.config.memory_bytes,
                processes=self.config.max_processes,
                cpus=self.config.cpus,
            )
            if self._isolated:
                await self._bubblewrap.start(self.config, self._owner, self._filter)
            else:
                log.warning(
                    "SANDBOX WITHOUT ISOLATION: programs run as the caller, with the caller's files and "
                    "network; for trusted programs only"
                )
                await asyncio.to_thread(orphans.sweep_folders, self._users)
                self._folder = orphans.make_folder("sandbox")
                self._inside(self.config.workdir).mkdir(parents=True, exist_ok=True)
            self._running = True
        except OSError as error:
            await self.stop()
            raise SandboxError(NO_START.format(error)) from error
        except BaseException:
            await self.stop()
            raise
        self.limits = describe_limits(
            self.config,
            self._groups.limits,
            has_users=bool(self._owner),
            has_filter=bool(self._filter),
        )
        warn_of_missing_limits(self.limits)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        user: str = "agent",
        policy: RightsPolicy | None = None,
    ) -> ExecResult:
        """Runs a program (a list of its name and arguments) or a shell script (a string), and returns its result.

        Background processes keep running. On a timeout everything that the command started is killed, or, without
        process groups (`limits`), everything in the sandbox.

        Args:
          command: program or script.
          timeout_s: time limit, in seconds; None: the config's.
          cwd: working folder; None: the config's.
          env: additional environment variables.
          stdin: bytes for standard input.
          user: "agent" or "root".
          policy: rules for which started programs keep root's rights; None: all do.
        """
        self._check_running()
        groups = self._groups
        assert groups is not None, "a running sandbox has process groups"
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        # Start the command in a separate control group.
        identity = self._identity(user)
        defaults = {"PATH": PATH, "HOME": HOMES[user], "USER": user, "LANG": "C.UTF-8"}
        try:
            group = groups.command()
        except OSError as error:
            raise SandboxError(f"no group of processes for a command: {error}") from error
        kills, refused = groups.memory_kills(), groups.refused_processes()
        child = self._enter(
            stdin=stdin,
            output_bytes=self.config.output_bytes,
            end_bytes=self.config.end_bytes,
            operation="execute",
            command=["/bin/sh", "-c", command] if isinstance(command, str) else [*command],
            env={**defaults, **self.config.env, **(env or {})},
            cwd=str(self._inside(cwd or self.config.workdir)),
            user=identity,
            capabilities=ROOT_CAPABILITIES if user == "root" else (),
            rlimits=rlimits(self.config, groups.limits),
            filter=self._filter,
            groups=groups.procs_files(group),
            policy=policy and {**dataclasses.asdict(policy), "user": AGENT},
        )
        try:
            ended = await child.wait(timeout_s)
            counts = groups.refused_processes() if ended else {}
            out_of_processes = any(count > refused.get(one, 0) for one, count in counts.items())
            if not ended:
                await shield_until_done(self._end(child, group))
            kills = groups.memory_kills() - kills
        except BaseException:
            await shield_until_done(self._end(child, group))
            raise
        finally:
            self._close(child)
            groups.tidy()
        result = await self._interpret(command, child, ended=ended, kills=kills)
        return dataclasses.replace(result, out_of_processes=out_of_processes)

    async def _interpret(
        self, command: str | Sequence[str], child: EntryProcess, *, ended: bool, kills: int
    ) -> ExecResult:
        """Returns the result of a command from the status that its process reported.

        ended: whether it ended within its time. kills: number of its processes that the memory limit killed.
        """
        kind, _, rest = child.status.partition(" ")
        if self._isolated and ended and not kills and child.status.startswith("signal 9 "):
            # The sandbox may be lost, and its first process ends last.
            await wait_for_end(self._bubblewrap.init_pidfd, _LOSS_WAIT_S)
        self._check_running()
        if ended and kind not in ("exit", "signal"):
            raise SandboxError(f"{command!r} could not be run: {rest or child.output['stderr']}")
        number, _, rest = rest.partition(" ")
        alert, _, note = rest.partition(_NOTE)
        code = 128 + signal.SIGKILL if not ended else int(number) + 128 * (kind == "signal")
        return ExecResult(
            code=code,
            stdout=bytes(child.output["stdout"]),
            stderr=bytes(child.output["stderr"]),
            timed_out=not ended,
            truncated=child.truncated,
            out_of_memory=kills > 0,
            stdout_end=bytes(child.ends["stdout"]),
            stderr_end=bytes(child.ends["stderr"]),
            alert=alert if ended else "",
            note=note if ended else "",
        )

    async def put(
        self,
        path: str,
        source: bytes | os.PathLike,
        *,
        user: str = "agent",
        mode: int | None = None,
    ) -> None:
        """Writes a file's content, or copies a host file or folder, to an absolute path in the sandbox.

        Existing files are replaced; an existing folder is replaced file by file.

        Args:
          source: content, or path on the host.
          user: owner of the file and of folders made on the way.
          mode: permissions of the file or topmost folder; None: 0o644 for content, else those of the source.
        """
        if isinstance(source, bytes):
            data = transfer.record(b"", stat.S_IFREG, 0o644 if mode is None else mode, source)
            await self._put(path, data + transfer.END, user)
            return
        # Not through memory, because a task may have gigabytes.
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(transfer.write_path, pathlib.Path(source), mode, file)
            await self.put_saved(path, file, user=user)

    async def save(self, path: str, file: IO[bytes], max_bytes: int) -> None:
        """Writes a regular file, or a folder with its contents, into a file of the host for `put_saved`.

        Links stay links. Raises SandboxFileError for anything else, and above max_bytes.
        """
        fields = {"file": file.fileno(), "descriptors": (file.fileno(),), "max_bytes": max_bytes}
        await self._transfer("save", path, **fields)

    async def put_saved(self, path: str, file: IO[bytes], *, user: str = "agent") -> None:
        """Restores what `save` wrote to an absolute path, owned by `user`."""
        file.seek(0)
        await self._put(path, b"", user, file)

    async def changes(self, max_paths: int) -> list[str]:
        """Returns the paths of written or removed files and links, at most `max_paths`."""
        fields = {
            "monitor": self._bubblewrap.monitor_pidfd,
            "descriptors": (self._bubblewrap.monitor_pidfd,),
        }
        size = max_paths * _MAX_PATH_BYTES
        data = await self._transfer(
            "changes", "/", output_bytes=size, max_paths=max_paths, **fields
        )
        paths = [os.fsdecode(path) for path in data.split(b"\0")[:-1]]
        return [path for path in paths if path not in HOST_SETTINGS]  # where those are mounted

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Returns a regular file's content.

        Raises SandboxFileError for anything else, and if it is larger than max_bytes.
        """
        return await self._transfer("get", path, output_bytes=max_bytes, max_bytes=max_bytes)

    async def stop_links(self, folders: Sequence[str]) -> None:
        """Disables links in these folders: they can still be made and read, but nothing in the sandbox follows them.

        Must be called before untrusted programs run. Missing folders, and folders that are links, are left unchanged.
        """
        if not self._isolated:
            raise ValueError("a sandbox with isolation='none' has no separate mounts")
        await self._transfer("stop_links", "/", folders=list(folders))

    async def hide_processes(self) -> None:
        """Hides other users' processes, with their arguments, from everyone except root's group."""
        if not self._isolated:
            raise ValueError("a sandbox with isolation='none' has no separate /proc")
        await self._transfer("hide_processes", "/")

    async def snapshot(self, folder: pathlib.Path | None = None) -> Layer:
        """Returns a layer of what was written, on top of the base layer.

        folder: empty folder that becomes the layer and stays after this process; None: a temporary one.

        `Layer.remove` deletes it; after the end of this process, the next snapshot of another process does. Nothing
        should write during the call. The layer of a sandbox that ran untrusted programs is untrusted.
        """
        if not self._isolated:
            raise ValueError("a sandbox with isolation='none' has no layers to take a snapshot of")
        self._check_running()
        await asyncio.to_thread(orphans.sweep_folders, self._users)
        folder = folder or orphans.make_folder("layer")
        base = self.config.base
        layer = Layer((folder, *base.folders), base.host_programs)
        try:
            if self._owner:
                os.chown(folder, self._owner, self._owner)
            folder.chmod(0o755)
            await self._transfer(
                "snapshot",
                "/",
                folder=str(folder),
                monitor=self._bubblewrap.monitor_pidfd,
                descriptors=(self._bubblewrap.monitor_pidfd,),
                max_bytes=self.config.disk_bytes,
                timeout_s=_SNAPSHOT_TIMEOUT_S,
            )
        except BaseException:
            layer.remove()
            raise
        return layer

    async def stop(self) -> None:
        """Ends all processes and removes all resources. Can be called again, and at any time."""
        if self._stopping is None:
            self._bubblewrap.is_stopping = True
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        await shield_until_done(self._stopping)

    # -- private ------------------------------------------------------------------------------------

    def _identity(self, user: str) -> int:
        """Returns the number of a user inside the sandbox."""
        if user not in ("agent", "root"):
            raise ValueError(f"user is {user!r}; it can be 'agent' or 'root'")
        if not self._isolated:
            return os.getuid()
        return AGENT if self._owner and user == "agent" else 0

    def _inside(self, path: str) -> pathlib.Path:
        return pathlib.Path(path) if self._folder is None else self._folder / path.lstrip("/")

    def _check_running(self) -> None:
        if not self._running:
            raise SandboxError("the sandbox does not run: it was not started, or was stopped")
        if self._isolated and has_ended(self._bubblewrap.init_pidfd):
            raise SandboxError("the sandbox is lost: its first process has ended")

    def _enter(
        self, *, stdin: bytes, output_bytes: int, end_bytes: int = 0, descriptors=(), **task: Any
    ) -> EntryProcess:
        """Starts a process that enters this sandbox to run a task."""
        sandbox = self._bubblewrap.init_pidfd if self._isolated else None
        task |= {"sandbox": sandbox, "owner": self._owner, "root": str(self._folder)}
        descriptors = (*descriptors, *(() if sandbox is None else (sandbox,)))
        try:
            child = EntryProcess(
                task,
                stdin=stdin,
                output_bytes=output_bytes,
                end_bytes=end_bytes,
                descriptors=descriptors,
            )
        except OSError as error:
            raise SandboxError(f"no process to enter the sandbox: {error}") from error
        self._children.add(child)
        return child

    def _close(self, child: EntryProcess) -> None:
        child.close()
        self._children.discard(child)

    async def _transfer(
        self,
        operation: str,
        path: str,
        *,
        timeout_s=_TRANSFER_TIMEOUT_S,
        stdin=b"",
        output_bytes=0,
        descriptors=(),
        **task: Any,
    ) -> bytes:
        """Runs an operation of `entry` and returns its standard output."""
        if not path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} must be an absolute path in the sandbox, without ..")
        self._check_running()
        child = self._enter(
            stdin=stdin,
            output_bytes=output_bytes,
            descriptors=descriptors,
            operation=operation,
            path=path,
            **task,
        )
        try:
            ended = await child.wait(timeout_s)
        finally:
            self._close(child)
        status = child.status
        kind, _, rest = status.partition(" ")
        if kind == "refused":
            number, _, text = rest.partition(" ")
            raise SandboxFileError(int(number), text)
        self._check_running()
        if not ended or status != "exit 0":
            message = rest or child.output["stderr"].decode(errors="replace")
            late = f"not done within {timeout_s} s"
            raise SandboxError(f"{operation} of {path}: {message if ended else late}")
        return bytes(child.output["stdout"])

    async def _put(self, path: str, data: bytes, user: str, file: IO[bytes] | None = None) -> None:
        number = None if file is None else file.fileno()
        fields = {"file": number, "descriptors": () if number is None else (number,)}
        await self._transfer("put", path, stdin=data, user=self._identity(user), **fields)

    async def _end(self, child: EntryProcess, group: pathlib.Path | None) -> None:
        """Kills the processes that a command started, and waits for their end."""
        clock = asyncio.get_running_loop().time
        last = clock() + _END_TIMEOUT_S
        while True:
            if group is not None:
                assert self._groups is not None, "it made the group"
                await self._groups.end(group, _END_TIMEOUT_S)
            elif self._folder is None:
                try:
                    await self._transfer("kill_all", "/", timeout_s=_END_TIMEOUT_S)
                except SandboxError:  # usually the sandbox has ended, with everything in it
                    if has_ended(self._bubblewrap.init_pidfd):
                        child.kill()
            else:
                child.kill()
            # Again, because the command may not have been in its group yet.
            if await child.wait(0.05):
                return
            if clock() > last:
                raise SandboxError(f"a command was killed but not gone after {_END_TIMEOUT_S} s")

    async def _stop(self) -> None:
        self._running = False
        self._bubblewrap.kill()
        for child in self._children:
            child.kill()
        left = await self._bubblewrap.close(_END_TIMEOUT_S)
        if self._groups is not None:
            left += await self._groups.remove(_END_TIMEOUT_S)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            left += [str(self._folder)] if self._folder.exists() else []
        if left:
            raise SandboxError(
                f"a sandbox could not be removed completely: {', '.join(left)} is left"
            )


async def run_python(
    code: str, *, stdin: bytes = b"", config: SandboxConfig | None = None
) -> ExecResult:
    """Runs a Python program in a new sandbox, without importing anything from its folder or user."""
    async with Sandbox(config) as box:
        if len(code) < _MAX_ARGUMENT_BYTES // 4:  # a character has at most 4 bytes
            return await box.exec(["python3", "-I", "-c", code], stdin=stdin)
        path = f"{box.config.workdir}/main.py"
        await box.put(path, code.encode())
        return await box.exec(["python3", "-I", "main.py"], stdin=stdin)
