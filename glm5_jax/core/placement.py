"""Which programs a run consists of, and the seam behind which they are placed on machines.

A `Role` is a program and how many copies of it there are. A `Placement` has a `Place` for each process of it: on this
machine (launch/local.py) or on a Ray cluster (launch/on_ray.py). `Roles` (core/roles.py) starts and watches what is there;
launch/slurm.py and launch/gke.py write the same roles down for schedulers.

Words in braces in a role's argv are filled in where it is started:

    {python}            the interpreter there
    {index}             of the replica, from 0
    {host} {port}       where to listen; port 0 is any
    {ready}             file to write the port to (`core.server.ListenConfig.ready_file`)
    {distributed}       HOST:PORT,N,I for --distributed of launch/run.py: how the processes of a replica find each other
    {NAME.url}          http://HOST:PORT of role NAME, which has one replica
    {NAME.urls}         of all its replicas, with commas between
    {self.url}          http://HOST:PORT by which other roles reach this replica; its port is 0 where {port} is
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
_WORD = re.compile(r"\{([a-z][a-z0-9_-]*(?:\.[a-z]+)?)\}")
WORDS = ("python", "index", "host", "port", "ready", "distributed")
SELF, SELF_URL = "self", "self.url"
# Exit code of a program that was told to stop, has saved, and goes on when it is started again: EX_TEMPFAIL of sysexits.h.
AGAIN = 75


def _check_positive(config, prefix: str, *names: str) -> None:
    dot = "." if not prefix.endswith(":") else " "
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{prefix}{dot}{name} is {getattr(config, name)}; it must be positive")


@dataclasses.dataclass(frozen=True)
class Health:
    """How a server is asked whether it is well: GET `path`. Construction refuses values out of range (ValueError).

    Attributes:
      path: of its URL.
      interval: seconds between two looks, once it is ready.
      timeout: seconds that an answer may take.
      silence: seconds without an answer after which it is taken for dead, though it runs.
    """

    path: str = "/health"
    interval: float = 10.0  # slime's heartbeat of engines
    timeout: float = 5.0  # slime's
    silence: float = 60.0  # ours

    def __post_init__(self):
        if not self.path.startswith("/"):
            raise ValueError(f"health.path is {self.path!r}; it must begin with /")
        _check_positive(self, "health", "interval", "timeout", "silence")


@dataclasses.dataclass(frozen=True)
class Restarts:
    """How often a replica that died is started again. Construction refuses values out of range (ValueError).

    Attributes:
      limit: deaths that are forgiven within any `window` seconds; one more ends the run.
      delay: seconds before it is started again, doubled for each further death in the window.
      longest_delay: seconds, at most.
    """

    limit: int = 5  # ours, as are the others
    window: float = 600.0
    delay: float = 0.5
    longest_delay: float = 30.0

    def __post_init__(self):
        if self.limit < 0:
            raise ValueError(f"restarts.limit is {self.limit}; it must be 0 or more")
        _check_positive(self, "restarts", "window", "delay", "longest_delay")


@dataclasses.dataclass(frozen=True)
class Role:
    """A program of a run. Construction refuses values out of range (ValueError).

    Attributes:
      name: small letters, digits and dashes, as in host names.
      argv: its command; words in braces as above.
      count: replicas, each with an address of its own.
      hosts: processes of a replica, each on a host of its own where there are several, which are one program of jax. They
        are started, and die, together; the first one's address is the replica's.
      cpus: cores of a process; 0: it shares what is there.
      devices: accelerators of a process, or of what plays them on a CPU.
      tpu_topology: of the slice of TPUs that a replica takes, such as 4x4x8, or of each of its `slices`, which have equal parts
        of its hosts; for launch/gke.py alone.
      memory: GiB of a process that schedulers are asked for; 0: not asked for.
      env: added to the environment.
      port: of the first replica, the next one's is one more; 0: any that is free, and the same after a restart.
      health: None: a server is well while it runs.
      after: roles that must be ready before it starts, besides those that argv names.
      main: the run has ended when all its main roles have ended with code 0. Others that end, with any code, have died, but
        for `AGAIN`, with which a main role asks for another start.
      start_seconds: until a server must be ready, that is healthy.
      settle_seconds: that what is no server must run to be ready.
      grace: seconds from SIGTERM to SIGKILL.
    """

    name: str
    argv: Sequence[str]
    count: int = 1
    hosts: int = 1
    cpus: int = 0
    devices: int = 0
    tpu_topology: str = ""
    slices: int = 1
    memory: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    port: int = 0
    health: Health | None = Health()
    after: Sequence[str] = ()
    main: bool = False
    start_seconds: float = 300.0  # slime's first wait for an engine
    settle_seconds: float = 1.0  # supervisord's startsecs
    grace: float = 60.0  # as core.server.ListenConfig's
    restarts: Restarts = Restarts()

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"role name {self.name!r}; use up to 32 small letters, digits and dashes, a letter first"
            )
        if self.name == SELF:
            raise ValueError(
                f"role name {self.name!r} stands for the role itself in {{{SELF_URL}}}; use another name"
            )
        if isinstance(self.argv, str) or not self.argv:
            raise ValueError(
                f"role {self.name}: argv is {self.argv!r}; give the words of a command"
            )
        seconds = ("start_seconds", "settle_seconds", "grace")
        _check_positive(self, f"role {self.name}:", "count", "hosts", "slices", *seconds)
        if self.hosts % self.slices:
            raise ValueError(
                f"role {self.name}: {self.slices} slices cannot have equal parts of {self.hosts} hosts"
            )
        for name in ("cpus", "devices", "memory"):
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
        """Those in braces in argv."""
        return tuple(word for text in self.argv for word in _WORD.findall(text))

    @property
    def serves(self) -> bool:
        """Whether it listens at a port."""
        return self.port > 0 or "ready" in self.words

    @property
    def addresses(self) -> tuple[str, ...]:
        """Words in argv that stand for addresses of other roles."""
        return tuple(word for word in self.words if "." in word and word != SELF_URL)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the roles that must be ready before it starts."""
        named = (word.partition(".")[0] for word in self.addresses)
        return tuple(dict.fromkeys((*named, *self.after)))


