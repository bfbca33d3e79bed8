"""Manages the control groups of sandboxes, version 1 or 2, whichever has the controllers on this machine.

A sandbox has one group per controller, with its limits, and one group for each command. Killing a command's
group ends everything that the command started: a process can leave its session and its parent, but not its
group.
"""

import asyncio
import itertools
import os
import pathlib
import re
import signal

from glm5_jax.envs.sandbox.orphans import find_orphans, name_prefix

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD = 100_000  # microseconds, the kernel's default; the sandbox gets its share of each period
_numbers = itertools.count()


def hierarchies(
    proc: pathlib.Path = pathlib.Path("/proc/self"),
) -> tuple[dict[str, pathlib.Path], pathlib.Path | None, pathlib.Path | None]:
    """Returns a process's groups of version 1, by controller, and its group and the mount of version 2."""
    paths = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths.update((name, path) for name in names.split(","))
    first, second, top = {}, None, None
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, (kind, _, options, *_) = (part.split() for part in line.partition(" - "))
        root, mount = fields[3], pathlib.Path(fields[4])
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in {*names} & {"", *CONTROLLERS}:
            # In a container the path may be the host's, which is not visible here.
            folder = mount / os.path.relpath(paths.get(name, "/"), root)
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


def has_process_limit_per_namespace() -> bool:
    """Returns whether RLIMIT_NPROC is counted per user namespace.

    Linux 5.14 and newer do so; older ones have one count for all sandboxes.
    """
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


class Groups:
    """Control groups of one sandbox.

    Attributes:
      limits: controller -> how it is limited; controllers that are not available are left out.
    """

    def __init__(self, *, memory_bytes: int, processes: int, cpus: float):
        self.limits: dict[str, str] = {}
        self._folders: dict[str, pathlib.Path] = {}
        self._commands: list[pathlib.Path] = []
        self._name = f"{name_prefix()}{next(_numbers)}"
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
                if controller == "memory":  # the file exists only if swap is counted
                    write_file(folder, "memory.memsw.limit_in_bytes", memory_bytes)

    def _try_version_2(self, group, top, memory_bytes: int, processes: int, quota: int) -> None:
        settings = {
            "memory": ("memory.max", memory_bytes),
            "pids": ("pids.max", processes),
            "cpu": ("cpu.max", f"{quota} {_PERIOD}"),
        }
        # A group that holds processes cannot delegate controllers, so a parent may have to be used.
        for parent in (group, *group.parents):
            _sweep(parent)
            offered = set((parent / "cgroup.controllers").read_text().split()) & {*CONTROLLERS}
            if {"memory", "pids"} <= offered:
                # In one write, so that all or none are enabled.
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
        """Makes a group for a command; returns None if process groups are not available."""
        if "pids" not in self._folders:
            return None
        folder = self._folders["pids"] / f"command-{next(_numbers)}"
        folder.mkdir()
        self._commands.append(folder)
        return folder

    def procs_files(self, command: pathlib.Path | None) -> list[str]:
        """Returns the files that a process of the command writes itself into."""
        folders = set(self._folders.values())
        if command is not None:
            folders = folders - {self._folders["pids"]} | {command}
        return [str(folder / "cgroup.procs") for folder in folders]

    def memory_kills(self) -> int:
        """Returns the number of processes that were killed for lack of memory."""
        folder = self._folders.get("memory")
        if folder is None:
            return 0
        file = folder / "memory.events"
        file = file if file.exists() else folder / "memory.oom_control"
        counts = dict(line.split() for line in read_file(file).splitlines())
        return int(counts.get("oom_kill", 0))

    def refused_processes(self) -> dict[pathlib.Path, int]:
        """Returns how many processes the limit on their number refused, by group.

        Kernels differ in whether they count them in the limited group or in that of the parent process.
        """
        folder = self._folders.get("pids")
        counts = {}
        for group in [folder, *self._commands] if folder else []:
            words = read_file(group / "pids.events").split()
            counts[group] = int(words[1]) if words[:1] == ["max"] else 0
        return counts

    async def end(self, command: pathlib.Path, timeout_s: float) -> bool:
        """Kills all processes of the command; returns whether they are gone within the time limit."""
        write_file(command, "pids.max", 0)  # version 1 kills one by one, so nothing new may start
        killed_at_once = write_file(command, "cgroup.kill", 1)
        clock = asyncio.get_running_loop().time
        last = clock() + timeout_s
        while pids := read_file(command / "cgroup.procs").split():
            # Stopped first, because a shell would run its next line when the command it waits for is killed before it.
            for number in () if killed_at_once else (signal.SIGSTOP, signal.SIGKILL):
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
        """Removes the groups of commands without processes; returns those that remain."""
        self._commands = [folder for folder in self._commands if not remove_group(folder)]
        return self._commands

    async def remove(self, timeout_s: float) -> list[str]:
        """Removes all groups after their processes have ended; returns those that could not be removed."""
        clock = asyncio.get_running_loop().time
        last = clock() + timeout_s
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
    """Removes the groups that killed processes left."""
    for parent in parents:
        for name in find_orphans(os.listdir(parent)):
            for command in (parent / name).glob("command-*"):
                remove_group(command)
            remove_group(parent / name)
