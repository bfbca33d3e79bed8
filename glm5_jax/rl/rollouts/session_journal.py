"""Journal of the gateway on disk: its sessions and the required weights, for the next gateway process."""

import dataclasses
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glm5_jax.metrics.jsonl import append_lines, read_complete_lines
from glm5_jax.rl.rollouts.sessions import Session, SessionError, SessionStart, Turn
from glm5_jax.rl.types import WeightVersion, check_lease

_WEIGHTS = "weights.json"  # not the name of a session's file, which ends in .jsonl
# A file may hold anything: text that is not JSON, other JSON, or turns that do not follow each other.
_READ_ERRORS = (OSError, ValueError, TypeError, LookupError, RecursionError, SessionError)
_log = logging.getLogger(__name__)


class JournalError(Exception):
    """Raised if a change could not be written. The files are then unchanged."""


class SessionJournal:
    """Folder with a file for each open session, and one for the weights that engines must have.

    The first line of a session's file has its `SessionStart`. Each further line has a turn and its rank. A change that cannot be
    written raises JournalError and leaves the file unchanged. A file that cannot be read is renamed, with a warning.

    folder: created if it does not exist; only one gateway at a time may write it.
    """

    def __init__(self, folder: str | os.PathLike):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(
        self, make_session: Callable[[SessionStart], Session]
    ) -> Iterator[tuple[str, SessionStart, Session, str | None]]:
        """Yields (id, start, session, rank of its last turn or None) of each session.

        An incomplete last line is ignored, because its reply was never sent. make_session: returns a session without
        turns.
        """
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                lines = read_complete_lines(path)
                if not lines:
                    path.unlink()
                    continue
                first, *turns = map(json.loads, lines)
                start = _start_from_json(first)
                session, rank = make_session(start), None
                for body in turns:
                    rank = body["rank"]
                    session.add(_turn_from_json(body))
                _check_rank(rank)
                session.records()  # raises for tokens that do not fit together
            except _READ_ERRORS as error:
                _set_aside(path, error)
            else:
                yield path.stem, start, session, rank

    def read_weights(self) -> WeightVersion | None:
        """Returns the weights that were required last; None if there are none.

        A file with a lease that no orchestrator can have given is renamed too.
        """
        path = self._folder / _WEIGHTS
        try:
            if not path.exists():
                return None
            weights = WeightVersion(**json.loads(path.read_bytes()))
            _check_weights(weights)
            check_lease(weights.lease, time.time())
            return weights
        except _READ_ERRORS as error:
            _set_aside(path, error)
            return None

    def write_weights(self, weights: WeightVersion) -> None:
        """Stores the weights that are required from now on. Raises JournalError."""
        new = self._folder / f"{_WEIGHTS}.new"
        try:
            new.write_bytes(json.dumps(weights._asdict()).encode())
            new.replace(self._folder / _WEIGHTS)
        except OSError as error:
            raise to_journal_error(error) from error

    def begin(self, name: str, start: SessionStart) -> None:
        """Stores a new session. Raises JournalError."""
        self._append(name, dataclasses.asdict(start))

    def add(self, name: str, turn: Turn, rank: str | None) -> None:
        """Stores a turn of a session. Raises JournalError."""
        self._append(name, dataclasses.asdict(turn) | {"rank": rank})

    def end(self, name: str) -> None:
        """Removes the file of a session. Raises JournalError."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise to_journal_error(error) from error

    def _append(self, name: str, value: Mapping[str, Any]) -> None:
        try:
            append_lines(self._path(name), json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise to_journal_error(error) from error

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{name}.jsonl"


def _check_rank(rank: Any) -> None:
    """Raises TypeError unless it can be the rank of a session."""
    if not isinstance(rank, str | None):
        raise TypeError(f"rank is {rank!r:.60}; it must be a text or null")


def _check_weights(weights: WeightVersion) -> None:
    """Raises TypeError unless lease and version are integers, and the checksum a text or None."""
    lease, version, checksum = weights
    if not (type(lease) is type(version) is int and isinstance(checksum, str | None)):
        raise TypeError(f"weights are {weights!r:.200}; lease and version must be integers")


def _set_aside(path: pathlib.Path, error: Exception) -> None:
    """Renames a file that cannot be read."""
    aside = path.with_name(f"{path.name}.torn")
    path.replace(aside)
    why = f"{type(error).__name__} {error}"
    _log.warning("%s cannot be read, and what it held is lost (%s); it is now %s", path, why, aside)


def to_journal_error(error: OSError) -> JournalError:
    """Returns the error of a change that could not be written."""
    return JournalError(
        f"the gateway's journal cannot be written ({error}), so nothing was changed; make room for it and ask again"
    )


def _start_from_json(body: Mapping[str, Any]) -> SessionStart:
    """Raises TypeError or ValueError unless the numbers are such as a gateway writes."""
    start = SessionStart(**body)
    if type(start.seed) is not int:
        raise TypeError(f"seed is {start.seed!r:.60}; it must be an integer")
    if not (0 <= start.temperature <= 100 and 0 < start.top_p <= 1):
        raise ValueError(f"temperature is {start.temperature!r:.60} and top_p {start.top_p!r:.60}")
    return start


def _turn_from_json(body: Mapping[str, Any]) -> Turn:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in body.items()
        if name != "rank"
    }
    return Turn(**fields)
