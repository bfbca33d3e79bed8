"""Functions of a sandbox for its caller: commands, limits, files, layers."""

import asyncio
import os
import shutil
import stat
import subprocess
import time

import pytest

from glm5_jax.envs import sandbox
from glm5_jax.envs.sandbox import (
    Layer,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
    run_python,
)
from glm5_jax.envs.sandbox.cgroups import has_process_limit_per_namespace
from tests.envs.leftovers import first_process, run

pytestmark = pytest.mark.usefixtures("isolation", "nothing_left")
MIB = 1 << 20
root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs users and groups that only root has")


def in_box(work, **config):
    """Returns the result of `work(box)` in a new sandbox."""

    async def run_work():
        async with Sandbox(SandboxConfig(**config)) as box:
            return await work(box)

    return run(run_work())


def execute(command, config=None, **options):
    return in_box(lambda box: box.exec(command, **options), **(config or {}))


@pytest.mark.parametrize(
    ("command", "code", "stdout", "stderr"),
    [
        (["printf", "%s|", "a b", "$HOME"], 0, b"a b|$HOME|", b""),
        ("printf out; printf err >&2; exit 7", 7, b"out", b"err"),
        ("kill -TERM $$", 128 + 15, b"", b""),
        (["python3", "-I", "-c", "import os; os.abort()"], 128 + 6, b"", b""),
        (["no-such-program"], 127, b"", b"sandbox: no-such-program: not found\n"),
        (["/etc/passwd"], 126, b"", b"sandbox: /etc/passwd: Permission denied\n"),
        (["echo", "\0"], 126, b"", b"sandbox: embedded null byte\n"),
    ],
)
def test_returns_exit_code_and_output(command, code, stdout, stderr):
    result = execute(command)
    assert (result.code, result.stdout, result.stderr) == (code, stdout, stderr)
    assert not (result.timed_out or result.truncated or result.out_of_memory)


def test_sets_folder_environment_and_user():
    result = execute(
        "pwd; cat; echo $A $B $USER; umask; ulimit -c; id -u",
        {"env": {"A": "1", "B": "1"}},
        cwd="/tmp",
        env={"B": "2"},
        stdin=b"given\n",
        user="root",
    )
    assert result.stdout.decode().split() == ["/tmp", "given", "1", "2", "root", "0022", "0", "0"]
    assert execute("pwd", {"workdir": "/srv/x"}).stdout == b"/srv/x\n"
    missing = execute("pwd", cwd="/missing")
    assert (missing.code, missing.stderr) == (127, b"sandbox: /missing: not found\n")


@root_only
def test_agent_is_no_root_and_root_can_change_users():
    result = execute("id -un; touch /etc/mine || echo refused")
    assert result.stdout == b"agent\nrefused\n"
    text = "touch /etc/mine && chown agent:nogroup /etc/mine && stat -c %U:%G /etc/mine; "
    text += "setpriv --reuid=agent --clear-groups sh -c 'id -un; touch /etc/yours || echo refused'"
    assert execute(text, user="root").stdout == b"agent:nogroup\nagent\nrefused\n"


def test_accepts_large_and_unread_input():
    data = bytes(range(256)) * 40_000
    assert execute("sha256sum | head -c 64", stdin=data).stdout.decode() == sha256(data)
    assert execute("exit 0", stdin=data).code == 0


def sha256(data: bytes) -> str:
    return subprocess.run(["sha256sum"], input=data, capture_output=True).stdout[:64].decode()


def test_reports_argument_that_is_too_long():
    result = execute(["echo", "x" * 200_000])
    assert (result.code, result.stderr) == (
        126,
        b"sandbox: /usr/bin/echo: Argument list too long\n",
    )


