"""Watches the opening of files that only programs with rights can open, by permission events of fanotify.

A program that opens such a file waits for a decision. Its system call still has the path that it requested.
If that path is somewhere else, a link led to the file, no matter who made the link and how briefly it
existed. The program then gets EPERM, and the path is reported.
"""

import _signal as signal  # pyright: ignore[reportMissingImports]: typeshed lacks it
import ctypes
import os
import stat
import struct
import time

from .system import NEWNS, NEWUSER, SET_PDEATHSIG, call, libc

_CLASS_CONTENT, _CLOEXEC, _REPORT_TID = 4, 1, 0x100
_MARK_ADD, _OPEN_PERM, _EVENT_ON_CHILD = 1, 0x10000, 0x8000000
_ALLOW, _DENY = 1, 2
_EVENT = struct.Struct(
    "IBBHQii"
)  # length, version, unused, length of this, mask, descriptor, thread
_AT_FDCWD = -100
_TRIES, _PAUSE_S = 1000, 0.001
_MAX_PATH_BYTES = 200  # of a reported path
_C_TYPES = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p
# Architecture -> number of a system call that opens a file -> (index of the path argument, of the folder's or None).
_CALLS = {
    "x86_64": {2: (0, None), 85: (0, None), 59: (0, None), 257: (1, 0), 437: (1, 0), 322: (1, 0)},
    "aarch64": {56: (1, 0), 437: (1, 0), 221: (0, None), 281: (1, 0)},
}
# Paths of open descriptors, which may be opened again.
_OPENED = ("/proc/", "/dev/fd/", "/dev/stdin", "/dev/stdout", "/dev/stderr")


class Watch:
    """Process that watches folders of a sandbox, with everything below, until `stop`.

    It enters the sandbox's mount namespace, but not its PID namespace. It does nothing if the kernel or the
    caller's rights do not allow watching.
    """

    def __init__(self, task, folders, proc):
        """Starts the process.

        Args:
          task: task of `execute`.
          folders: folders in the sandbox.
          proc: descriptor of the /proc that has processes by the numbers this process sees.
        """
        self._folders, self._proc = tuple(folders), proc
        (self._reader, writer), (waiting, ready) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                self._set_up(task)
                os.close(self._reader)
                os.close(waiting)
                os.close(ready)  # lets the parent continue
                self._run(writer)
            finally:
                os._exit(1)
        os.close(writer)
        os.close(ready)
        os.read(waiting, 1)
        os.close(waiting)

    def stop(self):
        """Ends the process, and returns a description of what it prevented, or ""."""
        os.kill(self._pid, signal.SIGKILL)
        path = os.read(self._reader, _MAX_PATH_BYTES)
        os.close(self._reader)
        return f"a link at {os.fsdecode(path)} led to files of root's" if path else ""

    def _set_up(self, task):
        call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        flags = _CLASS_CONTENT | _CLOEXEC | _REPORT_TID
        self._group = libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)
        if task["sandbox"] is not None:
            call("setns", task["sandbox"], NEWUSER | NEWNS)
        libc.fanotify_mark.argtypes = [*_C_TYPES]
        for folder in self._folders:
            for subfolder, _, _ in os.walk(folder):
                self._mark(subfolder)

    def _mark(self, folder):
        mask = _OPEN_PERM | _EVENT_ON_CHILD
        libc.fanotify_mark(self._group, _MARK_ADD, mask, _AT_FDCWD, os.fsencode(folder))

    def _run(self, writer):
        while True:
            data = os.read(self._group, 4096)
            while data:
                length, *_, descriptor, thread = _EVENT.unpack_from(data)
                data = data[length:]
                path = self._led_by_link(descriptor, thread)
                if path:
                    os.write(writer, path.encode(errors="replace")[:_MAX_PATH_BYTES])
                os.write(self._group, struct.pack("iI", descriptor, _DENY if path else _ALLOW))
                os.close(descriptor)

    def _led_by_link(self, descriptor, thread):
        """Returns the path by which a thread was led into a watched folder; "" if it requested that folder."""
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        try:
            path = self._requested_path(thread)
        except Exception:  # refuse if undecidable, because the program would wait forever
            return "a path that is not known"
        return "" if self._is_watched(path) else path

    def _is_watched(self, path):
        return path.startswith(_OPENED) or any(
            path.startswith(f"{folder}/") for folder in self._folders
        )

    def _requested_path(self, thread):
        """Returns the path that a waiting thread requested, absolute and without `..`."""
        words = self._call(thread).split()
        text, folder = _CALLS[os.uname().machine][int(words[0])]
        path = self._text(thread, int(words[1 + text], 16))
        number = (
            _AT_FDCWD
            if folder is None
            else ctypes.c_int(int(words[1 + folder], 16) & 0xFFFFFFFF).value
        )
        link = "cwd" if number == _AT_FDCWD else f"fd/{number}"
        if not path.startswith("/"):
            path = os.path.join(os.readlink(f"{thread}/{link}", dir_fd=self._proc), path)
        return os.path.normpath(path)

    def _call(self, thread):
        """Returns the line of /proc about a thread's system call, as soon as the thread waits in it."""
        for _ in range(_TRIES):
            descriptor = os.open(f"{thread}/syscall", os.O_RDONLY, dir_fd=self._proc)
            with open(descriptor, "rb") as file:
                line = file.read().decode()
            if not line.startswith("running"):
                break
            time.sleep(_PAUSE_S)
        return line

    def _text(self, thread, address):
        descriptor = os.open(f"{thread}/mem", os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.fsdecode(os.pread(descriptor, 4096, address).partition(b"\0")[0])
        finally:
            os.close(descriptor)
