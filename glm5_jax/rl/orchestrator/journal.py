"""Entries on disk that outlive the process that wrote them: each a file that is whole or not there.

An entry is a head, which is JSON, and trajectories, whose token streams are kept as bytes: numbers as text would take ten
times as long, and a group of long rollouts has millions. A digest in front tells whole files from torn ones.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm5_jax.data.record import STREAMS, TokenRecord
from glm5_jax.rl.trajectory import Trajectory, trajectory

_log = logging.getLogger(__name__)

_DIGEST = 16  # bytes
_LENGTH = 8  # bytes, of the text's length
_WHOLE, _NEW, _TORN = ".entry", ".entry.new", ".entry.torn"
# What a record holds beside its streams.
_BESIDE = [field.name for field in dataclasses.fields(TokenRecord) if field.name not in STREAMS]


class Entry(NamedTuple):
    """head: JSON; members: the trajectories, with all that their records hold."""

    head: Mapping[str, Any]
    members: tuple[Trajectory, ...]


class Journal:
    """A folder of entries by name, which one process at a time writes.

    A change that fails, as on a full disk, is kept in memory with all that follow. `flush` makes them in their order, so that
    the folder is at each time as it was meant to be at some time.

    folder: made if it is not there. durable: whether an entry that was written outlives the machine's power too, and
    not only the process; that takes a disk's time for each.

    Attributes:
      error: why the last changes are not in the folder, and what to do; "" if they are.
    """

    def __init__(self, folder: pathlib.Path, durable: bool = False):
        self._folder, self._durable = pathlib.Path(folder), durable
        self._changes: collections.deque[tuple[str, bytes | None]] = collections.deque()
        self.error = ""
        self._folder.mkdir(parents=True, exist_ok=True)
        for cut_off in self._folder.glob(f"*{_NEW}"):
            cut_off.unlink()

    def write(self, name: str, head: Mapping[str, Any], members: Sequence[Trajectory] = ()) -> None:
        """Replaces an entry; a process that is killed meanwhile leaves the one before."""
        self._changes.append((name, _packed(head, members)))
        self.flush()

    def remove(self, name: str) -> None:
        """Removes an entry; one that is missing was removed before."""
        self._changes.append((name, None))
        self.flush()

    def flush(self) -> None:
        """Makes the changes that are left, and sets `error` if one fails."""
        try:
            while self._changes:
                self._change(*self._changes[0])
                self._changes.popleft()
        except OSError as error:
            self.error = (
                f"the journal in {self._folder} cannot be written ({error}), so the run waits; make room for it, and the "
                "run goes on"
            )
        else:
            self.error = ""

    def _change(self, name: str, packed: bytes | None) -> None:
        """Writes the bytes of an entry, or removes it."""
        whole = self._folder / f"{name}{_WHOLE}"
        if packed is None:
            whole.unlink(missing_ok=True)
        else:
            new = self._folder / f"{name}{_NEW}"
            try:
                with new.open("wb") as file:
                    file.write(packed)
                    if self._durable:
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(new, whole)
            except OSError:
                new.unlink(missing_ok=True)  # which would take the room that is left
                raise
        self._settle()

    def read(self) -> tuple[dict[str, Entry], list[str]]:
        """All entries by name, and the names of torn ones, which are set aside."""
        found, torn = {}, []
        for path in sorted(self._folder.glob(f"*{_WHOLE}")):
            name = path.name.removesuffix(_WHOLE)
            entry = _unpacked(path.read_bytes())
            if entry is None:
                os.replace(path, path.with_name(f"{name}{_TORN}"))
                _log.warning("%s is torn, and what it held is lost; it is set aside", path)
                torn.append(name)
            else:
                found[name] = entry
        return found, torn

    def _settle(self) -> None:
        if self._durable:
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextlib.contextmanager
def of_this_release(folder: pathlib.Path) -> Iterator[None]:
    """Raises ValueError, with what to do, if what is read within it lacks what this release writes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the journal in {folder} is not of this release ({type(error).__name__} {error}); go on with the release "
            "that wrote it, or empty the folder"
        ) from error


def _packed(head: Mapping[str, Any], members: Sequence[Trajectory]) -> bytes:
    """digest, length of the text, text, streams one after the other."""
    told, streams = [], []
    for member in members:
        records = []
        for record in member.records:
            own = record.streams()
            streams += [stream.tobytes() for stream in own.values()]
            more = {name: getattr(record, name) for name in _BESIDE}
            records.append({"length": len(record), "streams": list(own), "more": more})
        told.append(dataclasses.replace(member, records=()).told() | {"records": records})
    text = json.dumps({"head": head, "members": told}).encode()
    body = b"".join([len(text).to_bytes(_LENGTH, "big"), text, *streams])
    return hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def _unpacked(packed: bytes) -> Entry | None:
    """The way back; None if it is torn."""
    digest, body = packed[:_DIGEST], packed[_DIGEST:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        return None
    at = _LENGTH + int.from_bytes(body[:_LENGTH], "big")
    try:
        return _entry(json.loads(body[_LENGTH:at]), body, at)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        # Whole, and of a release that took what this one refuses, such as a reward that is no number of float32.
        _log.warning("an entry cannot be read: %s %s", type(error).__name__, error)
        return None


def _entry(told: Mapping[str, Any], body: bytes, at: int) -> Entry:
    """Returns the entry of a text whose streams begin at a byte of the body."""
    members = []
    for said in told["members"]:
        records = []
        for one in said["records"]:
            streams = {}
            for name in one["streams"]:
                streams[name] = np.frombuffer(body, STREAMS[name], one["length"], at)
                at += streams[name].nbytes
            spans = tuple((start, end, kind) for start, end, kind in one["more"]["spans"])
            records.append(TokenRecord(**{**streams, **one["more"], "spans": spans}))
        bare = trajectory({**said, "records": ()})
        members.append(dataclasses.replace(bare, records=tuple(records)))
    return Entry(told["head"], tuple(members))
