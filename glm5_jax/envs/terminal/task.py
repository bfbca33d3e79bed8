"""Task folders in Harbor's format, read and checked.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh

What a folder asks for and this place does not have is refused by the name of the field, never left out.
"""

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

_MB = 1 << 20
_LEAST_CPUS = 0.01  # of a sandbox
_PARTS = (
    "task.toml",
    "instruction.md",
    "environment",
    "environment/Dockerfile",
    "tests",
    "tests/test.sh",
    "solution",
)
_PARTS += ("solution/solve.sh",)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMG])", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([A-Za-z_]\w*)(:-([^}]*))?\}")
# What no agent may make its own: the folders of grading, and those that programs come from.
_RESERVED = ("", "tests", "logs", "solution", "grader", "bin", "sbin", "lib", "lib64", "usr", "etc")
_RESERVED += ("proc", "sys", "dev", "tmp", "var", "run")


class TaskError(ValueError):
    """A task folder that is incomplete, wrong, or asks for what there is not here."""


@dataclasses.dataclass(frozen=True)
class TerminalTask:
    """A task folder.

    name: of the folder. docker_image: what is used where there is no Dockerfile. workdir: None is that of the image.
    user: of the agent, None is that of the image. artifacts: paths other than the work folder that are graded.
    is_shared: whether tests run in the agent's sandbox, in which an attempt can forge its reward.
    """

    name: str
    folder: pathlib.Path
    instruction: str
    docker_image: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    user: str | None = None
    agent_seconds: float = 600.0
    verifier_seconds: float = 600.0
    build_seconds: float = 600.0
    verifier_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    solution_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cpus: float = 1.0
    memory_bytes: int = 2048 * _MB
    disk_bytes: int = 10240 * _MB
    artifacts: tuple[str, ...] = ()
    is_shared: bool = False

    @property
    def dockerfile(self) -> pathlib.Path:
        return self.folder / "environment" / "Dockerfile"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLimits:
    """What tasks may ask of the machine that they run on. Construction refuses values that are not positive (ValueError).

    Attributes:
      memory_bytes: largest memory of a task.
      disk_bytes: largest storage of a task.
      cpus: largest number of processors of a task.
      processes: number of processes and threads in a sandbox.
    """

    memory_bytes: int = 16 << 30
    disk_bytes: int = 32 << 30
    cpus: float = 16.0
    processes: int = 256

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)}; it must be positive"
                )

    def check(self, task: TerminalTask) -> None:
        """Raises TaskError if the task asks for more."""
        for name in ("memory_bytes", "disk_bytes", "cpus"):
            wanted, limit = getattr(task, name), getattr(self, name)
            if wanted > limit:
                raise TaskError(
                    f"task {task.name}: it asks for {name}={wanted:g}, and limits.{name} is {limit:g}; raise that, or "
                    "leave the task out"
                )


