"""Starts the programs of a run, monitors them, and restarts those that die.

    with RoleSupervisor(roles, LocalPlacement(), workdir / "roles") as running:
        running.wait()  # until the main roles have ended; raises RoleError if a role has died too often

Each replica has a thread, and only that thread uses its slots. The thread waits for the roles that the replica needs, starts
it, checks it and restarts it, until the run ends. A restarted replica has the same port, so other roles need no update. If
its address has changed nevertheless, because its machine is gone, the roles that name it in their argv are restarted.
"""

import collections
import dataclasses
import json
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from glm5_jax.metrics.jsonl import append_lines, read_objects
from glm5_jax.runtime.client import is_healthy
from glm5_jax.runtime.folder_lock import FolderLock
from glm5_jax.runtime.placement import (
    EXIT_RESTART,
    SELF_URL,
    Health,
    Placement,
    ProcessSlot,
    Role,
    SlotLostError,
    http_url,
    substitute_words,
    topological_order,
)

_EVENTS = "events.jsonl"
_log = logging.getLogger(__name__)


class RoleError(RuntimeError):
    """Raised if a role cannot be started or has died too often; the message ends with the end of its log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleEvent:
    """Event in the life of a replica.

    Attributes:
      time: seconds since 1970.
      role, index: name of the role and index of the replica.
      what: started, ready, died, finished, stopped, or one of:
        - failed: it is not restarted.
        - moved: it is restarted, because an address in its argv has changed.
        - interrupted: it is restarted at its request, after a signal from outside of the run.
      pid: process id of its first process.
      num_starts: number of its starts so far.
      detail: reason.
    """

    time: float
    role: str
    index: int
    what: str
    pid: int | None
    num_starts: int
    detail: str = ""


def read_events(folder: str | os.PathLike) -> list[RoleEvent]:
    """Returns all events in the folder of a `RoleSupervisor`, including those of earlier runs."""
    path = pathlib.Path(folder) / _EVENTS
    return [RoleEvent(**event) for event in read_objects(path)] if path.exists() else []


class _Exit(NamedTuple):
    """End of a run of a replica.

    Attributes:
      why: reason.
      what: kind of the event; only deaths count for the restart limit.
      fatal: whether a restart would end in the same way.
    """

    why: str
    what: str = "died"
    fatal: bool = False

    @property
    def is_death(self) -> bool:
        return self.what == "died"


class RoleSupervisor:
    """Runs the roles of a run, from `start` to `stop`; a context manager.

    - folder: receives NAME-INDEX.log (NAME-INDEX.PROCESS.log for a replica of several processes) and events.jsonl;
      existing files are continued.
    - poll_interval_s: time between two checks of a process, in seconds.
    - tail_lines: lines of a log that an error quotes.
    - on_event: called with each event.

    Raises ValueError if the roles do not fit together or do not fit on the placement.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        placement: Placement,
        folder: str | os.PathLike,
        *,
        poll_interval_s: float = 0.1,
        tail_lines: int = 20,
        on_event: Callable[[RoleEvent], None] | None = None,
    ):
        self._roles = topological_order(roles)
        placement.check(self._roles)
        self.placement, self.folder = placement, pathlib.Path(folder)
        self.poll_interval_s, self.tail_lines = poll_interval_s, tail_lines
        self._on_event, self._write_lock = on_event, threading.Lock()
        self._lock: FolderLock | None = None
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
        """Starts all roles, each after those that it needs, and blocks until all are ready.

        Raises RoleError if a role fails; all roles are stopped then. Raises OSError if the folder cannot be written or is
        in use.
        """
        self._lock = FolderLock(self.folder)
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
        """Stops all roles in reverse order, each within its grace period."""
        for role in reversed(self._roles):
            for replica in self._replicas[role.name]:
                replica.stopping.set()
            for replica in self._replicas[role.name]:
                if replica.thread.is_alive():
                    replica.thread.join()
        if self._lock is not None:
            self._lock.release()

    def check(self) -> None:
        """Raises the RoleError of a replica that is not restarted; call it wherever the run waits for a role."""
        for replica in self._all():
            if replica.error is not None:
                raise replica.error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the main roles, and returns True if all of them end with code 0 within `timeout_s`.

        timeout_s: time limit in seconds; None: no limit. Raises RoleError if a role fails.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        main = [replica for replica in self._all() if replica.role.main]
        with self.changed:
            while True:
                self.check()
                if main and all(replica.is_finished for replica in main):
                    return True
                remaining = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if remaining <= 0:
                    return False
                self.changed.wait(remaining)

    def url(self, name: str, index: int = 0) -> str:
        """Returns the URL of a replica. Raises KeyError if it has not been ready yet."""
        url = self._replicas[name][index].url
        if url is None:
            raise KeyError(f"{name}-{index} has no address (yet)")
        return url

    def urls(self, name: str) -> list[str]:
        """Returns the URLs of all replicas of a role."""
        return [self.url(name, index) for index in range(len(self._replicas[name]))]

    def pids(self, name: str, index: int = 0) -> tuple[int, ...]:
        """Returns the process ids of a replica, each valid on its machine; none while it is down."""
        return self._replicas[name][index].pids

    def _all(self) -> Iterator["_Replica"]:
        for role in self._roles:
            yield from self._replicas[role.name]

    # -- called by replicas -------------------------------------------------------------------------------

    def is_up(self, name: str) -> bool:
        """Returns True if all replicas of a role have been ready."""
        return all(replica.is_up for replica in self._replicas[name])

    def addresses(self, role: Role) -> dict[str, str]:
        """Returns the values of the words in a role's argv that name other roles."""
        values = {}
        for word in role.addresses:
            name = word.partition(".")[0]
            values[word] = ",".join(self.urls(name))
        return values

    def write(self, event: RoleEvent) -> None:
        """Appends an event to the file and wakes waiting threads. On a full disk the line is lost, and the run goes on."""
        with self._write_lock:
            line = json.dumps(dataclasses.asdict(event)).encode() + b"\n"
            try:
                append_lines(self.folder / _EVENTS, line)
            except OSError as error:
                _log.warning("%s cannot be written (%s); it lacks an event", _EVENTS, error)
            if self._on_event:
                self._on_event(event)
        with self.changed:
            self.changed.notify_all()


