"""Programs that root starts under a policy keep its rights by their file, and links can be stopped."""

import dataclasses
import os
import tempfile

import pytest

from glm5_jax.envs.sandbox import RightsPolicy, Sandbox, SandboxConfig, SandboxFileError
from tests.envs.leftovers import run
from tests.envs.terminal.folders import needs_root
from tests.traced_memory import traced_memory

pytestmark = [pytest.mark.usefixtures("isolation", "nothing_left"), needs_root]
POLICY = RightsPolicy(
    data=("cat", "chmod", "cp", "id", "mkdir", "mv", "sort"),
    launchers=("env", "timeout"),
    shells=("sh", "bash", "dash"),
    shims={"perl": "/standin/perl"},
    folders=("/own",),
    sealed=("/log/reward",),
    watched=("/secret",),
)
AGENT, ROOT = "1000", "0"
SPAWN = "os.execv('/bin/sh', ['sh', '-c', 'cat /secret/key; /app/reads'])"
# What root's shell starts -> the user that it runs as.
STARTED = {
    "id -u": ROOT,
    "/app/prog": AGENT,
    "cd /app; exec ./prog": AGENT,
    "bash -c 'cd /app; ./prog'": AGENT,
    "sh /app/prog": AGENT,
    "sh -e /app/prog": AGENT,
    "sh < /app/prog": AGENT,
    "/app/plain": AGENT,
    "cd /app; exec ./plain": AGENT,
    "sh -c /app/plain": AGENT,
    "timeout 5 /app/plain": AGENT,
    "(cd /app; ./plain)": AGENT,
    "/own/plain": ROOT,
    "cat /app/prog | sh": AGENT,
    "timeout 5 env -i /app/prog": AGENT,
    "cp /app/prog /copy; sh /copy": AGENT,
    "mkdir /b; cp /app/prog /b/id; /b/id": AGENT,
    "cp /app/prog /app/p; mv /app/p /moved; /moved": AGENT,
    "printf 'id -u' > /new; sh /new": AGENT,
    "sed -n 1e\\ id\\ -u /app/prog": AGENT,
    "LD_LIBRARY_PATH=/app id -u": ROOT,  # it loads no library there
    "export LD_PRELOAD=/app/libc.so.6; bash -c 'id -u'": ROOT,
    "LD_LIBRARY_PATH=/lib/none timeout 5 /app/loads": f"/lib/none {AGENT}",
    "export LD_LIBRARY_PATH=/lib/none; bash -c 'cd /app; ./loads'": f"/lib/none {AGENT}",
    "sh /own/script": ROOT,
    "cd /own; ./script": ROOT,
    "chmod 775 /own/script; /own/script": ROOT,
    "printf 'id -u' > /own/script; /own/script": AGENT,
    "cp /app/prog /own/script; /own/script": AGENT,
    "cp -p /app/prog /own/new; /own/new": AGENT,
    "chmod 775 /elsewhere/other; /elsewhere/other": AGENT,
    "bash -c 'id -u'": ROOT,
    "BASH_COMPAT=5.0 bash -c 'sh <<E\nid -u\nE'": ROOT,
    "/usr/bin/perl x": "standin 0 x",
    "printf '/secret/key\\0' > /list; sort /secret/key": "answer",
    "printf '/secret/key\\0' > /list; sort --files0-from=/list || id -u": ROOT,
    "printf '/secret/key\\0' > /list; sort --fil=/list || id -u": ROOT,
    "HOME=/app bash -lc 'id -u'": AGENT,
    "HOME=/own bash -lc 'id -u'": ROOT,
    "cp --preserve=timestamps /app/prog /own/script; /own/script": AGENT,
    "cd /app/link 2>/dev/null; cat key || id -u": AGENT,
    "{ /app/prog; } > /log/reward; cat /log/reward; echo nothing": "nothing",
}


