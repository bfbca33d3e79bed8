"""A sandbox leaves nothing, whatever ran in it and however it ended, and its neighbours are not affected."""

import asyncio
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from glm5_jax.envs.sandbox import (
    Sandbox,
    SandboxConfig,
    SandboxError,
    bubblewrap,
    run_python,
)
from glm5_jax.envs.sandbox.cgroups import Groups
from tests.envs.leftovers import (
    all_that_sandboxes_make,
    first_process,
    folders,
    groups,
    made_since,
    namespaces,
    origin_of,
    processes_in,
    run,
)
from tests.envs.terminal.folders import slow_but
from tests.envs.test_sandbox import root_only

pytestmark = pytest.mark.usefixtures("isolation", "nothing_left")
FORK_BOMB = """
    import os, time
    while True:
        try:
            if not os.fork():
                os.setsid()
        except OSError:
            time.sleep(0.01)
"""
MEMORY_HOG = """
    import os
    for _ in range(5):
        os.fork()
    kept = []
    while True:
        kept.append(bytearray(b"x" * 2**20))
"""
MUCH_OUTPUT = """
    import os
    for _ in range(300):
        os.write(1, bytes(2**20))
    print("end")
"""
DAEMONS = """
    import os, signal, time
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    for _ in range(10):
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            while True:
                open("/tmp/x", "a").write("x")
                time.sleep(0.01)
"""
FULL_DISK = """
    with open("/app/x", "wb") as file:
        while True:
            file.write(bytes(2**20))
"""
POISONS = [FORK_BOMB, MEMORY_HOG, MUCH_OUTPUT, DAEMONS, FULL_DISK]
CONFIG = SandboxConfig(timeout_s=4, memory_bytes=2**28, disk_bytes=2**27, max_processes=100)


async def run_poisoned(poison: str, stop_first: bool):
    async with Sandbox(CONFIG) as box:
        if stop_first:
            os.kill(await first_process(box), signal.SIGSTOP)
        return await box.exec(["python3", "-I", "-c", textwrap.dedent(poison)])


async def run_healthy(number: int):
    start = time.monotonic()
    for _ in range(3):
        result = await run_python(f"print({number} + sum(range(10**5)))")
        assert (result.code, result.stdout) == (0, b"%d\n" % (number + 4999950000)), result
    return time.monotonic() - start


@pytest.mark.slow
def test_poisoned_sandboxes_do_not_affect_neighbours():
    """Acceptance check 28 of the specification."""

    async def work():
        bad = [
            asyncio.create_task(run_poisoned(poison, stop_first))
            for poison, stop_first in [*((poison, False) for poison in POISONS), (DAEMONS, True)]
        ]
        await asyncio.sleep(0.5)
        times = await asyncio.gather(*(run_healthy(number) for number in range(4)))
        return await asyncio.gather(*bad), times

    (bomb, hog, output, daemons, disk, stopped), times = run(work())
    assert bomb.timed_out and bomb.code == 137
    assert hog.code != 0
    assert output.truncated and len(output.stdout) == CONFIG.output_bytes
    assert daemons.code == stopped.code == 0
    assert disk.code == 1 and b"No space left" in disk.stderr
    assert max(times) < 30  # each started, ran and ended three sandboxes


def test_detects_parts_of_running_sandbox():
    """Shows that the checks of the other tests can detect something."""

    async def work():
        before = all_that_sandboxes_make()
        async with Sandbox() as box:
            await box.exec("sleep 1007 >/dev/null 2>&1 &")
            (namespace,) = namespaces()
            inside = processes_in(namespace)
            layer = await box.snapshot()
            during = made_since(before)
        layer.remove()
        return inside, during, processes_in(namespace)

    inside, during, after = run(work())
    assert len(inside) == 2 and "1007" in "".join(inside) and after == []
    assert {*during} >= {"children", "namespaces", "folders", "descriptors"}
    assert os.getuid() != 0 or "groups" in during


def test_ignores_files_of_earlier_tests(tmp_path):
    """Python closes files whenever it collects garbage, so counts before and after differ."""
    forgotten = open(tmp_path / "forgotten", "w")
    before = all_that_sandboxes_make()
    forgotten.close()
    assert made_since(before) == {}
    with open(tmp_path / "own", "w") as file:
        assert made_since(before) == {"descriptors": {(str(file.fileno()), file.name)}}


