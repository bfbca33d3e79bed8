"""Defines the programs of a run (roles), and the interface that places their processes on machines.

- A `Role` is a program with a number of replicas.
- A `Placement` provides a `ProcessSlot` for each process of a role: on this machine (launch/local.py) or on a Ray
  cluster (launch/on_ray.py).
- `RoleSupervisor` (runtime/supervisor.py) starts the processes in their slots and restarts them.
- launch/slurm.py and launch/gke.py write scripts and manifests for schedulers from the same roles.

Words in braces in a role's argv are substituted when it starts:

    {python}            the interpreter on its machine
    {index}             index of the replica, from 0
    {host} {port}       address to listen at; port 0 is any free one
    {ready}             file to write the port to (`runtime.http_server.ListenConfig.ready_file`)
    {distributed}       HOST:PORT,N,I for --distributed of launch/run.py, by which the processes of a replica connect
    {NAME.url}          http://HOST:PORT of role NAME, which has one replica
    {NAME.urls}         URLs of all replicas of role NAME, separated by commas
    {self.url}          http://HOST:PORT by which other roles reach this replica; its port is 0 if {port} is
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
_WORD_NAME = r"[a-z][a-z0-9_-]*(?:\.[a-z]+)?"
_WORD = re.compile(
    rf"\{{(\{{)?({_WORD_NAME})\}}"
)  # a second brace before it: no word, but a text in braces
WORDS = ("python", "index", "host", "port", "ready", "distributed")
SELF, SELF_URL = "self", "self.url"
# Exit code of a program that stopped on a signal, has saved, and continues when restarted: EX_TEMPFAIL of sysexits.h.
EXIT_RESTART = 75


def _check_positive(config, prefix: str, *names: str) -> None:
    dot = "." if not prefix.endswith(":") else " "
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{prefix}{dot}{name} is {getattr(config, name)}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """Health check of a server: GET `path`. Raises ValueError if a value is out of range.

    Attributes:
      path: path of the URL.
      interval_s: time between two checks after it is ready, in seconds.
      timeout_s: time limit of one reply, in seconds.
      max_silence_s: time without a healthy reply after which a running server counts as dead, in seconds.
    """

    path: str = "/health"
    interval_s: float = 10.0  # slime's heartbeat of engines
    timeout_s: float = 5.0  # slime's
    max_silence_s: float = 60.0  # ours

    def __post_init__(self):
        if not self.path.startswith("/"):
            raise ValueError(f"health.path is {self.path!r}; it must begin with /")
        _check_positive(self, "health", "interval_s", "timeout_s", "max_silence_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
    """Restart policy of a replica that died. Raises ValueError if a value is out of range.

    Attributes:
      max_restarts: deaths within any `window_s` after which it is restarted; one more ends the run.
      window_s: time window in which deaths are counted, in seconds.
      initial_delay_s: delay before a restart, in seconds; doubled for each further death in the window.
      max_delay_s: upper limit of the delay, in seconds.
    """

    max_restarts: int = 5  # ours, as are the others
    window_s: float = 600.0
    initial_delay_s: float = 0.5
    max_delay_s: float = 30.0

    def __post_init__(self):
        if self.max_restarts < 0:
            raise ValueError(f"restarts.max_restarts is {self.max_restarts}; it must be 0 or more")
        _check_positive(self, "restarts", "window_s", "initial_delay_s", "max_delay_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """Program of a run. Raises ValueError if a value is out of range.

    Attributes:
      name: lower-case letters, digits and dashes, as in host names.
      argv: command; words in braces as in the module's docstring.
      count: number of replicas, each with its address.
      hosts: number of processes of a replica. If there are several, each is on a separate host, and they form one JAX
        program: they start and die together, and the first one's address is the replica's.
      cpus: CPU cores of a process; 0: no cores are reserved.
      devices: accelerators of a process, or the CPU devices that stand for them.
      tpu_topology: topology of the TPU slice of a replica, such as 4x4x8, or of each of its `slices`; for launch/gke.py
        only.
      slices: TPU slices of a replica, each with an equal part of its hosts.
      memory_gib: memory of a process that is requested from schedulers, in GiB; 0: no request.
      env: variables added to the environment.
      port: port of the first replica, counted up for the next ones; 0: any free port, which a restart keeps.
      health: health check; None: a server is healthy while it runs.
      after: roles that must be ready before it starts, in addition to those that argv names.
      main: whether the run ends once this and all other main roles have exited with code 0. A role that is not main
        has died when it exits, with any code. A main role that exits with `EXIT_RESTART` requests a restart.
      start_timeout_s: time limit until a server is ready, that is healthy, in seconds.
      settle_s: time after which a role that is not a server counts as ready, in seconds.
      grace_s: time from SIGTERM to SIGKILL, in seconds.
      restarts: restart policy.
    """

    name: str
    argv: Sequence[str]
    count: int = 1
    hosts: int = 1
    cpus: int = 0
    devices: int = 0
    tpu_topology: str = ""
    slices: int = 1
    memory_gib: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    port: int = 0
    health: Health | None = Health()
    after: Sequence[str] = ()
    main: bool = False
    start_timeout_s: float = 300.0  # slime's first wait for an engine
    settle_s: float = 1.0  # supervisord's startsecs
    grace_s: float = 60.0  # like runtime.http_server.ListenConfig
    restarts: Restarts = Restarts()

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"role name {self.name!r}; use up to 32 lower-case letters, digits and dashes, a letter first"
            )
        if self.name == SELF:
            raise ValueError(
                f"role name {self.name!r} stands for the role itself in {{{SELF_URL}}}; use another name"
            )
        if isinstance(self.argv, str) or not self.argv:
            raise ValueError(
                f"role {self.name}: argv is {self.argv!r}; give the words of a command"
            )
        seconds = ("start_timeout_s", "settle_s", "grace_s")
        _check_positive(self, f"role {self.name}:", "count", "hosts", "slices", *seconds)
        if self.hosts % self.slices:
            raise ValueError(
                f"role {self.name}: {self.slices} slices cannot have equal parts of {self.hosts} hosts"
            )
        for name in ("cpus", "devices", "memory_gib"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"role {self.name}: {name} is {getattr(self, name)}; it must be 0 or more"
                )
        if not 0 <= self.port <= 65536 - self.count:
            raise ValueError(
                f"role {self.name}: port is {self.port}; {self.count} replicas need ports up to 65535"
            )
        wrong = [word for word in self.words if "." not in word and word not in WORDS]
        if wrong:
            known = ", ".join(f"{{{word}}}" for word in (*WORDS, SELF_URL, "NAME.url", "NAME.urls"))
            raise ValueError(f"role {self.name}: argv has {{{wrong[0]}}}; there are {known}")

    @property
    def words(self) -> tuple[str, ...]:
        """The words in braces in argv."""
        matches = (match for text in self.argv for match in _WORD.findall(text))
        return tuple(word for is_escaped, word in matches if not is_escaped)

    @property
    def serves(self) -> bool:
        """Whether the role is a server, which listens at a port."""
        return self.port > 0 or "ready" in self.words

    @property
    def addresses(self) -> tuple[str, ...]:
        """The words in argv for addresses of other roles."""
        return tuple(word for word in self.words if "." in word and word != SELF_URL)

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the roles that must be ready before it starts."""
        named = (word.partition(".")[0] for word in self.addresses)
        return tuple(dict.fromkeys((*named, *self.after)))


