"""Lists processes, groups, mounts and files of sandboxes, seen from outside."""

import asyncio
import contextlib
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable

SECONDS = 120  # limit of one test; none takes a quarter of it on a quiet machine


def run(work):
    """Returns the result of a coroutine, run in a new event loop with a time limit."""
    return asyncio.run(asyncio.wait_for(work, SECONDS))


def processes_in(namespace: int) -> list[str]:
    """Returns the processes, with their commands, in the process namespace of that inode."""
    commands = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if namespace_of(folder.name) == namespace:
                commands.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
        except OSError:  # ended, or of another user
            continue
    return commands


async def first_process(box) -> int:
    """Returns the number that a sandbox's first process has outside."""
    namespace = int((await box.exec("stat -Lc %i /proc/self/ns/pid")).stdout)
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            numbers = re.search(r"NSpid:(.*)", (folder / "status").read_text())[1].split()
            if numbers[-1] == "1" and os.stat(folder / "ns/pid").st_ino == namespace:
                return int(folder.name)
    raise AssertionError("the sandbox has no first process")


def descendants(top: int) -> dict[tuple[int, int], int]:
    """Returns {(pid, ticks of its start): process namespace of its children} of a process and all below it.

    The start is needed because bombs use up numbers, which are then assigned again.
    """
    parents, namespace_by_process = {}, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            pid, (parent, start) = int(folder.name), origin_of(folder.name)
            namespace_by_process[pid, start] = namespace_of(pid)
            parents[pid] = parent
        except OSError:
            continue

    def is_below(pid):
        while pid in parents and pid != top:
            pid = parents[pid]
        return pid == top

    return {
        process: space for process, space in namespace_by_process.items() if is_below(process[0])
    }


def origin_of(pid: int | str) -> tuple[int, int]:
    """Returns (parent, ticks of its start). Raises OSError if the process has ended."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def namespace_of(pid: int | str) -> int:
    """Returns the process namespace. Raises OSError if the process has ended."""
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def running_processes(processes: Iterable[tuple[int, int]]) -> list[int]:
    """Returns the processes of `descendants` that have not ended."""
    running = []
    for pid, start in processes:
        with contextlib.suppress(OSError):
            running += [pid] if origin_of(pid)[1] == start else []
    return running


def namespaces(top: int | None = None) -> set[int]:
    """Returns the process namespaces of the sandboxes of a process, or of this one."""
    current = namespace_of(os.getpid())
    return {*descendants(top or os.getpid()).values()} - {current}


def groups(maker: int | None = None) -> list[str]:
    """Returns the control groups of the sandboxes of a process, or of this one."""
    mark = f"-{maker or os.getpid()}-"
    return sorted(
        os.path.join(place, name)
        for place, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith("glm5_jax-") and mark in name
    )


def folders(maker: int) -> list[str]:
    """Returns the temporary folders of the sandboxes of a process."""
    return sorted(name for name in os.listdir(tempfile.gettempdir()) if f"-{maker}-" in name)


def all_that_sandboxes_make() -> dict[str, set]:
    children = [
        task.read_text().split() for task in pathlib.Path("/proc/self/task").glob("*/children")
    ]
    return {
        "children": {pid for pids in children for pid in pids},
        "namespaces": namespaces(),
        "groups": {*groups()},
        "mounts": {*pathlib.Path("/proc/self/mounts").read_text().splitlines()},
        "folders": {*os.listdir(tempfile.gettempdir())},
        "descriptors": descriptors(),
    }


def made_since(before: dict[str, set]) -> dict[str, set]:
    """Returns by kind the items that did not exist before.

    Items that have disappeared do not count, because Python closes forgotten files of earlier tests at any time.
    """
    now = all_that_sandboxes_make()
    return {kind: items for kind in now if (items := now[kind] - before[kind])}


def descriptors() -> set[tuple[str, str]]:
    """Returns (number, target) of each open descriptor of this process."""
    targets = set()
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing
            targets.add((link.name, os.readlink(link)))
    return targets