class _Replica:
    """One replica; its thread owns everything except these attributes.

    Attributes:
      is_up: whether it has been ready once.
      finished: whether it has ended with code 0.
      url, pids: the last known URL and process ids.
      error: why it is not restarted; None: it runs or will.
      stopping: event that makes it end.
    """

    def __init__(self, supervisor: RoleSupervisor, role: Role, index: int):
        self.role, self.index = role, index
        self.is_up = self.is_finished = False
        self.url: str | None = None
        self.pids: tuple[int, ...] = ()
        self.error: Exception | None = None
        self.stopping = threading.Event()
        # A daemon thread, because the children die with the interpreter anyway.
        self.thread = threading.Thread(target=self._run, name=f"{role.name}-{index}", daemon=True)
        self._supervisor = supervisor
        self._slots: list[ProcessSlot] = []
        self._port = self._first_port = role.port + index if role.port else 0
        self._num_starts = 0

    def _run(self) -> None:
        try:
            while not all(self._supervisor.is_up(name) for name in self.role.needs):
                if self.stopping.wait(self._supervisor.poll_interval_s):
                    return
            self._run_until_done()
        except Exception as error:  # `check` raises it again in the caller's thread
            self.error = error
            self._report("failed", repr(error))
        finally:
            self._release()

    def _run_until_done(self) -> None:
        """Runs the replica again and again, until it ends or dies too often."""
        restarts, deaths = self.role.restarts, collections.deque()
        while not self.stopping.is_set():
            self._num_starts += 1
            end = self._run_once()
            self._report(*self._outcome(end))
            self.pids = ()
            if end is None:
                return
            if not end.is_death:
                continue
            now = time.monotonic()
            deaths.append(now)
            while now - deaths[0] > restarts.window_s:
                deaths.popleft()
            if end.fatal or len(deaths) > restarts.max_restarts:
                self._stop_retrying(end, len(deaths))
                return
            delay = restarts.initial_delay_s * 2 ** (len(deaths) - 1)
            self.stopping.wait(min(delay, restarts.max_delay_s))

    def _run_once(self) -> _Exit | None:
        """Starts the replica and monitors it to its end; returns None if it was stopped or has finished."""
        is_gentle = lost = False
        try:
            addresses = self._supervisor.addresses(self.role)
            self._start(addresses)
            end = self._watch(addresses)
            is_gentle = end is None or not end.is_death
        except (SlotLostError, OSError) as error:
            end, lost = _Exit(str(error)), isinstance(error, SlotLostError)
        finally:
            self._end_processes(is_gentle)
        if lost:  # the next start claims a new slot
            self._release()
        return end

    def _outcome(self, end: _Exit | None) -> tuple[str, str]:
        """Returns the kind and the detail of the event for the end of a run."""
        if end is not None:
            return end.what, end.why
        if self.stopping.is_set():
            return "stopped", ""
        self.is_up = self.is_finished = True
        return "finished", ""

    def _start(self, addresses: dict[str, str]) -> None:
        """Claims the slots that are missing, and starts a process in each."""
        role = self.role
        while len(self._slots) < role.hosts:
            process = len(self._slots)
            stem = f"{role.name}-{self.index}" + (f".{process}" if role.hosts > 1 else "")
            slot = self._supervisor.placement.claim(
                role, self.index, process, self._supervisor.folder / stem
            )
            self._slots.append(slot)
        first = self._slots[0]
        rendezvous = f"{first.host}:{first.free_port()}" if "distributed" in role.words else ""
        pids = []
        for process, slot in enumerate(self._slots):
            values = {
                "python": slot.python,
                "index": str(self.index),
                "host": slot.host,
                # The other processes may be on the machine of the first one.
                "port": str(self._port if process == 0 else 0),
                "ready": slot.ready,
                "distributed": f"{rendezvous},{role.hosts},{process}",
                SELF_URL: http_url(first.host, self._port),
            }
            pids.append(slot.start(substitute_words(role.argv, values | addresses)))
        self.pids = tuple(pids)
        self._report("started")

    def _watch(self, addresses: dict[str, str]) -> _Exit | None:
        """Polls the processes until they end; returns why, or None if they finished or were stopped."""
        role, health, began = self.role, self.role.health, time.monotonic()
        is_ready, last_reply, next_check = False, began, began
        while not self.stopping.wait(self._supervisor.poll_interval_s):
            # Did a process exit?
            codes = [slot.exit_code() for slot in self._slots]
            if role.main and all(code == 0 for code in codes):
                return None
            if role.main and EXIT_RESTART in codes:
                return _Exit("was stopped by a signal, and has saved", "interrupted")
            for code in codes:
                if code is not None and not (role.main and code == 0):
                    # A program that exits before it was ever ready will do so again. Code 2 means a mistake of the user in
                    # all programs of this project.
                    is_fatal = code == 2 or code >= 0 and not self.is_up
                    return _Exit(_describe_exit(code), fatal=is_fatal)
            # Is it ready, and does it stay healthy?
            now = time.monotonic()
            if not is_ready:
                if self._is_ready(now - began):
                    is_ready, last_reply = True, now
                    next_check = now + (health.interval_s if health else 0)
                    self.is_up = True
                    self._report("ready", self.url or "")
                elif role.serves and now - began > role.start_timeout_s:
                    return _Exit(f"was not ready within {role.start_timeout_s:g} s")
            elif role.serves and health and now >= next_check:
                assert self.url is not None, "a role that serves is ready once it has a URL"
                if self._is_healthy(health, self.url):
                    last_reply = time.monotonic()
                elif now - last_reply > health.max_silence_s:
                    return _Exit(f"has not replied for {health.max_silence_s:g} s")
                next_check = now + health.interval_s
            if addresses != self._supervisor.addresses(role):
                return _Exit("an address in its argv has changed", "moved")
        return None

    def _is_ready(self, age: float) -> bool:
        if not self.role.serves:
            return age >= self.role.settle_s
        first = self._slots[0]
        port = first.port() if "ready" in self.role.words else self._port
        if port is None:
            return False
        url, self._port = http_url(first.host, port), port
        health = self.role.health
        if health and not self._is_healthy(health, url):
            return False
        self.url = url
        return True

    def _is_healthy(self, health: Health, url: str) -> bool:
        return is_healthy(url + health.path, health.timeout_s)

    def _end_processes(self, is_gentle: bool) -> None:
        """Ends all processes; gently: sends SIGTERM first and waits for the grace period."""
        try:
            if is_gentle:
                for slot in self._slots:
                    slot.terminate()
                deadline = time.monotonic() + self.role.grace_s
                while any(p.exit_code() is None for p in self._slots):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(self._supervisor.poll_interval_s)
            for slot in self._slots:
                slot.kill()
        except SlotLostError:
            self._release()

    def _release(self) -> None:
        for slot in self._slots:
            slot.release()
        self._slots = []
        self._port = self._first_port

    def _stop_retrying(self, end: _Exit, deaths: int) -> None:
        name, restarts = self.thread.name, self.role.restarts
        message = f"{name} {end.why}"
        if not end.fatal and deaths > 1:
            message = f"{name} died {deaths} times within {restarts.window_s:g} s; the last time it {end.why}"
        for slot in self._slots:
            tail = slot.tail(self._supervisor.tail_lines)
            message += f"; {slot.log} ends:\n{tail}" if tail else f"; {slot.log} is empty"
        self.error = RoleError(message)
        self._report("failed", end.why)

    def _report(self, what: str, detail: str = "") -> None:
        pid = self.pids[0] if self.pids else None
        event = RoleEvent(
            time=time.time(),
            role=self.role.name,
            index=self.index,
            what=what,
            pid=pid,
            num_starts=self._num_starts,
            detail=detail,
        )
        self._supervisor.write(event)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = next((member.name for member in signal.Signals if member == -code), f"signal {-code}")
    return f"was killed by {name}"