def test_timeout_ends_only_processes_of_command():
    async def work(box):
        await box.exec("sleep 1001 >/dev/null 2>&1 &")
        start = time.monotonic()
        text = "printf early; setsid sleep 1002 & (setsid sleep 1002 &) ; trap '' TERM; sleep 1002"
        result = await box.exec(text, timeout_s=0.3)
        took = time.monotonic() - start
        counts = [(await box.exec(f"pgrep -fc 'sleep {n}'")).stdout for n in ("100[1]", "100[2]")]
        return result, took, counts, box.limits["time"]

    result, took, (before, during), means = in_box(work)
    assert result.timed_out and result.code == 137 and result.stdout == b"early"
    assert 0.3 <= took < 10
    assert during == b"0\n"
    if means == "ends all that the command started":
        assert before == b"1\n"


@pytest.mark.slow
def test_timeout_before_start_of_program():
    async def work(box):
        results = [
            await box.exec("sleep 1003", timeout_s=after / 1000) for after in range(1, 60, 4)
        ]
        return results, await box.exec("pgrep -fc 'sleep 100[3]'")

    results, left = in_box(work)
    assert all(result.timed_out for result in results)
    assert left.stdout == b"0\n"


def test_background_program_does_not_delay_command():
    async def work(box):
        start = time.monotonic()
        result = await box.exec("echo on; sleep 1004 &")
        return result, time.monotonic() - start, await box.exec("pgrep -fc 'sleep 100[4]'")

    result, took, count = in_box(work)
    assert result.stdout == b"on\n" and took < 10
    assert count.stdout == b"1\n"


def test_truncates_output_per_stream():
    text = "head -c 1000 /dev/zero; head -c 1000 /dev/zero >&2"
    result = execute(text, {"output_bytes": 1000})
    assert not result.truncated and len(result.stdout) == len(result.stderr) == 1000
    result = execute("printf abcdef; echo >&2", {"output_bytes": 5})
    assert result.truncated and (result.stdout, result.stderr) == (b"abcde", b"\n")
    result = execute("head -c 100000000 /dev/zero; exit 5", {"output_bytes": 10})
    assert result.truncated and (len(result.stdout), result.code) == (10, 5)


def test_keeps_end_of_truncated_output():
    limits = {"output_bytes": 10, "end_bytes": 5}
    result = execute("seq 1 1000000; echo 0123456789 >&2", limits)
    assert (result.stdout, result.stdout_end) == (b"1\n2\n3\n4\n5\n", b"0000\n")
    assert (result.stderr, result.stderr_end) == (b"0123456789", b"\n")
    result = execute("printf 0123456789ab", limits)
    assert (result.stdout, result.stdout_end, result.stderr_end) == (b"0123456789", b"ab", b"")
    result = execute("seq 1 9999", {**limits, "end_bytes": 0})
    assert result.truncated and result.stdout_end == b""


def test_limits_memory_and_continues():
    hog = [
        "python3",
        "-I",
        "-c",
        "x = [bytearray(b'x' * 2**20) for _ in range(400)]; print(len(x))",
    ]

    async def work(box):
        return await box.exec(hog), await box.exec("echo on"), box.limits["memory"]

    bad, good, means = in_box(work, memory_bytes=200 * MIB)
    assert bad.code != 0 and bad.stdout == b""
    assert bad.out_of_memory == means.startswith("cgroup")
    assert (good.code, good.out_of_memory) == (0, False)
    assert execute(hog).stdout == b"400\n"


def test_reports_that_processes_of_other_users_use_up_limit():
    async def work(box):
        fork = "i=0; while [ $i -lt %d ]; do sleep 30 & i=$((i+1)); done"
        few = await box.exec(fork % 20, user="agent")
        return few, await box.exec(fork % 30, user="root"), box.limits["processes"]

    few, many, means = in_box(work, max_processes=40)
    assert not few.out_of_processes
    assert many.out_of_processes == means.startswith("cgroup")


def test_limits_number_of_processes():
    text = "i=0; while [ $i -lt 60 ]; do sleep 30 & i=$((i+1)); done; echo all"
    assert b"all" not in execute(text, {"max_processes": 40}).stdout
    assert execute(text, {"max_processes": 80}).stdout == b"all\n"
    if has_process_limit_per_namespace():  # refused by its limit, a fork costs next to nothing
        limit = "import resource; print(*resource.getrlimit(resource.RLIMIT_NPROC))"
        assert execute(["python3", "-c", limit], {"max_processes": 80}).stdout == b"80 80\n"


