"""Whose something on the machine is, a control group or a temporary folder, by its name; what its maker could not remove,
as it was killed, the next one does.
"""

import logging
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable

log = logging.getLogger(__name__)

_PREFIX = "glm5_jax"


def mark() -> str:
    """What the names of all begin with that this process makes."""
    return f"{_PREFIX}-{_space()}-{os.getpid()}-{_began(os.getpid())}-"


def left_of(names: Iterable[str]) -> list[str]:
    """Of these names those whose maker is gone. Process numbers mean something in their namespace only, and are given out
    again: of what was made in another namespace nothing can be said."""
    here, gone, found = [_PREFIX, str(_space())], {}, []
    for name in names:
        *place, pid, began, kind = [*name.split("-", 4), "", "", ""][:5]
        if kind and place == here and pid.isdecimal():
            if (pid, began) not in gone:
                gone[pid, began] = _began(int(pid)) != began
            if gone[pid, began]:
                found.append(name)
    return found


def make_folder(kind: str) -> pathlib.Path:
    """A temporary folder that lasts no longer than this process, but for `sweep_folders` of another."""
    return pathlib.Path(tempfile.mkdtemp(prefix=f"{mark()}{kind}-"))


def remove_folder(folder: pathlib.Path) -> None:
    """Deletes it with what programs have put into it; OSError."""
    if os.getuid() != 0:
        # They may have closed folders to their owner, whom only root passes.
        for place, names, _ in os.walk(folder):
            for path in (pathlib.Path(place, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder)


def sweep_folders(users: Collection[int]) -> None:
    """Deletes the temporary folders that belong to these users, of processes that were killed before they could."""
    top = pathlib.Path(tempfile.gettempdir())
    for name in left_of(os.listdir(top)):
        folder = top / name
        try:
            found = folder.lstat()
            # All may write there, so that a name alone says nothing.
            if found.st_uid in users and stat.S_ISDIR(found.st_mode):
                remove_folder(folder)
        except FileNotFoundError:  # another sweeps it
            continue
        except OSError as error:
            log.warning("%s is left of a process that was killed: %s", folder, error)


def _space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" if there is none."""
    try:
        said = pathlib.Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return said.rpartition(")")[2].split()[19]
