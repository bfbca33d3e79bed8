"""Decides for each program that is started with root's rights whether it keeps them.

The process that starts the programs is traced from outside the sandbox, and so are its forks. Each stops
after it executed a program, before the program's first instruction. The decision depends on the file:

- programs that only read files as data, launchers of other programs, and shells with a trusted script keep
  their rights;
- an interpreter with a shim is replaced by that;
- every other program becomes an ordinary user's process and is no longer traced.

Variables that tell the dynamic loader what to load (`LD_LIBRARY_PATH`) are renamed for programs with rights,
and get their names back in programs without: only those load libraries of an attempt.

A process that runs as an ordinary user already, such as tests that gave up root, is hidden from the user's
other processes as long as it executes such programs. It loses its remaining capabilities with the first
other program.

A file is trusted if the ordinary user does not own it, if it has not changed since supervision began, and
if only root can replace it. Copies of an attempt's files, and files compiled from them, are newer.
"""

import _signal as signal  # pyright: ignore[reportMissingImports]: typeshed lacks it
import errno
import os
import stat
import time

from .tracee import CONT, DETACH, LISTEN, SEIZE, SYSCALL, WALL, Tracee, ptrace, register_layout

# TRACESYSGOOD, TRACEFORK, TRACEVFORK, TRACECLONE, TRACEEXEC, EXITKILL: all tracees are killed when the tracer ends.
OPTIONS = 1 | 2 | 4 | 8 | 16 | 1 << 20
_EXEC, _STOP = 4, 128
_GROUP_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_MIN_FREE_BYTES, _MIN_FREE_FILES = 1 << 16, 16
_TICK_S = 0.02  # more than the coarsest clock of a file system
_INLINE = (
    "-c",
    "-e",
    "-r",
    "-E",
    "-p",
    "--eval",
)  # the next argument is a program text from the caller
# Beginnings of the names of the dynamic loader's variables, and of these variables for programs with rights.
_LOADER, _RENAMED = b"LD_", b"Ld_"
# Separates an alert from a note in the report of a command.
NOTE = "\x1f"
# Programs that read data, and their option that takes the paths from a file.
_LISTS, _LIST_OPTION = ("du", "sort", "wc"), "--files0-from"
_MAX_NOTE = 300  # characters
# Programs that change the permissions of folders.
_CHANGERS = ("chmod", "chown", "chgrp", "install")
_PROFILES = (".bash_profile", ".bash_login", ".profile", ".bashrc")
_SHELL_OPTIONS_WITH_VALUE = ("-o", "+o", "-O", "+O")