def find_tasks(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """The task folders in a folder, or itself if it is one; TaskError if there is none."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise TaskError(f"no folder {folder}; give one that holds task folders")
    if (folder / "task.toml").is_file():
        return [folder.resolve()]
    found = sorted(path.parent.resolve() for path in folder.glob("*/task.toml"))
    if not found:
        raise TaskError(f"no task in {folder}: none of its folders has a task.toml")
    return found


def load_task(folder: str | pathlib.Path) -> TerminalTask:
    """Reads a task folder; TaskError names the task and what is wrong with it, or not supported."""
    folder = pathlib.Path(folder).resolve()
    try:
        return _load(folder)
    except TaskError as error:
        raise TaskError(f"task {folder.name}: {error}") from None


def _load(folder: pathlib.Path) -> TerminalTask:
    _check_links(folder)
    try:
        data = tomllib.loads((folder / "task.toml").read_text("utf-8"))
    except FileNotFoundError:
        raise TaskError("it has no task.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"task.toml: {error}") from None
    except RecursionError:
        raise TaskError("task.toml: its lists or tables are too deep") from None
    if (folder / "steps").exists() or "steps" in data:
        raise TaskError("steps: tasks of several steps are not supported")
    for name in ("environment/docker-compose.yaml", "environment/docker-compose.yml"):
        if (folder / name).exists():
            raise TaskError(f"{name} is not supported: a task has one sandbox")
    for name in ("environment/.dockerignore", "tests/Dockerfile"):
        if (folder / name).exists():
            raise TaskError(f"{name} is not supported")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise TaskError(f"it has no {name}")
    values = _read_fields(data)
    if not (folder / "environment/Dockerfile").is_file() and not values.get("docker_image"):
        raise TaskError("it has neither environment/Dockerfile nor environment.docker_image")
    if values.get("workdir") and not values.get("is_shared"):
        check_workdir(values["workdir"], f"environment.workdir = {values['workdir']!r}: the folder")
    instruction = (folder / "instruction.md").read_text("utf-8", errors="replace")
    return TerminalTask(folder.name, folder, instruction, **values)


def _check_links(folder: pathlib.Path) -> None:
    """Raises TaskError if a link of the folder leads out of it: its files would be read where trials run.

    Links within environment/, tests/ and solution/ are copied as links, and resolved in a sandbox. So only what is
    opened here is looked at: the parts of a task, and what links to them.
    """
    for part in _PARTS:
        path = folder / part
        if path.is_symlink() or path.parent.is_symlink():
            try:
                target = path.resolve(strict=True)
            except (OSError, RuntimeError):
                raise TaskError(f"{part} is a link that leads nowhere") from None
            if not target.is_relative_to(folder):
                raise TaskError(
                    f"{part} is a link out of the folder, to {target}; give the file itself"
                )


def can_be_workdir(path: str) -> bool:
    """Whether an agent can have a folder of that path as its own."""
    parts = [part for part in path.split("/") if part]
    top = parts[0] if parts else ""
    inside = len(parts) > 1 and top in ("usr", "tmp", "var")
    return path.startswith("/") and ".." not in parts and (inside or top not in _RESERVED)


def check_workdir(path: str, where: str) -> str:
    """The path if an agent can have that folder to work in; TaskError."""
    if not can_be_workdir(path):
        raise TaskError(
            f"{where} {path!r} cannot be the folder that is worked in and graded; give one of its own, as /app, or "
            'verifier.environment_mode = "shared"'
        )
    return "/" + "/".join(part for part in path.split("/") if part)


# -- fields ---------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise TaskError("it must be a number above 0")
    return float(value)


def _processors(value: Any) -> float:
    if _number(value) < _LEAST_CPUS:
        raise TaskError(f"it must be at least {_LEAST_CPUS}")
    return float(value)


def _megabytes(value: Any) -> int:
    return int(_number(value)) * _MB


def _size(value: Any) -> int:
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    number = float(found[1]) if found else 0.0
    if not 0 < number < 1e9:
        raise TaskError("it must be a size such as 512M or 2G")
    return int(number * {"K": 1 << 10, "M": _MB, "G": 1 << 30}[found[2].upper()])


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TaskError("it must be a text")
    return value


def _user(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value):
        raise TaskError("it must be the name or number of a user")
    return str(value)


def _env(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise TaskError("it must be a table of texts")
    return {name: _TEMPLATE.sub(_filled, text) for name, text in value.items()}


def _filled(found: re.Match) -> str:
    if found[2] is None:
        raise TaskError(
            f"{found[0]} takes a variable of the host, none of which are passed on; give it a default, "
            f"as ${{{found[1]}:-value}}"
        )
    return found[3]


def _paths(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TaskError("it must be a list")
    paths = []
    for item in value:
        if isinstance(item, dict):
            if other := sorted(item.keys() - {"source", "destination"}):
                raise TaskError(f"{other[0]} is not supported")
            item = item.get("source")
        paths.append(check_workdir(_text(item), "the artifact"))
    return tuple(paths)


def _environment_mode(value: Any) -> bool:
    _one_of("shared", "separate")(value)
    return value.lower() == "shared"


def _workdir(value: Any) -> str:
    path = _text(value)
    if not path.startswith("/") or ".." in path.split("/"):
        raise TaskError(
            "it cannot be the folder that is worked in; give an absolute path, without .."
        )
    return "/" + "/".join(part for part in path.split("/") if part)


def _one_of(*known: Any) -> Callable[[Any], None]:
    """For what changes nothing at these values, and at any other is something there is not here."""

    def check(value: Any) -> None:
        value = value.lower() if isinstance(value, str) else value
        if value not in known:
            raise TaskError(f"not supported; it can be {' or '.join(map(repr, known))}")

    return check


def _any(value: Any) -> None:
    """For what is told to people."""


_NETWORK = {
    # There never is a network; a task that may have one finds out what it lacks as it runs.
    "network_mode": (None, _one_of("no-network", "public")),
    "allowed_hosts": (None, _one_of([])),
}
# Section -> field -> name in TerminalTask or None, and how the value is read.
_FIELDS: dict[str, dict[str, tuple[str | None, Callable]]] = {
    "": {
        "schema_version": (None, _any),
        "version": (None, _any),
        "source": (None, _any),
        "metadata": (None, _any),
        "artifacts": ("artifacts", _paths),
    },
    "task": dict.fromkeys(("name", "version", "description", "authors", "keywords"), (None, _any)),
    "verifier": {
        "timeout_sec": ("verifier_seconds", _number),
        "env": ("verifier_env", _env),
        "user": (None, _one_of("root", 0)),
        "environment_mode": ("is_shared", _environment_mode),
        "collect": (None, _one_of([])),
        **_NETWORK,
    },
    "agent": {"timeout_sec": ("agent_seconds", _number), "user": ("user", _user), **_NETWORK},
    "solution": {"env": ("solution_env", _env)},
    "environment": {
        "build_timeout_sec": ("build_seconds", _number),
        "docker_image": ("docker_image", _text),
        "os": (None, _one_of("linux")),
        "cpus": ("cpus", _processors),
        "memory_mb": ("memory_bytes", _megabytes),
        "memory": ("memory_bytes", _size),
        "storage_mb": ("disk_bytes", _megabytes),
        "storage": ("disk_bytes", _size),
        "gpus": (None, _one_of(0)),
        "gpu_types": (None, _one_of([])),
        "mcp_servers": (None, _one_of([])),
        "env": ("env", _env),
        "workdir": ("workdir", _workdir),
        "allow_internet": (None, _one_of(True, False)),
        **_NETWORK,
    },
}


def _read_fields(data: dict[str, Any]) -> dict[str, Any]:
    version = str(data.get("schema_version", data.get("version", "1.1")))
    if not re.fullmatch(r"1\.[0-9]+", version):
        raise TaskError(f"schema_version is {version!r}; known is 1.x")
    tables = {"": {name: value for name, value in data.items() if name not in _FIELDS}}
    for section in _FIELDS.keys() & data.keys():
        if not isinstance(data[section], dict):
            raise TaskError(f"{section} must be a table")
        tables[section] = data[section]
    values = {}
    for section, table in tables.items():
        for field, value in table.items():
            where = f"{section}.{field}" if section else field
            if field not in _FIELDS[section]:
                raise TaskError(f"{where} is unknown here, or not supported")
            name, read = _FIELDS[section][field]
            try:
                value = read(value)
            except TaskError as error:
                raise TaskError(f"{where} = {table[field]!r}: {error}") from None
            if name is not None:
                if values.setdefault(name, value) != value:
                    raise TaskError(f"{where} says other than its newer name in {section}")
    return values
