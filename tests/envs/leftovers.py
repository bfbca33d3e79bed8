"""What sandboxes make on the machine, counted from outside."""

import asyncio
import contextlib
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable

SECONDS = 120  # for one test; none takes a quarter of it on a quiet machine


def run(work):
    """The result of a coroutine, in an event loop of its own that must end in time."""
    return asyncio.run(asyncio.wait_for(work, SECONDS))


def processes_in(namespace: int) -> list[str]:
    """The processes, with their commands, in the process namespace of that inode."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if namespace_of(folder.name) == namespace:
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


async def first_process(box) -> int:
    """The number that a sandbox's first process has outside."""
    namespace = int((await box.exec("stat -Lc %i /proc/self/ns/pid")).stdout)
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            numbers = re.search(r"NSpid:(.*)", (folder / "status").read_text())[1].split()
            if numbers[-1] == "1" and os.stat(folder / "ns/pid").st_ino == namespace:
                return int(folder.name)
    raise AssertionError("the sandbox has no first process")


def descendants(top: int) -> dict[tuple[int, int], int]:
    """The processes below one, and itself: (number, ticks of its start), as bombs use numbers up and they are given
    again -> the process namespace that its children are to be in."""
    parents, found = {}, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            pid, (parent, start) = int(folder.name), origin_of(folder.name)
            found[pid, start] = namespace_of(pid)
            parents[pid] = parent
        except OSError:
            continue

    def is_below(pid):
        while pid in parents and pid != top:
            pid = parents[pid]
        return pid == top

    return {process: space for process, space in found.items() if is_below(process[0])}


def origin_of(pid: int | str) -> tuple[int, int]:
    """(its parent, ticks of its start); OSError if the process has ended."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def namespace_of(pid: int | str) -> int:
    """OSError if the process has ended."""
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def still_there(processes: Iterable[tuple[int, int]]) -> list[int]:
    """Of what `descendants` found those that have not ended."""
    found = []
    for pid, start in processes:
        with contextlib.suppress(OSError):
            found += [pid] if origin_of(pid)[1] == start else []
    return found


def namespaces(top: int | None = None) -> set[int]:
    """Process namespaces of the sandboxes of a process, or of this one."""
    own = namespace_of(os.getpid())
    return {*descendants(top or os.getpid()).values()} - {own}


def groups(maker: int | None = None) -> list[str]:
    """Control groups of the sandboxes of a process, or of this one."""
    mark = f"-{maker or os.getpid()}-"
    return sorted(
        os.path.join(place, name)
        for place, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith("glm5_jax-") and mark in name
    )


def folders(maker: int) -> list[str]:
    """Temporary folders of the sandboxes of a process."""
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
    """By kind, what was not there before. What has gone meanwhile is not told: Python closes at any time what an
    earlier test forgot."""
    now = all_that_sandboxes_make()
    return {kind: made for kind in now if (made := now[kind] - before[kind])}


def descriptors() -> set[tuple[str, str]]:
    """(number, what it is) of each open descriptor of this process."""
    found = set()
    for link in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add((link.name, os.readlink(link)))
    return found