class ProgramRights:
    """Rules for which programs keep root's rights (`RightsPolicy`).

    Attributes:
      user: number of the ordinary user.
      data: names of programs that only read files as data.
      launchers: names of programs that execute what their arguments say.
      shells: names of shells.
      shims: beginning of an interpreter's name -> path of the program that runs instead of it.
      helper: arguments of the only interpreter process that the shims themselves start.
      worker: arguments of interpreter processes that run the ordinary user's code from their beginning.
      folders: folders whose initial files remain trusted after a change of permissions.
      sealed: files that a program without root's rights never inherits as open descriptors.
      watched: folders of root in which no file is opened through a link.
      since: start of supervision, in nanoseconds.
    """

    def __init__(
        self, user, data, launchers, shells, shims, helper, worker, folders, sealed, watched
    ):
        self.user, self.data, self.launchers, self.shells = user, data, launchers, shells
        self.shims, self.helper, self.worker = shims, list(helper), list(worker)
        self.sealed, self.watched = sealed, watched
        self.known = dict(entry for folder in folders for entry in _files(folder))
        self.since = time.time_ns()
        time.sleep(_TICK_S)  # later writes are then newer even by a coarse clock

    def decide(self, tracee):
        """Returns True to keep rights, False to revoke them, or the path of a program to execute instead."""
        words, exe = tracee.words("cmdline"), _program_of(tracee)
        if not words or not self._is_trusted_file(tracee.stat("exe")):
            return False
        started = os.path.join(tracee.link("cwd"), tracee.executed_path())
        is_trusted = self.is_trusted(started)
        for name, path in self.shims.items():
            if exe.startswith(name):
                is_helper = words[1 : len(self.helper) + 1] == self.helper != []
                return (is_trusted and is_helper) or path
        if not is_trusted:
            return False
        if exe in self.shells:
            return self._is_trusted_shell(tracee, words)
        if exe in _LISTS and any(map(_takes_paths_from_file, words[1:])):
            return False  # a file of the attempt may have the name of this option
        return exe in self.data or exe in self.launchers

    def is_of_tests(self, tracee):
        """Returns whether an ordinary user's process executed a program that keeps rights, or an interpreter
        of a trusted script.
        """
        decision = self.decide(tracee)
        if not isinstance(decision, str):
            return decision
        if not self.is_trusted(os.path.join(tracee.link("cwd"), tracee.executed_path())):
            return False
        words = tracee.words("cmdline")[1:]
        if words[: len(self.worker)] == self.worker != []:
            return False
        while words and words[0][:1] == "-":
            if words.pop(0) in _INLINE:
                return True
        return bool(words) and self.is_trusted(os.path.join(tracee.link("cwd"), words[0]))

    def is_trusted(self, path):
        """Returns whether only root controls the file at an absolute path, and it has not changed."""
        try:
            real = os.path.realpath(path, strict=True)
            parts = [*_prefixes(path), *_prefixes(real)]
            statuses = [os.lstat(part) for part in parts]
            status = os.stat(real)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and all(
            self._is_trusted_file(item) for item in statuses
        )

    def _is_trusted_file(self, status):
        if status.st_uid == self.user:
            return False
        if stat.S_ISDIR(status.st_mode):
            # In a sticky folder nobody else can replace root's files.
            return not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX)
        # A copy that preserves times has the times of another file, not of this one.
        is_known = self.known.get((status.st_dev, status.st_ino)) == (
            status.st_mtime_ns,
            status.st_size,
        )
        return is_known or status.st_ctime_ns < self.since

    def _is_trusted_shell(self, tracee, words):
        """Returns whether the script of a shell comes from its caller or from a trusted file."""
        env = dict(word.partition("=")[::2] for word in tracee.words("environ"))
        files = [env[name] for name in ("BASH_ENV", "ENV") if env.get(name)]
        if not all(map(self.is_trusted, files)):
            return False
        if _reads_profile(words) and not self._is_trusted_home(env.get("HOME", "/")):
            return False
        words = words[1:]
        while words and words[0][:1] in ("-", "+"):
            word = words.pop(0)
            if word in ("--rcfile", "--init-file"):
                return False
            if word in _SHELL_OPTIONS_WITH_VALUE:
                del words[:1]
            elif word == "--" or word == "-":
                break
            elif not word.startswith("--") and "c" in word[1:]:
                return True
            elif not word.startswith("--") and "s" in word[1:]:
                words = []
        if words:
            return self.is_trusted(os.path.join(tracee.link("cwd"), words[0]))
        stdin = tracee.stat("fd/0")
        # A here-document is a file of root without a name.
        if stat.S_ISREG(stdin.st_mode) and not (stdin.st_nlink or stdin.st_uid):
            return True
        return self.is_trusted(tracee.link("fd/0"))

    def _is_trusted_home(self, home):
        """Returns whether only root owns or can create the files that shells read there."""
        try:
            folders = [os.lstat(part) for part in _prefixes(home)]
        except OSError:
            return True
        files = [os.path.join(home, name) for name in _PROFILES]
        are_trusted = all(self.is_trusted(file) for file in files if os.path.lexists(file))
        return are_trusted and all(self._is_trusted_file(item) for item in folders)


def _reads_profile(words):
    """Returns whether a shell is a login shell or interactive."""
    options = [word for word in words[1:] if word[:1] == "-"]
    short = "".join(word for word in options if word[:2] != "--")
    return words[0][:1] == "-" or "--login" in options or "l" in short or "i" in short


def _takes_paths_from_file(word):
    """Returns whether an argument is `--files0-from=FILE`, or a beginning of that name."""
    name, equals, _ = word.partition("=")
    return bool(equals) and len(name) > len("--f") and _LIST_OPTION.startswith(name)


def _files(folder):
    """Yields the identity of each file below a folder of the sandbox, with the time and size of its content."""
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            yield (status.st_dev, status.st_ino), (status.st_mtime_ns, status.st_size)


def _program_of(tracee):
    """Returns the name of a process's program."""
    name = os.path.basename(tracee.link("exe"))
    words = tracee.words("cmdline")
    # One file with many names.
    return (
        os.path.basename(words[0]) if words and name in ("busybox", "coreutils", "toybox") else name
    )


