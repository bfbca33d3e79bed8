"""Resolves Dockerfiles into steps: changes of a sandbox's files, with all variables replaced.

`Recipe` reads the instructions once, without a sandbox. It checks them, applies ENV, ARG, WORKDIR and USER, and turns
WORKDIR, COPY and RUN into steps. Each step has a key of its inputs, so that equal steps can share a layer.
"""

import abc
import dataclasses
import hashlib
import os
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5_jax.envs.sandbox import Layer, Sandbox
from glm5_jax.envs.terminal import dockerfile, grader
from glm5_jax.envs.terminal.dockerfile import DockerfileError, DockerInstruction
from glm5_jax.envs.terminal.shell import run_as
from glm5_jax.envs.terminal.task import TerminalTask

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Runs a here-document that begins with "#!".
_RUN_FILE = (
    'f=$(mktemp) && printf %s "$0" > "$f" && chmod 755 "$f" && "$f"; c=$?; rm -f "$f"; exit $c'
)
_MAX_OUTPUT = 1000  # characters of a failed instruction's output in an error


class ImageError(RuntimeError):
    """Image that cannot be built on this machine, which is a failure of the environment."""


@dataclasses.dataclass(frozen=True)
class BuildStep(abc.ABC):
    """Change of files by an instruction."""

    item: DockerInstruction

    @abc.abstractmethod
    def key(self) -> Any:
        """Returns the inputs of the step, without the files of the layers below."""

    @abc.abstractmethod
    async def act(self, box: Sandbox, env: Mapping[str, str], timeout_s: float) -> None:
        """Makes the change in a sandbox. Raises ImageError if that fails, TimeoutError if it takes too long.

        env: variables of commands that images do not keep.
        """


