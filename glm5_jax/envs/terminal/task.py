"""Reads and checks task folders in Harbor's format.

    task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh  [tests/Dockerfile]

Tests with an image of their own (tests/Dockerfile, or [verifier.environment]) get only the declared artifacts. A feature that is not supported raises an error with the name of the field; none is ignored.
"""

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from glm5_jax.runtime.files import read_start

_MB = 1 << 20
_MAX_TEXT_BYTES = 1 << 20  # of task.toml, and of an instruction
_MIN_CPUS = 0.01  # minimum of a sandbox
_PARTS = (
    "task.toml",
    "instruction.md",
    "environment",
    "environment/Dockerfile",
    "tests",
    "tests/test.sh",
    "tests/Dockerfile",
    "solution",
)
_PARTS += ("solution/solve.sh",)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMG])", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([A-Za-z_]\w*)(:-([^}]*))?\}")
# Folders that cannot be a work folder: those of grading, and those with programs.
_RESERVED = ("", "tests", "logs", "solution", "grader", "bin", "sbin", "lib", "lib64", "usr", "etc")
_RESERVED += ("proc", "sys", "dev", "tmp", "var", "run")


class TaskError(ValueError):
    """Raised for a task folder that is incomplete, wrong, or uses an unsupported feature."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """Check that an environment is ready, with the meaning of Docker's HEALTHCHECK.

    Attributes:
      command: shell command that ends with 0 if it is.
      interval_s: time between two checks, in seconds.
      timeout_s: time limit of one check, in seconds.
      start_period_s: time at the start during which failures do not count, in seconds.
      start_interval_s: time between two checks in that period, in seconds.
      retries: number of failures in a row after which the environment has failed.
    """

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TerminalTask:
    """Task folder.

    Attributes:
      name: name of the folder.
      folder: path of the folder.
      instruction: prompt.
      docker_image: image if there is no Dockerfile.
      workdir: work folder; None: the image's.
      env: environment variables of the sandbox.
      user: user of the agent; None: the image's.
      agent_timeout_s, verifier_timeout_s, build_timeout_s: time limits of the agent, the tests and the
          image build, in seconds.
      verifier_env, solution_env: environment variables of the tests and of the solution.
      cpus: number of processors.
      memory_bytes, disk_bytes: memory and storage, in bytes.
      artifacts: paths that are graded in addition to the work folder.
      solution_timeout_s: time limit of the solution, in seconds; None: the agent's.
      health_check: check that the environment is ready; None: no check.
      context: name of the folder with the Dockerfile.
      verifier: environment of the tests, which gets only the artifacts; None: a fresh copy of the agent's.
      is_shared: whether tests run in the agent's sandbox, in which an attempt can forge its reward.
    """

    name: str
    folder: pathlib.Path
    instruction: str
    docker_image: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    user: str | None = None
    agent_timeout_s: float = 600.0
    verifier_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    verifier_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    solution_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cpus: float = 1.0
    memory_bytes: int = 2048 * _MB
    disk_bytes: int = 10240 * _MB
    artifacts: tuple[str, ...] = ()
    solution_timeout_s: float | None = None
    health_check: HealthCheck | None = None
    context: str = "environment"
    verifier: "TerminalTask | None" = None
    is_shared: bool = False

    @property
    def dockerfile(self) -> pathlib.Path:
        """Returns the path of the Dockerfile, which need not exist."""
        return self.folder / self.context / "Dockerfile"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLimits:
    """Maximum resources of tasks on this machine. Raises ValueError for values that are not positive.

    Attributes:
      memory_bytes: largest memory of a task, in bytes.
      disk_bytes: largest storage of a task, in bytes.
      cpus: largest number of processors of a task.
      max_processes: maximum number of processes and threads in a sandbox.
    """

    memory_bytes: int = 16 << 30
    disk_bytes: int = 32 << 30
    cpus: float = 16.0
    max_processes: int = 256

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)}; it must be positive"
                )

    def check(self, task: TerminalTask) -> None:
        """Raises TaskError if the task, or the environment of its tests, needs more."""
        for name in ("memory_bytes", "disk_bytes", "cpus"):
            wanted = max(getattr(part, name) for part in (task, task.verifier) if part is not None)
            limit = getattr(self, name)
            if wanted > limit:
                raise TaskError(
                    f"task {task.name}: it asks for {name}={wanted:g}, and limits.{name} is {limit:g}; raise that, or "
                    "leave the task out"
                )


def find_tasks(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the task folders in a folder, or the folder itself if it is one. Raises TaskError if there is none."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise TaskError(f"no folder {folder}; pass one that holds task folders")
    if (folder / "task.toml").is_file():
        return [folder.resolve()]
    folders = sorted(path.parent.resolve() for path in folder.glob("*/task.toml"))
    if not folders:
        raise TaskError(f"no task in {folder}: none of its folders has a task.toml")
    return folders


def load_task(folder: str | pathlib.Path) -> TerminalTask:
    """Reads a task folder. Raises TaskError that names the task and what is wrong or not supported."""
    folder = pathlib.Path(folder).resolve()
    try:
        return _load(folder)
    except TaskError as error:
        raise TaskError(f"task {folder.name}: {error}") from None


def _load(folder: pathlib.Path) -> TerminalTask:
    _check_links(folder)
    try:
        data = tomllib.loads(_read(folder / "task.toml").decode("utf-8"))
    except FileNotFoundError:
        raise TaskError("it has no task.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"task.toml: {error}") from None
    except RecursionError:
        raise TaskError("task.toml: its lists or tables are too deep") from None
    if (folder / "steps").exists() or "steps" in data:
        raise TaskError("steps: tasks of several steps are not supported")
    for part in ("environment", "tests"):
        for name in (f"{part}/docker-compose.yaml", f"{part}/docker-compose.yml"):
            if (folder / name).exists():
                raise TaskError(f"{name} is not supported: a task has one sandbox")
    for name in ("environment/.dockerignore", "tests/.dockerignore", ".harborignore"):
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
    instruction = _read(folder / "instruction.md").decode("utf-8", errors="replace")
    verifier = values.pop("verifier", None)
    task = TerminalTask(name=folder.name, folder=folder, instruction=instruction, **values)
    return _with_verifier(task, verifier)


def _with_verifier(task: TerminalTask, values: dict[str, Any] | None) -> TerminalTask:
    """Returns the task with the environment of its tests, if they have one."""
    has_dockerfile = (task.folder / "tests/Dockerfile").is_file()
    if values is None and not has_dockerfile:
        return task
    if task.is_shared:
        if values is not None:
            raise TaskError(
                'verifier.environment_mode = "shared" contradicts verifier.environment; leave one out'
            )
        return task
    if not task.artifacts:
        raise TaskError(
            "the tests have an environment of their own and artifacts is empty, so nothing would be graded; "
            'list what to grade, for example artifacts = ["/app"]'
        )
    if values is None:
        values = {}
    else:
        limits = {name: getattr(TerminalTask, name) for name in _LIMITS}
        values = {**limits, "env": {}, "workdir": None, **values}
    if has_dockerfile and "docker_image" in values:
        raise TaskError(
            "it has tests/Dockerfile and verifier.environment.docker_image; leave one out"
        )
    # Without an image of their own, the tests run in the agent's.
    if has_dockerfile or "docker_image" in values:
        values = {"docker_image": None, **values, "context": "tests"}
    return dataclasses.replace(task, verifier=dataclasses.replace(task, **values))


def _read(path: pathlib.Path) -> bytes:
    """Returns the content of a small file. Raises TaskError if it is large, or not a regular file."""
    try:
        data = read_start(path, _MAX_TEXT_BYTES + 1)
    except ValueError as error:
        raise TaskError(str(error)) from None
    if len(data) > _MAX_TEXT_BYTES:
        raise TaskError(f"{path.name} has more than {_MAX_TEXT_BYTES:,} bytes")
    return data


def _check_links(folder: pathlib.Path) -> None:
    """Raises TaskError if a link of the folder leads out of it: its target would be read on the machine that
    runs trials.

    Links within environment/, tests/ and solution/ are copied as links, and resolved in a sandbox. So only
    paths that are opened here are checked: the parts of a task, and the folders that hold them.
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
                    f"{part} is a link out of the folder, to {target}; replace it by the file"
                )


