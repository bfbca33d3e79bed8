"""What a sandbox is made of and what it gives back."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping

from glm5_jax.envs.sandbox.remains import remove_folder

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OWNER = 100_000  # root of the sandbox's 65536 users, outside: above the users of common systems


class SandboxError(RuntimeError):
    """The sandbox, not the program in it, failed: its reward is unknown, not 0."""


class SandboxFileError(OSError):
    """What lies at a path in the sandbox is not what was asked for, which is the program's doing.

    Missing, a link, a folder or pipe in place of a file, too large; `errno` tells which.
    """


@dataclasses.dataclass(frozen=True)
class Layer:
    """A file system to start from: folders, the topmost first, that sandboxes read and never change.

    host_programs: whether the host's /usr, and what /bin and /lib are, lie read-only over it. A folder
    with a root file system of its own comes from `Layer.of_folder`.
    """

    folders: tuple[pathlib.Path, ...] = ()
    host_programs: bool = True

    @classmethod
    def of_folder(cls, folder: str | os.PathLike) -> "Layer":
        """A root file system (of debootstrap, say). Run by root, its files change owner, once.

        They become the users of the sandbox: 0 is 100000 outside, and so on.
        """
        folder = pathlib.Path(folder).resolve()
        if not (folder / "bin/sh").exists():
            raise ValueError(f"{folder} is no root file system: it has no /bin/sh")
        if os.getuid() == 0 and folder.stat().st_uid < OWNER:
            for place, names, files in os.walk(folder, topdown=False):
                for name in (*names, *files, "."):
                    path = os.path.join(place, name)
                    found = os.lstat(path)
                    if found.st_uid < OWNER:
                        os.chown(
                            path, OWNER + found.st_uid, OWNER + found.st_gid, follow_symlinks=False
                        )
                        if not os.path.islink(path):  # a change of owner takes set-user-id away
                            os.chmod(path, found.st_mode & 0o7777)
        return cls((folder,), host_programs=False)

    def remove(self) -> None:
        """Deletes the topmost folder, which a snapshot made."""
        remove_folder(self.folders[0])


HOST = Layer()


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """The limits of a sandbox. The network is off, always.

    seconds: of a command that names no limit; generated programs answer in less or hang.
    memory_bytes: of all processes together, and of the files they write, which lie in memory. Enough
        for a Python with its libraries, and dozens at once on a common machine.
    disk_bytes: of all files written; half the memory, so that files alone do not use it up.
    files: how many files and folders; a large source tree.
    processes: processes and threads; a build or a browser, and a fork bomb stops early.
    output_bytes: kept of each output stream; more than a model reads. end_bytes: and, of a longer one, of its end.
    cpus: share of processors; one, so that a busy sandbox leaves its neighbours theirs.
    open_files: descriptors of each process, the usual limit.
    start_seconds: for the sandbox to come up; a tenth of a second on a machine that is not overloaded.
    env: added to PATH, HOME, USER and LANG. workdir: where commands start; made for the agent.
    base: the file system; see `Layer`.
    isolation: "bubblewrap", or "none" for trusted programs only: they run as the caller, in a temporary
        folder, with only some of the limits.
    """

    seconds: float = 30.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 1 << 29
    files: int = 100_000
    processes: int = 256
    output_bytes: int = 1 << 20
    end_bytes: int = 1 << 16
    cpus: float = 1.0
    open_files: int = 1024
    start_seconds: float = 30.0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/app"
    base: Layer = HOST
    isolation: str = "bubblewrap"

    def __post_init__(self):
        for name in (
            "memory_bytes",
            "disk_bytes",
            "files",
            "processes",
            "output_bytes",
            "open_files",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; a sandbox needs a whole number above 0")
        if not isinstance(self.end_bytes, int) or self.end_bytes < 0:
            raise ValueError(f"end_bytes is {self.end_bytes!r}; give a whole number, or 0")
        for name in ("seconds", "cpus", "start_seconds"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}; a sandbox needs a finite number above 0")
        if self.cpus < 0.01:  # the kernel's least share of a period
            raise ValueError(f"cpus is {self.cpus}; the least is 0.01")
        if not self.workdir.startswith("/") or ".." in self.workdir.split("/"):
            raise ValueError(
                f"workdir is {self.workdir!r}; it must be an absolute path, without .."
            )
        if self.isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is {self.isolation!r}; it can be 'bubblewrap' or 'none'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RightsPolicy:
    """Which programs keep root's rights when a process of root starts them; all others become the agent's.

    Attributes:
      data: names of programs that take files for data only.
      launchers: names of programs that execute what their arguments say.
      shells: names of shells, which keep rights for scripts that the agent cannot have written.
      standins: beginning of an interpreter's name -> path of the program that runs in its place.
      helper: arguments of the one interpreter process that the stand-ins themselves start.
      folders: folders whose files can be trusted although their permissions change while the policy holds.
    """

    data: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    shells: tuple[str, ...] = ()
    standins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    helper: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExecResult:
    """How a command ended and what it wrote, cut off at the sandbox's `output_bytes` each.

    code: its exit code; 128 + N if signal N ended it; 126 or 127 if it could not be started. timed_out:
    it was ended for its time. out_of_memory: processes of the sandbox were ended for want of memory
    while it ran. stdout_end, stderr_end: of a stream that was cut off the last bytes behind it.
    """

    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    out_of_memory: bool = False
    stdout_end: bytes = b""
    stderr_end: bytes = b""
