"""Removes control groups and temporary folders that killed processes left on the machine.

The name of each encodes its owner, so the next process can tell which owners are gone.
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


def name_prefix() -> str:
    """Returns the prefix of all names that this process creates."""
    return f"{_PREFIX}-{_pid_namespace()}-{os.getpid()}-{_started_at(os.getpid())}-"


def find_orphans(names: Iterable[str]) -> list[str]:
    """Returns the names whose owner is gone.

    Process numbers are unique only in their namespace, and are reused. Names from another namespace are
    never returned, because their owner cannot be checked.
    """
    namespace, gone, orphans = [_PREFIX, str(_pid_namespace())], {}, []
    for name in names:
        *prefix, pid, started_at, kind = [*name.split("-", 4), "", "", ""][:5]
        if kind and prefix == namespace and pid.isdecimal():
            if (pid, started_at) not in gone:
                gone[pid, started_at] = _started_at(int(pid)) != started_at
            if gone[pid, started_at]:
                orphans.append(name)
    return orphans


def make_folder(kind: str) -> pathlib.Path:
    """Makes a temporary folder of this process, which `sweep_folders` of another removes if this one is killed."""
    return pathlib.Path(tempfile.mkdtemp(prefix=f"{name_prefix()}{kind}-"))


def remove_folder(folder: pathlib.Path) -> None:
    """Deletes a folder with everything that programs put into it. Raises OSError."""
    if os.getuid() != 0:
        # Programs may have revoked the owner's permissions on folders, which only root can bypass.
        for parent, names, _ in os.walk(folder):
            for path in (pathlib.Path(parent, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder)


def sweep_folders(users: Collection[int]) -> None:
    """Deletes temporary folders of these users that were left by killed processes."""
    top = pathlib.Path(tempfile.gettempdir())
    for name in find_orphans(os.listdir(top)):
        folder = top / name
        try:
            status = folder.lstat()
            # Everybody may write there, so the name does not prove the owner.
            if status.st_uid in users and stat.S_ISDIR(status.st_mode):
                remove_folder(folder)
        except FileNotFoundError:  # another process removed it
            continue
        except OSError as error:
            log.warning("%s is left from a killed process: %s", folder, error)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started_at(pid: int) -> str:
    """Returns the start time of a process, in the kernel's ticks; "" if there is none."""
    try:
        text = pathlib.Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[19]
