"""Locks a folder for one process, so that a second start of a run cannot write into its files.

The kernel holds the lock (`flock`), so it ends with its process, however that ends. It is on a file in the folder that
names the process. File systems without locks, such as some shared ones, are used unlocked, with a warning.
"""

import errno
import fcntl
import logging
import os
import pathlib
from typing import Self

LOCK_FILE = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_log = logging.getLogger(__name__)


class FolderInUse(OSError):
    """Raised if another process holds the lock of a folder; the message names both."""


class FolderLock:
    """Lock of a folder, which is created if missing; held until `release`, the end of a `with`, or of the object.

    Raises FolderInUse if another process holds it, OSError if the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike):
        self._descriptor: int | None = None
        path = pathlib.Path(folder) / LOCK_FILE
        self._path, self._created_folder = path, not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        # A descriptor: an open file object that nobody closes is warned of, and a server may never be started.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
            self.release()
            holder = holder or "another process"
            raise FolderInUse(
                f"{path.parent} is in use by {holder}; end that run first, or give another --workdir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
            _log.warning("%s has no locks (%s); start one run at a time there", path.parent, error)
        self._name_holder(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.release()

    def release(self) -> None:
        """Unlocks the folder. The lock file stays, because another process may be about to lock it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = release

    def remove_unused_folder(self) -> None:
        """Removes the folder if this lock has created it and nothing else was written."""
        if self._created_folder and os.listdir(self._path.parent) == [LOCK_FILE]:
            self._path.unlink()
            self._path.parent.rmdir()

    def _name_holder(self, descriptor: int) -> None:
        text = f"process {os.getpid()} of {os.uname().nodename}\n"
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)
        except OSError as error:  # such as a full disk; the lock is held anyway
            _log.debug("the lock names no process: %s", error)
