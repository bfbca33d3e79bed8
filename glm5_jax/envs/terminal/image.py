"""Images of tasks: a Dockerfile built into layers that sandboxes start from.

Each RUN makes a layer. Tasks whose Dockerfiles begin with the same steps over the same base share the layers of these.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import logging
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from glm5_jax.envs.sandbox import (
    HOST,
    Layer,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
)
from glm5_jax.envs.sandbox.orphans import name_prefix
from glm5_jax.envs.terminal import dockerfile, grader, isolation_check
from glm5_jax.envs.terminal.build import (
    PATH,
    BuildStep,
    ImageError,
    Recipe,
    digest_of,
    where,
)
from glm5_jax.envs.terminal.task import TaskError, TerminalTask

log = logging.getLogger(__name__)

# This machine's programs replace images that contain little more than a base system.
IMAGES = {"debian": "host", "ubuntu": "host"}
_TESTERS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LIB = f"{grader.FOLDER}/lib"
_FOLDERS = ("/var/lib", "/var/log", "/var/cache", "/var/spool", "/opt", "/srv", "/mnt", "/media")
_NOWHERE = "/var/agent"  # a folder that always exists
_MAX_FILES = 1_000_000  # in a layer; packages have many small files
_RESOLVER = pathlib.Path("/etc/resolv.conf")
_ON_HOST = (
    "this machine's programs cannot be changed; `python -m launch.base_image --help` says how to make a root file "
    "system that can"
)
_NO_NETWORK = "builds have no network; build.network=True lets them use the machine's"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """How images are built. Construction refuses values out of range (ValueError).

    Attributes:
      network: whether RUN lines reach the machine's network, its loopback included.
      env: variables of RUN lines that images do not keep, such as http_proxy.
      memory_bytes: memory limit of a step with the files that it writes; a task that may use more has its limit.
    """

    network: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory_bytes: int = 4 << 30

    def __post_init__(self):
        if self.memory_bytes < 1:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """File system and settings that sandboxes of a task start from.

    Attributes:
      layer: file system.
      workdir: WORKDIR of the Dockerfile; None if it has none.
      env: environment variables.
      user: USER of the Dockerfile; group and home are those of the user.
    """

    layer: Layer
    workdir: str | None
    env: Mapping[str, str]
    user: str = "root"


class Images:
    """Builds images and caches them by their inputs until it is closed; an asynchronous context manager.

    Raises ValueError for a table entry that is neither "host" nor a root file system.

    Args:
      table: image name, with tag or without -> "host", or the folder of a root file system, as
          launch/base_image.py makes it.
      build: options for building images.
    """

    def __init__(self, table: Mapping[str, str] | None = None, build: BuildConfig = BuildConfig()):
        self._config = build
        self._table = {**IMAGES, **(table or {})}
        for name, source in self._table.items():
            if source != "host" and not pathlib.Path(source, "bin/sh").exists():
                raise ValueError(
                    f"images: {name} is {source!r}, neither 'host' nor a root file system"
                )
        self._bases: dict[str, Layer] = {}
        self._images: dict[str, asyncio.Task[Image]] = {}
        self._stages: dict[str, asyncio.Task[Layer]] = {}
        self._tools: asyncio.Task[Layer] | None = None
        self._layers: list[Layer] = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        await self.close()

    async def of(self, task: TerminalTask) -> Image:
        """Returns the image of a task; builds it if no equal one exists. Raises ImageError, TaskError."""
        key = await asyncio.to_thread(_digest, task)
        if key not in self._images:
            self._images[key] = asyncio.create_task(self._build(task))
        try:
            return await asyncio.shield(self._images[key])
        except (ImageError, SandboxError):  # may succeed the next time
            self._images.pop(key, None)
            raise

    async def rebuild(self, task: TerminalTask) -> Image:
        """Builds the image of a task from its base, without layers that were built before."""
        return await self._build(task, shares_layers=False)

    async def tools(self) -> Layer:
        """Returns the layer that grading adds: the shims of programs that start tests, and pytest."""
        if self._tools is None:
            self._tools = asyncio.create_task(self._build_tools())
        return await asyncio.shield(self._tools)

    async def close(self) -> None:
        """Removes all layers that were built."""
        tasks = [*self._images.values(), *self._stages.values()]
        tasks += [self._tools] if self._tools else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for layer in self._layers:
            await asyncio.to_thread(layer.remove)
        self._layers, self._images, self._stages, self._tools = [], {}, {}, None

    def _base(self, name: str) -> Layer:
        plain = name.removeprefix("docker.io/").removeprefix("library/").partition("@")[0]
        folder, slash, last = plain.rpartition("/")  # the first part may have a port
        untagged = folder + slash + last.partition(":")[0]
        candidates = [self._table.get(known) for known in (name, plain, untagged)]
        source = next((candidate for candidate in candidates if candidate), None)
        if source is None:
            raise ImageError(
                f"image {name} is not on this machine; known are {', '.join(sorted(self._table))}. A folder with a "
                "root file system can replace it (images), and `python -m launch.base_image FOLDER` makes one"
            )
        if source == "host":
            return HOST
        if source not in self._bases:
            self._bases[source] = Layer.of_folder(source)
        return self._bases[source]

    async def _build(self, task: TerminalTask, *, shares_layers: bool = True) -> Image:
        if not task.dockerfile.is_file():
            if task.docker_image is None:
                raise TaskError(f"{task.context} has no Dockerfile, and the task no docker_image")
            base = self._base(task.docker_image)
            return Image(layer=base, workdir=None, env={"PATH": PATH})
        try:
            recipe = Recipe(task, self._base)
        except (dockerfile.DockerfileError, UnicodeDecodeError) as error:
            raise TaskError(f"{task.context}/Dockerfile: {error}") from None
        layer = recipe.base
        if layer.host_programs:
            tools = await self.tools()
            layer = Layer((*tools.folders[:1], *layer.folders), host_programs=True)
        key, end = repr(layer), time.monotonic() + task.build_timeout_s
        for stage in recipe.stages():
            key = await asyncio.to_thread(_key, key, stage)
            if shares_layers:
                layer = await self._layer(key, layer, stage, task, end)
            else:
                layer = await self._make_layer(layer, stage, task, end)
        return _with_tester(
            Image(layer=layer, workdir=recipe.workdir, env=recipe.env, user=recipe.user)
        )

    async def _layer(
        self, key: str, below: Layer, stage: list[BuildStep], task: TerminalTask, end: float
    ) -> Layer:
        """Returns the layer of a stage, which tasks with equal stages share."""
        if (shared := self._stages.get(key)) is not None:
            try:
                return await asyncio.shield(shared)
            except (ImageError, SandboxError):  # the error names a line of another task
                pass
        layer = asyncio.create_task(self._make_layer(below, stage, task, end))
        self._stages[key] = layer
        try:
            return await asyncio.shield(layer)
        except (ImageError, SandboxError):
            if self._stages.get(key) is layer:
                del self._stages[key]
            raise

    async def _make_layer(
        self, below: Layer, stage: list[BuildStep], task: TerminalTask, end: float
    ) -> Layer:
        config = SandboxConfig(
            base=below,
            workdir=_NOWHERE,
            memory_bytes=max(task.memory_bytes, self._config.memory_bytes),
            disk_bytes=task.disk_bytes,
            max_files=_MAX_FILES,
            cpus=task.cpus,
            network=self._config.network,
        )
        async with Sandbox(config) as box:
            if self._config.network:
                await box.put(str(_RESOLVER), _name_servers(), user="root")
            for step in stage:
                await self._act(step, box, task, end)
            if self._config.network:  # nothing of the machine's network stays in images
                await box.put(str(_RESOLVER), b"", user="root")
            layer = await box.snapshot()
        self._layers.append(layer)
        return layer

    async def _act(self, step: BuildStep, box: Sandbox, task: TerminalTask, end: float) -> None:
        """Runs a step. Raises ImageError with its line, and the likely reason if that is a limit of this machine."""
        left = end - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            await step.act(box, self._config.env, left)
        except TimeoutError:
            raise ImageError(
                f"{where(step.item, task.context)}: no end within {task.build_timeout_s:g} s"
            ) from None
        except (SandboxFileError, ImageError) as error:
            hint = ""
            if box.config.base.host_programs:
                hint = f" ({_ON_HOST})"
            elif not self._config.network and step.item.name == "RUN":
                hint = f" ({_NO_NETWORK})"
            raise ImageError(f"{where(step.item, task.context)}: {error}{hint}") from None

    async def _build_tools(self) -> Layer:
        with tempfile.TemporaryDirectory(prefix=f"{name_prefix()}tools-") as path:
            folder = pathlib.Path(path)
            await asyncio.to_thread(_lay_out_tools, folder)
            async with Sandbox(SandboxConfig(workdir=_NOWHERE, timeout_s=120)) as box:
                await box.put(grader.FOLDER, folder, user="root", mode=0o755)
                # Scripts source this file after they installed uv.
                await box.put("/root/.local/bin/env", b"", user="root")
                # Folders that Debian has and sandboxes lack.
                await box.exec(["mkdir", "-p", *_FOLDERS], user="root")
                await box.put("/tmp/test_it.py", b"def test_it():\n    assert 'a' in 'abc'\n")
                command = ["python3", "-s", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                command += ["-c", "/dev/null", "/tmp/test_it.py"]
                # Leaves compiled modules, which saves a second of each grading.
                await box.exec(command, env={"PYTHONPATH": _LIB}, user="root", cwd="/tmp")
                await box.exec("rm -rf /tmp/* /tmp/.[!.]*", user="root")
                layer = await box.snapshot()
                await isolation_check.check(box)
        self._layers.append(layer)
        return layer


def _with_tester(image: Image) -> Image:
    """Adds pytest to an image with this machine's programs, because the images that those replace usually have it."""
    if not image.layer.host_programs or "PYTHONPATH" in image.env:
        return image
    return dataclasses.replace(image, env={**image.env, "PYTHONPATH": _LIB})


