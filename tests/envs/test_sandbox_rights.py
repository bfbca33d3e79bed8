"""Programs that root starts under a policy keep its rights by the file that they are, and links can be stopped."""

import os
import tempfile

import pytest

from glm5_jax.envs.sandbox import RightsPolicy, Sandbox, SandboxConfig, SandboxFileError
from tests.envs.leftovers import run
from tests.envs.terminal.folders import needs_root

pytestmark = [pytest.mark.usefixtures("isolation", "nothing_left"), needs_root]
POLICY = RightsPolicy(
    data=("cat", "chmod", "cp", "id", "mkdir", "mv"),
    launchers=("env", "timeout"),
    shells=("sh", "bash", "dash"),
    standins={"perl": "/standin/perl"},
    folders=("/own",),
)
AGENT, ROOT = "1000", "0"
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
    "LD_LIBRARY_PATH=/app id -u": AGENT,
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
}


async def prepared(box):
    await box.put("/app/prog", b"#!/bin/sh\nid -u\n", mode=0o755)
    await box.put("/app/plain", b"id -u\n", mode=0o755)
    await box.put("/elsewhere/other", b"#!/bin/sh\nid -u\n", user="root", mode=0o755)
    await box.put("/own/plain", b"id -u\n", user="root", mode=0o755)
    await box.put("/own/script", b"#!/bin/sh\nid -u\n", user="root", mode=0o755)
    await box.put(
        "/standin/perl", b'#!/bin/sh\necho standin $(id -u) "$@"\n', user="root", mode=0o755
    )


def test_decides_rights_by_file():
    async def work():
        found = {}
        async with Sandbox(SandboxConfig(seconds=10)) as box:
            await prepared(box)
            for command in STARTED:
                script = ["/bin/bash", "-c", f"{command}\nexit 7"]
                done = await box.exec(script, user="root", cwd="/", policy=POLICY)
                found[command] = done.stdout.decode().strip().splitlines()[:1], done.stderr
        return found

    found = run(work())
    assert {command: said for command, said in found.items() if said[0] != [STARTED[command]]} == {}


def test_reports_how_supervised_command_ended():
    async def work():
        async with Sandbox(SandboxConfig(seconds=2)) as box:
            await prepared(box)
            commands = (
                "exit 7",
                "kill -9 $$",
                "(/bin/sleep 0.2; kill -CONT $$) & kill -STOP $$; exit 3",
                "/bin/sleep 20",
            )
            return [
                await box.exec(command, user="root", policy=POLICY, seconds=1.0)
                for command in commands
            ]

    *ended, late = run(work())
    assert [(done.code, done.timed_out) for done in ended] == [(7, False), (137, False), (3, False)]
    assert late.timed_out


def test_ends_what_has_rights_with_its_supervision():
    """A shell that root leaves running could go on with rights that nobody decides on."""

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
    """What an attempt has for nothing must not cost the one who grades."""

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
                    SandboxFileError, match="/app: more than the 1000 bytes asked for"
                ):
                    await box.save("/app", file, 1000)
                file.seek(0)
                file.truncate()
                await box.save("/app", file, 1 << 28)
                blocks = os.fstat(file.fileno()).st_blocks
                await other.put_saved("/app", file)
            look = "stat -c '%n %s %a' big d; tail -c 4 big | od -c; readlink d/l; [ $(stat -c %b big) -lt 100 ] && echo sparse"
            return blocks, (await other.exec(look)).stdout.decode(), (await box.changes(10))

    blocks, said, changes = run(work())
    assert blocks * 512 < 1 << 22
    assert said.split("\n")[:2] == ["big 104857603 644", "d 700"] or said.startswith(
        "big 104857603 644\nd "
    )
    assert "a   b   c" in said and said.endswith("big\nsparse\n")
    assert changes == ["/app/big", "/app/d/l"]
