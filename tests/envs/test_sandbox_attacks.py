"""Attacks on a sandbox and on rewards, and the barriers against each."""

import asyncio
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time

import pytest

from glm5_jax.envs.sandbox import (
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
    launch_spec,
)
from tests.envs.leftovers import first_process, run
from tests.envs.test_sandbox import in_box, root_only

pytestmark = pytest.mark.usefixtures("isolation", "nothing_left")
PROBE = pathlib.Path(__file__).with_name("probe.py")
REFUSED = {
    "read_host_file": "ENOENT",
    "read_host_environment": "not found",
    "list_homes": "none has a file",
    "write_programs": "EROFS",
    "connect_to_host": "ECONNREFUSED",
    "connect_to_host_by_name": "ECONNREFUSED",
    "leave_the_machine": "ENETUNREACH",
    "use_another_interface": "only {'lo'}",
    "open_raw_socket": "EPERM",
    "open_netlink_of_another_part": "EPROTONOSUPPORT",
    "open_packet_socket": "EAFNOSUPPORT",
    "open_socket_to_the_hypervisor": "EAFNOSUPPORT",
    "kill_host_process": "ESRCH",
    "trace_first_process": "EPERM",
    "write_first_process": "EACCES",
    "enter_first_process": "EACCES",
    "mount": "EPERM",
    "unmount": "EPERM",
    "remount_writable": "EPERM",
    "make_device": "EPERM",
    "write_kernel_setting": "EACCES",
    "allow_user_namespaces": "EACCES",
    # EACCES on a kernel that has it
    "sysrq": "EACCES" if os.path.exists("/proc/sysrq-trigger") else "ENOENT",
    "read_kernel_log": "EPERM",
    "chroot_out": "EPERM",
    "unshare_user": "PermissionError(1, 'Operation not permitted')",
    "unshare_mounts": "PermissionError(1, 'Operation not permitted')",
    "clone_user": "ENOSPC",
    "add_key": "EPERM",
    "load_bpf": "EPERM",
    "io_uring": "EPERM",
    "reboot": "EPERM",
    "keep_the_right_to_gain_privileges": "no new privileges",
    "find_other_descriptors": "none but its own",
    "find_host_in_dev": "only the usual",
}
AGENT = {
    "kill_all_others": "EPERM",
    "stop_first_process": "EPERM",
    "gain_capabilities": "only []",
    "become_root": "EPERM",
}
ROOT = {
    "kill_all_others": "the first process lives on",
    "stop_first_process": "state S: not stopped, not dead",
    "gain_capabilities": "only [0, 1, 2, 3, 4, 5, 6, 7, 10]",
}
# Harmless actions of the probe, which work without a sandbox.
HARMLESS = ("read_host_file", "read_host_environment", "connect_to_host", "connect_to_host_by_name")
HARMLESS += (
    "keep_the_right_to_gain_privileges",
    "kill_host_process",
    "find_host_in_dev",
    "use_another_interface",
)
HARMLESS_AS_ROOT = ("open_raw_socket", "open_packet_socket", "unshare_user", "unshare_mounts")
HARMLESS_AS_ROOT += ("clone_user", "gain_capabilities")


HOMES = [path for path in ("/home", "/root") if os.access(path, os.R_OK)]
if any(os.listdir(path) for path in HOMES):
    HARMLESS += ("list_homes",)


def probe_outcomes(user, attacks, tmp_path, **config):
    """Returns the probe's outcomes, with everything on the host that it looks for."""
    (tmp_path / "host.txt").write_text("secret")
    tmp_path.chmod(0o755)
    holder = subprocess.Popen(["sleep", "100"], env={"PROBE_SECRET": "very-secret"})
    with holder, socket.socket() as server, socket.socket(socket.AF_UNIX) as named:
        server.bind(("127.0.0.1", 0))
        server.listen()
        name = f"glm5_jax-probe-{os.getpid()}"
        named.bind("\0" + name)
        named.listen()
        host = {
            "attacks": list(attacks),
            "file": str(tmp_path / "host.txt"),
            "secret": "very-secret",
            "port": server.getsockname()[1],
            "name": name,
            "pid": os.getpid(),
            "device": os.stat("/").st_dev,
        }

        async def work(box):
            command = ["python3", "-I", "-c", PROBE.read_text(), json.dumps(host)]
            return await box.exec(command, user=user)

        try:
            result = in_box(work, **config)
        finally:
            holder.kill()
    assert result.code == 0, result.stderr.decode()
    return json.loads(result.stdout)


