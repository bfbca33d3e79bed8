"""Control groups of version 2, in a tree of folders that obeys its rules; those of version 1 hold the sandboxes of other
tests."""

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
    """What the kernel does when a group is made, written to and removed (Documentation/admin-guide/cgroup-v2.rst).

    kills: whether it knows cgroup.kill, as from Linux 5.14 on.
    """

    def __init__(self, top: pathlib.Path, controllers: str = "cpu memory pids", kills: bool = True):
        self.top, self.kills = top, kills
        top.mkdir()
        self.fill(top, controllers)

    def fill(self, folder, controllers):
        given = {"cgroup.controllers": controllers, **FILES[""]}
        if self.kills and folder != self.top:
            given["cgroup.kill"] = ""
        for name in controllers.split() if folder != self.top else ():
            given |= FILES[name]
        for name, text in given.items():
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
            # Of all groups but the kernel's first: who holds processes gives no controllers on.
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
        """A process that is dead is in no group."""
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
    """Makes a tree in which this process is in a group, and has the code see it in place of the machine's."""

    def made(own: str = "", **options) -> tuple[Tree, pathlib.Path]:
        tree = Tree(tmp_path / "unified", **options)
        folder = tree.top
        for name in filter(None, own.split("/")):
            folder = tree.make(folder, name)
        (folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "cgroup").write_text(f"0::/{own}\n")
        (proc / "mountinfo").write_text(
            "22 1 0:20 / /proc rw,nosuid - proc proc rw\n"
            f"30 23 0:26 / {tree.top} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
        )
        found = cgroups.hierarchies(proc)
        monkeypatch.setattr(cgroups, "hierarchies", lambda: found)
        for name in ("make_group", "write_file", "read_file", "remove_group"):
            monkeypatch.setattr(cgroups, name, getattr(tree, name.partition("_")[0]))
        return tree, folder

    return made


def groups_below(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("glm5_jax-*"))


def said(folder: pathlib.Path, *names: str) -> list[str]:
    return [(folder / name).read_text() for name in names]


def test_a_sandbox_stands_beside_the_group_that_holds_processes(tree):
    """That one cannot give controllers on."""
    made, own = tree("system.slice/run.service")
    made.write(made.top, "cgroup.subtree_control", "+cpu +memory +pids")
    made.fill(made.top / "system.slice", "cpu memory pids")
    groups = Groups(**LIMITS)
    assert groups.limits == dict.fromkeys(("memory", "pids", "cpu"), "cgroup v2")
    [folder] = groups_below(made.top)
    assert folder.parent == own.parent and not groups_below(own)
    files = "memory.max", "memory.swap.max", "pids.max", "cpu.max"
    assert said(folder, *files) == [str(2**28), "0", "100", "50000 100000"]


def test_a_group_without_processes_is_the_place(tree):
    made, own = tree("work")
    made.write(made.top, "cgroup.subtree_control", "+cpu +memory +pids")
    made.fill(own, "cpu memory pids")
    assert Groups(**LIMITS).limits and groups_below(made.top)[0].parent == own
    assert said(own, "cgroup.subtree_control") == ["cpu memory pids"]


def test_without_processors_to_share_out_the_rest_is_limited(tree):
    made, _ = tree(controllers="memory pids")
    groups = Groups(**LIMITS)
    assert groups.limits == {"memory": "cgroup v2", "pids": "cgroup v2"}
    [folder] = groups_below(made.top)
    assert not (folder / "cpu.max").exists()


@pytest.mark.parametrize("controllers", ["", "cpu", "cpu memory", "cpu pids"])
def test_where_what_matters_cannot_be_limited_nothing_is_left(tree, controllers):
    made, _ = tree("a/b", controllers=controllers)
    groups = Groups(**LIMITS)
    assert groups.limits == {} and groups.command() is None and groups.procs_files(None) == []
    assert groups_below(made.top) == [] and groups.memory_kills() == 0