async def prepare(box):
    await box.put("/app/prog", b"#!/bin/sh\nid -u\n", mode=0o755)
    await box.put("/app/plain", b"id -u\n", mode=0o755)
    await box.put("/app/loads", b"#!/bin/sh\necho $LD_LIBRARY_PATH $(id -u)\n", mode=0o755)
    await box.put("/app/libc.so.6", b"no library")
    await box.put("/elsewhere/other", b"#!/bin/sh\nid -u\n", user="root", mode=0o755)
    await box.put("/own/plain", b"id -u\n", user="root", mode=0o755)
    await box.put("/own/script", b"#!/bin/sh\nid -u\n", user="root", mode=0o755)
    await box.put("/secret/key", b"answer\n", user="root")
    await box.put("/log/reward", b"", user="root")
    await box.exec("chmod 700 /secret", user="root")
    await box.exec("ln -s /secret link")
    await box.put(
        "/standin/perl", b'#!/bin/sh\necho standin $(id -u) "$@"\n', user="root", mode=0o755
    )


def test_decides_rights_by_file():
    async def work():
        results = {}
        async with Sandbox(SandboxConfig(timeout_s=10)) as box:
            await prepare(box)
            for command in STARTED:
                script = ["/bin/bash", "-c", f"{command}\nexit 7"]
                done = await box.exec(script, user="root", cwd="/", policy=POLICY)
                results[command] = done.stdout.decode().strip().splitlines()[:1], done.stderr
        return results

    results = run(work())
    assert {
        command: outcome for command, outcome in results.items() if outcome[0] != [STARTED[command]]
    } == {}


def test_refuses_watched_files_through_links():
    """A link that is removed before the check has been followed all the same."""
    commands = {
        "cat /secret/key; cd /secret; cat key; cat < ./key; cat /dev/stdin < key": "",
        "cat /app/link/key": "a link at /app/link/key led to files of root's",
        "cd /app; cat < link/key; rm link": "a link at /app/link/key led to files of root's",
    }

    async def work():
        async with Sandbox(SandboxConfig(timeout_s=10)) as box:
            await prepare(box)
            return {
                command: await box.exec(command, user="root", cwd="/", policy=POLICY)
                for command in commands
            }

    results = run(work())
    assert {command: done.alert for command, done in results.items()} == commands
    assert [done.stdout for done in results.values()] == [b"answer\n" * 4, b"", b""]


def test_notices_full_disk_under_supervision():
    async def work():
        async with Sandbox(SandboxConfig(timeout_s=10, disk_bytes=1 << 20)) as box:
            fill = "cat /dev/zero > /fill 2> /dev/null; rm /fill; id -u"
            return await box.exec(fill, user="root", policy=POLICY)

    assert run(work()).alert == "the disk was full"


def test_hides_processes_of_other_users():
    async def work():
        async with Sandbox() as box:
            await box.hide_processes()
            await box.exec("sleep 5 > /dev/null 2>&1 &", user="root")
            look = "grep -asc ^sleep /proc/[0-9]*/cmdline | grep -c :1"
            return [(await box.exec(look, user=user)).stdout for user in ("agent", "root")]

    assert run(work()) == [b"0\n", b"2\n"]  # including the sandbox's first process


def test_lets_ordinary_programs_signal_each_other():
    script = (
        "#!/bin/bash\ncase $1 in start) exec sleep 60;; stop) kill $2 && ! kill -0 999999;; "
        "self) kill -TERM $$;; group) trap '' TERM; kill -TERM 0; echo group;; esac\n"
    )
    commands = (
        "/app/ctl start & sleep 0.2; /app/ctl stop $!; echo $?; wait $!; echo $?",
        "/app/ctl self; echo $?; setsid -w /app/ctl group",
    )

    async def work():
        async with Sandbox(SandboxConfig(timeout_s=10)) as box:
            await prepare(box)
            await box.put("/app/ctl", script.encode(), mode=0o755)
            return [
                (await box.exec(["/bin/bash", "-c", command], user="root", policy=POLICY)).stdout
                for command in commands
            ]

    assert run(work()) == [b"0\n143\n", b"143\ngroup\n"]


