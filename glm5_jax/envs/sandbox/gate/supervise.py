"""Decides for each program that is started with root's rights whether it keeps them.

The process that starts the programs is traced, and so are those that it forks, from outside of the sandbox. Each stops
when it has executed a program, before the first instruction of that. What is decided depends on the file:

- keep: programs that take files for data, launchers of other programs, and shells whose script can be trusted;
- an interpreter for which there is a stand-in executes that instead;
- everything else becomes an ordinary user's process, and is traced no longer.

A file can be trusted if the ordinary user does not own it, if it has not changed since supervision began, and if nobody
but root can put another in its place. Copies of an attempt's files and what is compiled from them are newer.
"""

import _signal as signal
import errno
import os
import stat
import time

from .tracee import CONT, DETACH, LISTEN, SEIZE, SYSCALL, WALL, Tracee, machine, ptrace

# TRACESYSGOOD, TRACEFORK, TRACEVFORK, TRACECLONE, TRACEEXEC, EXITKILL: nothing keeps rights when the tracer ends.
OPTIONS = 1 | 2 | 4 | 8 | 16 | 1 << 20
_EXEC, _STOP = 4, 128
_GROUP_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_TICK_S = 0.02  # more than the coarsest clock of a file system
_SHELL_OPTIONS_WITH_VALUE = ("-o", "+o", "-O", "+O")


class Policy:
    """Which programs keep root's rights.

    Attributes:
      user: number of the ordinary user.
      data: names of programs that take files for data only.
      launchers: names of programs that execute what their arguments say.
      shells: names of shells.
      standins: beginning of an interpreter's name -> path of the program that runs in its place.
      helper: arguments of the one interpreter process that the stand-ins themselves start.
      folders: folders whose files at the beginning of supervision can be trusted after a change of permissions, too.
      since: time at which supervision began, in nanoseconds.
    """

    def __init__(self, user, data, launchers, shells, standins, helper, folders):
        self.user, self.data, self.launchers, self.shells = user, data, launchers, shells
        self.standins, self.helper = standins, list(helper)
        self.known = {found for folder in folders for found in _files(folder)}
        self.since = time.time_ns()
        time.sleep(_TICK_S)  # what is written from now on is newer, also by a coarse clock

    def decide(self, tracee):
        """True to keep rights, a path to be executed instead, or False to give rights up."""
        words, exe = tracee.words("cmdline"), os.path.basename(tracee.link("exe"))
        if not words or not self._is_trusted_file(tracee.stat("exe")) or _loads_libraries(tracee):
            return False
        started = os.path.join(tracee.link("cwd"), tracee.started())
        is_trusted = self.is_trusted(started)
        if exe in ("busybox", "coreutils", "toybox"):  # one file with many names
            exe = os.path.basename(words[0])
        for name, path in self.standins.items():
            if exe.startswith(name):
                is_helper = words[1 : len(self.helper) + 1] == self.helper != []
                return (is_trusted and is_helper) or path
        if not is_trusted:
            return False
        if exe in self.shells:
            return self._is_trusted_shell(tracee, words)
        return exe in self.data or exe in self.launchers

    def is_trusted(self, path):
        """Whether only root decides what lies at an absolute path, and it has not changed."""
        try:
            real = os.path.realpath(path, strict=True)
            parts = [*_prefixes(path), *_prefixes(real)]
            found = [os.lstat(part) for part in parts]
            own = os.stat(real)
        except OSError:
            return False
        return stat.S_ISREG(own.st_mode) and all(self._is_trusted_file(item) for item in found)

    def _is_trusted_file(self, found):
        if found.st_uid == self.user:
            return False
        if stat.S_ISDIR(found.st_mode):
            # In a sticky folder nobody replaces what is root's.
            return not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX)
        is_known = (found.st_dev, found.st_ino) in self.known
        return (found.st_mtime_ns if is_known else found.st_ctime_ns) < self.since

    def _is_trusted_shell(self, tracee, words):
        """Whether the text that a shell runs comes from its starter or from a trusted file."""
        for name, _, path in (word.partition("=") for word in tracee.words("environ")):
            if name in ("BASH_ENV", "ENV") and path and not self.is_trusted(path):
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
        given = tracee.stat("fd/0")
        # A here-document is a file of root's without a name.
        if stat.S_ISREG(given.st_mode) and not (given.st_nlink or given.st_uid):
            return True
        return self.is_trusted(tracee.link("fd/0"))


