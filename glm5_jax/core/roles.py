"""Starts the programs of a run, watches them, and starts again what dies.

    with Roles(roles, LocalPlacement(), workdir / "roles") as running:
        running.wait()  # until the main roles have ended; RoleError if one of any kind has died too often

Each replica has a thread of its own that alone touches its places: it waits for the roles that it needs, starts it, looks at
it and starts it again, until the run ends. A replica that died comes back with the same port, so nobody needs to be told.
If its address has changed all the same, because its machine is gone, the roles that name it in their argv are started again.
"""

import collections
import dataclasses
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from glm5_jax.core.client import answers
from glm5_jax.core.placement import (
    AGAIN,
    SELF_URL,
    Place,
    PlaceError,
    Placement,
    Role,
    address,
    filled,
    ordered,
)

_EVENTS = "events.jsonl"


class RoleError(RuntimeError):
    """A role cannot be started or has died too often; the message ends with the last lines of its log."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What became of a replica.

    Attributes:
      time: seconds since 1970.
      role, index: the replica.
      what: started, ready, died, finished, failed (not started again), moved (started again, as an address that it was given
        has changed), interrupted (started again, as it asks: it was told to stop, by others) or stopped.
      pid: of its first process.
      life: how often it has been started by then.
      detail: why.
    """

    time: float
    role: str
    index: int
    what: str
    pid: int | None
    life: int
    detail: str = ""


def read_events(folder: str | os.PathLike) -> list[Event]:
    """All events of a folder of `Roles`, those of earlier runs too."""
    path = pathlib.Path(folder) / _EVENTS
    lines = (
        path.read_text().split("\n")[:-1] if path.exists() else []
    )  # not one that is being written
    return [Event(**json.loads(line)) for line in lines]


class _End(NamedTuple):
    """Of a life. what: the event, of which only a death counts; fatal: whether another life would end alike."""

    why: str
    what: str = "died"
    fatal: bool = False

    @property
    def counts(self) -> bool:
        return self.what == "died"


class Roles:
    """The roles of a run, from `start` to `stop`; a context manager. ValueError if they do not fit together or on the placement.

    folder: gets NAME-INDEX.log (NAME-INDEX.PROCESS.log of a replica of several processes) and events.jsonl, which go on if they are
      there. look: seconds between two looks at a process. tail: lines of a log that an error quotes. tell: called with each event.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        placement: Placement,
        folder: str | os.PathLike,
        *,
        look: float = 0.1,
        tail: int = 20,
        tell: Callable[[Event], None] | None = None,
    ):
        self._roles = ordered(roles)
        placement.check(self._roles)
        self.placement, self.folder = placement, pathlib.Path(folder)
        self.look, self.tail_lines = look, tail
        self._tell, self._writing = tell, threading.Lock()
        self.changed = threading.Condition()
        self._replicas = {
            role.name: [_Replica(self, role, index) for index in range(role.count)]
            for role in self._roles
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all roles, each when those that it needs are ready, and waits until they are. RoleError: all are stopped again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for replica in self._all():
                replica.thread.start()
            with self.changed:
                while not all(replica.is_up for replica in self._all()):
                    self.check()
                    self.changed.wait(1.0)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops all roles, in the reverse order, within their grace."""
        for role in reversed(self._roles):
            for replica in self._replicas[role.name]:
                replica.stopping.set()
            for replica in self._replicas[role.name]:
                if replica.thread.is_alive():
                    replica.thread.join()

    def check(self) -> None:
        """Raises the RoleError of a replica that is not started again; call it wherever the run waits for a role."""
        for replica in self._all():
            if replica.error is not None:
                raise replica.error

    def wait(self, seconds: float | None = None) -> bool:
        """Whether all main roles end well within so many seconds (None: however long it takes). RoleError."""
        until = None if seconds is None else time.monotonic() + seconds
        main = [replica for replica in self._all() if replica.role.main]
        with self.changed:
            while True:
                self.check()
                if main and all(replica.finished for replica in main):
                    return True
                left = 1.0 if until is None else min(1.0, until - time.monotonic())
                if left <= 0:
                    return False
                self.changed.wait(left)

    def url(self, name: str, index: int = 0) -> str:
        """The address of a replica, once it has been ready; KeyError."""
        url = self._replicas[name][index].url
        if url is None:
            raise KeyError(f"{name}-{index} has no address (yet)")
        return url

    def urls(self, name: str) -> list[str]:
        """Of all replicas of a role."""
        return [self.url(name, index) for index in range(len(self._replicas[name]))]

    def pids(self, name: str, index: int = 0) -> tuple[int, ...]:
        """The processes of a replica, on the machines where they run; none while it is down."""
        return self._replicas[name][index].pids

    def _all(self) -> Iterator["_Replica"]:
        for role in self._roles:
            yield from self._replicas[role.name]

    # -- what replicas ask --------------------------------------------------------------------------------

    def is_up(self, name: str) -> bool:
        """Whether all replicas of a role have been ready."""
        return all(replica.is_up for replica in self._replicas[name])

    def addresses(self, role: Role) -> dict[str, str]:
        """What stands for the words of a role's argv that name others."""
        found = {}
        for word in role.addresses:
            name = word.partition(".")[0]
            found[word] = ",".join(r.url for r in self._replicas[name])
        return found

    def write(self, event: Event) -> None:
        """Adds an event to the file, and wakes those that wait for one."""
        with self._writing:
            with open(self.folder / _EVENTS, "a") as file:
                file.write(json.dumps(dataclasses.asdict(event)) + "\n")
            if self._tell:
                self._tell(event)
        with self.changed:
            self.changed.notify_all()


