"""Rights that end where another program begins.

The process leaves root for another user but keeps root's capabilities, which the kernel takes from any program it
starts: a test may read what only root can, and drop to another user, while the programs under test that it starts
are an ordinary user's. And folders can be closed to writing for good, also to what is imported.
"""

import ctypes
import os
import signal
import struct

USER = 1000  # whose the attempt's files are, too: its programs may write their own folder
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
# Numbers that are the same on all machines.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
# Writing, removing, making of each kind, linking across folders, cutting off.
_WRITE = (1 << 1) | sum(1 << bit for bit in range(4, 15))
_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
_libc = ctypes.CDLL(None, use_errno=True)


def keep_rights_here():
    """Leaves root; the rights stay with this process, and with nothing that it executes."""
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    kept = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, kept))
    low, permitted, _, high, permitted_high, _ = struct.unpack("6I", kept.raw)
    _check(_libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    _check(
        _libc.capset(
            header, struct.pack("6I", permitted, permitted, 0, permitted_high, permitted_high, 0)
        )
    )
    # Nobody reads its memory or its descriptors, whatever fs.suid_dumpable is.
    _check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))
    _check(_libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))  # as one with the stand-in
    os.environ.update(HOME=HOME, USER="agent", LOGNAME="agent")
    for name in ("setuid", "setreuid", "setresuid"):
        setattr(os, name, _giving_up(getattr(os, name)))


def _giving_up(change):
    """A change of user that takes the rights along, as it would have from root."""

    def changed(*users):
        change(*users)
        if 0 not in users:
            header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
            _check(_libc.capset(header, bytes(24)))

    return changed


def keep_reading():
    """Becomes the ordinary user, who may read all files, and so may all that it starts."""
    _check(_libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0))
    leave_root()
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    kept = 1 << _READ_ALL
    _check(_libc.capset(header, struct.pack("6I", kept, kept, kept, 0, 0, 0)))
    _check(_libc.prctl(_CAP_AMBIENT, _AMBIENT_RAISE, _READ_ALL, 0, 0))


def leave_root():
    """Becomes the ordinary user, without any rights."""
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.environ.update(HOME=HOME, USER="agent", LOGNAME="agent")


def close_folders(closed=CLOSED):
    """From here on this process and all it starts can write nothing in these folders of the root.

    Nor can it signal or trace processes that are not closed off likewise. False where the kernel cannot do that.
    """
    version = _libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = _WRITE & _BY_VERSION.get(version, -1)
    # Files, network, scope: abstract sockets and signals.
    attributes = struct.pack("QQQ", handled, 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 8
    rules = _libc.syscall(_CREATE_RULESET, attributes, size, 0)
    _check(rules)
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