@dataclasses.dataclass(frozen=True)
class _MakeFolder(BuildStep):
    path: str

    def key(self) -> Any:
        return self.path

    async def act(self, box: Sandbox, env: Mapping[str, str], timeout_s: float) -> None:
        await _run_as_root(box, ["mkdir", "-p", self.path])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RunCommand(BuildStep):
    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    user: str

    def key(self) -> Any:
        return self.command, self.cwd, sorted(self.env.items()), self.user

    async def act(self, box: Sandbox, env: Mapping[str, str], timeout_s: float) -> None:
        env = {**env, **self.env}
        env["PATH"] = (
            f"{grader.FOLDER}/build:{env['PATH']}"  # its apt-get accepts installed packages
        )
        done = await run_as(
            box, self.user, self.command, cwd=self.cwd, env=env, timeout_s=timeout_s
        )
        if done.timed_out:
            raise TimeoutError
        if done.code and done.out_of_memory:
            raise ImageError(
                f"it needs more than {box.config.memory_bytes >> 20} MiB of memory, including its files; raise "
                "build.memory_bytes"
            )
        if done.code:
            raise ImageError(f"exit code {done.code}: {_tail(done)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CopyFiles(BuildStep):
    sources: tuple[pathlib.Path, ...]
    path: str
    is_folder: bool  # True: the path is a folder, which need not exist yet
    modes: tuple[tuple[str, str], ...]  # chown and chmod with their values

    def key(self) -> Any:
        files = [digest_of(source) for source in self.sources]
        return [path.name for path in self.sources], files, self.path, self.is_folder, self.modes

    async def act(self, box: Sandbox, env: Mapping[str, str], timeout_s: float) -> None:
        is_folder = self.is_folder
        is_folder |= (await box.exec(["test", "-d", self.path], user="root", cwd="/")).code == 0
        paths = []
        for source in self.sources:
            if not source.is_dir():
                paths.append(os.path.join(self.path, source.name) if is_folder else self.path)
                await box.put(paths[-1], source, user="root")
                continue
            # One by one, so that an existing folder keeps its owner and permissions.
            for path in sorted(source.iterdir()):
                paths.append(os.path.join(self.path, path.name))
                await _put(box, paths[-1], path)
        for program, value in self.modes if paths else ():
            await _run_as_root(box, [program, "-R", value, "--", *paths])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WriteFiles(BuildStep):
    files: tuple[tuple[str, str], ...]  # paths with contents
    modes: tuple[tuple[str, str], ...]  # chown and chmod with their values

    def key(self) -> Any:
        return self.files, self.modes

    async def act(self, box: Sandbox, env: Mapping[str, str], timeout_s: float) -> None:
        for path, text in self.files:
            await box.put(path, text.encode(), user="root")
        for program, value in self.modes:
            await _run_as_root(box, [program, value, "--", *(path for path, _ in self.files)])


class Recipe:
    """Resolved Dockerfile of a task.

    Construction raises DockerfileError, and ImageError if the image of FROM cannot be had.

    Attributes:
      base: layer that `base_of` returns for the image of FROM.
      steps: changes of files, in order.
      env, workdir, user: settings of the image; workdir is None if the Dockerfile has no WORKDIR.
    """

    def __init__(self, task: TerminalTask, base_of: Callable[[str], Layer]):
        recipe = dockerfile.parse(task.dockerfile.read_text("utf-8-sig"))
        self._context = task.dockerfile.parent.resolve()
        self._arguments: dict[str, str] = {}  # from ARG; not part of the image
        self._defaults: dict[str, str] = {}  # from ARG before FROM
        self.env: dict[str, str] = {"PATH": PATH}
        self.workdir: str | None = None
        self.user = "root"
        self.steps: list[BuildStep] = []
        at = next(i for i, item in enumerate(recipe) if item.name == "FROM")
        for item in recipe[:at]:
            self._arg(item)
        self.base = self._from(recipe[at], base_of)
        self._defaults, self._arguments = self._arguments, {}
        for item in recipe[at + 1 :]:
            self._resolve[item.name](self, item)

    def stages(self) -> list[list[BuildStep]]:
        """Returns the steps in groups, of which each makes a layer: a RUN ends a group."""
        stages: list[list[BuildStep]] = [[]]
        for step in self.steps:
            stages[-1].append(step)
            if isinstance(step, _RunCommand):
                stages.append([])
        return [stage for stage in stages if stage]

    def _from(self, item: DockerInstruction, base_of: Callable[[str], Layer]) -> Layer:
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "")
        if item.flags.get("platform", machine).removeprefix("linux/") != machine:
            raise ImageError(f"{where(item, self._context.name)}: this machine is linux/{machine}")
        words = dockerfile.substitute(item.text, self._arguments).split()
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise DockerfileError(f"line {item.line}: FROM {item.text}: no image")
        return base_of(words[0])

    def _variables(self) -> dict[str, str]:
        return {**self._arguments, **self.env}

    def _words(self, item: DockerInstruction) -> list[str]:
        try:
            return dockerfile.words(item.text, self._variables())
        except DockerfileError as error:
            raise DockerfileError(f"line {item.line}: {item.name} {error}") from None

    def _arg(self, item: DockerInstruction) -> None:
        for word in self._words(item):
            name, is_set, value = word.partition("=")
            if is_set:
                self._arguments[name] = value
            elif name in self._defaults:
                self._arguments[name] = self._defaults[name]

    def _env(self, item: DockerInstruction) -> None:
        self.env.update(dockerfile.pairs(item, self._variables()))

    def _user(self, item: DockerInstruction) -> None:
        self.user = dockerfile.substitute(item.text, self._variables()).partition(":")[0]

    def _workdir(self, item: DockerInstruction) -> None:
        path = dockerfile.substitute(item.text, self._variables())
        self.workdir = os.path.normpath(os.path.join(self.workdir or "/", path))
        self.steps.append(_MakeFolder(item, self.workdir))

    def _run(self, item: DockerInstruction) -> None:
        command = item.arguments or ("/bin/sh", "-c", item.script)
        if item.script.startswith("#!"):
            command = ("/bin/sh", "-c", _RUN_FILE, item.script)
        self.steps.append(
            _RunCommand(
                item,
                command=command,
                cwd=self.workdir or "/",
                env=self._variables(),
                user=self.user,
            )
        )

    def _copy(self, item: DockerInstruction) -> None:
        words = self._words(item)
        if item.arguments:
            words = [dockerfile.substitute(word, self._variables()) for word in item.arguments]
        if len(words) < 2:
            raise DockerfileError(f"line {item.line}: COPY needs a source and a destination")
        *patterns, destination = words
        documents = item.files(self._variables())
        patterns = [word for word in patterns if not (documents and word.startswith("<<"))]
        sources = [path for pattern in patterns for path in self._sources(item, pattern)]
        is_folder = destination.endswith("/") or destination in (".", "..")
        is_folder |= len(sources) + len(documents) > 1
        destination = os.path.normpath(os.path.join(self.workdir or "/", destination))
        modes = [
            (program, dockerfile.substitute(value, self._variables()))
            for program in ("chown", "chmod")
            if (value := item.flags.get(program)) is not None
        ]
        if documents:
            files = (
                (os.path.join(destination, name) if is_folder else destination, text)
                for name, text in documents.items()
            )
            self.steps.append(_WriteFiles(item, files=tuple(files), modes=tuple(modes)))
        if sources:
            self.steps.append(
                _CopyFiles(
                    item,
                    sources=tuple(sources),
                    path=destination,
                    is_folder=is_folder,
                    modes=tuple(modes),
                )
            )

    def _sources(self, item: DockerInstruction, pattern: str) -> list[pathlib.Path]:
        pattern = os.path.normpath(pattern.lstrip("/") or ".")
        top = self._context
        paths = [top] if pattern == "." else sorted(top.glob(pattern))
        if pattern.startswith("..") or not all(p.resolve().is_relative_to(top) for p in paths):
            raise DockerfileError(f"line {item.line}: COPY {pattern} leads out of {top.name}/")
        if not paths:
            raise DockerfileError(f"line {item.line}: no {pattern} in {top.name}/ to COPY")
        return paths

    _resolve = {
        "ARG": _arg,
        "ENV": _env,
        "WORKDIR": _workdir,
        "USER": _user,
        "RUN": _run,
        "COPY": _copy,
    }


def where(item: DockerInstruction, context: str) -> str:
    """Returns the file, line and text of an instruction, for messages."""
    return f"{context}/Dockerfile, line {item.line}: {item.name} {item.text[:80]}"


def digest_of(top: pathlib.Path) -> str:
    """Returns a digest of a file or folder: paths, permissions, contents and targets of links."""
    digest = hashlib.sha256()
    paths = [top]
    for parent, folders, files in os.walk(top):
        folders.sort()
        paths += [pathlib.Path(parent, name) for name in (*folders, *sorted(files))]
    for path in paths:
        digest.update(repr((str(path.relative_to(top)), path.lstat().st_mode)).encode())
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


async def _put(box: Sandbox, target: str, path: pathlib.Path) -> None:
    if not path.is_symlink():
        await box.put(target, path, user="root")
        return
    await box.exec(["mkdir", "-p", os.path.dirname(target)], user="root")
    await box.exec(["ln", "-sfn", os.readlink(path), target], user="root")


async def _run_as_root(box: Sandbox, command: Sequence[str]) -> None:
    """Runs a command as root. Raises ImageError if it fails."""
    done = await box.exec(command, user="root", cwd="/")
    if done.code:
        raise ImageError(_tail(done))


def _tail(done) -> str:
    text = (done.stdout + done.stderr).decode(errors="replace").strip()
    return text[-_MAX_OUTPUT:]