def _files(folder):
    """Identities of all files below a folder of the sandbox."""
    for place, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(place, name))
            yield found.st_dev, found.st_ino


def _loads_libraries(tracee):
    """Whether its variables have the dynamic loader look for libraries."""
    return any(word.startswith("LD_") for word in tracee.words("environ"))


def _prefixes(path):
    """The path and all folders above it; `..` stays, and is resolved by whoever looks at one."""
    names = [name for name in path.split("/") if name]
    return ["/" + "/".join(names[: count + 1]) for count in range(len(names))]


class Supervisor:
    """Traces a child, which waits for that, until it ends.

    Shells run a file that the kernel does not know to execute themselves, without another call: so their calls are
    watched, too, and one whose execve has failed in that way is decided on by the file.

    proc: descriptor of the /proc in which processes have the numbers that this process knows them by.
    """

    def __init__(self, child, policy, proc):
        machine()
        self._child, self._policy, self._proc = child, policy, proc
        self._modes = {}  # process -> how it goes on: CONT, or SYSCALL for shells
        self._paths = {}  # process -> what it is executing

    def run(self):
        """The exit code of the child, as of `os.waitstatus_to_exitcode`."""
        while True:
            pid, status = os.waitpid(-1, WALL)
            if not os.WIFSTOPPED(status):
                self._forget(pid)
                if pid == self._child:
                    return os.waitstatus_to_exitcode(status)
                continue
            try:
                self._go_on(Tracee(pid, self._proc), status)
            except (ProcessLookupError, FileNotFoundError):  # it was killed meanwhile
                pass
            except Exception:
                # What cannot be decided must not run with rights.
                os.kill(pid, signal.SIGKILL)
                if pid == self._child:
                    raise

    def _forget(self, pid):
        self._modes.pop(pid, None)
        self._paths.pop(pid, None)

    def _go_on(self, tracee, status):
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == _EXEC:
            self._decide(tracee)
        elif event == _STOP and number in _GROUP_STOPS:
            ptrace(LISTEN, tracee.pid)
        elif number == signal.SIGTRAP | 0x80:
            self._watch_call(tracee)
        elif event:  # it has forked, or is what was forked
            self._resume(tracee)
        else:
            self._resume(tracee, number)

    def _resume(self, tracee, number=0):
        if tracee.pid not in self._modes:
            is_shell = os.path.basename(tracee.link("exe")) in self._policy.shells
            self._modes[tracee.pid] = SYSCALL if is_shell and tracee.user() == 0 else CONT
        ptrace(self._modes[tracee.pid], tracee.pid, 0, number)

    def _watch_call(self, tracee):
        begun = tracee.call_begun()
        if begun is not None:
            if begun[0] == machine().calls["execve"]:
                self._paths[tracee.pid] = tracee.text(begun[1])
        elif (path := self._paths.pop(tracee.pid, None)) is not None:
            is_script = tracee.call_result() == -errno.ENOEXEC
            path = os.path.join(tracee.link("cwd"), path)
            if is_script and not self._policy.is_trusted(path):
                self._give_up(tracee)
                return
        self._resume(tracee)

    def _give_up(self, tracee):
        tracee.become(self._policy.user)
        self._forget(tracee.pid)
        ptrace(DETACH, tracee.pid)

    def _decide(self, tracee):
        self._forget(tracee.pid)
        if tracee.user() != 0:  # the kernel has taken its rights with the program before
            ptrace(DETACH, tracee.pid)
            return
        decision = self._policy.decide(tracee)
        if decision is True:
            self._resume(tracee)
            return
        tracee.leave_execve()
        if decision is False:
            self._give_up(tracee)
        else:
            tracee.execute(decision)
            ptrace(CONT, tracee.pid)


def seize(child):
    """Begins to trace a child, which is not stopped by that."""
    ptrace(SEIZE, child, 0, OPTIONS)