def test_reaps_orphaned_processes():
    text = "for i in $(seq 100); do (true &); done; echo all"
    result = execute(text + "; sleep 0.1; ps -A | grep -c defunct", {"max_processes": 40})
    assert result.stdout == b"all\n0\n", result.stderr


def test_limits_bytes_and_files_of_disk():
    fill = "head -c 30000000 /dev/zero > {}; echo $?"
    for place in ("/app/x", "/tmp/x", "/dev/shm/x"):
        assert execute(fill.format(place), {"disk_bytes": 20 * MIB}).stdout == b"1\n", place
        assert execute(fill.format(place), {"disk_bytes": 40 * MIB}).stdout == b"0\n", place
    many = "for i in $(seq 300); do : > $i || exit 1; done; echo all"
    assert execute(many, {"max_files": 200}).stdout == b""
    assert execute(many, {"max_files": 400}).stdout == b"all\n"


@pytest.mark.slow
@root_only
def test_limits_cpus():
    burn = "import time\ns = time.monotonic()\nwhile time.monotonic() < s + 1: pass\n"
    burn += "print(time.process_time())"
    assert float(execute(["python3", "-I", "-c", burn], {"cpus": 0.2}).stdout) < 0.5


def test_copies_files_in_and_out(tmp_path):
    folder = tmp_path / "task"
    (folder / "empty").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\ncat data")
    (folder / "run.sh").chmod(0o750)
    (folder / "data").write_bytes(bytes(range(256)) * 20_000)
    (folder / "link").symlink_to("/etc/passwd")

    async def work(box):
        await box.put("/app/task", folder)
        await box.put("/app/a/b/note", b"hello", mode=0o600)
        await box.put("/app/copy", folder / "run.sh")
        listing = await box.exec("stat -c '%n %A' task/* a/b/note copy a; readlink task/link")
        content = await box.exec("./run.sh | cat", cwd="/app/task")
        note = await box.get("/app/a/b/note", 5)
        with open(tmp_path / "saved", "w+b") as file:
            await box.save("/app/task", file, 10 * MIB)
            await box.put_saved("/app/again", file)
        same = await box.exec("diff -r --no-dereference task again && stat -c %A again/run.sh")
        return listing, content, note, same

    listing, content, note, same = in_box(work, output_bytes=6 * MIB)
    assert listing.stdout.decode().splitlines() == [
        "task/data -rw-r--r--",
        "task/empty drwxr-xr-x",
        "task/link lrwxrwxrwx",
        "task/run.sh -rwxr-x---",
        "a/b/note -rw-------",
        "copy -rwxr-x---",
        "a drwxr-xr-x",
        "/etc/passwd",
    ]
    assert content.stdout == (folder / "data").read_bytes()
    assert note == b"hello"
    assert same.stdout == b"-rwxr-x---\n"


@root_only
def test_files_of_root_do_not_belong_to_agent():
    async def work(box):
        await box.put("/tests/check.py", b"secret", user="root", mode=0o600)
        await box.put("/app/mine", b"")
        return await box.exec("stat -c %U:%G /tests /tests/check.py mine; cat /tests/check.py")

    result = in_box(work)
    assert result.stdout == b"root:root\nroot:root\nagent:agent\n"
    assert b"Permission denied" in result.stderr


def test_reports_full_disk_for_files():
    with pytest.raises(SandboxFileError, match="No space left"):
        in_box(lambda box: box.put("/app/x", bytes(3 * MIB)), disk_bytes=2 * MIB)


@pytest.mark.parametrize("path", ["work/x", "/app/../etc/x", "/.."])
def test_rejects_relative_and_indirect_paths(path):
    with pytest.raises(ValueError, match="absolute path"):
        in_box(lambda box: box.put(path, b""))


