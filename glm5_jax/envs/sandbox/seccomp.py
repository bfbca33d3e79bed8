"""Builds the kernel's seccomp filter of system calls that are refused to all programs in a sandbox.

It is a second line of defence after namespaces and capabilities, and the only one for what those do not
cover: kernel keys are shared by all processes of one user outside, and a socket of the AF_VSOCK family
reaches the machine's host past every network namespace.
"""

import errno
import platform
import struct

# Names with their numbers on x86_64 and aarch64.
_REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_SOCKET = (41, 198), (53, 199)  # socket, socketpair
# Allowed families of sockets with their protocols; None: all. Others load kernel modules, or reach parts of the kernel
# without namespaces. inet and inet6 allow ICMP, TCP and UDP; netlink allows ROUTE, which lists interfaces.
_FAMILIES = {
    "unix": (1, None),
    "inet": (2, (0, 1, 6, 17)),
    "inet6": (10, (0, 6, 17, 58)),
    "netlink": (16, (0,)),
}
# Machine -> column in the table, and the kernel's number of the architecture.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # on x86_64 a second set of numbers for the same calls

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
# Offsets in the filter's input. Arguments of socket are ints, of which the kernel reads this half.
_NUMBER, _MACHINE, _FAMILY, _PROTOCOL = 0, 4, 16, 32
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


def build_filter(machine: str = platform.machine()) -> bytes:
    """Returns the filter as an array of the kernel's `sock_filter`; empty for an unknown architecture."""
    if machine not in _MACHINES:
        return b""
    column, audit = _MACHINES[machine]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    sockets = [numbers[column] for numbers in _SOCKET]
    lines: list[tuple[int, object, object, int]] = []

    def jump(kind: int, value: int, then: str) -> None:
        lines.append((kind, then, 0, value))

    # Dispatch by architecture and number of the call.
    lines.append((_LOAD, 0, 0, _MACHINE))
    lines.append((_EQUAL, 0, "no such call", audit))
    lines.append((_LOAD, 0, 0, _NUMBER))
    jump(_AT_LEAST, _X32, "no such call")
    for number in sockets:
        jump(_EQUAL, number, "socket")
    for number in refused:
        jump(_EQUAL, number, "refused")
    labels = {}
    lines.append((_RETURN, 0, 0, _ALLOW))
    # Sockets: by family, then by protocol.
    labels["socket"] = len(lines)
    lines.append((_LOAD, 0, 0, _FAMILY))
    for name, (family, protocols) in _FAMILIES.items():
        jump(_EQUAL, family, "allowed" if protocols is None else name)
    lines.append((_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT))
    for name, (_, protocols) in _FAMILIES.items():
        if protocols is None:
            continue
        labels[name] = len(lines)
        lines.append((_LOAD, 0, 0, _PROTOCOL))
        for protocol in protocols:
            jump(_EQUAL, protocol, "allowed")
        lines.append((_RETURN, 0, 0, _FAIL | errno.EPROTONOSUPPORT))
    # Actions that the jumps end in.
    for label, action in (
        ("allowed", _ALLOW),
        ("refused", _FAIL | errno.EPERM),
        ("no such call", _FAIL | errno.ENOSYS),
    ):
        labels[label] = len(lines)
        lines.append((_RETURN, 0, 0, action))

    def distance(index: int, target) -> int:
        return target if isinstance(target, int) else labels[target] - index - 1

    return b"".join(
        struct.pack("=HBBI", code, distance(index, then), distance(index, other), value)
        for index, (code, then, other, value) in enumerate(lines)
    )
