"""Control groups of the sandboxes, version 1 or 2, whichever has the controllers here.

A sandbox has one group per controller, with its limits, and one group for each command, by which that
command is ended with all that it started: a process can leave its session and its parent, not its group.
"""

import asyncio
import itertools
import os
import pathlib
import re
import signal

from glm5_jax.envs.sandbox.remains import left_of, mark

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD = 100_000  # microseconds; of each the sandbox has its share, the kernel's default
_numbers = itertools.count()


def hierarchies(
    proc: pathlib.Path = pathlib.Path("/proc/self"),
) -> tuple[dict[str, pathlib.Path], pathlib.Path | None, pathlib.Path | None]:
    """A process's own group of each version 1 controller, and of version 2 with its mount."""
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update((name, path) for name in names.split(","))
    first, second, top = {}, None, None
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, (kind, _, options, *_) = (part.split() for part in line.partition(" - "))
        root, mount = fields[3], pathlib.Path(fields[4])
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in {*names} & {"", *CONTROLLERS}:
            # In a container the path may be the host's, which is not to be seen here.
            folder = mount / os.path.relpath(own.get(name, "/"), root)
            folder = folder if folder.is_dir() else mount
            if name:
                first[name] = folder
            else:
                second, top = folder, mount
    return first, second, top


def make_group(parent: pathlib.Path, name: str) -> pathlib.Path | None:
    """Makes a group and returns its folder; None if the kernel refuses."""
    try:
        (parent / name).mkdir()
    except OSError:
        return None
    return parent / name


def write_file(folder: pathlib.Path, file: str, value: object) -> bool:
    """Writes a value into a group's file; returns whether the kernel took it."""
    try:
        (folder / file).write_text(str(value))
    except OSError:
        return False
    return True


def counts_processes_apart() -> bool:
    """Whether RLIMIT_NPROC counts the users of each user namespace for themselves, as from Linux 5.14 on; until then one count is
    for all sandboxes."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


class Groups:
    """The groups of one sandbox.

    limits: controller -> how it is limited, of those that are. What cannot be had here is left out.
    """

    def __init__(self, *, memory_bytes: int, processes: int, cpus: float):
        self.limits: dict[str, str] = {}
        self._folders: dict[str, pathlib.Path] = {}
        self._commands: list[pathlib.Path] = []
        self._name = f"{mark()}{next(_numbers)}"
        first, second, top = hierarchies()
        _sweep(*first.values())
        quota = int(cpus * _PERIOD)
        self._try_version_1(first, memory_bytes, processes, quota)
        if not self._folders and second is not None:
            self._try_version_2(second, top, memory_bytes, processes, quota)

    def _try_version_1(self, parents, memory_bytes: int, processes: int, quota: int) -> None:
        settings = {
            "memory": {"memory.limit_in_bytes": memory_bytes},
            "pids": {"pids.max": processes},
            "cpu": {"cpu.cfs_period_us": _PERIOD, "cpu.cfs_quota_us": quota},
        }
        for controller, parent in parents.items():
            if folder := make_group(parent, self._name):
                self._folders[controller] = folder
                if all([write_file(folder, *item) for item in settings[controller].items()]):
                    self.limits[controller] = "cgroup v1"
                if controller == "memory":  # there only where swap is counted
                    write_file(folder, "memory.memsw.limit_in_bytes", memory_bytes)

    def _try_version_2(self, own, top, memory_bytes: int, processes: int, quota: int) -> None:
        settings = {
            "memory": ("memory.max", memory_bytes),
            "pids": ("pids.max", processes),
            "cpu": ("cpu.max", f"{quota} {_PERIOD}"),
        }
        # A group that holds processes cannot give controllers on, so the place may be further up.
        for parent in (own, *own.parents):
            _sweep(parent)
            offered = set((parent / "cgroup.controllers").read_text().split()) & {*CONTROLLERS}
            if {"memory", "pids"} <= offered:
                # In one write, so that it is all or nothing.
                wanted = " ".join(f"+{controller}" for controller in sorted(offered))
                write_file(parent, "cgroup.subtree_control", wanted)
            folder = make_group(parent, self._name)
            if folder and (folder / "memory.max").exists() and (folder / "pids.max").exists():
                self._folders = dict.fromkeys(CONTROLLERS, folder)
                write_file(folder, "memory.swap.max", 0)
                for controller, item in settings.items():
                    if write_file(folder, *item):
                        self.limits[controller] = "cgroup v2"
                return
            if folder:
                remove_group(folder)
            if parent == top:
                return

    def command(self) -> pathlib.Path | None:
        """A new group for a command; None where there are no groups of processes."""
        if "pids" not in self._folders:
            return None
        folder = self._folders["pids"] / f"command-{next(_numbers)}"
        folder.mkdir()
        self._commands.append(folder)
        return folder

    def joined_by(self, command: pathlib.Path | None) -> list[str]:
        """The files that a process of the command writes itself into."""
        folders = set(self._folders.values())
        if command is not None:
            folders = folders - {self._folders["pids"]} | {command}
        return [str(folder / "cgroup.procs") for folder in folders]

    def memory_kills(self) -> int:
        """How many processes have been ended for want of memory."""
        folder = self._folders.get("memory")
        if folder is None:
            return 0
        file = folder / "memory.events"
        file = file if file.exists() else folder / "memory.oom_control"
        counts = dict(line.split() for line in read_file(file).splitlines())
        return int(counts.get("oom_kill", 0))

    async def end(self, command: pathlib.Path, seconds: float) -> bool:
        """Kills all of the command's processes; whether they are gone within so many seconds."""
        write_file(command, "pids.max", 0)  # version 1 kills one by one: nothing new may come up
        whole = write_file(command, "cgroup.kill", 1)
        clock = asyncio.get_running_loop().time
        last = clock() + seconds
        while pids := read_file(command / "cgroup.procs").split():
            # Stopped first: a shell would go on to its next line when what it waits for is killed before it.
            for number in () if whole else (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    try:
                        os.kill(int(pid), number)
                    except ProcessLookupError:
                        pass
            if clock() > last:
                return False
            await asyncio.sleep(0.002)
        return True

    def tidy(self) -> list[pathlib.Path]:
        """Removes the groups of commands that nothing runs in any more; those that are left."""
        self._commands = [folder for folder in self._commands if not remove_group(folder)]
        return self._commands

    async def remove(self, seconds: float) -> list[str]:
        """Removes all groups, which takes until their processes are gone; what could not be."""
        clock = asyncio.get_running_loop().time
        last = clock() + seconds
        while True:
            for command in self.tidy():
                await self.end(command, 0)
            left = [*self.tidy()]
            left += [folder for folder in set(self._folders.values()) if not remove_group(folder)]
            if not left or clock() > last:
                return [str(folder) for folder in left]
            await asyncio.sleep(0.002)


def read_file(file: pathlib.Path) -> str:
    """Returns the text of a group's file; empty if the group is gone."""
    try:
        return file.read_text()
    except OSError:  # removed meanwhile
        return ""


def remove_group(folder: pathlib.Path) -> bool:
    """Removes a group; returns whether it is gone."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _sweep(*parents: pathlib.Path) -> None:
    """Removes the groups of processes that were killed before they could."""
    for parent in parents:
        for name in left_of(os.listdir(parent)):
            for command in (parent / name).glob("command-*"):
                remove_group(command)
            remove_group(parent / name)