def topological_order(roles: Sequence[Role]) -> tuple[Role, ...]:
    """Returns the roles sorted so that each comes after those that it needs, otherwise in their order.

    Raises ValueError if names repeat, a needed role is missing or has no address, or roles need each other.
    """
    by_name = {role.name: role for role in roles}
    if len(by_name) < len(roles):
        raise ValueError(f"role names are {[r.name for r in roles]}; they must differ")
    # Every needed role exists, and every address in argv is that of a server.
    for role in roles:
        for name in role.needs:
            if name not in by_name:
                raise ValueError(f"role {role.name} needs {name}; there are {', '.join(by_name)}")
        if SELF_URL in role.words and not role.serves:
            raise ValueError(
                f"role {role.name} has {{{SELF_URL}}} in argv and neither {{ready}} nor a port; add one"
            )
        for word in role.addresses:
            name, _, what = word.partition(".")
            if what not in ("url", "urls"):
                raise ValueError(f"role {role.name}: argv has {{{word}}}; a role has url and urls")
            if not by_name[name].serves:
                raise ValueError(
                    f"role {role.name} needs the address of {name}, which has neither {{ready}} nor a port; add one"
                )
            if what == "url" and by_name[name].count > 1:
                raise ValueError(
                    f"role {role.name}: argv has {{{word}}}, but {name} has {by_name[name].count} replicas; use "
                    f"{{{name}.urls}}"
                )
    # Take the first role whose needs are sorted already, repeatedly.
    sorted_roles: dict[str, Role] = {}
    while len(sorted_roles) < len(roles):
        ready = [
            r
            for r in roles
            if r.name not in sorted_roles and all(n in sorted_roles for n in r.needs)
        ]
        if not ready:
            rest = [r.name for r in roles if r.name not in sorted_roles]
            raise ValueError(f"roles {', '.join(rest)} need each other; one must start first")
        sorted_roles[ready[0].name] = ready[0]
    return tuple(sorted_roles.values())