def _name_servers() -> bytes:
    """Returns the machine's configuration of its resolver, empty if it has none."""
    return _RESOLVER.read_bytes() if _RESOLVER.is_file() else b""


def _key(below: str, stage: list[BuildStep]) -> str:
    """Returns the key of a layer, from its steps and the key of the layer below it."""
    parts = below, [(type(step).__name__, step.key()) for step in stage]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _digest(task: TerminalTask) -> str:
    """Returns a digest of all inputs of an image."""
    context = digest_of(task.folder / task.context)
    parts = task.docker_image, sorted(task.env.items()), task.context, context
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _lay_out_tools(folder: pathlib.Path) -> None:
    """Writes the files of `grader.FOLDER`."""
    code, bin_, lib = folder / "code" / "grader", folder / "bin", folder / "lib"
    for path in (code, bin_, lib, folder / "missing", folder / "home"):
        path.mkdir(parents=True)
    for path in pathlib.Path(grader.__file__).parent.glob("*.py"):
        shutil.copyfile(path, code / path.name)
    (folder / "build").mkdir()
    for name in ("apt", "apt-get"):
        (folder / "build" / name).write_text(grader.INSTALLER)
        (folder / "build" / name).chmod(0o755)
        shutil.copy(folder / "build" / name, bin_)
    for name in grader.SHIMS:
        (bin_ / name).write_text(grader.SHIM.replace("NAME", name))
        (bin_ / name).chmod(0o755)
    status = pathlib.Path("/var/lib/dpkg/status")
    lines = status.read_text(errors="replace").splitlines() if status.exists() else ()
    installed = (line.removeprefix("Package: ") for line in lines if line.startswith("Package: "))
    (folder / "packages").write_text("".join(f"{name}\n" for name in installed))
    _copy_distributions(_TESTERS, lib)


@contextlib.contextmanager
def copy_distributions(names: Sequence[str]) -> Iterator[pathlib.Path]:
    """Yields a temporary folder with Python packages of this program, without compiled modules."""
    with tempfile.TemporaryDirectory(prefix=f"{name_prefix()}packages-") as path:
        _copy_distributions(names, pathlib.Path(path))
        yield pathlib.Path(path)


def _copy_distributions(names: Sequence[str], folder: pathlib.Path) -> None:
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # reported when a task needs it
            continue
        for file in distribution.files or ():
            if file.suffix == ".pyc" or ".." in file.parts:
                continue
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(distribution.locate_file(file)), target)
