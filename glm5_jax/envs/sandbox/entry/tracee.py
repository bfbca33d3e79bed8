"""Makes system calls in a traced process, and reads its state from `/proc`.

A process that has executed a program stops before the program's first instruction. The tracer can then
write its registers and memory, to make it give up its rights or execute another program instead.
"""

import ctypes
import os
import struct

from .system import Failed, libc

CONT, SYSCALL, SINGLESTEP, DETACH = 7, 24, 9, 17
SEIZE, LISTEN, POKEDATA = 0x4206, 0x4208, 5
_GETREGSET, _SETREGSET, _NT_PRSTATUS, _GET_SYSCALL_INFO = 0x4204, 0x4205, 1, 0x420E
_ENTRY, _EXIT = 1, 2
_AT_SECURE, _AT_EXECFN = 23, 31
_SET_DUMPABLE, _CAPABILITY_VERSION = 4, 0x20080522
WALL = 0x40000000  # option of waitpid: children of every kind
_WORD = struct.calcsize("P")


_CALLS = "setgroups", "setresgid", "setresuid", "execve", "chdir", "close", "prctl", "capset"


class RegisterLayout:
    """Layout of registers, numbers of system calls, and the call instruction on one kind of processor.

    The bytes after the instruction end the process, so that a call that should not return never does.

    Args:
      size: number of registers.
      counter, stack, number, result: index of the program counter, stack pointer, call number and result.
      arguments: indices of the first three arguments.
      extra: index -> value that a new call needs.
      code: call instruction, and one that ends the process.
      calls: numbers of `_CALLS`.
    """

    def __init__(self, size, counter, stack, number, arguments, result, extra, code, calls):
        self.size, self.counter, self.stack, self.number = size, counter, stack, number
        self.arguments, self.result, self.extra, self.code = arguments, result, extra, code
        self.calls = dict(zip(_CALLS, calls))


LAYOUTS = {
    # orig_rax is set to -1, so that the kernel does not restart an interrupted call.
    "x86_64": RegisterLayout(
        27,
        16,
        19,
        10,
        (14, 13, 12),
        10,
        {15: 2**64 - 1},
        b"\x0f\x05\x0f\x0b",
        (116, 119, 117, 59, 80, 3, 157, 126),
    ),
    "aarch64": RegisterLayout(
        34,
        32,
        31,
        8,
        (0, 1, 2),
        0,
        {},
        b"\x01\x00\x00\xd4\x00\x00\x20\xd4",
        (159, 149, 147, 221, 49, 57, 167, 91),
    ),
}