def test_snapshot_is_immutable_base():
    first = (
        "mkdir -p old/in kept; echo 1 > old/in/x; echo 1 > kept/x; echo 1 > gone; ln kept/x twin"
    )
    second = "rm -r old gone; mkdir old; echo 2 > old/y; echo 2 > kept/y; ln -s /nowhere link"
    see = "find . | sort; cat kept/x old/*; stat -c %U kept; [ kept/x -ef twin ] && echo linked"

    async def work():
        async with Sandbox() as box:
            await box.exec(first)
            one = await box.snapshot()
        async with Sandbox(SandboxConfig(base=one)) as box:
            assert (await box.exec(second)).code == 0
            two = await box.snapshot()
            seen = [(await box.exec(see)).stdout.decode()]
        for layer in (two, one):
            async with Sandbox(SandboxConfig(base=layer)) as box:
                seen.append((await box.exec(see)).stdout.decode())
        two.remove()
        one.remove()
        return seen

    run(isolated_umask(work))


async def isolated_umask(work):
    """Runs work with a strict umask, because folders of snapshots are made under any umask."""
    before = os.umask(0o077)
    try:
        inside, after, original = await work()
    finally:
        os.umask(before)
    assert inside == after
    agent = "agent" if os.getuid() == 0 else "root"
    assert after.split() == [
        *(".", "./kept", "./kept/x", "./kept/y", "./link", "./old", "./old/y", "./twin"),
        *("1", "2", agent, "linked"),
    ]
    assert original.split() == [
        *(".", "./gone", "./kept", "./kept/x", "./old", "./old/in", "./old/in/x", "./twin"),
        *("1", agent, "linked"),
    ]


def test_rejects_snapshot_larger_than_disk():
    """A sparse file takes no room in the sandbox, and would take its full length outside."""

    async def work(box):
        await box.exec("truncate -s 1T x")
        await box.snapshot()

    with pytest.raises(SandboxFileError, match="more than 536870912 bytes"):
        in_box(work)


@pytest.fixture
def root_folder(tmp_path):
    """Returns a root file system of a few programs."""
    folder = tmp_path / "base"
    wanted = set()
    for name in ("sh", "sleep", "ls", "cat", "stat", "rm"):
        program = shutil.which(name)
        libraries = subprocess.run(
            ["ldd", program], capture_output=True, text=True, check=True
        ).stdout
        wanted |= {word for word in libraries.split() if word.startswith("/")}
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(program, folder / "bin" / name)
    for library in wanted:
        place = folder / library.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)
    (folder / "etc").mkdir()
    (folder / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nbird:x:7:7::/:/bin/sh\n")
    if os.getuid() == 0:
        os.chown(folder / "etc/passwd", 7, 7)
    (folder / "bin/cat").chmod(0o4755)
    return folder


def test_accepts_root_file_system_as_base(root_folder):
    layer = Layer.of_folder(root_folder)
    assert layer == Layer.of_folder(root_folder)  # owners are changed only once
    config = {"base": layer}
    result = execute("stat -c '%u %a' /etc/passwd /bin/cat; cat /etc/passwd; ls /bin", config)
    owner = "7" if os.getuid() == 0 else "0"
    assert result.stdout.decode().splitlines() == [
        *(f"{owner} 644", "0 4755", "root:x:0:0::/:/bin/sh", "bird:x:7:7::/:/bin/sh"),
        *("cat", "ls", "rm", "sh", "sleep", "stat"),
    ]
    assert execute("rm /bin/ls /etc/passwd && ls", config, user="root").code == 127
    assert sorted(os.listdir(root_folder / "bin")) == ["cat", "ls", "rm", "sh", "sleep", "stat"]
    with pytest.raises(ValueError, match="no /bin/sh"):
        Layer.of_folder(root_folder / "etc")


def test_runs_ten_sandboxes_concurrently():
    async def one(number):
        result = await run_python(f"print({number} * 2)")
        return result.code, int(result.stdout)

    async def work():
        return await asyncio.gather(*(one(number) for number in range(10)))

    assert run(work()) == [(0, number * 2) for number in range(10)]


def test_runs_program_longer_than_an_argument():
    code = "print(len('''" + "é" * 150_000 + "'''))"
    assert run(run_python(code)).stdout == b"150000\n"


def test_runs_commands_concurrently_in_one_sandbox():
    async def work(box):
        start = time.monotonic()
        results = await asyncio.gather(*(box.exec(f"sleep 0.6; echo {n}") for n in range(5)))
        return results, time.monotonic() - start

    results, took = in_box(work)
    assert [int(result.stdout) for result in results] == list(range(5))
    assert took < 2.6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"cpus": float("inf")}, "cpus is inf"),
        ({"cpus": 0.001}, "the minimum is 0.01"),
        ({"memory_bytes": 1.5}, "memory_bytes is 1.5"),
        ({"max_processes": -1}, "max_processes is -1"),
        ({"workdir": "work"}, "absolute path"),
        ({"isolation": "docker"}, "isolation is 'docker'"),
    ],
)
def test_rejects_invalid_config(wrong, message):
    with pytest.raises(ValueError, match=message):
        SandboxConfig(**wrong)