@root_only
@pytest.mark.parametrize("user", ["agent", "root"])
def test_probe_cannot_get_out(user, tmp_path):
    expected = REFUSED | (ROOT if user == "root" else AGENT)
    assert probe_outcomes(user, expected, tmp_path) == expected


def test_probe_works_without_isolation(tmp_path):
    names = [*HARMLESS, *(HARMLESS_AS_ROOT if os.getuid() == 0 else ())]
    outcomes = probe_outcomes("agent", names, tmp_path, isolation="none")
    assert outcomes == dict.fromkeys(names, "worked")


def test_commands_wait_for_complete_sandbox(monkeypatch):
    """Bubblewrap reports the first process's number earlier, when the sandbox is incomplete."""
    shell, option, program = launch_spec.HOLDER
    late = "sleep 0.4; echo done > /tmp/set-up; " + program
    monkeypatch.setattr(launch_spec, "HOLDER", (shell, option, late))
    assert in_box(lambda box: box.exec("cat /tmp/set-up")).stdout == b"done\n"


@pytest.mark.slow
def test_setup_timeout_raises(monkeypatch):
    monkeypatch.setattr(launch_spec, "HOLDER", ("/bin/sleep", "infinity"))
    with pytest.raises(SandboxError, match="nothing happened within 1 s"):
        in_box(lambda box: box.exec("true"), start_timeout_s=1)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("ln -s /etc/passwd x", "x: a link, not a regular file"),
        ("ln -s x x", "x: a link, not a regular file"),
        ("mkfifo x", "x: a named pipe, not a regular file"),
        ("mkdir x", "x: a folder, not a regular file"),
        ("python3 -c 'import socket; socket.socket(1).bind(\"x\")'", "x: a socket"),
        ("true", "x: No such file or directory"),
        ("head -c 101 /dev/zero > x", "more than the maximum of 100 bytes"),
    ],
)
def test_gets_only_small_regular_files(command, message):
    async def work(box):
        assert (await box.exec(command)).code == 0
        start = time.monotonic()
        with pytest.raises(SandboxFileError, match=message):
            await box.get("/app/x", 100)
        assert time.monotonic() - start < 10
        assert (await box.exec("rm -rf x; head -c 100 /dev/zero > x")).code == 0
        return await box.get("/app/x", 100)

    assert in_box(work) == bytes(100)


def test_gets_no_device_or_file_below_link():
    async def work(box):
        await box.exec("mkdir real; echo x > real/file; ln -s real linked; ln -s / up")
        for path, message in [
            ("/dev/zero", "a device"),
            ("/app/linked/file", "which is not followed"),
            ("/app/up/etc/passwd", "which is not followed"),
            ("/app/real/file/x", "no folder"),
        ]:
            with pytest.raises(SandboxFileError, match=message):
                await box.get(path, 1000)
        with tempfile.TemporaryFile() as file:
            with pytest.raises(SandboxFileError, match="a link, not a regular file"):
                await box.save("/app/linked", file, 1000)
            with pytest.raises(SandboxFileError, match="which is not followed"):
                await box.save("/app/linked/file", file, 1000)
        with pytest.raises(SandboxFileError, match="which is not followed"):
            await box.put("/app/linked/new", b"")
        return await box.get("/app/real/file", 1000)

    assert in_box(work) == b"x\n"


def test_put_replaces_links_and_pipes():
    async def work(box):
        await box.exec("echo old > target; ln -s target link; mkfifo pipe; ln target hard")
        for name in ("link", "pipe", "hard"):
            await box.put(f"/app/{name}", b"new")
        return await box.exec("stat -c %F link pipe hard; cat target link")

    result = in_box(work)
    assert result.stdout == b"regular file\n" * 3 + b"old\nnew"


def test_copies_no_links_and_pipes_of_folder():
    async def work(box):
        text = "mkdir a; echo x > a/file; ln -s /etc/passwd a/link; ln -s .. a/up; mkfifo a/pipe"
        await box.exec(text)
        with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as other:
            await box.save("/app/a", file, 10_000)
            await box.put_saved("/app/c", file)
            with pytest.raises(SandboxFileError, match="more than the maximum of 100 bytes"):
                await box.save("/app/a", other, 100)
            await box.exec("mkdir b; cd b; for i in $(seq 300); do mkdir d; cd d; done")
            with pytest.raises(SandboxFileError, match="deep"):
                await box.save("/app/b", other, 10_000_000)
        with pytest.raises(SandboxFileError, match="deep"):
            await box.snapshot()
        return await box.exec("find c -mindepth 1 -printf '%P %y %l\n' | sort")

    assert in_box(work).stdout == b"file f \nlink l /etc/passwd\nup l ..\n"