def substitute_words(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Returns argv with the words in braces replaced by their values."""

    def value(match: re.Match) -> str:
        is_escaped, word = match.groups()
        return f"{{{word}}}" if is_escaped else values[word]

    return [_WORD.sub(value, text) for text in argv]


def escape_words(text: str) -> str:
    """Returns a text that `substitute_words` turns into the given one, although it may hold words in braces."""
    return re.sub(rf"\{{(?={_WORD_NAME}\}})", "{{", text)


def http_url(host: str, port: int) -> str:
    """Returns http://HOST:PORT, with an IPv6 host in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class SlotLostError(RuntimeError):
    """Raised if a slot is lost with its process, for example with its machine; claim a new one."""


class ProcessSlot(Protocol):
    """Slot on a machine that runs one process of a role at a time, until it is released.

    All methods may raise SlotLostError.

    Attributes:
      host: host name by which other slots reach it, and at which its server listens.
      python: path of the interpreter on its machine.
      log: file that receives the output of the process.
      ready: file that a server writes its port to.
    """

    host: str
    python: str
    log: str
    ready: str

    def start(self, argv: Sequence[str]) -> int:
        """Starts a process, forgets the port of the previous one, and returns its process id. Raises OSError."""
        ...

    def exit_code(self) -> int | None:
        """Returns the exit code: None while it runs, -N after signal N. Its process group is gone then."""
        ...

    def port(self) -> int | None:
        """Returns the port that the process wrote to `ready`; None: not yet."""
        ...

    def free_port(self) -> int:
        """Returns a port that is free at the moment."""
        ...

    def tail(self, lines: int) -> str:
        """Returns the last lines of the log."""
        ...

    def terminate(self) -> None:
        """Sends the process SIGTERM."""
        ...

    def kill(self) -> None:
        """Kills the process and all that it started."""
        ...

    def release(self) -> None:
        """Returns the slot to its machine; no process of it runs any more."""
        ...


class Placement(Protocol):
    """Provider of slots, on one machine or many."""

    def check(self, roles: Sequence[Role]) -> None:
        """Raises ValueError if the roles do not fit at the same time. Called before the first claim."""
        ...

    def claim(self, role: Role, index: int, process: int, stem: str | os.PathLike) -> ProcessSlot:
        """Returns a slot for a process of a replica, with log STEM.log and port file STEM.ready.

        Raises SlotLostError.
        """
        ...