def can_be_workdir(path: str) -> bool:
    """Returns whether a path can be the work folder of an agent."""
    parts = [part for part in path.split("/") if part]
    top = parts[0] if parts else ""
    inside = len(parts) > 1 and top in ("usr", "tmp", "var")
    return path.startswith("/") and ".." not in parts and (inside or top not in _RESERVED)


def check_workdir(path: str, where: str) -> str:
    """Returns the normalised path if it can be a work folder. Raises TaskError."""
    if not can_be_workdir(path):
        raise TaskError(
            f"{where} {path!r} cannot be the work folder that is graded; use a separate one, such as /app, or "
            'verifier.environment_mode = "shared"'
        )
    return "/" + "/".join(part for part in path.split("/") if part)


# -- fields ---------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise TaskError("it must be a number above 0")
    return float(value)


def _processors(value: Any) -> float:
    if _number(value) < _MIN_CPUS:
        raise TaskError(f"it must be at least {_MIN_CPUS}")
    return float(value)


def _megabytes(value: Any) -> int:
    return int(_number(value)) * _MB


def _size(value: Any) -> int:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or not 0 < float(match[1]) < 1e9:
        raise TaskError("it must be a size such as 512M or 2G")
    return int(float(match[1]) * {"K": 1 << 10, "M": _MB, "G": 1 << 30}[match[2].upper()])


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