@pytest.mark.slow
def test_changing_files_are_no_sandbox_failure():
    churn = "import os\nwhile True:\n  for i in range(50):\n"
    churn += (
        "    open(str(i), 'w').write('x' * 9999); os.rename(str(i), 'y'); os.symlink('y', str(i))\n"
    )
    churn += "  for i in range(50): os.unlink(str(i))\n"

    async def outcome(reading):
        try:
            await reading
            return "read"
        except SandboxFileError:
            return "refused"

    async def work(box):
        running = asyncio.create_task(box.exec(["python3", "-I", "-c", churn], timeout_s=4))
        outcomes = set()
        while not running.done():
            with tempfile.TemporaryFile() as file:
                readings = (box.save("/app", file, 10**7), box.get("/app/7", 10**5))
                outcomes |= set(await asyncio.gather(*map(outcome, readings)))
        return outcomes, await running

    outcomes, result = in_box(work)
    assert outcomes == {"read", "refused"}
    assert result.timed_out, result.stderr


def test_isolated_interpreter_ignores_planted_modules():
    async def work(box):
        for name in ("json", "sitecustomize", "conftest", "usercustomize"):
            await box.put(f"/app/{name}.py", b"print('forged')")
            await box.put(f"/var/agent/.local/lib/python3/{name}.py", b"print('forged')")
        plain = await box.exec(["python3", "-c", "import json"])
        isolated = await box.exec(["python3", "-I", "-c", "import json"])
        return plain.stdout, isolated.stdout

    assert in_box(work) == (b"forged\n", b"")


@root_only
def test_grades_work_in_fresh_sandbox():
    """The daemon, the replaced interpreter and the planted tests stay in the stopped sandbox."""
    forge = "while true; do mkdir -p /logs; echo 1 > /logs/reward; sleep 0.01; done"

    async def work():
        async with Sandbox() as image:
            await image.exec("mkdir /data; echo base > /data/base", user="root")
            layer = await image.snapshot()
        saved = tempfile.TemporaryFile()
        async with Sandbox(SandboxConfig(base=layer)) as box:
            await box.exec(
                "mkdir -p /tests; echo forged > /tests/test.py; echo x >> /data/base", user="root"
            )
            await box.exec(
                f"echo 42 > answer; ln -s /etc/shadow link; setsid sh -c '{forge}' &", user="root"
            )
            await asyncio.sleep(0.2)
            assert await box.get("/logs/reward", 10) == b"1\n"
            os.kill(await first_process(box), signal.SIGSTOP)
            await box.save("/app", saved, 10_000)
        async with Sandbox(SandboxConfig(base=layer)) as fresh:
            with saved:
                await fresh.put_saved("/app", saved)
            await fresh.put("/tests/test.py", b"print('judge')", user="root", mode=0o600)
            await fresh.exec("mkdir -m 700 /logs; chmod 700 /tests", user="root")
            judged = await fresh.exec(
                "cat answer /data/base; python3 -I /tests/test.py", user="root"
            )
            spied = await fresh.exec("cat /tests/test.py; echo 1 > /logs/reward; pgrep -c sleep")
            left = await fresh.exec("ls /logs", user="root")
        layer.remove()
        return judged, spied, left

    judged, spied, left = run(work())
    assert judged.stdout == b"42\nbase\njudge\n"
    assert spied.stdout == b"1\n"  # the first process itself
    assert spied.stderr.count(b"ermission denied") == 2
    assert left.stdout == b""


@root_only
def test_root_inside_cannot_break_sandbox():
    """Otherwise a failing program could turn its reward of 0 into none."""
    bomb = "import os, signal\nfor _ in range(3):\n  try: os.kill(-1, signal.SIGKILL)\n"
    bomb += "  except OSError: pass\nfor pid in range(1, os.getpid()):\n  try: os.kill(pid, signal.SIGKILL)\n"
    bomb += "  except OSError: pass\nprint('on')"

    async def work(box):
        results = [await box.exec(["python3", "-I", "-c", bomb], user="root")]
        results.append(await box.exec("rm -rf /app /etc/* /bin /lib /lib64; echo on", user="root"))
        return results, await box.exec("/usr/bin/true", user="root")

    results, after = in_box(work, max_processes=50)
    assert results[0].stdout == b"on\n"
    assert after.code in (
        126,
        127,
    )  # the loader is missing, and the program is blamed for it
