"""Runs as an ordinary user for `test_sandbox_ordinary`, and prints the outcomes of sandboxes as a JSON object."""

import asyncio
import json
import logging
import os
import sys
import time

from glm5_jax.envs.sandbox import Sandbox, SandboxConfig, SandboxFileError

HOG = "x = [bytearray(b'x' * 2**20) for _ in range(400)]; print(len(x))"
STOPPER = """
import os, signal
friends = set(os.listdir("/proc"))
while True:
    for pid in set(os.listdir("/proc")) - friends:
        try:
            os.kill(int(pid), signal.SIGSTOP)
        except OSError:
            pass
"""
MANY = "i=0; while [ $i -lt 60 ]; do sleep 30 & i=$((i+1)); done; echo all"


async def main(probe: str, host: str) -> dict:
    outcomes = {}
    config = SandboxConfig(memory_bytes=200 << 20, max_processes=40, disk_bytes=20 << 20)
    async with Sandbox(config) as box:
        outcomes["limits"] = box.limits
        for user in ("agent", "root"):
            result = await box.exec(["python3", "-I", "-c", probe, host], user=user)
            assert result.code == 0, result.stderr.decode()
            outcomes[user] = json.loads(result.stdout)
        outcomes["memory"] = (await box.exec(["python3", "-I", "-c", HOG])).stdout.decode()
        outcomes["disk"] = (
            await box.exec("head -c 30000000 /dev/zero > x; echo $?; rm x")
        ).stdout.decode()
        late = await box.exec("setsid sleep 2001 & sleep 2001", timeout_s=0.5)
        outcomes["late"] = (
            late.timed_out,
            (await box.exec("pgrep -fc 'sleep 200[1]'")).stdout.decode(),
        )
        await box.put("/app/a/x", b"1")
        await box.exec("ln -s x a/link; mkdir -m 0 a/closed")
        outcomes["files"] = (await box.get("/app/a/x", 1)).decode()
        try:
            await box.get("/app/a/link", 100)
        except SandboxFileError as error:
            outcomes["link"] = str(error)
        layer = await box.snapshot()
        namespace = (await box.exec("readlink /proc/self/ns/user")).stdout.decode().strip()
    try:
        async with Sandbox(SandboxConfig(base=layer)) as box:
            again = await box.exec("rm -r a; mkdir a; ls -A a; echo on > a/y; cat a/y; ls -A")
            outcomes["layer"] = again.stdout.decode() + again.stderr.decode()
            second = await box.snapshot()
        async with Sandbox(SandboxConfig(base=second)) as box:
            outcomes["layer"] += (await box.exec("ls -A a")).stdout.decode()
        second.remove()
    finally:
        layer.remove()
    async with Sandbox(config) as box:
        outcomes["processes"] = (await box.exec(MANY)).stdout.decode()
    async with Sandbox(config) as box:
        start = time.monotonic()
        late = await box.exec(["python3", "-I", "-c", STOPPER], timeout_s=1.0)
        outcomes["stopper"] = late.timed_out, time.monotonic() - start
    async with Sandbox() as box:
        outcomes["more processes"] = (await box.exec(MANY)).stdout.decode()
    outcomes["folders"] = os.path.exists(layer.folders[0])
    time.sleep(0.1)
    outcomes["left"] = [
        pid for pid in os.listdir("/proc") if pid.isdigit() and namespace_of(pid) == namespace
    ]
    return outcomes


def namespace_of(pid: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/user")
    except OSError:
        return None


logging.basicConfig(stream=sys.stderr)
with open(sys.argv[1]) as file:
    print(json.dumps(asyncio.run(main(file.read(), sys.argv[2]))))
