"""Wraps the kernel calls that all operations need, and reports their outcome."""

import ctypes
import os

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
SET_PDEATHSIG = 1
ALL_NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """Raised if a file in the sandbox is not as requested, which is the program's fault, not the sandbox's."""


class Failed(Exception):
    """Raised if the system refused something that a sandbox needs."""


def call(function, *arguments):
    """Calls a function of libc. Raises Failed if it fails."""
    if getattr(libc, function)(*arguments) == -1:
        raise Failed(f"{function}: {os.strerror(ctypes.get_errno())}")


def become(user, owner):
    """Changes all user and group identities of this process to a user inside."""
    if owner:  # with only one user, the kernel does not allow to change groups
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def report(task, text):
    """Sends the outcome to the process that started this one."""
    os.write(task["status"], text.encode(errors="replace")[:2000] + b"\n")
