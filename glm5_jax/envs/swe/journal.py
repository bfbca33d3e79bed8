"""Appends results to a file of JSON lines, so that a run that was killed continues with what it had finished."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Generic, TypeVar

import msgspec

_Record = TypeVar("_Record", bound=msgspec.Struct)


class JournalBusyError(RuntimeError):
    """Raised if another process appends to the same journal."""


class ResultJournal(Generic[_Record]):
    """Journal of results of one kind in a file; open it with `open_journal`.

    Attributes:
      records: records of earlier runs, in their order.
    """

    def __init__(self, file: IO[bytes], records: list[_Record]):
        self._file, self.records = file, records

    def append(self, record: _Record) -> None:
        """Appends a record, which is on the disk when the call returns."""
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@contextlib.contextmanager
def open_journal(path: pathlib.Path, kind: type[_Record]) -> Iterator[ResultJournal[_Record]]:
    """Opens a journal for one process, and removes the incomplete last line of a process that was killed.

    Raises JournalBusyError if another process has opened it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalBusyError(
                f"another process writes {path}; wait for its end, or give another folder"
            ) from None
        file.seek(0)
        data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        file.truncate(len(complete))
        records = [msgspec.json.decode(line, type=kind) for line in complete.splitlines()]
        yield ResultJournal(file, records)