def register_layout():
    """Returns the layout of this processor. Raises Failed if it is not known."""
    name = os.uname().machine
    if name not in LAYOUTS:
        raise Failed(f"programs cannot be supervised on {name}; known are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def ptrace(request, pid, address=0, data=0):
    """Calls ptrace(2). Raises OSError if it fails."""
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    ctypes.set_errno(0)
    if libc.ptrace(request, pid, address, data) == -1 and ctypes.get_errno():
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")


class Tracee:
    """Traced process that is stopped.

    Args:
      pid: number of the process.
      proc: descriptor of the /proc that has it by this number.
    """

    def __init__(self, pid, proc):
        self.pid, self.proc = pid, proc

    def read(self, name):
        """Returns the content of a file of the process in /proc."""
        descriptor = os.open(f"{self.pid}/{name}", os.O_RDONLY, dir_fd=self.proc)
        with open(descriptor, "rb") as file:
            return file.read()

    def stat(self, name):
        """Returns the status of the target of a link of the process in /proc."""
        return os.stat(f"{self.pid}/{name}", dir_fd=self.proc)

    def link(self, name):
        """Returns the target of a link of the process in /proc."""
        return os.readlink(f"{self.pid}/{name}", dir_fd=self.proc)

    def user(self):
        """Returns the effective user of the process."""
        return int(self._status(b"Uid:").split()[1])

    def has_capabilities(self):
        """Returns whether the process has any capability."""
        return int(self._status(b"CapPrm:"), 16) != 0

    def _status(self, field):
        lines = self.read("status").splitlines()
        return next(line for line in lines if line.startswith(field)).removeprefix(field)

    def open_paths(self):
        """Returns the path of each descriptor of the process, by its number."""
        folder = os.open(f"{self.pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
        try:
            return {int(name): os.readlink(name, dir_fd=folder) for name in os.listdir(folder)}
        finally:
            os.close(folder)

    def words(self, name):
        """Returns the arguments (`cmdline`) or variables (`environ`) of the process."""
        return [os.fsdecode(word) for word in self.read(name).split(b"\0")[:-1]]

    def executed_path(self):
        """Returns the path that execve was called with: of a script or link, not of its target."""
        vector = self.read("auxv")
        for kind, value in struct.iter_unpack("PP", vector[: len(vector) // 16 * 16]):
            if kind == _AT_EXECFN:
                return self.text(value)
        raise Failed("the kernel does not say what was executed")

    def text(self, address):
        """Returns the null-terminated text at an address of the process."""
        return os.fsdecode(self._memory(address, 4096).partition(b"\0")[0])

    def entered_call(self):
        """Returns the number and first arguments of the system call that begins, or None if one ends."""
        info = self._call_info()
        return struct.unpack_from("4Q", info, 24) if info[0] == _ENTRY else None

    def call_result(self):
        """Returns the result of the system call that ends, or None if one begins."""
        info = self._call_info()
        return struct.unpack_from("q", info, 24)[0] if info[0] == _EXIT else None

    def _call_info(self):
        buffer = ctypes.create_string_buffer(96)
        ptrace(_GET_SYSCALL_INFO, self.pid, 96, ctypes.addressof(buffer))
        return buffer.raw

    def leave_execve(self):
        """Continues until execve returns, because the registers are not the program's before."""
        ptrace(SYSCALL, self.pid)
        _stopped(self.pid)

    def become(self, user):
        """Makes the process give up root for an ordinary user, and root's home folder."""
        for name, arguments in (
            ("setgroups", (0, 0)),
            ("setresgid", (user, user, user)),
            ("setresuid", (user, user, user)),
        ):
            self._call(name, arguments)
        self._replace_variable(b"HOME=/root", b"HOME=/tmp")

    def take_real_group(self):
        """Makes a process whose real and effective groups differ take the real one, and be visible to others."""
        group, effective, *_ = map(int, self._status(b"Gid:").split())
        if group != effective:
            self._call("setresgid", (group, group, group))
            self._call("prctl", (_SET_DUMPABLE, 1, 0))

    def clear_secure(self):
        """Makes the dynamic loader handle the new program as an ordinary one, although its groups differ."""
        keys = [key for key, _ in struct.iter_unpack("PP", self.read("auxv"))]
        if _AT_SECURE not in keys:
            return
        # The vector follows the number of arguments, and the pointers to arguments and variables.
        stack = self._registers()[register_layout().stack]
        (count,) = struct.unpack("P", self._memory(stack, _WORD))
        before = 1 + count + 1 + len(self.words("environ")) + 1
        address = stack + (before + 2 * keys.index(_AT_SECURE)) * _WORD
        (key,) = struct.unpack("P", self._memory(address, _WORD))
        if key != _AT_SECURE:
            raise Failed("the vector of a new program is not where it should be")
        self._write(address + _WORD, bytes(_WORD))

    def hide(self):
        """Hides the process's arguments, memory and descriptors from other processes of its user."""
        self._call("prctl", (_SET_DUMPABLE, 0, 0))

    def drop_capabilities(self):
        """Makes the process, which is an ordinary user's, drop all its capabilities."""
        address = (self._registers()[register_layout().stack] - 4096) & ~15
        self._write(address, struct.pack("Ii", _CAPABILITY_VERSION, 0) + bytes(24))
        self._call("capset", (address, address + 8, 0))

    def rename_variables(self, prefix, new):
        """Replaces the beginning of the names of variables by another one of the same length."""
        content = b"\0" + self.read("environ")
        at = content.find(b"\0" + prefix)
        while at >= 0:
            self._write(self._environment() + at, new)
            at = content.find(b"\0" + prefix, at + 1)

    def close(self, descriptor):
        """Makes the process close a descriptor."""
        self._call("close", (descriptor, 0, 0))

    def execute(self, path):
        """Prepares the process to execute another program with the same arguments and variables."""
        kind, registers = register_layout(), self._registers()
        stack = registers[kind.stack]
        (count,) = struct.unpack("P", self._memory(stack, _WORD))
        address = (stack - 4096) & ~15
        self._write(address, os.fsencode(path) + b"\0")
        first = stack + _WORD
        self._prepare(
            registers, kind.calls["execve"], (address, first, first + (count + 1) * _WORD)
        )

    def _call(self, name, arguments):
        kind, before = register_layout(), self._registers()
        start = before[kind.counter]
        code = self._memory(start, len(kind.code))
        self._prepare(before, kind.calls[name], arguments)
        ptrace(SINGLESTEP, self.pid)
        _stopped(self.pid)
        result = self._registers()[kind.result]
        self._write(start, code)
        self._set_registers(before)
        if result:
            raise OSError(2**64 - result, f"{name} in a traced process")

    def _prepare(self, registers, number, arguments):
        kind, new = register_layout(), list(registers)
        self._write(new[kind.counter], kind.code)
        for index, value in zip(kind.arguments, arguments):
            new[index] = value
        for index, value in {kind.number: number, **kind.extra}.items():
            new[index] = value
        self._set_registers(new)

    def _registers(self):
        return list(
            struct.unpack(f"{register_layout().size}Q", self._registers_as_bytes(_GETREGSET))
        )

    def _set_registers(self, registers):
        self._registers_as_bytes(_SETREGSET, struct.pack(f"{register_layout().size}Q", *registers))

    def _registers_as_bytes(self, request, data=None):
        size = register_layout().size * 8
        buffer = ctypes.create_string_buffer(data or size, size)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), size)
        ptrace(request, self.pid, _NT_PRSTATUS, ctypes.addressof(vector))
        return buffer.raw

    def _memory(self, address, size):
        descriptor = os.open(f"{self.pid}/mem", os.O_RDONLY, dir_fd=self.proc)
        try:
            return os.pread(descriptor, size, address)
        finally:
            os.close(descriptor)

    def _write(self, address, data):
        """Writes memory word by word with ptrace, which may write where the process itself may not."""
        for at in range(0, len(data), _WORD):
            part = data[at : at + _WORD]
            if len(part) < _WORD:
                part += self._memory(address + at + len(part), _WORD - len(part))
            ptrace(POKEDATA, self.pid, address + at, struct.unpack("P", part)[0])

    def _replace_variable(self, old, new):
        """Overwrites a variable of the environment with a shorter one."""
        at = (b"\0" + self.read("environ")).find(b"\0" + old + b"\0")
        if at >= 0:
            self._write(self._environment() + at, new.ljust(len(old), b"\0"))

    def _environment(self):
        """Returns the address of the variables of the environment."""
        return int(self.read("stat").rpartition(b")")[2].split()[47])


def _stopped(pid):
    """Waits until the process stops. Raises ProcessLookupError if it ends."""
    status = os.waitpid(pid, WALL)[1]
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(f"process {pid} has ended")
