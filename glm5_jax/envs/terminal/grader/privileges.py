"""Limits root's rights to one process.

The process changes to another user but keeps root's capabilities, which the kernel removes from every
program that it starts. So a test may read what only root can, and change to another user, while the
programs under test that it starts are an ordinary user's. Folders can also be closed to writing
permanently, including for imported code.
"""

import ctypes
import os
import signal
import struct

USER = 1000  # owns the attempt's files too, so its programs may write in their folder
# Group of tests and of what they start, until that turns out to be a program of the attempt. The kernel hides a
# process from others of its user that are in another group, so nobody sees what a test passes to grep.
GROUP = 1001
HOME = "/var/agent"
CLOSED = (
    "logs",
    "tests",
    "grader",
    "solution",
    "etc",
    "usr",
    "bin",
    "sbin",
    "boot",
    "root",
    "proc",
)
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS, _CAP_AMBIENT = 1, 4, 8, 38, 47
_AMBIENT_RAISE = 2
_READ_ALL = 2  # CAP_DAC_READ_SEARCH
_CAPABILITY_VERSION = 0x20080522
# System calls with the same number on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
# Write, remove, create of each kind, link across folders, truncate.
_WRITE = (1 << 1) | sum(1 << bit for bit in range(4, 15))
_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
_libc = ctypes.CDLL(None, use_errno=True)


def keep_rights_of_this_process():
    """Leaves root; the rights remain with this process only, not with programs that it executes."""
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    capabilities = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, capabilities))
    low, permitted, _, high, permitted_high, _ = struct.unpack("6I", capabilities.raw)
    _check(_libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(USER, GROUP, GROUP)
    os.setresuid(USER, USER, USER)
    _check(
        _libc.capset(
            header, struct.pack("6I", permitted, permitted, 0, permitted_high, permitted_high, 0)
        )
    )
    # Hides its memory and descriptors, regardless of fs.suid_dumpable.
    _check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))
    _check(_libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))  # ends together with the shim
    os.environ.update(HOME=HOME, USER="agent", LOGNAME="agent")
    # Programs of the attempt can write in this user's site folder, which every Python of the user would load.
    os.environ["PYTHONNOUSERSITE"] = "1"
    for name in ("setuid", "setreuid", "setresuid"):
        setattr(os, name, _giving_up(getattr(os, name)))


def _giving_up(change):
    """Wraps a change of user so that it drops all rights, as the change from root would."""

    def changed(*users):
        change(*users)
        if 0 not in users:
            header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
            _check(_libc.capset(header, bytes(24)))

    return changed


def keep_reading():
    """Changes to the ordinary user, with the right to read all files, also for programs that it starts."""
    _check(_libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
    leave_root(GROUP)
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    capability = 1 << _READ_ALL
    _check(_libc.capset(header, struct.pack("6I", capability, capability, capability, 0, 0, 0)))
    _check(_libc.prctl(_CAP_AMBIENT, _AMBIENT_RAISE, _READ_ALL, 0, 0))


def leave_root(group=USER):
    """Changes to the ordinary user without any rights, and to an effective group."""
    os.setgroups([])
    os.setresgid(USER, group, group)
    os.setresuid(USER, USER, USER)
    os.environ.update(HOME=HOME, USER="agent", LOGNAME="agent")


def close_folders(writes_reward=False):
    """Makes top-level folders read-only for this process and all that it starts; returns False if unsupported.

    Tests unpack archives of attempts, whose members can have any path. With `writes_reward` they can write below /logs.

    It can then also not signal or trace processes that are not restricted in the same way.
    """
    version = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = _WRITE & _BY_VERSION.get(version, -1)
    # Rights on files, on the network, and scope: abstract sockets and signals.
    attributes = struct.pack("QQQ", handled, 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 8
    rules = _libc.syscall(_CREATE_RULESET, attributes, size, 0)
    _check(rules)
    closed = {*CLOSED} - ({"logs"} if writes_reward else set())
    for name in os.listdir("/"):
        if name in closed or name.startswith("lib") or os.path.islink("/" + name):
            continue
        try:
            folder = os.open("/" + name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        rule = struct.pack("=Qi", handled, folder)
        _check(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
        os.close(folder)
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)
    return True


def _check(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
