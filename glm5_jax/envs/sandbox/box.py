"""The sandbox: bubblewrap over an overlay in a user namespace, entered from outside for each command."""

import asyncio
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import signal
import stat
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

from glm5_jax.envs.sandbox import remains, seccomp, transfer
from glm5_jax.envs.sandbox.cgroups import Groups, counts_processes_apart
from glm5_jax.envs.sandbox.child import Child
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
from glm5_jax.envs.sandbox.processes import end_of, has_ended, kill, to_the_end
from glm5_jax.envs.sandbox.recipe import AGENT, HOMES, HOST_SETTINGS, ROOT_CAPABILITIES, launch_task

log = logging.getLogger(__name__)

_TRANSFER_SECONDS = 60.0  # for half a gigabyte on a busy machine
_END_SECONDS = 10.0  # for killed processes to be gone: large ones give their memory back first
_LOSS_SECONDS = 0.2  # for what is left of a sandbox that lost a command by SIGKILL to be gone too
_SAID_BYTES = 4096  # of what a gate and bubblewrap say
_LONGEST_ARGUMENT = 1 << 17  # bytes, of Linux
_LONGEST_PATH = 1 << 12  # bytes, of Linux
_told: set[tuple] = set()
_NO_BWRAP = (
    "untrusted programs are not run without isolation, and bubblewrap (bwrap) is not installed; "
    "on Debian: apt-get install bubblewrap. SandboxConfig(isolation='none') is for trusted programs only"
)
_NO_START = (
    "the sandbox did not start: {}. It needs Linux 5.11 or newer with user namespaces "
    "(sysctl user.max_user_namespaces above 0; where they exist kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0), and in a container its --privileged"
)


