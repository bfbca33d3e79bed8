"""What all operations of the gate need of the kernel, and how they tell what came of it."""

import ctypes
import os

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """What lies in the sandbox is not what was asked for: the program's doing, not the sandbox's."""


class Failed(Exception):
    """The system refused what a sandbox needs."""


def call(function, *arguments):
    """A function of libc; Failed if it fails."""
    if getattr(libc, function)(*arguments) == -1:
        raise Failed(f"{function}: {os.strerror(ctypes.get_errno())}")


def become(user, owner):
    """All identities of this process become those of a user inside."""
    if owner:  # who is the only user there is may not give up groups
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def report(task, text):
    """Tells the outcome to who started this process."""
    os.write(task["status"], text.encode(errors="replace")[:2000] + b"\n")
