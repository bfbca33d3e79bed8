"""Control groups of version 2, in a tree of folders that obeys its rules. Version 1 is covered by the sandbox tests."""

import asyncio
import os
import pathlib
import signal
import subprocess
import time

import pytest

from glm5_jax.envs.sandbox import cgroups, orphans
from glm5_jax.envs.sandbox.cgroups import Groups

FILES = {
    "": {"cgroup.procs": "", "cgroup.subtree_control": ""},
    "memory": {
        "memory.max": "max",
        "memory.swap.max": "max",
        "memory.events": "oom 0\noom_kill 0\n",
    },
    "pids": {"pids.max": "max"},
    "cpu": {"cpu.max": "max 100000"},
}
KILL = os.kill
LIMITS = {"memory_bytes": 2**28, "processes": 100, "cpus": 0.5}


class Tree:
    """Model of the kernel when a group is made, written or removed (Documentation/admin-guide/cgroup-v2.rst).

    kills: True if it has cgroup.kill, as Linux has since 5.14.
    """

    def __init__(self, top: pathlib.Path, controllers: str = "cpu memory pids", kills: bool = True):
        self.top, self.kills = top, kills
        top.mkdir()
        self.fill(top, controllers)

    def fill(self, folder, controllers):
        contents = {"cgroup.controllers": controllers, **FILES[""]}
        if self.kills and folder != self.top:
            contents["cgroup.kill"] = ""
        for name in controllers.split() if folder != self.top else ():
            contents |= FILES[name]
        for name, text in contents.items():
            (folder / name).write_text(text)

    def make(self, parent, name):
        if (parent / name).exists():
            return None
        (parent / name).mkdir()
        self.fill(parent / name, (parent / "cgroup.subtree_control").read_text())
        return parent / name

    def write(self, folder, file, value):
        if not (folder / file).exists():
            return False
        if file == "cgroup.subtree_control":
            wanted = [name.removeprefix("+") for name in value.split()]
            offered = (folder / "cgroup.controllers").read_text().split()
            full = (folder / "cgroup.procs").read_text() and folder != self.top
            # Except for the kernel's root, a group with processes delegates no controllers.
            if full or not set(wanted) <= {*offered}:
                return False
            value = " ".join(wanted)
        if file == "cgroup.kill":
            for procs in folder.rglob("cgroup.procs"):
                for pid in self.read(procs).split():
                    KILL(int(pid), signal.SIGKILL)
            return True
        (folder / file).write_text(str(value))
        return True

    def read(self, file):
        """Returns the text of a file; dead processes are in no group."""
        text = file.read_text() if file.exists() else ""
        if file.name == "cgroup.procs":
            return "".join(f"{pid}\n" for pid in text.split() if is_alive(int(pid)))
        return text

    def remove(self, folder):
        if not folder.exists():
            return True
        inside = [path for path in folder.iterdir() if path.is_dir()]
        if inside or self.read(folder / "cgroup.procs"):
            return False
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        return True


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Returns a function that makes a tree with this process in a group, and uses it in place of the machine's."""

    def make_tree(path: str = "", **options) -> tuple[Tree, pathlib.Path]:
        tree = Tree(tmp_path / "unified", **options)
        folder = tree.top
        for name in filter(None, path.split("/")):
            folder = tree.make(folder, name)
        (folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "cgroup").write_text(f"0::/{path}\n")
        (proc / "mountinfo").write_text(
            "22 1 0:20 / /proc rw,nosuid - proc proc rw\n"
            f"30 23 0:26 / {tree.top} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
        )
        hierarchies = cgroups.hierarchies(proc)
        monkeypatch.setattr(cgroups, "hierarchies", lambda: hierarchies)
        for name in ("make_group", "write_file", "read_file", "remove_group"):
            monkeypatch.setattr(cgroups, name, getattr(tree, name.partition("_")[0]))
        return tree, folder

    return make_tree


def groups_below(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("glm5_jax-*"))


def read_files(folder: pathlib.Path, *names: str) -> list[str]:
    return [(folder / name).read_text() for name in names]


def test_makes_group_next_to_group_with_processes(tree):
    """A group with processes cannot delegate controllers."""
    hierarchy, current = tree("system.slice/run.service")
    hierarchy.write(hierarchy.top, "cgroup.subtree_control", "+cpu +memory +pids")
    hierarchy.fill(hierarchy.top / "system.slice", "cpu memory pids")
    groups = Groups(**LIMITS)
    assert groups.limits == dict.fromkeys(("memory", "pids", "cpu"), "cgroup v2")
    [folder] = groups_below(hierarchy.top)
    assert folder.parent == current.parent and not groups_below(current)
    files = "memory.max", "memory.swap.max", "pids.max", "cpu.max"
    assert read_files(folder, *files) == [str(2**28), "0", "100", "50000 100000"]


def test_makes_group_inside_group_without_processes(tree):
    hierarchy, current = tree("work")
    hierarchy.write(hierarchy.top, "cgroup.subtree_control", "+cpu +memory +pids")
    hierarchy.fill(current, "cpu memory pids")
    assert Groups(**LIMITS).limits and groups_below(hierarchy.top)[0].parent == current
    assert read_files(current, "cgroup.subtree_control") == ["cpu memory pids"]


def test_limits_memory_and_processes_without_cpu_controller(tree):
    hierarchy, _ = tree(controllers="memory pids")
    groups = Groups(**LIMITS)
    assert groups.limits == {"memory": "cgroup v2", "pids": "cgroup v2"}
    [folder] = groups_below(hierarchy.top)
    assert not (folder / "cpu.max").exists()


