"""Keeps programs of the ordinary user from sending signals to tests, which may run as the same user.

The kernel compares users only, so a program of an attempt could kill a search of the tests, which then finds nothing. Calls
that send signals wait for this module (seccomp's user notifications). It refuses those from an ordinary program to a program
that `supervise` traces, which are those of the tests.
"""

import _signal as signal  # pyright: ignore[reportMissingImports]: typeshed lacks it
import _socket
import ctypes
import errno
import fcntl
import os
import struct

from .system import NEWUSER, SET_PDEATHSIG, Failed, call, libc

_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(os.uname().machine, -1)
_SET_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_REQUEST, _ANSWER = struct.Struct("QIIiIQ6Q"), struct.Struct("Qqii")
_CONTINUE = 1
# Architecture -> numbers of kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal; fcntl, ioctl.
_CALLS = {
    "x86_64": ((62, 200, 234, 129, 297, 424), 72, 16),
    "aarch64": ((129, 130, 131, 138, 240, 424), 25, 29),
}
# Requests of fcntl and ioctl that make the kernel send signals: F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP.
_OWNER_REQUESTS, _OWNER_IOCTLS = (8, 10, 15), (0x8901, 0x8902)
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _SECOND_ARGUMENT = 0, 24
_ALLOW, _NOTIFY, _REFUSE = 0x7FFF0000, 0x7FC00000, 0x00050000 | errno.EPERM


def pass_listener(channel):
    """Installs the filter for this process and all that it starts, and passes its notifications to a `SignalGuard`.

    Does nothing if the kernel has no such filters, or allows no second one.
    """

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    program = _filter()
    data = Program(len(program) // 8, program)
    listener = libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, ctypes.byref(data))
    if listener == -1:
        return
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", listener))
    channel.sendmsg([b"1"], [rights])
    if not channel.recv(1):
        raise Failed("the signals of a command cannot be watched")


def _filter():
    calls, file_control, device_control = _CALLS[os.uname().machine]
    checks = [(file_control, _OWNER_REQUESTS), (device_control, _OWNER_IOCTLS)]
    lines = [(_LOAD, 0, 0, _NUMBER)]
    for number in calls:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOTIFY)]
    for number, requests in checks:
        lines += [(_EQUAL, 0, 2 * len(requests) + 2, number), (_LOAD, 0, 0, _SECOND_ARGUMENT)]
        for request in requests:
            lines += [(_EQUAL, 0, 1, request), (_RETURN, 0, 0, _REFUSE)]
        lines.append((_RETURN, 0, 0, _ALLOW))
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


class SignalGuard:
    """Process that decides on signals, until `stop`. It is outside of the sandbox's PID namespace.

    Attributes:
      channel: socket for `pass_listener`.
    """

    def __init__(self, task, proc):
        """Starts the process.

        Args:
          task: task of `execute`.
          proc: descriptor of the /proc that has processes by the numbers this process sees.
        """
        self._proc, self._user, self._tracer = proc, task["policy"]["user"], os.getpid()
        end, self.channel = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._pid = os.fork()
        if not self._pid:
            try:
                self.channel.close()
                call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                _, ancillary, _, _ = end.recvmsg(1, _socket.CMSG_SPACE(4))
                if ancillary:
                    call("setns", task["sandbox"], NEWUSER)  # users then have the sandbox's numbers
                    end.send(b"1")
                    self._run(struct.unpack("i", ancillary[0][2])[0])
            finally:
                os._exit(1)
        end.close()

    def stop(self):
        """Ends the process."""
        os.kill(self._pid, signal.SIGKILL)

    def _run(self, listener):
        while True:
            request = bytearray(_REQUEST.size)
            try:
                fcntl.ioctl(listener, _RECEIVE, request)
                number, sender, _, kind, _, _, *arguments = _REQUEST.unpack(request)
                try:
                    error = self._error_of(sender, kind, arguments)
                except (OSError, ValueError, KeyError, IndexError):  # a process has ended
                    error = errno.EPERM
                flags = 0 if error else _CONTINUE
                fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, -error, flags))
            except OSError:  # the sender has ended
                continue

    def _error_of(self, sender, kind, arguments):
        """Returns the error of a call that sends a signal, or 0 to let the kernel decide."""
        status = self._status(sender)
        if status is None or not self._is_ordinary(status) or self._is_of_tests(status):
            return 0
        _, by_thread, _, _, _, by_descriptor = _CALLS[os.uname().machine][0]
        target = ctypes.c_int(arguments[0] & 0xFFFFFFFF).value
        if kind == by_thread and self._is_own_thread(sender, target):
            return 0
        if kind == by_descriptor:
            targets = [self._status(self._process_of(sender, target))]
        else:
            targets = self._targets(sender, status, target)
        targets = [one for one in targets if one is not None]
        if any(map(self._is_of_tests, targets)):
            return errno.EPERM
        return 0 if targets else errno.ESRCH

    def _is_ordinary(self, status):
        return int(status["Uid"][1]) == self._user and not int(status["CapPrm"][0], 16)

    def _is_of_tests(self, status):
        return int(status["TracerPid"][0]) == self._tracer

    def _targets(self, pid, sender, target):
        """Returns the statuses of the processes that `kill` with this number means."""
        others = self._statuses(self._space(pid))
        if target > 0:
            return [one for one in others if one["NSpid"][-1] == str(target)]
        if target == -1:
            return [one for one in others if one["NSpid"][-1] not in ("1", sender["NSpid"][-1])]
        group = sender["NSpgid"][-1] if target == 0 else str(-target)
        return [one for one in others if one["NSpgid"][-1] == group]

    def _statuses(self, space):
        """Yields the statuses of the processes in a PID namespace; other sandboxes have the same numbers."""
        for name in filter(str.isdigit, os.listdir(self._proc)):
            status = self._status(name)
            try:
                if status is not None and self._space(name) == space:
                    yield status
            except OSError:  # of somebody else
                continue

    def _space(self, pid):
        return os.readlink(f"{pid}/ns/pid", dir_fd=self._proc)

    def _status(self, pid):
        """Returns the fields of a process's status, or None if it has ended."""
        try:
            return self._fields(f"{pid}/status")
        except OSError:
            return None

    def _fields(self, name):
        """Returns the words of each field of a file in /proc."""
        descriptor = os.open(name, os.O_RDONLY, dir_fd=self._proc)
        with open(descriptor, "rb") as file:
            lines = file.read().decode(errors="replace").splitlines()
        return {key: words.split() for key, _, words in (line.partition(":") for line in lines)}

    def _is_own_thread(self, sender, thread):
        folder = os.open(f"{sender}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            names = os.listdir(folder)
        finally:
            os.close(folder)
        statuses = (self._status(f"{sender}/task/{name}") for name in names)
        return any(one["NSpid"][-1] == str(thread) for one in statuses if one is not None)

    def _process_of(self, sender, descriptor):
        """Returns the number of the process that a descriptor of a process stands for."""
        return self._fields(f"{sender}/fdinfo/{descriptor}")["Pid"][0]