def test_rejects_unknown_user():
    with pytest.raises(ValueError, match="'agent' or 'root'"):
        execute("id", user="admin")


def test_names_missing_package_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.bubblewrap, "PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        execute("touch /tmp/never")


def test_reports_why_sandbox_did_not_start(tmp_path):
    with pytest.raises(SandboxError, match="No such file or directory.*gone"):
        execute("true", {"base": Layer((tmp_path / "gone",))})


def test_logs_that_programs_run_without_isolation(caplog, tmp_path):
    async def work(box):
        await box.put("/app/x.py", b"print(open('/proc/1/comm').read() != '')")
        result = await box.exec(["python3", "-I", "x.py"])
        late = await box.exec("sleep 1005 & sleep 1005", timeout_s=0.3)
        with pytest.raises(ValueError, match="no layers"):
            await box.snapshot()
        return result, late, await box.get("/app/x.py", 100), box.limits

    result, late, data, limits = in_box(work, isolation="none")
    assert result.stdout == b"True\n" and data.startswith(b"print")
    assert late.timed_out
    assert subprocess.run(["pgrep", "-f", "sleep 100[5]"], stdout=-3).returncode == 1
    assert "SANDBOX WITHOUT ISOLATION" in caplog.text
    assert "not limited" in limits["network"]


def test_lost_sandbox_raises():
    async def work(box):
        first = await first_process(box)
        running = asyncio.create_task(box.exec("sleep 30"))
        await asyncio.sleep(0.1)
        os.kill(first, 9)
        with pytest.raises(SandboxError, match="lost"):
            await running
        with pytest.raises(SandboxError, match="lost"):
            await box.exec("true")
        with pytest.raises(SandboxError, match="lost"):
            await box.get("/etc/passwd", 1000)

    in_box(work)


def test_stopped_sandbox_refuses_commands():
    async def work():
        box = Sandbox()
        with pytest.raises(SandboxError, match="not started"):
            await box.exec("true")
        await box.start()
        running = asyncio.create_task(box.exec("sleep 30"))
        await asyncio.sleep(0.2)
        await asyncio.gather(box.stop(), box.stop())
        await box.stop()
        for attempt in (running, box.exec("true"), box.put("/app/x", b""), box.snapshot()):
            with pytest.raises(SandboxError, match="stopped"):
                await attempt
        with pytest.raises(ValueError, match="make a new one"):
            await box.start()
        await Sandbox().stop()

    run(work())


def test_layer_keeps_modes_of_files():
    async def work():
        async with Sandbox() as box:
            await box.exec("mkdir closed; echo x > closed/f; chmod 640 closed/f; chmod 0 closed")
            layer = await box.snapshot()
        mode = os.stat(layer.folders[0] / "app/closed").st_mode
        async with Sandbox(SandboxConfig(base=layer)) as box:
            result = await box.exec("stat -c %a closed closed/f", user="root")
        layer.remove()
        return stat.S_IMODE(mode), result.stdout

    assert run(work()) == (0, b"0\n640\n")
