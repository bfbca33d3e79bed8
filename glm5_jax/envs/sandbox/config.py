"""Defines the options and results of sandboxes."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping

from glm5_jax.envs.sandbox.orphans import remove_folder

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OWNER = 100_000  # root of the sandbox's 65536 users, outside: above the users of common systems


class SandboxError(RuntimeError):
    """Raised if the sandbox failed, not the program in it. The reward is then unknown, not 0."""


class SandboxFileError(OSError):
    """Raised if a path in the sandbox is not as requested, which is the program's fault.

    The path is missing, a link, a folder or pipe instead of a file, or too large; `errno` says which.
    """


@dataclasses.dataclass(frozen=True)
class Layer:
    """File system to start from, which sandboxes read and never change.

    Attributes:
      folders: folders of the layers, the topmost first.
      host_programs: whether the host's /usr, /bin and /lib are mounted read-only over it. For a folder with
          a complete root file system use `Layer.of_folder`.
    """

    folders: tuple[pathlib.Path, ...] = ()
    host_programs: bool = True

    @classmethod
    def of_folder(cls, folder: str | os.PathLike) -> "Layer":
        """Returns a layer of a root file system (of debootstrap, for example).

        Called by root, it changes the owners of the files once, to the users of the sandbox: 0 becomes
        100000 outside, and so on. Raises ValueError for a folder without /bin/sh.
        """
        folder = pathlib.Path(folder).resolve()
        if not (folder / "bin/sh").exists():
            raise ValueError(f"{folder} is no root file system: it has no /bin/sh")
        if os.getuid() == 0 and folder.stat().st_uid < OWNER:
            for parent, names, files in os.walk(folder, topdown=False):
                for name in (*names, *files, "."):
                    path = os.path.join(parent, name)
                    status = os.lstat(path)
                    if status.st_uid < OWNER:
                        os.chown(
                            path,
                            OWNER + status.st_uid,
                            OWNER + status.st_gid,
                            follow_symlinks=False,
                        )
                        if not os.path.islink(path):  # a change of owner removes set-user-id
                            os.chmod(path, status.st_mode & 0o7777)
        return cls((folder,), host_programs=False)

    def remove(self) -> None:
        """Deletes the topmost folder, which a snapshot made."""
        remove_folder(self.folders[0])


HOST = Layer()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Limits of a sandbox. Raises ValueError for values out of range.

    Attributes:
      timeout_s: time limit of a command that sets none, in seconds; generated programs either answer in
          less or hang.
      memory_bytes: memory of all processes together, in bytes, including written files, which are kept in
          memory. Enough for Python with its libraries, and for dozens of sandboxes on a common machine.
      disk_bytes: total size of written files, in bytes; half the memory, so that files cannot use up all
          memory.
      max_files: maximum number of files and folders; enough for a large source tree.
      max_processes: maximum number of processes and threads; enough for a build or a browser, and stops a
          fork bomb early.
      output_bytes: retained bytes of each output stream; more than a model reads.
      end_bytes: retained bytes of the end of a longer stream.
      cpus: number of processors; one, so that a busy sandbox does not slow the others.
      max_open_files: maximum number of descriptors of each process; the usual limit.
      start_timeout_s: time limit for the start of the sandbox, in seconds; 0.1 s suffices if the machine is
          not overloaded.
      env: environment variables added to PATH, HOME, USER and LANG.
      workdir: folder in which commands start; created for the agent.
      base: file system; see `Layer`.
      hostname: name of the machine.
      network: whether processes share the machine's network, including its loopback; only for image builds
          that an operator allows to download packages.
      isolation: "bubblewrap", or "none" for trusted programs only. With "none" they run as the caller, in a
          temporary folder, with only some of the limits.
    """

    timeout_s: float = 30.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 1 << 29
    max_files: int = 100_000
    max_processes: int = 256
    output_bytes: int = 1 << 20
    end_bytes: int = 1 << 16
    cpus: float = 1.0
    max_open_files: int = 1024
    start_timeout_s: float = 30.0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/app"
    base: Layer = HOST
    hostname: str = "sandbox"
    network: bool = False
    isolation: str = "bubblewrap"

    def __post_init__(self):
        for name in (
            "memory_bytes",
            "disk_bytes",
            "max_files",
            "max_processes",
            "output_bytes",
            "max_open_files",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; use a whole number above 0")
        if not isinstance(self.end_bytes, int) or self.end_bytes < 0:
            raise ValueError(f"end_bytes is {self.end_bytes!r}; use a whole number, or 0")
        for name in ("timeout_s", "cpus", "start_timeout_s"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}; use a finite number above 0")
        if self.cpus < 0.01:  # the kernel's minimum share of a period
            raise ValueError(f"cpus is {self.cpus}; the minimum is 0.01")
        if not self.workdir.startswith("/") or ".." in self.workdir.split("/"):
            raise ValueError(
                f"workdir is {self.workdir!r}; it must be an absolute path, without .."
            )
        if self.isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is {self.isolation!r}; it can be 'bubblewrap' or 'none'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RightsPolicy:
    """Rules for which programs keep root's rights when a process of root starts them; all others become the agent's.

    Attributes:
      data: names of programs that only read files as data.
      launchers: names of programs that execute what their arguments say.
      shells: names of shells, which keep rights for scripts that the agent cannot have written.
      shims: beginning of an interpreter's name -> path of the program that runs instead of it.
      helper: arguments of the only interpreter process that the shims themselves start.
      worker: arguments of interpreter processes that run the agent's code from their beginning.
      sealed: files that a program without rights never inherits as open descriptors.
      folders: folders whose files are trusted although their permissions change while the policy holds.
      watched: folders of root; no program opens a file in them by a path that leads there through a link.
    """

    data: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    shells: tuple[str, ...] = ()
    shims: Mapping[str, str] = dataclasses.field(default_factory=dict)
    helper: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    sealed: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecResult:
    """Exit status of a command and its output, truncated to the sandbox's `output_bytes` per stream.

    Attributes:
      code: exit code; 128 + N if signal N ended it; 126 or 127 if it could not be started.
      stdout, stderr: output.
      timed_out: whether it was killed at its time limit.
      truncated: whether output was cut off.
      out_of_memory: whether processes of the sandbox were killed for lack of memory while it ran.
      out_of_processes: whether the limit on the processes of all users refused one while it ran; False without
        process groups.
      stdout_end, stderr_end: last bytes of a truncated stream after the cut.
      alert: description of what a `RightsPolicy` prevented or noticed; "" if nothing.
      note: what a program without rights was told to read and cannot, under a `RightsPolicy`; "" if nothing.
    """

    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    out_of_memory: bool = False
    out_of_processes: bool = False
    stdout_end: bytes = b""
    stderr_end: bytes = b""
    alert: str = ""
    note: str = ""
