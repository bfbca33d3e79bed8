"""Layers of images: shared by tasks that begin alike, writable copies of root file systems, and builds with a network."""

import asyncio
import pathlib
import shutil
import socket
import subprocess

import pytest

from glm5_jax.envs.sandbox import Sandbox, SandboxConfig
from glm5_jax.envs.terminal import BuildConfig, load_task
from glm5_jax.envs.terminal.image import ImageError, Images
from tests.envs.leftovers import run
from tests.envs.terminal.folders import make_task

pytestmark = pytest.mark.usefixtures("isolation", "nothing_left")


async def output(image, command: str) -> str:
    """Returns the output of a command in a sandbox over an image, or its errors if there is none."""
    async with Sandbox(SandboxConfig(base=image.layer)) as box:
        done = await box.exec(command, env=image.env, user="root")
        return (done.stdout or done.stderr).decode().strip()


@pytest.fixture
def small_root(tmp_path) -> pathlib.Path:
    """Returns a minimal root file system of this machine's programs."""
    root = tmp_path / "root"
    for program in ("/bin/sh", "/bin/bash", "/bin/mkdir", "/bin/sleep", "/usr/bin/env"):
        words = subprocess.run(["ldd", program], capture_output=True, text=True).stdout.split()
        for path in {program, *(word for word in words if word.startswith("/"))}:
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path[1:])
    return root


def test_shares_layers_of_equal_beginnings(tmp_path, small_root):
    """Each layer holds a text that no other run produces."""
    draw = "RUN read a < /proc/sys/kernel/random/uuid; echo $a > /usr/drawn\n"
    texts = [
        f"FROM base\n{draw}RUN echo one > /usr/rest\n",
        f"FROM base:2\n# Words that change nothing.\n{draw}",
        f"FROM base\nENV B=2\n{draw}",
        f"FROM base\nCOPY file /usr/\n{draw}",
    ]

    async def work():
        async with Images({"base": str(small_root)}) as images:
            tasks = [
                load_task(make_task(tmp_path, f"t{i}", dockerfile=text, **{"environment/file": ""}))
                for i, text in enumerate(texts)
            ]
            built = await asyncio.gather(*(images.of(task) for task in tasks))
            look = "read a < /usr/drawn; echo $a; read b < /usr/rest && echo $b"
            return [await output(image, look) for image in built], built

    (first, second, *others), images = run(work())
    assert first.splitlines() == [second, "one"]
    assert len({second, *others}) == 3
    assert images[0].layer.folders[1:] == images[1].layer.folders


def test_each_task_has_errors_of_its_lines(tmp_path, small_root):
    async def work():
        async with Images({"base": str(small_root)}) as images:
            tasks = [
                load_task(
                    make_task(tmp_path, f"t{i}", dockerfile=f"FROM base\n{space}RUN exit 3\n")
                )
                for i, space in enumerate(("", "\n\n"))
            ]
            return await asyncio.gather(
                *(images.of(task) for task in tasks), return_exceptions=True
            )

    lines = [str(error).split(":")[0] for error in run(work())]
    assert lines == [f"environment/Dockerfile, line {number}" for number in (2, 4)]


def test_builds_write_into_copies_of_root_file_systems(tmp_path, small_root):
    table = {"registry.example:5000/team/base": str(small_root)}
    text = "FROM registry.example:5000/team/base:1.0\nWORKDIR /app\n"
    text += "RUN echo new > /usr/new && echo x > /usr/bin/env\n"

    async def work():
        async with Images(table) as images:
            built = await images.of(load_task(make_task(tmp_path, dockerfile=text)))
            assert not built.layer.host_programs
            look = "read a < /usr/new; read b < /usr/bin/env; echo $a $b and no $PYTHONPATH"
            return await output(built, look)

    assert run(work()) == "new x and no"
    assert not (small_root / "usr/new").exists()
    assert (small_root / "usr/bin/env").stat().st_size > 1000


@pytest.mark.parametrize("network", [False, True])
def test_only_permitted_builds_reach_network(tmp_path, small_root, network):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
        text = f'FROM base\nRUN ["bash", "-c", "{connect} && echo $WORD > /usr/word"]\n'
        build = BuildConfig(network=network, env={"WORD": "fig"})

        async def work():
            async with Images({"base": str(small_root)}, build) as images:
                image = await images.of(load_task(make_task(tmp_path, dockerfile=text)))
                look = "read a < /usr/word; read b < /etc/resolv.conf; echo $a$b"
                return await output(image, f"{look}; bash -c '{connect}' || echo $WORD cut off")

        if not network:
            with pytest.raises(ImageError, match="build.network=True lets them use the machine's"):
                run(work())
            return
        assert run(work()) == "fig\ncut off"


def test_refuses_folder_that_is_no_root_file_system():
    with pytest.raises(ValueError, match="images: a is '/none', neither 'host' nor a root"):
        Images({"a": "/none"})


def test_refuses_build_without_memory():
    with pytest.raises(ValueError, match="memory_bytes is 0; it must be positive"):
        BuildConfig(memory_bytes=0)