def _filled(match: re.Match) -> str:
    if match[2] is None:
        raise TaskError(
            f"{match[0]} refers to a variable of the host, which is not passed on; add a default, "
            f"such as ${{{match[1]}:-value}}"
        )
    return match[3]


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
        raise TaskError("it cannot be the work folder; use an absolute path, without ..")
    return "/" + "/".join(part for part in path.split("/") if part)


def _one_of(*known: Any) -> Callable[[Any], None]:
    """Returns a reader that accepts only these no-op values; any other asks for an unsupported feature."""

    def check(value: Any) -> None:
        value = value.lower() if isinstance(value, str) else value
        if value not in known:
            raise TaskError(f"not supported; it can be {' or '.join(map(repr, known))}")

    return check


def _health_check(value: Any) -> HealthCheck:
    values = _read_table(value, "environment.healthcheck", _HEALTH_CHECK)
    if "command" not in values:
        raise TaskError("it has no command")
    return HealthCheck(**values)


def _not_negative(value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _number(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or _number(value) < 1:
        raise TaskError("it must be a whole number above 0")
    return value


def _verifier_environment(value: Any) -> dict[str, Any]:
    return _read_table(value, "verifier.environment", _VERIFIER_ENVIRONMENT)


def _ignore(value: Any) -> None:
    """Accepts any value of a field that is only information for people."""


_NETWORK = {
    # There is no network; a task that may use one fails at the commands that need it.
    "network_mode": (None, _one_of("no-network", "public")),
    "allowed_hosts": (None, _one_of([])),
}
_LIMITS = ("cpus", "memory_bytes", "disk_bytes", "build_timeout_s")
_HEALTH_CHECK: dict[str, tuple[str | None, Callable]] = {
    "command": ("command", _text),
    "interval_sec": ("interval_s", _not_negative),
    "timeout_sec": ("timeout_s", _number),
    "start_period_sec": ("start_period_s", _not_negative),
    "start_interval_sec": ("start_interval_s", _not_negative),
    "retries": ("retries", _count),
}
_VERIFIER_ENVIRONMENT: dict[str, tuple[str | None, Callable]] = {
    "build_timeout_sec": ("build_timeout_s", _number),
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
}
# Section -> field -> (name in TerminalTask or None, reader of the value).
_FIELDS: dict[str, dict[str, tuple[str | None, Callable]]] = {
    "": {
        "schema_version": (None, _ignore),
        "version": (None, _ignore),
        "source": (None, _ignore),
        "metadata": (None, _ignore),
        "artifacts": ("artifacts", _paths),
    },
    "task": dict.fromkeys(
        ("name", "version", "description", "authors", "keywords"), (None, _ignore)
    ),
    "verifier": {
        "timeout_sec": ("verifier_timeout_s", _number),
        "env": ("verifier_env", _env),
        "user": (None, _one_of("root", 0)),
        "environment_mode": ("is_shared", _environment_mode),
        "environment": ("verifier", _verifier_environment),
        "collect": (None, _one_of([])),
        **_NETWORK,
    },
    "agent": {"timeout_sec": ("agent_timeout_s", _number), "user": ("user", _user), **_NETWORK},
    "solution": {"env": ("solution_env", _env), "timeout_sec": ("solution_timeout_s", _number)},
    "environment": {**_VERIFIER_ENVIRONMENT, "healthcheck": ("health_check", _health_check)},
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
        values |= _read_table(table, section, _FIELDS[section])
    return values


def _read_table(
    table: Any, section: str, fields: Mapping[str, tuple[str | None, Callable]]
) -> dict[str, Any]:
    """Returns the values of a table by their names in the dataclass."""
    if not isinstance(table, dict):
        raise TaskError("it must be a table")
    values: dict[str, Any] = {}
    for field, value in table.items():
        where = f"{section}.{field}" if section else field
        if field not in fields:
            raise TaskError(f"{where} is unknown or not supported")
        name, read = fields[field]
        try:
            value = read(value)
        except TaskError as error:
            raise TaskError(f"{where} = {table[field]!r}: {error}") from None
        if name is not None:
            if values.setdefault(name, value) != value:
                raise TaskError(f"{where} differs from its newer name in {section}")
    return values
