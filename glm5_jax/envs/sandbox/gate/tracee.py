"""System calls made in a traced process, and what `/proc` says of it.

A process that has just executed a program stops before the first instruction of that program. There its registers and
its memory can be written: the tracer has it give up its rights, or execute another program in place of this one.
"""

import ctypes
import os
import struct

from .system import Failed, libc

CONT, SYSCALL, SINGLESTEP, DETACH = 7, 24, 9, 17
SEIZE, LISTEN, POKEDATA = 0x4206, 0x4208, 5
_GETREGSET, _SETREGSET, _NT_PRSTATUS, _GET_SYSCALL_INFO = 0x4204, 0x4205, 1, 0x420E
_ENTRY, _EXIT = 1, 2
_AT_EXECFN = 31
WALL = 0x40000000  # waitpid: children of every kind
_WORD = struct.calcsize("P")


class Machine:
    """Layout of registers, number of system calls and their instruction on one kind of processor.

    The bytes behind the instruction end the process, so that a call that should not return never does.
    """

    def __init__(self, size, counter, stack, number, arguments, result, extra, code, calls):
        self.size, self.counter, self.stack, self.number = size, counter, stack, number
        self.arguments, self.result, self.extra, self.code = arguments, result, extra, code
        self.calls = dict(zip(("setgroups", "setresgid", "setresuid", "execve"), calls))


MACHINES = {
    # orig_rax is set to -1: no call that was interrupted is begun again.
    "x86_64": Machine(
        27, 16, 19, 10, (14, 13, 12), 10, {15: 2**64 - 1}, b"\x0f\x05\x0f\x0b", (116, 119, 117, 59)
    ),
    "aarch64": Machine(
        34, 32, 31, 8, (0, 1, 2), 0, {}, b"\x01\x00\x00\xd4\x00\x00\x20\xd4", (159, 149, 147, 221)
    ),
}


def machine():
    """The `Machine` of this processor; Failed if it is not known."""
    name = os.uname().machine
    if name not in MACHINES:
        raise Failed(f"programs cannot be supervised on {name}; known are {', '.join(MACHINES)}")
    return MACHINES[name]


def ptrace(request, pid, address=0, data=0):
    """ptrace(2); OSError if it fails."""
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    ctypes.set_errno(0)
    if libc.ptrace(request, pid, address, data) == -1 and ctypes.get_errno():
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")


class Tracee:
    """A traced process that is stopped. proc: descriptor of the /proc that has it by this number."""

    def __init__(self, pid, proc):
        self.pid, self.proc = pid, proc

    def read(self, name):
        """The content of a file of the process in /proc."""
        descriptor = os.open(f"{self.pid}/{name}", os.O_RDONLY, dir_fd=self.proc)
        with open(descriptor, "rb") as file:
            return file.read()

    def stat(self, name):
        """The status of what a link of the process in /proc leads to."""
        return os.stat(f"{self.pid}/{name}", dir_fd=self.proc)

    def link(self, name):
        """The path that a link of the process in /proc shows."""
        return os.readlink(f"{self.pid}/{name}", dir_fd=self.proc)

    def user(self):
        """The effective user of the process."""
        line = next(line for line in self.read("status").splitlines() if line.startswith(b"Uid:"))
        return int(line.split()[2])

    def words(self, name):
        """The arguments (`cmdline`) or variables (`environ`) of the process."""
        return [os.fsdecode(word) for word in self.read(name).split(b"\0")[:-1]]

    def started(self):
        """The path that execve was called with: of a script, or of a link, not of what that leads to."""
        vector = self.read("auxv")
        for kind, value in struct.iter_unpack("PP", vector[: len(vector) // 16 * 16]):
            if kind == _AT_EXECFN:
                return self.text(value)
        raise Failed("the kernel does not say what was executed")

    def text(self, address):
        """The text at an address of the process, which ends with a null byte."""
        return os.fsdecode(self._memory(address, 4096).partition(b"\0")[0])

    def call_begun(self):
        """The number and first arguments of the system call that begins, or None if one ends."""
        info = self._call_info()
        return struct.unpack_from("4Q", info, 24) if info[0] == _ENTRY else None

    def call_result(self):
        """The result of the system call that ends, or None if one begins."""
        info = self._call_info()
        return struct.unpack_from("q", info, 24)[0] if info[0] == _EXIT else None

    def _call_info(self):
        buffer = ctypes.create_string_buffer(96)
        ptrace(_GET_SYSCALL_INFO, self.pid, 96, ctypes.addressof(buffer))
        return buffer.raw

    def leave_execve(self):
        """Goes on to where execve returns; before that the registers are not those of the program."""
        ptrace(SYSCALL, self.pid)
        _stopped(self.pid)

    def become(self, user):
        """Has the process give up root for an ordinary user, and its home folder."""
        for name, arguments in (
            ("setgroups", (0, 0)),
            ("setresgid", (user, user, user)),
            ("setresuid", (user, user, user)),
        ):
            self._call(name, arguments)
        self._replace_variable(b"HOME=/root", b"HOME=/tmp")

    def execute(self, path):
        """Sets the process up to execute another program, with the same arguments and variables."""
        kind, registers = machine(), self._registers()
        stack = registers[kind.stack]
        (count,) = struct.unpack("P", self._memory(stack, _WORD))
        place = (stack - 4096) & ~15
        self._write(place, os.fsencode(path) + b"\0")
        first = stack + _WORD
        self._prepare(registers, kind.calls["execve"], (place, first, first + (count + 1) * _WORD))

    def _call(self, name, arguments):
        kind, before = machine(), self._registers()
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
        kind, new = machine(), list(registers)
        self._write(new[kind.counter], kind.code)
        for place, value in zip(kind.arguments, arguments):
            new[place] = value
        for place, value in {kind.number: number, **kind.extra}.items():
            new[place] = value
        self._set_registers(new)

    def _registers(self):
        return list(struct.unpack(f"{machine().size}Q", self._registers_as_bytes(_GETREGSET)))

    def _set_registers(self, registers):
        self._registers_as_bytes(_SETREGSET, struct.pack(f"{machine().size}Q", *registers))

    def _registers_as_bytes(self, request, data=None):
        size = machine().size * 8
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
        """By words: ptrace may write where the process itself may not."""
        for at in range(0, len(data), _WORD):
            part = data[at : at + _WORD]
            if len(part) < _WORD:
                part += self._memory(address + at + len(part), _WORD - len(part))
            ptrace(POKEDATA, self.pid, address + at, struct.unpack("P", part)[0])

    def _replace_variable(self, old, new):
        """Writes a shorter variable over one of the environment."""
        at = (b"\0" + self.read("environ")).find(b"\0" + old + b"\0")
        if at < 0:
            return
        fields = self.read("stat").rpartition(b")")[2].split()
        self._write(int(fields[47]) + at, new.ljust(len(old), b"\0"))


def _stopped(pid):
    """Waits until the process stops; ProcessLookupError if it ends."""
    status = os.waitpid(pid, WALL)[1]
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(f"process {pid} has ended")