@pytest.mark.parametrize("controllers", ["", "cpu", "cpu memory", "cpu pids"])
def test_leaves_no_group_without_required_controllers(tree, controllers):
    hierarchy, _ = tree("a/b", controllers=controllers)
    groups = Groups(**LIMITS)
    assert groups.limits == {} and groups.command() is None and groups.procs_files(None) == []
    assert groups_below(hierarchy.top) == [] and groups.memory_kills() == 0


def test_leaves_no_group_if_only_memory_is_delegated(tree):
    hierarchy, _ = tree("a")
    hierarchy.write(hierarchy.top, "cgroup.subtree_control", "+memory")
    (hierarchy.top / "cgroup.controllers").write_text("memory")
    assert Groups(**LIMITS).limits == {} and groups_below(hierarchy.top) == []


def test_leaves_no_group_in_container_with_processes_at_top(tree, monkeypatch):
    """A container's top group is not the kernel's root: it has processes and delegates nothing."""
    hierarchy, _ = tree()
    hierarchy.top, top = pathlib.Path("/elsewhere"), hierarchy.top
    groups = Groups(**LIMITS)
    assert groups.limits == {} and groups_below(top) == []


def test_commands_have_separate_groups(tree):
    hierarchy, _ = tree()
    groups = Groups(**LIMITS)
    [folder] = groups_below(hierarchy.top)
    one, two = groups.command(), groups.command()
    assert one.parent == two.parent == folder and one != two
    # With one hierarchy, a process that joins the command's group is in the sandbox.
    assert groups.procs_files(one) == [str(one / "cgroup.procs")]
    for command in (one, two):
        hierarchy.fill(command, "")
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert groups.memory_kills() == 2
    (two / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert groups.tidy() == [two] and not one.exists()
    (two / "cgroup.procs").write_text("")
    assert asyncio.run(groups.remove(5)) == [] and not folder.exists()


@pytest.mark.parametrize("kills", [True, False])
def test_ends_command_with_all_its_processes(tree, kills, monkeypatch):
    hierarchy, _ = tree(kills=kills)
    one_by_one = []
    monkeypatch.setattr(cgroups.os, "kill", lambda *args: one_by_one.append(args) or KILL(*args))
    groups = Groups(**LIMITS)
    command = groups.command()
    hierarchy.fill(command, "")
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        (command / "cgroup.procs").write_text("".join(f"{child.pid}\n" for child in started))
        assert asyncio.run(groups.end(command, 5))
        assert [child.wait(60) for child in started] == [-signal.SIGKILL] * 3
        assert not (kills and one_by_one), "the kernel alone kills all at one moment"
        assert asyncio.run(groups.remove(5)) == [] and groups_below(hierarchy.top) == []
    finally:
        for child in started:
            child.kill()
            child.wait()


def test_no_process_continues_while_group_is_killed(tree, tmp_path, monkeypatch):
    hierarchy, _ = tree(kills=False)
    command = (groups := Groups(**LIMITS)).command()
    hierarchy.fill(command, "")
    # Enough time for another process to continue.
    monkeypatch.setattr(cgroups.os, "kill", lambda *args: KILL(*args) or time.sleep(0.1))
    text = f"sleep 60; echo > {tmp_path}/said; sleep 60"
    with subprocess.Popen(["sh", "-c", text]) as shell:
        inside = pathlib.Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        while not (children := inside.read_text().split()):
            time.sleep(0.01)
        # Numbers wrap around, so a child may have a lower number than its parent.
        (command / "cgroup.procs").write_text("\n".join([*children, str(shell.pid)]))
        assert asyncio.run(groups.end(command, 5))
    assert not (tmp_path / "said").exists() and shell.returncode == -signal.SIGKILL


def test_removes_only_groups_of_dead_processes(tree):
    """Next to the group of this process, where the groups of sandboxes are."""
    hierarchy, current = tree("system.slice/run.service")
    hierarchy.write(hierarchy.top, "cgroup.subtree_control", "+cpu +memory +pids")
    hierarchy.fill(current.parent, "cpu memory pids")
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    mine = orphans.name_prefix()
    dead = hierarchy.make(current.parent, mine.replace(f"-{os.getpid()}-", f"-{gone.pid}-") + "0")
    alive = hierarchy.make(current.parent, f"{mine}of another thread")
    (hierarchy.make(dead, "command-0") / "cgroup.procs").write_text("")
    assert Groups(**LIMITS).limits
    assert not dead.exists() and alive.exists()


def test_finds_groups_of_each_version(tmp_path):
    """Versions 1 and 2 together; in a container the path may be the host's, which is invisible."""
    for name in ("memory/own", "cpu", "unified/own"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "cgroup").write_text(
        "4:memory:/box/own\n3:cpu,cpuacct:/host/path\n1:name=systemd:/x\n0::/own\n"
    )
    (tmp_path / "mountinfo").write_text(
        f"31 1 0:27 / {tmp_path} rw - tmpfs tmpfs rw\n"
        f"32 31 0:28 /box {tmp_path}/memory rw shared:1 - cgroup cgroup rw,memory\n"
        f"33 31 0:29 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"34 31 0:30 / {tmp_path}/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
        f"35 31 0:31 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
    )
    first, second, top = cgroups.hierarchies(tmp_path)
    assert first == {"memory": tmp_path / "memory/own", "cpu": tmp_path / "cpu"}
    assert (second, top) == (tmp_path / "unified/own", tmp_path / "unified")
