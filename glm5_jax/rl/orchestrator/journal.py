"""Journal on disk: entries that outlive the process that wrote them. Each entry is one complete file, or does not exist.

An entry is a JSON object and trajectories without their records. A digest at the start detects incomplete files.
"""

import collections
import contextlib
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from glm5_jax.rl.trajectory import Trajectory, trajectory_from_json

_log = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_COMPLETE, _NEW, _TORN = ".entry", ".entry.new", ".entry.torn"  # suffixes of files


class Entry(NamedTuple):
    """Entry of a journal.

    Attributes:
      head: JSON object.
      members: trajectories without their records.
    """

    head: Mapping[str, Any]
    members: tuple[Trajectory, ...]


class Journal:
    """Folder of entries by name. Only one process at a time may write it.

    If a change fails, for example because the disk is full, it stays in memory with all later changes. `flush` applies
    them in their order, so that the folder always has the state of some moment.

    - folder: created if it does not exist.
    - durable: whether written entries survive a power failure, and not only the end of the process. It costs a disk sync
      for each change.

    Attributes:
      error: why the last changes are not in the folder, and what to do; "" if they are.
    """

    def __init__(self, folder: pathlib.Path, durable: bool = False):
        self._folder, self._durable = pathlib.Path(folder), durable
        self._changes: collections.deque[tuple[str, bytes | None]] = collections.deque()
        self.error = ""
        self._folder.mkdir(parents=True, exist_ok=True)
        for incomplete in self._folder.glob(f"*{_NEW}"):
            incomplete.unlink()

    def write(self, name: str, head: Mapping[str, Any], members: Sequence[Trajectory] = ()) -> None:
        """Writes or replaces an entry. If the process is killed meanwhile, the earlier entry remains."""
        self._changes.append((name, _encode(head, members)))
        self.flush()

    def remove(self, name: str) -> None:
        """Removes an entry; a missing one is ignored."""
        self._changes.append((name, None))
        self.flush()

    def flush(self) -> None:
        """Applies the pending changes, and sets `error` if one fails."""
        try:
            while self._changes:
                name, content = self._changes[0]
                self._apply(name, content)
                self._changes.popleft()
        except OSError as error:
            self.error = (
                f"the journal in {self._folder} cannot be written ({error}), so the run waits; make room for it, and the "
                "run continues"
            )
        else:
            self.error = ""

    def _apply(self, name: str, content: bytes | None) -> None:
        """Writes the bytes of an entry, or removes it if they are None."""
        path = self._folder / f"{name}{_COMPLETE}"
        if content is None:
            path.unlink(missing_ok=True)
        else:
            new = self._folder / f"{name}{_NEW}"
            try:
                with new.open("wb") as file:
                    file.write(content)
                    if self._durable:
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(new, path)
            except OSError:
                new.unlink(missing_ok=True)  # it would take the remaining disk space
                raise
        self._sync_folder()

    def read(self) -> tuple[dict[str, Entry], list[str]]:
        """Returns all entries by name, and the names of torn entries, whose files are renamed."""
        entries, torn = {}, []
        for path in sorted(self._folder.glob(f"*{_COMPLETE}")):
            name = path.name.removesuffix(_COMPLETE)
            entry = _decode(path.read_bytes())
            if entry is None:
                os.replace(path, path.with_name(f"{name}{_TORN}"))
                _log.warning("%s is torn, and what it held is lost; it is set aside", path)
                torn.append(name)
            else:
                entries[name] = entry
        return entries, torn

    def _sync_folder(self) -> None:
        if self._durable:
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@contextlib.contextmanager
def check_release(folder: pathlib.Path) -> Iterator[None]:
    """Raises ValueError, with advice, if the block fails because an entry lacks what this release writes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the journal in {folder} is not of this release ({type(error).__name__} {error}); continue with the release "
            "that wrote it, or empty the folder"
        ) from error


def _encode(head: Mapping[str, Any], members: Sequence[Trajectory]) -> bytes:
    """Returns the bytes of an entry: a digest of the JSON text, and the text."""
    text = json.dumps({"head": head, "members": [member.to_json() for member in members]}).encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() + text


def _decode(entry: bytes) -> Entry | None:
    """Returns the entry that `_encode` encoded; None if it is torn or cannot be read."""
    digest, text = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    try:
        body = json.loads(text)
        return Entry(body["head"], tuple(trajectory_from_json(m) for m in body["members"]))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        # Another release accepted a value that this one rejects, such as a reward that float32 cannot hold.
        _log.warning("an entry cannot be read: %s %s", type(error).__name__, error)
        return None
