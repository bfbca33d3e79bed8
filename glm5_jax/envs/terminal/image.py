"""Images of tasks: a Dockerfile built into a layer that sandboxes start from."""

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping

from glm5_jax.envs.sandbox import (
    HOST,
    Layer,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
)
from glm5_jax.envs.sandbox.remains import mark
from glm5_jax.envs.terminal import dockerfile, grader, walls
from glm5_jax.envs.terminal.shell import run_as
from glm5_jax.envs.terminal.task import TaskError, TerminalTask

log = logging.getLogger(__name__)

# The programs of this machine stand in for images that hold little else.
IMAGES = {"debian": "host", "ubuntu": "host"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TESTERS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LIB = f"{grader.FOLDER}/lib"
_FOLDERS = ("/var/lib", "/var/log", "/var/cache", "/var/spool", "/opt", "/srv", "/mnt", "/media")
# A here-document with a first line of its own.
_RUN_FILE = (
    'f=$(mktemp) && printf %s "$0" > "$f" && chmod 755 "$f" && "$f"; c=$?; rm -f "$f"; exit $c'
)
_SAID = 1000  # characters of what a failed instruction printed
_NOWHERE = "/var/agent"  # a folder that is there anyway


class ImageError(RuntimeError):
    """An image that cannot be had here: the environment's failure, and no attempt's."""


@dataclasses.dataclass(frozen=True)
class Image:
    """What sandboxes of a task start from.

    workdir, user: of the Dockerfile; group and home are those of the user.
    """

    layer: Layer
    workdir: str | None
    env: Mapping[str, str]
    user: str = "root"


class Images:
    """Builds images and keeps them by what they are made of, until it is closed; an asynchronous context manager.

    table: names of images, with their tag or without -> "host", or the folder of a root file system (of
    debootstrap, say).
    """

    def __init__(self, table: Mapping[str, str] | None = None):
        self._table = {**IMAGES, **(table or {})}
        for name, place in self._table.items():
            if place != "host" and not pathlib.Path(place, "bin/sh").exists():
                raise ValueError(
                    f"images: {name} is {place!r}, neither 'host' nor a root file system"
                )
        self._bases: dict[str, Layer] = {}
        self._made: dict[str, asyncio.Task[Image]] = {}
        self._tools: asyncio.Task[Layer] | None = None
        self._layers: list[Layer] = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        await self.close()

    async def of(self, task: TerminalTask) -> Image:
        """The image of a task, built if none like it was; ImageError, TaskError."""
        key = await asyncio.to_thread(_digest, task)
        if key not in self._made:
            self._made[key] = asyncio.create_task(self._build(task))
        try:
            return await asyncio.shield(self._made[key])
        except (ImageError, SandboxError):  # which may be otherwise the next time
            self._made.pop(key, None)
            raise

    async def tools(self) -> Layer:
        """What grading takes with it: the programs that tests are started by, and pytest."""
        if self._tools is None:
            self._tools = asyncio.create_task(self._build_tools())
        return await asyncio.shield(self._tools)

    async def close(self) -> None:
        """Removes all layers that were built."""
        tasks = [*self._made.values(), *([self._tools] if self._tools else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for layer in self._layers:
            await asyncio.to_thread(layer.remove)
        self._layers, self._made, self._tools = [], {}, None

    def _base(self, name: str) -> Layer:
        plain = name.removeprefix("docker.io/").removeprefix("library/").partition("@")[0]
        places = [self._table.get(known) for known in (name, plain, plain.partition(":")[0])]
        place = next((found for found in places if found), None)
        if place is None:
            raise ImageError(
                f"image {name} is not on this machine; known are {', '.join(sorted(self._table))}. A folder with its "
                "root file system can stand for it (images)"
            )
        if place == "host":
            return HOST
        if place not in self._bases:
            self._bases[place] = Layer.of_folder(place)
        return self._bases[place]

    async def _build(self, task: TerminalTask) -> Image:
        if not task.dockerfile.is_file():
            base = self._base(task.docker_image)
            return Image(base, None, {"PATH": PATH})
        try:
            text = task.dockerfile.read_text("utf-8-sig")
            recipe = dockerfile.parse(text)
            build = _Build(task, recipe, self._base)
        except (dockerfile.DockerfileError, UnicodeDecodeError) as error:
            raise TaskError(f"environment/Dockerfile: {error}") from None
        base = build.base
        if base.host_programs:
            tools = await self.tools()
            base = Layer((*tools.folders[:1], *base.folders), host_programs=True)
        config = SandboxConfig(
            base=base,
            workdir=_NOWHERE,
            memory_bytes=task.memory_bytes,
            disk_bytes=task.disk_bytes,
            cpus=task.cpus,
        )
        async with Sandbox(config) as box:
            await build.run(box)
            layer = await box.snapshot()
        self._layers.append(layer)
        return _with_tester(build.image(layer))

    async def _build_tools(self) -> Layer:
        with tempfile.TemporaryDirectory(prefix=f"{mark()}tools-") as place:
            folder = pathlib.Path(place)
            await asyncio.to_thread(_lay_out_tools, folder)
            async with Sandbox(SandboxConfig(workdir=_NOWHERE, seconds=120)) as box:
                await box.put(grader.FOLDER, folder, user="root", mode=0o755)
                # Sourced by scripts that have just installed uv.
                await box.put("/root/.local/bin/env", b"", user="root")
                # What a Debian has, too, and no sandbox needs.
                await box.exec(["mkdir", "-p", *_FOLDERS], user="root")
                await box.put("/tmp/test_it.py", b"def test_it():\n    assert 'a' in 'abc'\n")
                command = ["python3", "-s", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                command += ["-c", "/dev/null", "/tmp/test_it.py"]
                # Which leaves its modules compiled: a second, otherwise, of each grading.
                await box.exec(command, env={"PYTHONPATH": _LIB}, user="root", cwd="/tmp")
                await box.exec("rm -rf /tmp/* /tmp/.[!.]*", user="root")
                layer = await box.snapshot()
                await walls.check(box)
        self._layers.append(layer)
        return layer


def _with_tester(image: Image) -> Image:
    """With pytest, where programs are this machine's: images that those stand for have it as a rule."""
    if not image.layer.host_programs or "PYTHONPATH" in image.env:
        return image
    return dataclasses.replace(image, env={**image.env, "PYTHONPATH": _LIB})


def _digest(task: TerminalTask) -> str:
    """Of all that an image is made from."""
    digest = hashlib.sha256(repr((task.docker_image, sorted(task.env.items()))).encode())
    top = task.folder / "environment"
    for place, folders, files in os.walk(top):
        folders.sort()
        for name in (*folders, *sorted(files)):
            path = pathlib.Path(place, name)
            kind = path.lstat().st_mode
            digest.update(repr((str(path.relative_to(top)), kind)).encode())
            if path.is_symlink():
                digest.update(os.fsencode(os.readlink(path)))
            elif path.is_file():
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _lay_out_tools(folder: pathlib.Path) -> None:
    """The files of `grader.FOLDER`."""
    code, bin_, lib = folder / "code" / "grader", folder / "bin", folder / "lib"
    for place in (code, bin_, lib, folder / "missing"):
        place.mkdir(parents=True)
    for path in pathlib.Path(grader.__file__).parent.glob("*.py"):
        shutil.copyfile(path, code / path.name)
    (folder / "build").mkdir()
    for name in ("apt", "apt-get"):
        (folder / "build" / name).write_text(grader.INSTALLER)
        (folder / "build" / name).chmod(0o755)
        shutil.copy(folder / "build" / name, bin_)
    for name in grader.STANDINS:
        (bin_ / name).write_text(grader.STANDIN.replace("NAME", name))
        (bin_ / name).chmod(0o755)
    status = pathlib.Path("/var/lib/dpkg/status")
    lines = status.read_text(errors="replace").splitlines() if status.exists() else ()
    installed = (line.removeprefix("Package: ") for line in lines if line.startswith("Package: "))
    (folder / "packages").write_text("".join(f"{name}\n" for name in installed))
    for name in _TESTERS:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # told where a task needs it
            continue
        for file in found.files or ():
            if file.suffix == ".pyc" or ".." in file.parts:
                continue
            target = lib / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found.locate_file(file), target)


class _Build:
    """A recipe at work: what its instructions say of the image, and do in a sandbox."""

    def __init__(self, task: TerminalTask, recipe: list[dockerfile.Instruction], base_of):
        self._task, self._context = task, task.dockerfile.parent
        self._arguments: dict[str, str] = {}  # of ARG, which an image does not keep
        self._defaults: dict[str, str] = {}  # of ARG before FROM
        self._env: dict[str, str] = {"PATH": PATH}
        self._workdir: str | None = None
        self._user = "root"
        self._end = 0.0
        at = next(i for i, item in enumerate(recipe) if item.name == "FROM")
        for item in recipe[:at]:
            self._set_argument(item)
        self.base = self._from(recipe[at], base_of)
        self._defaults, self._arguments = self._arguments, {}
        self.steps = recipe[at + 1 :]

    def image(self, layer: Layer) -> Image:
        """Of what the sandbox has become."""
        return Image(layer, self._workdir, dict(self._env), self._user)

    async def run(self, box: Sandbox) -> None:
        """All instructions behind FROM."""
        self._end = time.monotonic() + self._task.build_seconds
        for item in self.steps:
            try:
                await self._do[item.name](self, box, item)
            except dockerfile.DockerfileError as error:
                raise TaskError(f"environment/Dockerfile: {error}") from None
            except (SandboxFileError, TaskError) as error:
                host = self.base.host_programs and isinstance(error, SandboxFileError)
                hint = " (of this machine's programs nothing is changed)" if host else ""
                raise ImageError(f"{_where(item)}: {error}{hint}") from None

    def _from(self, item: dockerfile.Instruction, base_of) -> Layer:
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "")
        if item.flags.get("platform", machine).removeprefix("linux/") != machine:
            raise ImageError(f"{_where(item)}: this machine is linux/{machine}")
        words = dockerfile.substitute(item.text, self._arguments).split()
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise dockerfile.DockerfileError(f"line {item.line}: FROM {item.text}: no image")
        return base_of(words[0])

    def _variables(self) -> dict[str, str]:
        return {**self._arguments, **self._env}

    def _set_argument(self, item: dockerfile.Instruction) -> None:
        for word in self._words(item):
            name, is_set, value = word.partition("=")
            if is_set:
                self._arguments[name] = value
            elif name in self._defaults:
                self._arguments[name] = self._defaults[name]

    def _words(self, item: dockerfile.Instruction) -> list[str]:
        try:
            return dockerfile.words(item.text, self._variables())
        except dockerfile.DockerfileError as error:
            raise dockerfile.DockerfileError(f"line {item.line}: {item.name} {error}") from None

    async def _arg(self, box: Sandbox, item: dockerfile.Instruction) -> None:
        self._set_argument(item)

    async def _env_(self, box: Sandbox, item: dockerfile.Instruction) -> None:
        self._env.update(dockerfile.pairs(item, self._variables()))

    async def _workdir_(self, box: Sandbox, item: dockerfile.Instruction) -> None:
        path = dockerfile.substitute(item.text, self._variables())
        path = os.path.normpath(os.path.join(self._workdir or "/", path))
        done = await box.exec(["mkdir", "-p", path], user="root")
        if done.code:
            raise ImageError(f"{_where(item)}: {_tail(done)}")
        self._workdir = path

    async def _user_(self, box: Sandbox, item: dockerfile.Instruction) -> None:
        self._user = dockerfile.substitute(item.text, self._variables()).partition(":")[0]

    async def _run(self, box: Sandbox, item: dockerfile.Instruction) -> None:
        command = list(item.arguments or ["/bin/sh", "-c", item.script])
        if item.script.startswith("#!"):
            command = ["/bin/sh", "-c", _RUN_FILE, item.script]
        left = self._end - time.monotonic()
        if left <= 0:
            raise ImageError(f"{_where(item)}: no end within {self._task.build_seconds:g} s")
        env = self._variables()
        env["PATH"] = f"{grader.FOLDER}/build:{env['PATH']}"  # what is installed can be asked for
        place = self._workdir or "/"
        done = await run_as(box, self._user, command, cwd=place, env=env, seconds=left)
        if done.timed_out:
            raise ImageError(f"{_where(item)}: no end within {self._task.build_seconds:g} s")
        if done.code:
            raise ImageError(f"{_where(item)}: exit code {done.code}: {_tail(done)}")

    async def _copy(self, box: Sandbox, item: dockerfile.Instruction) -> None:
        words = self._words(item)
        if item.arguments:
            known = self._variables()
            words = [dockerfile.substitute(word, known) for word in item.arguments]
        if len(words) < 2:
            raise dockerfile.DockerfileError(f"line {item.line}: COPY needs a source and a place")
        *patterns, place = words
        sources = [path for pattern in patterns for path in self._sources(item, pattern)]
        is_folder = place.endswith("/") or place in (".", "..") or len(sources) > 1
        place = os.path.normpath(os.path.join(self._workdir or "/", place))
        is_folder |= (await box.exec(["test", "-d", place], user="root", cwd="/")).code == 0
        written = []
        for source in sources:
            if not source.is_dir():
                written.append(os.path.join(place, source.name) if is_folder else place)
                await box.put(written[-1], source, user="root")
                continue
            # One by one: of a folder that is there, owner and permissions stay.
            for path in sorted(source.iterdir()):
                written.append(os.path.join(place, path.name))
                await self._put(box, written[-1], path)
        for flag, program in (("chown", "chown"), ("chmod", "chmod")):
            if (value := item.flags.get(flag)) is not None and written:
                value = dockerfile.substitute(value, self._variables())
                done = await box.exec([program, "-R", value, "--", *written], user="root")
                if done.code:
                    raise ImageError(f"{_where(item)}: {_tail(done)}")

    async def _put(self, box: Sandbox, target: str, path: pathlib.Path) -> None:
        if not path.is_symlink():
            await box.put(target, path, user="root")
            return
        await box.exec(["mkdir", "-p", os.path.dirname(target)], user="root")
        await box.exec(["ln", "-sfn", os.readlink(path), target], user="root")

    _do = {
        "ARG": _arg,
        "ENV": _env_,
        "WORKDIR": _workdir_,
        "USER": _user_,
        "RUN": _run,
        "COPY": _copy,
    }

    def _sources(self, item: dockerfile.Instruction, pattern: str) -> list[pathlib.Path]:
        pattern = os.path.normpath(pattern.lstrip("/") or ".")
        top = self._context.resolve()
        found = [top] if pattern == "." else sorted(top.glob(pattern))
        if pattern.startswith("..") or not all(p.resolve().is_relative_to(top) for p in found):
            raise dockerfile.DockerfileError(
                f"line {item.line}: COPY {pattern} leads out of environment/"
            )
        if not found:
            raise dockerfile.DockerfileError(
                f"line {item.line}: no {pattern} in environment/ to COPY"
            )
        return found


def _where(item: dockerfile.Instruction) -> str:
    return f"environment/Dockerfile, line {item.line}: {item.name} {item.text[:80]}"


def _tail(done) -> str:
    said = (done.stdout + done.stderr).decode(errors="replace").strip()
    return said[-_SAID:]
