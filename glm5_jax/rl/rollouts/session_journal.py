"""What has been said in sessions, and which weights were wanted, on disk for the gateway after this one."""

import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping

from glm5_jax.metrics.jsonl import append_lines, read_complete_lines
from glm5_jax.rl.rollouts.sessions import Session, SessionError, Turn
from glm5_jax.rl.types import Weights, check_lease

_WANTED = "weights.json"  # no session's file, whose names end otherwise
# What is read may be anything: no JSON, JSON of something else, or turns that do not go on from each other.
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, RecursionError, SessionError)
_log = logging.getLogger(__name__)


class JournalError(Exception):
    """What was to be kept could not be written, and is not there."""


class SessionJournal:
    """A file for each open session: its first line tells the seed, each further one a turn and the rank that has it. One
    more tells the weights that engines must have.

    folder: made if it is not there; one gateway at a time writes it. What cannot be written is a JournalError and leaves
    the file as it was; what cannot be read is set aside beside the others, with a warning.
    """

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, begun: Callable[[int], Session]) -> Iterator[tuple[str, Session, str | None]]:
        """(id, the session, rank of its last turn or None) of each. begun: makes one without turns, of a seed. A last
        line that was cut off was never answered."""
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                lines = read_complete_lines(path)
                if not lines:
                    path.unlink()
                    continue
                first, *turns = map(json.loads, lines)
                session, rank = begun(first["seed"]), None
                for said in turns:
                    rank = said["rank"]
                    session.add(_turn(said))
                _check_rank(rank)
                session.records()  # raises for tokens that do not fit together
            except _UNREADABLE as error:
                _set_aside(path, error)
            else:
                yield path.stem, session, rank

    def wanted(self) -> Weights | None:
        """Returns the weights that were last wanted. A lease that no orchestrator can have given is set aside."""
        path = self._folder / _WANTED
        try:
            if not path.exists():
                return None
            weights = Weights(**json.loads(path.read_bytes()))
            _check_weights(weights)
            check_lease(weights.lease, time.time())
            return weights
        except _UNREADABLE as error:
            _set_aside(path, error)
            return None

    def want(self, weights: Weights) -> None:
        """These are from now on. JournalError."""
        new = self._folder / f"{_WANTED}.new"
        try:
            new.write_bytes(json.dumps(weights._asdict()).encode())
            new.replace(self._folder / _WANTED)
        except OSError as error:
            raise _unwritten(error) from error

    def begin(self, name: str, seed: int) -> None:
        """A session is open. JournalError."""
        self._append(name, {"seed": seed})

    def add(self, name: str, turn: Turn, rank: str | None) -> None:
        """It has gone on by a turn. JournalError."""
        self._append(name, dataclasses.asdict(turn) | {"rank": rank})

    def end(self, name: str) -> None:
        """Nothing is kept of it. JournalError."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritten(error) from error

    def _append(self, name: str, value: Mapping) -> None:
        try:
            append_lines(self._path(name), json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise _unwritten(error) from error

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.jsonl"


def _check_rank(rank) -> None:
    """Raises TypeError unless it can be the rank of a session."""
    if not isinstance(rank, str | None):
        raise TypeError(f"rank is {rank!r:.60}; it must be a text or null")


def _check_weights(weights: Weights) -> None:
    """Raises TypeError unless lease and version are integers, and the checksum a text or None."""
    lease, version, checksum = weights
    if not (type(lease) is type(version) is int and isinstance(checksum, str | None)):
        raise TypeError(f"weights are {weights!r:.200}; lease and version must be integers")


def _set_aside(path: pathlib.Path, error: Exception) -> None:
    aside = path.with_name(f"{path.name}.torn")
    path.replace(aside)
    why = f"{type(error).__name__} {error}"
    _log.warning("%s cannot be read, and what it held is lost (%s); it is now %s", path, why, aside)


def _unwritten(error: OSError) -> JournalError:
    return JournalError(
        f"the gateway's journal cannot be written ({error}), so nothing was changed; make room for it and ask again"
    )


def _turn(said: Mapping) -> Turn:
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k != "rank"}
    return Turn(**fields)