def test_removes_rights_that_ordinary_process_passes_on():
    """A process that reads all files, as test interpreters do, starts a program of the agent's."""
    keep = "import ctypes, os, struct\nc = ctypes.CDLL(None)\nc.prctl(8, 1, 0, 0, 0)\nos.setresuid(1000, 1000, 1000)\n"
    keep += "c.capset(struct.pack('Ii', 0x20080522, 0), struct.pack('6I', 4, 4, 4, 0, 0, 0))\nc.prctl(47, 2, 2, 0, 0)\n"
    policy = dataclasses.replace(
        POLICY, shims={"python": "/own/python"}, helper=("-I", "-c", keep + SPAWN)
    )

    async def work():
        async with Sandbox(SandboxConfig(timeout_s=10)) as box:
            await prepare(box)
            await box.exec("chmod 700 /secret", user="root")
            await box.put(
                "/app/reads", b"#!/bin/sh\ncat /secret/key 2>&1 | head -c 40\n", mode=0o755
            )
            command = ["/usr/bin/python3", "-I", "-c", keep + SPAWN]
            return await box.exec(["/usr/bin/env", *command], user="root", cwd="/", policy=policy)

    done = run(work())
    assert done.stdout.split(b"\n")[:2] == [b"answer", b"cat: /secret/key: Permission denied"], done


def test_reports_how_supervised_command_ended():
    async def work():
        async with Sandbox(SandboxConfig(timeout_s=2)) as box:
            await prepare(box)
            commands = (
                "exit 7",
                "kill -9 $$",
                "(/bin/sleep 0.2; kill -CONT $$) & kill -STOP $$; exit 3",
                "/bin/sleep 20",
            )
            return [
                await box.exec(command, user="root", policy=POLICY, timeout_s=1.0)
                for command in commands
            ]

    *ended, late = run(work())
    assert [(done.code, done.timed_out) for done in ended] == [(7, False), (137, False), (3, False)]
    assert late.timed_out


def test_ends_privileged_processes_with_supervision():
    """A shell that root leaves running would otherwise continue with unsupervised rights."""

    async def work():
        async with Sandbox() as box:
            await box.exec("(sleep 0.3; echo 1 > /late) & exit 0", user="root", policy=POLICY)
            return await box.exec("sleep 0.6; ls /late")

    assert run(work()).code != 0


def test_stops_links_in_folders():
    async def work():
        async with Sandbox() as box:
            await box.put("/secret", b"x", user="root")
            await box.stop_links(["/app", "/none"])
            return await box.exec(
                "ln -s /secret /app/a; ln -s /secret /var/tmp/a; readlink a; cat a; cat /var/tmp/a",
                user="root",
            )

    done = run(work())
    assert done.stdout == b"/secret\nx" and b"Too many levels" in done.stderr


def test_saves_sparse_folder_without_its_zeros():
    """Files that cost the attempt nothing must cost the grader neither disk nor memory."""

    async def work():
        async with (
            Sandbox(SandboxConfig(memory_bytes=1 << 28, disk_bytes=1 << 27)) as box,
            Sandbox() as other,
        ):
            await box.exec(
                "truncate -s 100M big; printf abc >> big; mkdir d; ln -s big d/l; chmod 700 d"
            )
            with tempfile.TemporaryFile() as file:
                await box.save("/app", file, 1 << 28)
                with pytest.raises(
                    SandboxFileError, match="/app: more than the maximum of 1000 bytes"
                ):
                    await box.save("/app", file, 1000)
                file.seek(0)
                file.truncate()
                await box.save("/app", file, 1 << 28)
                blocks = os.fstat(file.fileno()).st_blocks
                await other.put_saved("/app", file)
            look = "stat -c '%n %s %a' big d; tail -c 4 big | od -c; readlink d/l; [ $(stat -c %b big) -lt 100 ] && echo sparse"
            return blocks, (await other.exec(look)).stdout.decode(), (await box.changes(10))

    with traced_memory() as memory:
        blocks, output, changes = run(work())
    assert blocks * 512 < 1 << 22 and memory.peak < 1 << 23
    assert output.split("\n")[:2] == ["big 104857603 644", "d 700"] or output.startswith(
        "big 104857603 644\nd "
    )
    assert "a   b   c" in output and output.endswith("big\nsparse\n")
    assert changes == ["/app/big", "/app/d/l"]