class _Replica:
    """One replica; all but the attributes belongs to its thread.

    Attributes:
      is_up: it has been ready once. finished: it ended well. url, pids: the last known. error: why it is given up.
      stopping: set to have it end.
    """

    def __init__(self, roles: Roles, role: Role, index: int):
        self.role, self.index = role, index
        self.is_up = self.finished = False
        self.url: str | None = None
        self.pids: tuple[int, ...] = ()
        self.error: Exception | None = None
        self.stopping = threading.Event()
        # Not waited for when the interpreter ends: the children die with it anyway.
        self.thread = threading.Thread(target=self._run, name=f"{role.name}-{index}", daemon=True)
        self._roles = roles
        self._places: list[Place] = []
        self._port = self._first_port = role.port + index if role.port else 0
        self._life = 0

    def _run(self) -> None:
        try:
            while not all(self._roles.is_up(name) for name in self.role.needs):
                if self.stopping.wait(self._roles.look):
                    return
            self._live()
        except Exception as error:  # raised anew by `check`: a thread would keep it to itself
            self.error = error
            self._say("failed", repr(error))
        finally:
            self._release()

    def _live(self) -> None:
        """Life after life."""
        restarts, deaths = self.role.restarts, collections.deque()
        while not self.stopping.is_set():
            self._life += 1
            end = self._one_life()
            self._say(*self._outcome(end))
            self.pids = ()
            if end is None:
                return
            if not end.counts:
                continue
            now = time.monotonic()
            deaths.append(now)
            while now - deaths[0] > restarts.window:
                deaths.popleft()
            if end.fatal or len(deaths) > restarts.limit:
                self._give_up(end, len(deaths))
                return
            delay = restarts.delay * 2 ** (len(deaths) - 1)
            self.stopping.wait(min(delay, restarts.longest_delay))

    def _one_life(self) -> _End | None:
        """Starts the replica and watches it to its end; None: it was told to stop, or has finished."""
        gently = lost = False
        try:
            given = self._roles.addresses(self.role)
            self._start(given)
            end = self._watch(given)
            gently = end is None or not end.counts
        except (PlaceError, OSError) as error:
            end, lost = _End(str(error)), isinstance(error, PlaceError)
        finally:
            self._end(gently)
        if lost:  # a new one is claimed
            self._release()
        return end

    def _outcome(self, end: _End | None) -> tuple[str, str]:
        """What is told of a life that has ended."""
        if end is not None:
            return end.what, end.why
        if self.stopping.is_set():
            return "stopped", ""
        self.is_up = self.finished = True
        return "finished", ""

    def _start(self, given: dict[str, str]) -> None:
        role = self.role
        while len(self._places) < role.hosts:
            process = len(self._places)
            stem = f"{role.name}-{self.index}" + (f".{process}" if role.hosts > 1 else "")
            place = self._roles.placement.claim(
                role, self.index, process, self._roles.folder / stem
            )
            self._places.append(place)
        first = self._places[0]
        meeting = f"{first.host}:{first.free_port()}" if "distributed" in role.words else ""
        pids = []
        for process, place in enumerate(self._places):
            own = {
                "python": place.python,
                "index": str(self.index),
                "host": place.host,
                "port": str(self._port),
                "ready": place.ready,
                "distributed": f"{meeting},{role.hosts},{process}",
                SELF_URL: address(first.host, self._port),
            }
            pids.append(place.start(filled(role.argv, own | given)))
        self.pids = tuple(pids)
        self._say("started")

    def _watch(self, given: dict[str, str]) -> _End | None:
        role, health, began = self.role, self.role.health, time.monotonic()
        ready, heard, next_look = False, began, began
        while not self.stopping.wait(self._roles.look):
            codes = [place.exit_code() for place in self._places]
            if role.main and all(code == 0 for code in codes):
                return None
            if role.main and AGAIN in codes:
                return _End("was told to stop, and has saved", "interrupted")
            for code in codes:
                if code is not None and not (role.main and code == 0):
                    # What ends by itself before it was ever ready will do so again; and code 2 is, in all programs of
                    # this project, a mistake of the user.
                    again = code == 2 or code >= 0 and not self.is_up
                    return _End(_described(code), fatal=again)
            now = time.monotonic()
            if not ready:
                if self._is_ready(now - began):
                    ready, heard, next_look = True, now, now + (health.interval if health else 0)
                    self.is_up = True
                    self._say("ready", self.url or "")
                elif role.serves and now - began > role.start_seconds:
                    return _End(f"was not ready within {role.start_seconds:g} s")
            elif role.serves and health and now >= next_look:
                if self._is_healthy():
                    heard = time.monotonic()
                elif now - heard > health.silence:
                    return _End(f"has not answered for {health.silence:g} s")
                next_look = now + health.interval
            if given != self._roles.addresses(role):
                return _End("an address that it was given has changed", "moved")
        return None

    def _is_ready(self, age: float) -> bool:
        if not self.role.serves:
            return age >= self.role.settle_seconds
        first = self._places[0]
        port = first.port() if "ready" in self.role.words else self._port
        if port is None:
            return False
        url, self._port = address(first.host, port), port
        if self.role.health and not self._is_healthy(url):
            return False
        self.url = url
        return True

    def _is_healthy(self, url: str | None = None) -> bool:
        health = self.role.health
        return answers((url or self.url) + health.path, health.timeout)

    def _end(self, gently: bool) -> None:
        """Ends all processes."""
        try:
            if gently:
                for place in self._places:
                    place.terminate()
                until = time.monotonic() + self.role.grace
                while any(p.exit_code() is None for p in self._places):
                    if time.monotonic() > until:
                        break
                    time.sleep(self._roles.look)
            for place in self._places:
                place.kill()
        except PlaceError:
            self._release()

    def _release(self) -> None:
        for place in self._places:
            place.release()
        self._places = []
        self._port = self._first_port

    def _give_up(self, end: _End, deaths: int) -> None:
        name, restarts = self.thread.name, self.role.restarts
        message = f"{name} {end.why}"
        if not end.fatal and deaths > 1:
            message = f"{name} died {deaths} times within {restarts.window:g} s; the last time it {end.why}"
        for place in self._places:
            tail = place.tail(self._roles.tail_lines)
            message += f"; {place.log} ends:\n{tail}" if tail else f"; {place.log} is empty"
        self.error = RoleError(message)
        self._say("failed", end.why)

    def _say(self, what: str, detail: str = "") -> None:
        pid = self.pids[0] if self.pids else None
        event = Event(time.time(), self.role.name, self.index, what, pid, self._life, detail)
        self._roles.write(event)


def _described(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"was killed by {name}"