def ordered(roles: Sequence[Role]) -> tuple[Role, ...]:
    """The roles, each behind those that it needs, otherwise as they were given; ValueError if that cannot be."""
    by_name = {role.name: role for role in roles}
    if len(by_name) < len(roles):
        raise ValueError(f"role names are {[r.name for r in roles]}; they must differ")
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
                    f"role {role.name} asks for the address of {name}, which has neither {{ready}} nor a port"
                )
            if what == "url" and by_name[name].count > 1:
                raise ValueError(
                    f"role {role.name}: argv has {{{word}}}, but {name} has {by_name[name].count} replicas; use "
                    f"{{{name}.urls}}"
                )
    found: dict[str, Role] = {}
    while len(found) < len(roles):
        ready = [r for r in roles if r.name not in found and all(n in found for n in r.needs)]
        if not ready:
            rest = [r.name for r in roles if r.name not in found]
            raise ValueError(f"roles {', '.join(rest)} need each other; one must start first")
        found[ready[0].name] = ready[0]
    return tuple(found.values())


def filled(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """argv with the words in braces replaced."""
    return [_WORD.sub(lambda match: values[match[1]], text) for text in argv]


def address(host: str, port: int) -> str:
    """http://HOST:PORT; a host with colons is one of IPv6."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class PlaceError(RuntimeError):
    """A place is gone, with all that ran there; a new one must be claimed."""


class Place(Protocol):
    """Where one process of a role runs, again and again until it is released. All may raise PlaceError.

    Attributes:
      host: its name for all other places, and what a server there listens at.
      python: the interpreter there.
      log: the file that has all that the process writes.
      ready: the file that a server writes its port to.
    """

    host: str
    python: str
    log: str
    ready: str

    def start(self, argv: Sequence[str]) -> int:
        """Starts a process, and forgets the port of the one before; its number there. OSError."""
        ...

    def exit_code(self) -> int | None:
        """None while the process runs; minus the signal that killed it. Nothing of its group is left then."""
        ...

    def port(self) -> int | None:
        """That it told; None: not yet."""
        ...

    def free_port(self) -> int:
        """One that nothing listens at just now."""
        ...

    def tail(self, lines: int) -> str:
        """The end of its log."""
        ...

    def terminate(self) -> None:
        """Asks the process to end."""
        ...

    def kill(self) -> None:
        """Kills it with all that it started."""
        ...

    def release(self) -> None:
        """Gives the place back; nothing runs there any more."""
        ...


class Placement(Protocol):
    """A machine, or many."""

    def check(self, roles: Sequence[Role]) -> None:
        """ValueError if there is no room for all of them at once. Called before the first claim."""
        ...

    def claim(self, role: Role, index: int, process: int, stem: str | os.PathLike) -> Place:
        """A place for a process of a replica, whose log is STEM.log and whose port will be in STEM.ready. PlaceError."""
        ...