def test_where_others_may_limit_memory_alone_nothing_is_left(tree):
    made, _ = tree("a")
    made.write(made.top, "cgroup.subtree_control", "+memory")
    (made.top / "cgroup.controllers").write_text("memory")
    assert Groups(**LIMITS).limits == {} and groups_below(made.top) == []


def test_in_a_container_whose_top_holds_its_processes_nothing_is_left(tree, monkeypatch):
    """A container's top is none of the kernel's: it holds processes and gives nothing on."""
    made, _ = tree()
    made.top, top = pathlib.Path("/elsewhere"), made.top
    groups = Groups(**LIMITS)
    assert groups.limits == {} and groups_below(top) == []


def test_commands_have_groups_of_their_own_within(tree):
    made, _ = tree()
    groups = Groups(**LIMITS)
    [folder] = groups_below(made.top)
    one, two = groups.command(), groups.command()
    assert one.parent == two.parent == folder and one != two
    # One hierarchy: who joins the command is in the sandbox.
    assert groups.procs_files(one) == [str(one / "cgroup.procs")]
    for command in (one, two):
        made.fill(command, "")
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert groups.memory_kills() == 2
    (two / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert groups.tidy() == [two] and not one.exists()
    (two / "cgroup.procs").write_text("")
    assert asyncio.run(groups.remove(5)) == [] and not folder.exists()


@pytest.mark.parametrize("kills", [True, False])
def test_a_command_is_ended_with_all_that_it_started(tree, kills, monkeypatch):
    made, _ = tree(kills=kills)
    one_by_one = []
    monkeypatch.setattr(cgroups.os, "kill", lambda *given: one_by_one.append(given) or KILL(*given))
    groups = Groups(**LIMITS)
    command = groups.command()
    made.fill(command, "")
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        (command / "cgroup.procs").write_text("".join(f"{child.pid}\n" for child in started))
        assert asyncio.run(groups.end(command, 5))
        assert [child.wait(60) for child in started] == [-signal.SIGKILL] * 3
        assert not (kills and one_by_one), "the kernel alone kills all at one moment"
        assert asyncio.run(groups.remove(5)) == [] and groups_below(made.top) == []
    finally:
        for child in started:
            child.kill()
            child.wait()


def test_none_goes_on_when_another_is_killed(tree, tmp_path, monkeypatch):
    made, _ = tree(kills=False)
    command = (groups := Groups(**LIMITS)).command()
    made.fill(command, "")
    # Time enough to go on.
    monkeypatch.setattr(cgroups.os, "kill", lambda *given: KILL(*given) or time.sleep(0.1))
    text = f"sleep 60; echo > {tmp_path}/said; sleep 60"
    with subprocess.Popen(["sh", "-c", text]) as shell:
        inside = pathlib.Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        while not (children := inside.read_text().split()):
            time.sleep(0.01)
        # Numbers wrap round, so that a child may come before its parent.
        (command / "cgroup.procs").write_text("\n".join([*children, str(shell.pid)]))
        assert asyncio.run(groups.end(command, 5))
    assert not (tmp_path / "said").exists() and shell.returncode == -signal.SIGKILL


def test_groups_of_the_dead_are_swept_and_others_are_left(tree):
    """Beside the group that holds processes, where those of sandboxes stand."""
    made, own = tree("system.slice/run.service")
    made.write(made.top, "cgroup.subtree_control", "+cpu +memory +pids")
    made.fill(own.parent, "cpu memory pids")
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    mine = orphans.name_prefix()
    dead = made.make(own.parent, mine.replace(f"-{os.getpid()}-", f"-{gone.pid}-") + "0")
    alive = made.make(own.parent, f"{mine}of another thread")
    (made.make(dead, "command-0") / "cgroup.procs").write_text("")
    assert Groups(**LIMITS).limits
    assert not dead.exists() and alive.exists()


def test_which_group_is_whose(tmp_path):
    """Version 1 and 2 side by side; in a container the path may be the host's, which is not to be seen."""
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
