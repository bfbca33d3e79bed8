"""What sandboxes make on the machine, counted from outside."""

import asyncio
import os
import pathlib
import tempfile

SECONDS = 120  # for one test; none takes a quarter of it on a quiet machine


def run(work):
    """The result of a coroutine, in an event loop of its own that must end in time."""
    return asyncio.run(asyncio.wait_for(work, SECONDS))


def processes_in(namespace: int) -> list[str]:
    """The processes, with their commands, in the process namespace of that inode."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.stat(folder / "ns/pid").st_ino == namespace:
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def namespaces() -> set[int]:
    """Process namespaces that this process's descendants are in, or children are to be in."""
    own, parents = os.stat("/proc/self/ns/pid").st_ino, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents[int(folder.name)] = parent, os.stat(folder / "ns/pid").st_ino
        except OSError:
            continue
    found = set()
    for pid, (_, namespace) in parents.items():
        ancestor = pid
        while ancestor in parents and ancestor != os.getpid():
            ancestor = parents[ancestor][0]
        if ancestor == os.getpid() and namespace != own:
            found.add(namespace)
    return found


def groups() -> list[str]:
    """Control groups of this process's sandboxes."""
    mark = f"-{os.getpid()}-"
    return sorted(
        os.path.join(place, name)
        for place, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith("glm5_jax-") and mark in name
    )


def all_that_sandboxes_make() -> dict[str, object]:
    children = [
        task.read_text().split() for task in pathlib.Path("/proc/self/task").glob("*/children")
    ]
    return {
        "children": sorted(pid for pids in children for pid in pids),
        "namespaces": namespaces(),
        "groups": groups(),
        "mounts": pathlib.Path("/proc/self/mounts").read_text(),
        "folders": sorted(os.listdir(tempfile.gettempdir())),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
