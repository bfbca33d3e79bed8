"""The filter of system calls, run by a small interpreter on the data that the kernel would pass."""

import errno
import struct

import pytest

from glm5_jax.envs.sandbox import seccomp

X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
ALLOW = 0x7FFF0000


def outcome(program: bytes, machine: int, number: int, first: int = 0, third: int = 0) -> int:
    """Returns the filter's result for a call with that first and third argument."""
    data = struct.pack("=IIQ6Q", number, machine, 0, first, 0, third, *[0] * 3)
    lines = list(struct.iter_unpack("=HBBI", program))
    at = held = 0
    while True:
        code, then, other, value = lines[at]
        at += 1
        if code == 0x20:
            held = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        elif code == 0x15:
            at += then if held == value else other
        elif code == 0x35:
            at += then if held >= value else other
        else:
            raise AssertionError(f"instruction {code:#x}")


def fails(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize(
    ("machine", "kind", "number", "first", "expected"),
    [
        ("x86_64", X86, 0, 0, ALLOW),  # read
        ("x86_64", X86, 59, 0, ALLOW),  # execve
        ("x86_64", X86, 56, 0, ALLOW),  # clone
        ("x86_64", X86, 101, 0, ALLOW),  # ptrace: debuggers are honest tools
        ("x86_64", X86, 165, 0, fails(errno.EPERM)),  # mount
        ("x86_64", X86, 272, 0, fails(errno.EPERM)),  # unshare
        ("x86_64", X86, 321, 0, fails(errno.EPERM)),  # bpf
        ("x86_64", X86, 425, 0, fails(errno.EPERM)),  # io_uring_setup
        ("x86_64", X86, 250, 0, fails(errno.EPERM)),  # keyctl
        ("x86_64", X86, 41, 1, ALLOW),  # socket, unix
        ("x86_64", X86, 41, 2, ALLOW),
        ("x86_64", X86, 41, 10, ALLOW),
        ("x86_64", X86, 41, 16, ALLOW),
        ("x86_64", X86, 41, 17, fails(errno.EAFNOSUPPORT)),  # packet
        ("x86_64", X86, 41, 40, fails(errno.EAFNOSUPPORT)),  # vsock
        ("x86_64", X86, 41, 1 << 32 | 40, fails(errno.EAFNOSUPPORT)),  # the kernel reads an int
        ("x86_64", X86, 53, 1, ALLOW),  # socketpair
        ("x86_64", X86, 53, 30, fails(errno.EAFNOSUPPORT)),
        ("x86_64", X86, 0x40000000 + 165, 0, fails(errno.ENOSYS)),  # mount by its other number
        ("x86_64", I386, 21, 0, fails(errno.ENOSYS)),  # mount of another instruction set
        ("x86_64", I386, 0, 0, fails(errno.ENOSYS)),
        ("aarch64", ARM, 63, 0, ALLOW),  # read
        ("aarch64", ARM, 221, 0, ALLOW),  # execve
        ("aarch64", ARM, 40, 0, fails(errno.EPERM)),  # mount
        ("aarch64", ARM, 97, 0, fails(errno.EPERM)),  # unshare
        ("aarch64", ARM, 198, 1, ALLOW),
        ("aarch64", ARM, 198, 40, fails(errno.EAFNOSUPPORT)),
        ("aarch64", X86, 63, 0, fails(errno.ENOSYS)),
    ],
)
def test_filters_system_calls(machine, kind, number, first, expected):
    assert outcome(seccomp.build_filter(machine), kind, number, first) == expected


@pytest.mark.parametrize(
    ("family", "protocol", "expected"),
    [
        (1, 0, ALLOW),
        (1, 7, ALLOW),  # the kernel's to refuse
        (2, 6, ALLOW),  # TCP
        (2, 1, ALLOW),  # ICMP
        (10, 17, ALLOW),  # UDP
        (10, 58, ALLOW),
        (2, 132, fails(errno.EPROTONOSUPPORT)),  # SCTP
        (2, 33, fails(errno.EPROTONOSUPPORT)),  # DCCP
        (10, 132, fails(errno.EPROTONOSUPPORT)),
        (2, 255, fails(errno.EPROTONOSUPPORT)),  # raw
        (16, 0, ALLOW),  # ROUTE
        (16, 4, fails(errno.EPROTONOSUPPORT)),  # SOCK_DIAG
        (16, 6, fails(errno.EPROTONOSUPPORT)),  # XFRM
        (16, 9, fails(errno.EPROTONOSUPPORT)),  # AUDIT
        (16, 12, fails(errno.EPROTONOSUPPORT)),  # NETFILTER
        (16, 15, fails(errno.EPROTONOSUPPORT)),  # KOBJECT_UEVENT
        (16, 16, fails(errno.EPROTONOSUPPORT)),  # GENERIC
        (16, 1 << 32 | 16, fails(errno.EPROTONOSUPPORT)),
    ],
)
def test_allows_few_protocols_of_sockets(family, protocol, expected):
    for machine, kind, number in (("x86_64", X86, 41), ("x86_64", X86, 53), ("aarch64", ARM, 198)):
        assert outcome(seccomp.build_filter(machine), kind, number, family, protocol) == expected


def test_unknown_machine_has_no_filter():
    assert seccomp.build_filter("riscv64") == b""