def _access_of(folder):
    """Returns the number, owner and permissions of a folder, or None."""
    try:
        status = os.lstat(folder)
    except OSError:
        return None
    return status.st_ino, status.st_uid, status.st_mode


def _is_below(path, folder):
    return path == folder or path.startswith(folder + "/")


def _prefixes(path):
    """Returns the path and all folders above it; `..` is left for the system to resolve."""
    names = [name for name in path.split("/") if name]
    return ["/" + "/".join(names[: count + 1]) for count in range(len(names))]


class Supervisor:
    """Tracer of a child until it ends; the child waits until it is traced.

    A shell executes a file of a format that the kernel does not know by itself, without another system
    call. So the calls of shells are watched, and after an execve that failed for that reason the file
    decides. Those of launchers are watched as well, since both change to folders.

    Attributes:
      alert: description of what was noticed; "" if nothing.
      note: what a program without rights was told to read and cannot; "" if nothing.

    Args:
      child: number of the process.
      policy: rules.
      proc: descriptor of the /proc that has processes by the numbers this process sees.
    """

    def __init__(self, child, policy, proc):
        register_layout()
        self._child, self._policy, self._proc = child, policy, proc
        self._modes = {}  # process -> request that resumes it: CONT, or SYSCALL to watch its calls
        self._calls = {}  # process -> number and path of its current call
        self.alert = self.note = ""
        self._helpers = set()  # processes whose program kept root's rights
        guarded = {part for folder in policy.watched for part in ("/", *_prefixes(folder))}
        self._access = {folder: _access_of(folder) for folder in guarded}

    def run(self):
        """Traces until the child ends; returns its exit code, as `os.waitstatus_to_exitcode` does."""
        while True:
            pid, status = os.waitpid(-1, WALL)
            if not os.WIFSTOPPED(status):
                self._check_sandbox()
                self._forget(pid)
                if pid == self._child:
                    return os.waitstatus_to_exitcode(status)
                continue
            try:
                self._handle_stop(Tracee(pid, self._proc), status)
            except (ProcessLookupError, FileNotFoundError):  # the process was killed
                pass
            except Exception:
                # Without a decision a program must not run with rights.
                os.kill(pid, signal.SIGKILL)
                if pid == self._child:
                    raise

    def _check_sandbox(self):
        """Notices what makes results worthless: a full disk, and folders of root that were opened to others.

        Output on a full disk is truncated, so that two different files look equal. A program such as chmod opens a
        folder if its argument is a link to it.
        """
        for folder, before in self._access.items():
            now = _access_of(folder)
            # Another folder of this name was made by root, on purpose.
            if now != before and before and now and now[0] == before[0]:
                self.alert = self.alert or f"the permissions of {folder} changed"
        disk = os.statvfs("/")
        if disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES or disk.f_favail < _MIN_FREE_FILES:
            self.alert = self.alert or "the disk was full"

    def _forget(self, pid):
        self._modes.pop(pid, None)
        self._calls.pop(pid, None)
        self._helpers.discard(pid)

    def _handle_stop(self, tracee, status):
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == _EXEC:
            self._decide(tracee)
        elif event == _STOP and number in _GROUP_STOPS:
            ptrace(LISTEN, tracee.pid)
        elif number == signal.SIGTRAP | 0x80:
            self._watch_call(tracee)
        elif event:  # it forked, or is the new process
            self._resume(tracee)
        else:
            self._resume(tracee, number)

    def _resume(self, tracee, number=0):
        if tracee.pid not in self._modes:
            name = os.path.basename(tracee.link("exe"))
            changes_folder = name in self._policy.shells or name in self._policy.launchers
            has_rights = tracee.user() == 0 or tracee.has_capabilities()
            self._modes[tracee.pid] = SYSCALL if changes_folder and has_rights else CONT
        ptrace(self._modes[tracee.pid], tracee.pid, 0, number)

    def _watch_call(self, tracee):
        begun = tracee.entered_call()
        if begun is not None:
            calls = register_layout().calls
            if begun[0] in (calls["execve"], calls["chdir"]):
                path = os.path.join(tracee.link("cwd"), tracee.text(begun[1]))
                self._calls[tracee.pid] = begun[0], path
        elif (call := self._calls.pop(tracee.pid, None)) is not None:
            number, path = call
            if number == register_layout().calls["chdir"]:
                is_refused = self._is_led_by_link(path, tracee.link("cwd"))
            else:
                is_script = tracee.call_result() == -errno.ENOEXEC
                is_refused = is_script and not self._policy.is_trusted(path)
            if is_refused:
                self._revoke(tracee)
                return
        self._resume(tracee)

    def _is_led_by_link(self, path, cwd):
        """Returns whether a link led a shell, which changed to a path, into a watched folder."""
        path = os.path.normpath(path)
        folders = [folder for folder in self._policy.watched if _is_below(cwd, folder)]
        return not all(_is_below(path, folder) for folder in folders)

    def _revoke(self, tracee):
        tracee.rename_variables(_RENAMED, _LOADER)
        self._close_files(tracee)
        if tracee.user() == 0:
            tracee.become(self._policy.user)
        else:
            if tracee.has_capabilities():
                tracee.drop_capabilities()
            tracee.take_real_group()
        self._forget(tracee.pid)
        ptrace(DETACH, tracee.pid)

    def _allow_change(self, tracee):
        """Takes note of a program whose arguments name folders of root, whose permissions it may change."""
        if _program_of(tracee) in _CHANGERS:
            cwd = tracee.link("cwd")
            names = {os.path.normpath(os.path.join(cwd, word)) for word in tracee.words("cmdline")}
            for folder in [f for f in self._access if names & {f, *_prefixes(f)}]:
                del self._access[folder]

    def _close_files(self, tracee):
        """Closes the descriptors that a program without rights does not inherit.

        These are sealed files, and above stderr all of a program of root and those of watched folders. Shells often
        read answers by such a descriptor.
        """
        is_of_root = tracee.user() == 0
        for number, path in tracee.open_paths().items():
            is_watched = any(_is_below(path, folder) for folder in self._policy.watched)
            is_extra = number > 2 and (is_of_root or is_watched)
            if is_extra or path in self._policy.sealed:
                tracee.close(number)

    def _decide(self, tracee):
        self._check_sandbox()
        is_helper = tracee.pid in self._helpers
        self._forget(tracee.pid)
        if tracee.user() != 0:  # the kernel revoked its rights with the previous program
            self._decide_ordinary(tracee, is_helper)
            return
        decision = self._policy.decide(tracee)
        if decision is not False:
            tracee.rename_variables(_LOADER, _RENAMED)
        if decision is True:
            self._allow_change(tracee)
            self._helpers.add(tracee.pid)
            self._resume(tracee)
            return
        tracee.leave_execve()
        if decision is False:
            self._note_unreadable(tracee)
            self._revoke(tracee)
        else:
            tracee.execute(decision)
            ptrace(CONT, tracee.pid)

    def _decide_ordinary(self, tracee, is_helper):
        """Decides on a process of an ordinary user.

        Args:
          tracee: process.
          is_helper: whether it had root's rights just before.
        """
        is_of_tests = self._policy.is_of_tests(tracee)
        keeps = is_of_tests and (is_helper or self._policy.decide(tracee) is True)
        tracee.leave_execve()
        tracee.clear_secure()
        if _program_of(tracee).startswith("perl"):
            tracee.take_real_group()  # Perl refuses to use its environment if its groups differ
        if not keeps and tracee.has_capabilities():
            tracee.drop_capabilities()
        if is_of_tests:
            tracee.rename_variables(_LOADER, _RENAMED)
            tracee.hide()
            self._resume(tracee)
        else:
            self._note_unreadable(tracee)
            self._revoke(tracee)

    def _note_unreadable(self, tracee):
        """Takes note of the first program without rights whose arguments name a file in a watched folder."""
        if self.note:
            return
        cwd = tracee.link("cwd")
        for word in tracee.words("cmdline")[1:]:
            path = os.path.normpath(os.path.join(cwd, word.rpartition("=")[2]))
            if not any(_is_below(path, folder) for folder in self._policy.watched):
                continue
            if os.path.isfile(path) and not os.stat(path).st_uid and tracee.executed_path() != path:
                program = os.path.basename(tracee.executed_path())
                self.note = f"{ascii(program)[1:-1]} has no right to read {ascii(path)[1:-1]}"[
                    :_MAX_NOTE
                ]
                return


def seize(child):
    """Begins to trace a child without stopping it."""
    ptrace(SEIZE, child, 0, OPTIONS)
