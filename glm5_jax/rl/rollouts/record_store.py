"""Keeps the encoded token records of finished rollouts at the gateway until they are trained on.

With a folder each rollout is a file, which outlives the process and takes no memory. The orchestrator deletes the records
of groups that were trained on or dropped. Those of runs that have ended are deleted after a time.
"""

import logging
import pathlib
import time
from collections.abc import Callable

from glm5_jax.rl.rollouts.session_journal import to_journal_error

_SUFFIX, _NEW = ".records", ".records.new"
_log = logging.getLogger(__name__)


class RecordStore:
    """Encoded records by rollout.

    - folder: folder of the files, created if it does not exist; None: the records are in memory.
    - clock: returns the time in seconds since the epoch.
    """

    def __init__(self, folder: pathlib.Path | None, clock: Callable[[], float] = time.time):
        self._folder, self._clock = folder, clock
        self._times: dict[str, float] = {}  # when each rollout finished
        self._contents: dict[str, bytes] = {}  # without a folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for incomplete in folder.glob(f"*{_NEW}"):
                incomplete.unlink()
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                self._times[path.name.removesuffix(_SUFFIX)] = path.stat().st_mtime

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._times

    @property
    def rollout_ids(self) -> list[str]:
        """Returns the ids of all rollouts with records."""
        return list(self._times)

    def write(self, rollout_id: str, content: bytes) -> None:
        """Stores the records of a rollout. Raises JournalError, and then stores nothing."""
        if self._folder is None:
            self._contents[rollout_id] = content
        else:
            new = self._folder / f"{rollout_id}{_NEW}"
            try:
                new.write_bytes(content)
                new.replace(self._path(rollout_id))
            except OSError as error:
                new.unlink(missing_ok=True)
                raise to_journal_error(error) from error
        self._times[rollout_id] = self._clock()

    def read(self, rollout_id: str) -> bytes | None:
        """Returns the records of a rollout; None if there are none, or if their file cannot be read."""
        if rollout_id not in self._times:
            return None
        if self._folder is None:
            return self._contents[rollout_id]
        try:
            return self._path(rollout_id).read_bytes()
        except OSError as error:
            _log.warning("the records of rollout %s are lost: %s", rollout_id, error)
            return None

    def delete(self, rollout_id: str) -> None:
        """Deletes the records of a rollout; a missing one is ignored. Raises JournalError."""
        if rollout_id not in self._times:
            return
        if self._folder is not None:
            try:
                self._path(rollout_id).unlink(missing_ok=True)
            except OSError as error:
                raise to_journal_error(error) from error
        self._contents.pop(rollout_id, None)
        del self._times[rollout_id]

    def expire(self, max_age_s: float) -> None:
        """Deletes the records of rollouts that finished longer ago than this. Raises JournalError."""
        limit = self._clock() - max_age_s
        for rollout_id in [name for name, finished in self._times.items() if finished < limit]:
            _log.warning("the records of rollout %s have expired", rollout_id)
            self.delete(rollout_id)

    def _path(self, rollout_id: str) -> pathlib.Path:
        if self._folder is None:
            raise ValueError("the records are in memory and have no files")
        return self._folder / f"{rollout_id}{_SUFFIX}"