class Sandbox:
    """A file system, users, processes and an empty network of their own; a context manager.

    limits: what is limited -> by what; "not" begins what is not limited here, which the log tells too.
    Its methods raise SandboxError if the sandbox fails, and are done with all that they began when they
    are cancelled. What could not be removed at the end of an `async with` is logged: it takes away nothing of what
    came of it.
    """

    def __init__(self, config: SandboxConfig | None = None):
        self.config = config or SandboxConfig()
        self.limits: dict[str, str] = {}
        self._isolated = self.config.isolation != "none"
        self._owner = OWNER if self._isolated and os.getuid() == 0 else 0
        self._users = {os.getuid(), self._owner or os.getuid()}  # to whom its folders belong
        self._filter = seccomp.program() if self._isolated else b""
        self._groups: Groups | None = None
        self._monitor: Child | None = (
            None  # bubblewrap outside, in whose mounts the upper layer lies
        )
        self._first = self._monitor_pidfd = -1  # pidfds; the first process of the sandbox
        self._folder: pathlib.Path | None = None  # in place of all that, without isolation
        self._children: set[Child] = set()
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
        if self._running or self._stopping is not None:
            raise ValueError("a sandbox starts once; make a new one")
        try:
            self._groups = Groups(
                memory_bytes=self.config.memory_bytes,
                processes=self.config.processes,
                cpus=self.config.cpus,
            )
            if self._isolated:
                await self._launch()
            else:
                log.warning(
                    "SANDBOX WITHOUT ISOLATION: programs run as the caller, with the caller's files and "
                    "network; for trusted programs only"
                )
                await asyncio.to_thread(remains.sweep_folders, self._users)
                self._folder = remains.make_folder("sandbox")
                self._inside(self.config.workdir).mkdir(parents=True, exist_ok=True)
            self._running = True
        except OSError as error:
            await self.stop()
            raise SandboxError(_NO_START.format(error)) from error
        except BaseException:
            await self.stop()
            raise
        self._tell_limits()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        seconds: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        user: str = "agent",
        policy: RightsPolicy | None = None,
    ) -> ExecResult:
        """Runs a program (a list of its name and arguments) or a shell's text (a string).

        policy: which of the programs that it starts keep root's rights; None: all of them.

        What it leaves running runs on, unless it is ended for its time: then all that it started is,
        or, where there are no groups of processes (`limits`), all that runs in the sandbox.
        """
        self._check_running()
        seconds = self.config.seconds if seconds is None else seconds
        identity = self._identity(user)
        defaults = {"PATH": PATH, "HOME": HOMES[user], "USER": user, "LANG": "C.UTF-8"}
        try:
            group = self._groups.command()
        except OSError as error:
            raise SandboxError(f"no group of processes for a command: {error}") from error
        kills = self._groups.memory_kills()
        child = self._child(
            stdin=stdin,
            output_bytes=self.config.output_bytes,
            end_bytes=self.config.end_bytes,
            operation="execute",
            command=["/bin/sh", "-c", command] if isinstance(command, str) else [*command],
            env={**defaults, **self.config.env, **(env or {})},
            cwd=str(self._inside(cwd or self.config.workdir)),
            user=identity,
            capabilities=ROOT_CAPABILITIES if user == "root" else (),
            rlimits=self._rlimits(),
            filter=self._filter,
            groups=self._groups.joined_by(group),
            policy=policy and {**dataclasses.asdict(policy), "user": AGENT},
        )
        try:
            ended = await child.wait(seconds)
            if not ended:
                await to_the_end(self._end(child, group))
            kills = self._groups.memory_kills() - kills
        except BaseException:
            await to_the_end(self._end(child, group))
            raise
        finally:
            self._close(child)
            self._groups.tidy()
        kind, _, rest = child.status.partition(" ")
        if self._isolated and ended and not kills and child.status == "signal 9":
            # The sandbox may be lost: its first process ends last.
            await end_of(self._first, _LOSS_SECONDS)
        self._check_running()
        if ended and kind not in ("exit", "signal"):
            raise SandboxError(f"{command!r} could not be run: {rest or child.output['stderr']}")
        code = 128 + signal.SIGKILL if not ended else int(rest) + 128 * (kind == "signal")
        found = [bytes(part[name]) for part in (child.output, child.ends) for name in part]
        stdout, stderr, *ends = found
        return ExecResult(code, stdout, stderr, not ended, child.truncated, kills > 0, *ends)

    async def put(
        self,
        path: str,
        source: bytes | os.PathLike,
        *,
        user: str = "agent",
        mode: int | None = None,
    ) -> None:
        """Writes a file's content, or copies a host file or folder, to an absolute path.

        It and folders made on the way belong to `user`. What is there is replaced; of a folder, file by
        file. mode: permissions of the file or topmost folder, 0o644 for content.
        """
        if isinstance(source, bytes):
            data = transfer.record(b"", stat.S_IFREG, 0o644 if mode is None else mode, source)
            data += transfer.END
        else:
            data = await asyncio.to_thread(transfer.pack_path, pathlib.Path(source), mode)
        await self._put(path, data, user)

    async def put_tar(self, path: str, data: bytes, *, user: str = "agent") -> None:
        """Unpacks what `get_folder` returned, or another tar of files, folders and links."""
        await self._put(path, await asyncio.to_thread(transfer.pack_tar, data), user)

    async def save(self, path: str, file: IO[bytes], max_bytes: int) -> None:
        """Writes a regular file, or a folder with what lies below it, into a file of the host for `put_saved`.

        Links are kept as links. SandboxFileError for anything else, and for more than max_bytes.
        """
        fields = {"file": file.fileno(), "descriptors": (file.fileno(),), "max_bytes": max_bytes}
        await self._transfer("save", path, **fields)

    async def put_saved(self, path: str, file: IO[bytes], *, user: str = "agent") -> None:
        """Writes what `save` wrote into the file to an absolute path, where it belongs to `user`."""
        file.seek(0)
        await self._put(path, b"", user, file)

    async def changes(self, max_paths: int) -> list[str]:
        """Paths of the files and links that have been written or removed, at most so many of them."""
        fields = {"monitor": self._monitor_pidfd, "descriptors": (self._monitor_pidfd,)}
        size = max_paths * _LONGEST_PATH
        data = await self._transfer(
            "changes", "/", output_bytes=size, max_paths=max_paths, **fields
        )
        paths = [os.fsdecode(path) for path in data.split(b"\0")[:-1]]
        return [path for path in paths if path not in HOST_SETTINGS]  # where those are mounted

    async def get(self, path: str, max_bytes: int) -> bytes:
        """A regular file's content; SandboxFileError for anything else, and if it is larger."""
        return await self._transfer("get", path, output_bytes=max_bytes, max_bytes=max_bytes)

    async def get_folder(self, path: str, max_bytes: int) -> bytes:
        """A tar of the files, folders and links below a folder; sockets, pipes are left out.

        Links are kept as links and never followed; `extract` unpacks it without them. max_bytes: of
        files and their names.
        """
        records = await self._transfer(
            "get_folder", path, output_bytes=max_bytes, max_bytes=max_bytes
        )
        return await asyncio.to_thread(transfer.to_tar, records)

    async def stop_links(self, folders: Sequence[str]) -> None:
        """Has nothing in the sandbox follow links in these folders from now on; they can still be made and read.

        Nothing untrusted should run yet. Folders that are missing, or links themselves, are left as they are.
        """
        if not self._isolated:
            raise ValueError("a sandbox with isolation='none' has no mounts of its own")
        await self._transfer("stop_links", "/", folders=list(folders))

    async def snapshot(self) -> Layer:
        """What has been written, on top of what the sandbox started from; `Layer.remove` deletes it, or once this
        process has ended the next that takes one.

        Nothing should be writing meanwhile. Taken from a sandbox that ran untrusted programs it is as
        untrusted as they are.
        """
        if not self._isolated:
            raise ValueError("a sandbox with isolation='none' has no layers to take a snapshot of")
        self._check_running()
        await asyncio.to_thread(remains.sweep_folders, self._users)
        folder = remains.make_folder("layer")
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
                monitor=self._monitor_pidfd,
                descriptors=(self._monitor_pidfd,),
                max_bytes=self.config.disk_bytes,
            )
        except BaseException:
            layer.remove()
            raise
        return layer

    async def stop(self) -> None:
        """Ends all that runs and removes all that was made. Can be called again, and at any time."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        await to_the_end(self._stopping)

    # -- inside -------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        bwrap = shutil.which("bwrap", path=PATH)
        if bwrap is None:
            raise SandboxError(_NO_BWRAP)
        info, info_write = os.pipe()
        filter_ = os.memfd_create("filter")
        try:
            os.write(filter_, self._filter)
            os.lseek(filter_, 0, os.SEEK_SET)
            passed = filter_ if self._filter else None
            self._monitor = Child(
                launch_task(self.config, bwrap, self._owner, info_write, passed),
                stdin=b"",
                output_bytes=_SAID_BYTES,
                descriptors=(info_write, filter_),
            )
            self._monitor_pidfd = os.pidfd_open(self._monitor.pid)
            await asyncio.wait([self._monitor.first_line], timeout=self.config.start_seconds)
            if self._stopping is not None:
                raise SandboxError("the sandbox was stopped while it started")
            if self._monitor.output["stdout"] != b"ready\n":
                said = self._monitor.output["stderr"].decode(errors="replace").strip()
                status = self._monitor.status.removeprefix("failed ")
                late = f"nothing happened within {self.config.start_seconds} s"
                raise SandboxError(_NO_START.format(status or said or late))
            # Told before the sandbox is set up, but it is the first process inside, as seen from here.
            self._first = os.pidfd_open(json.loads(os.read(info, _SAID_BYTES))["child-pid"])
        except ProcessLookupError:
            raise SandboxError("the sandbox ended as soon as it was started") from None
        finally:
            for descriptor in (info, info_write, filter_):
                os.close(descriptor)

    def _tell_limits(self) -> None:
        found, isolated = self._groups.limits, self._isolated
        if "pids" in found:
            time = "ends all that the command started"
        elif isolated:
            time = "ends all that runs in the sandbox, not only what the command started"
        else:
            time = "ends the command's process group, not what has left it"
        self.limits = {
            "time": time,
            "memory": found.get("memory", "rlimit: each process, not all together"),
            "processes": found.get("pids", "rlimit" if isolated else "not limited"),
            "cpus": found.get("cpu", "not limited"),
            "disk": "tmpfs" if isolated else "rlimit: each file, not all together",
            "network": "empty" if isolated else "the host's: not limited",
            "users": "65536" if self._owner else "one: root and agent are not apart",
            "system calls": "seccomp" if self._filter else "not filtered",
        }
        less = {name: text for name, text in self.limits.items() if " not " in f" {text} "}
        if less and tuple(less.items()) not in _told:
            _told.add(tuple(less.items()))
            log.warning("Sandboxes of this process are limited less than they could be: %s", less)

    def _rlimits(self) -> dict[str, int]:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": self.config.open_files}
        if "memory" not in self._groups.limits:
            limits["RLIMIT_AS"] = self.config.memory_bytes
        # A group refuses a fork late, when its memory is copied, and holds a lock of the kernel meanwhile for which
        # all wait that join a group: the bombs of one sandbox kept others from starting commands.
        if self._isolated and ("pids" not in self._groups.limits or counts_processes_apart()):
            limits["RLIMIT_NPROC"] = self.config.processes
        if not self._isolated:
            limits["RLIMIT_FSIZE"] = self.config.disk_bytes
        return limits

    def _identity(self, user: str) -> int:
        """The number of a user inside."""
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
        if self._isolated and has_ended(self._first):
            raise SandboxError("the sandbox is lost: its first process has ended")

    def _child(
        self, *, stdin: bytes, output_bytes: int, end_bytes: int = 0, descriptors=(), **task: Any
    ) -> Child:
        """A gate into this sandbox at work on a task."""
        sandbox = self._first if self._isolated else None
        task |= {"sandbox": sandbox, "owner": self._owner, "root": str(self._folder)}
        descriptors = (*descriptors, *(() if sandbox is None else (sandbox,)))
        try:
            child = Child(
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

    def _close(self, child: Child) -> None:
        child.close()
        self._children.discard(child)

    async def _transfer(
        self,
        operation: str,
        path: str,
        *,
        seconds=_TRANSFER_SECONDS,
        stdin=b"",
        output_bytes=0,
        descriptors=(),
        **task: Any,
    ) -> bytes:
        """What the gate writes to standard output."""
        if not path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} must be an absolute path in the sandbox, without ..")
        self._check_running()
        child = self._child(
            stdin=stdin,
            output_bytes=output_bytes,
            descriptors=descriptors,
            operation=operation,
            path=path,
            **task,
        )
        try:
            ended = await child.wait(seconds)
        finally:
            self._close(child)
        status = child.status
        kind, _, rest = status.partition(" ")
        if kind == "refused":
            number, _, text = rest.partition(" ")
            raise SandboxFileError(int(number), text)
        self._check_running()
        if not ended or status != "exit 0":
            said = rest or child.output["stderr"].decode(errors="replace")
            late = f"not done within {seconds} s"
            raise SandboxError(f"{operation} of {path}: {said if ended else late}")
        return bytes(child.output["stdout"])

    async def _put(self, path: str, data: bytes, user: str, file: IO[bytes] | None = None) -> None:
        number = None if file is None else file.fileno()
        fields = {"file": number, "descriptors": () if number is None else (number,)}
        await self._transfer("put", path, stdin=data, user=self._identity(user), **fields)

    async def _end(self, child: Child, group: pathlib.Path | None) -> None:
        """Ends what a command started, and waits until it is gone."""
        clock = asyncio.get_running_loop().time
        last = clock() + _END_SECONDS
        while True:
            if group is not None:
                await self._groups.end(group, _END_SECONDS)
            elif self._folder is None:
                try:
                    await self._transfer("kill_all", "/", seconds=_END_SECONDS)
                except SandboxError:  # as a rule the sandbox has ended, and all in it
                    if has_ended(self._first):
                        child.kill()
            else:
                child.kill()
            # Again if it was so early that the command was not in its group yet.
            if await child.wait(0.05):
                return
            if clock() > last:
                raise SandboxError(f"a command was killed but not gone after {_END_SECONDS} s")

    async def _stop(self) -> None:
        self._running = False
        if self._first >= 0:
            kill(self._first)  # and with it, by the kernel, all that runs inside
        elif self._monitor is not None:
            self._monitor.kill()  # which the sandbox does not survive
        for child in self._children:
            child.kill()
        left = []
        if self._monitor is not None:
            if not await self._monitor.wait(_END_SECONDS):
                left.append(f"process {self._monitor.pid}")
            self._monitor.close()
            for descriptor in (self._monitor_pidfd, self._first):
                if descriptor >= 0:
                    os.close(descriptor)
        if self._groups is not None:
            left += await self._groups.remove(_END_SECONDS)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            left += [str(self._folder)] if self._folder.exists() else []
        if left:
            raise SandboxError(f"a sandbox could not be removed wholly: {', '.join(left)} is left")


async def run_python(
    code: str, *, stdin: bytes = b"", config: SandboxConfig | None = None
) -> ExecResult:
    """Runs a Python program in a sandbox of its own, with nothing of its folder or user imported."""
    async with Sandbox(config) as box:
        if len(code) < _LONGEST_ARGUMENT // 4:  # bytes of a character, at most
            return await box.exec(["python3", "-I", "-c", code], stdin=stdin)
        path = f"{box.config.workdir}/main.py"
        await box.put(path, code.encode())
        return await box.exec(["python3", "-I", "main.py"], stdin=stdin)