@pytest.mark.parametrize(
    "stage", slow_but(["start", "exec"], ["start", "exec", "put", "save", "snapshot"])
)
def test_cancelled_sandbox_leaves_nothing(stage):
    """Cancels at moments from the first system call to the last; nothing_left checks afterwards."""
    rng = random.Random(stage)

    async def use_sandbox(started):
        async with Sandbox() as box:
            started.set()
            if stage == "exec":
                await box.exec("setsid sleep 1008 & sleep 1008")
            elif stage == "put":
                await box.put("/app/x", bytes(30_000_000))
            elif stage == "save":
                await box.exec("head -c 30000000 /dev/urandom > x")
                with tempfile.TemporaryFile() as file:
                    await box.save("/app", file, 10**8)
            elif stage == "snapshot":
                await box.exec("head -c 30000000 /dev/zero > x")
                (await box.snapshot()).remove()
            else:
                started.clear()

    async def work():
        cancelled = 0
        for number in range(12):
            started = asyncio.Event()
            task = asyncio.create_task(use_sandbox(started))
            if stage != "start":
                await started.wait()
            await asyncio.sleep(rng.uniform(0, 0.09) if number else 0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()  # an impatient caller
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
        return cancelled

    assert run(work()) > 0


def test_raises_exception_of_block_and_leaves_nothing():
    async def work():
        async with Sandbox() as box:
            await box.exec("sleep 1009 >/dev/null 2>&1 &")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(work())


def test_asyncio_timeout_ends_command():
    async def work():
        async with Sandbox() as box:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await box.exec("setsid sleep 1010 & sleep 1010")
            return await box.exec("pgrep -fc 'sleep 101[0]'")

    assert run(work()).stdout == b"0\n"


@root_only
def test_ends_sandbox_with_stopped_first_process():
    async def work():
        start = time.monotonic()
        async with Sandbox() as box:
            await box.exec("sleep 1011 >/dev/null 2>&1 &", user="root")
            os.kill(await first_process(box), signal.SIGSTOP)
            (namespace,) = namespaces()
        return processes_in(namespace), time.monotonic() - start

    left, took = run(work())
    assert left == [] and took < 10


def test_sandbox_ends_with_killed_bubblewrap():
    async def work():
        async with Sandbox() as box:
            await box.exec("sleep 1012 >/dev/null 2>&1 &")
            (namespace,) = namespaces()
            bubblewrap, _ = origin_of(await first_process(box))
            os.kill(bubblewrap, signal.SIGKILL)
            for _ in range(200):
                if not processes_in(namespace):
                    return True
                await asyncio.sleep(0.02)

    assert run(work())


OWNER = """
    import asyncio
    from glm5_jax.envs.sandbox import Sandbox

    async def main():
        async with Sandbox() as box:
            await box.snapshot()
            await box.exec("setsid sleep 1013 >/dev/null 2>&1 &")
            print("running", flush=True)
            await box.exec("sleep 1013", timeout_s=1000)

    asyncio.run(main())
"""


def test_killed_process_ends_sandboxes_and_next_one_sweeps(plain_env):
    command = [sys.executable, "-c", textwrap.dedent(OWNER)]
    env = plain_env | {"TMPDIR": tempfile.gettempdir()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as owner:
        assert owner.stdout.readline() == b"running\n"
        time.sleep(0.3)
        group_names, left = groups(owner.pid), folders(owner.pid)
        (namespace,) = namespaces()
        assert len(processes_in(namespace)) == 4
        owner.kill()
    for _ in range(500):
        if not processes_in(namespace):
            break
        time.sleep(0.02)
    assert processes_in(namespace) == []

    async def take_snapshot():
        async with Sandbox() as box:
            (await box.snapshot()).remove()

    assert run(run_python("print(1)")).stdout == b"1\n"
    assert groups(owner.pid) == [] and folders(owner.pid) == left != []
    run(take_snapshot())
    assert folders(owner.pid) == []
    assert group_names or os.getuid() != 0


SLOW_START = """
    import asyncio
    from glm5_jax.envs.sandbox import Sandbox, bubblewrap

    launch = bubblewrap.launch_task
    bubblewrap.launch_task = lambda *arguments: launch(*arguments) | {"command": ["/bin/sleep", "1014"]}
    asyncio.run(Sandbox().start())
"""


@pytest.mark.slow
def test_starting_sandbox_ends_with_killed_process(plain_env):
    """Kills before bubblewrap, which later ends with its parent, has started."""
    command = [sys.executable, "-c", textwrap.dedent(SLOW_START)]
    with subprocess.Popen(command, env=plain_env) as owner:
        while not (sleepers := sleepers_of(owner.pid)):
            assert owner.poll() is None
            time.sleep(0.01)
        owner.kill()
    [sandbox] = sleepers
    for _ in range(500):
        if not sandbox.exists():
            break
        time.sleep(0.02)
    assert not sandbox.exists()


def sleepers_of(pid: int) -> list[pathlib.Path]:
    """Returns children of a process that have become the fake bubblewrap."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    processes = [pathlib.Path("/proc", child) for child in children]
    return [path for path in processes if b"1014" in (path / "cmdline").read_bytes()]


def test_sandbox_without_caller_does_not_start(monkeypatch):
    """No process would end it."""
    launch = bubblewrap.launch_task
    monkeypatch.setattr(bubblewrap, "launch_task", lambda *args: launch(*args) | {"caller": 1})
    with pytest.raises(SandboxError, match="its caller is gone"):
        run(Sandbox().start())


def test_reports_remains_and_keeps_result(monkeypatch, caplog):
    remove = Groups.remove

    async def report_remains(groups, seconds):
        return [*await remove(groups, seconds), "/a/group"]

    monkeypatch.setattr(Groups, "remove", report_remains)
    assert run(run_python("print(1)")).stdout == b"1\n"
    assert "could not be removed completely: /a/group is left" in caplog.text


def test_makes_no_temporary_folder(tmp_path):
    async def work():
        async with Sandbox() as box:
            await box.exec("echo x > /tmp/x")
            return list(pathlib.Path(tmp_path).rglob("*"))

    assert run(work()) == [tmp_path / "temporary"]
    assert groups() == []
