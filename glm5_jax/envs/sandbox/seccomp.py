"""The system calls that no program in a sandbox gets, as a program for the kernel's filter.

A second wall behind namespaces and capabilities, and the only one before what those do not cover: kernel
keys are shared by all who have the same user outside, and a socket of the AF_VSOCK family reaches the
machine's host past every network namespace.
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
_FAMILIES = 1, 2, 10, 16  # unix, inet, inet6, netlink
# Column in the table, and what the kernel calls the machine.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000  # on x86_64 a second set of numbers for the same calls

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # where they lie in what the filter is shown
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


def program(machine: str = platform.machine()) -> bytes:
    """The filter as an array of the kernel's `sock_filter`; empty for an unknown kind of machine."""
    if machine not in _MACHINES:
        return b""
    column, audit = _MACHINES[machine]
    refused = [numbers[column] for numbers in _REFUSED.values()]
    sockets = [numbers[column] for numbers in _SOCKET]
    lines: list[tuple[int, object, object, int]] = []

    def jump(kind: int, value: int, then: str) -> None:
        lines.append((kind, then, 0, value))

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
    labels["socket"] = len(lines)
    lines.append((_LOAD, 0, 0, _ARGUMENT))
    for family in _FAMILIES:
        jump(_EQUAL, family, "allowed")
    lines.append((_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT))
    for label, action in (
        ("allowed", _ALLOW),
        ("refused", _FAIL | errno.EPERM),
        ("no such call", _FAIL | errno.ENOSYS),
    ):
        labels[label] = len(lines)
        lines.append((_RETURN, 0, 0, action))

    def distance(here: int, target) -> int:
        return target if isinstance(target, int) else labels[target] - here - 1

    return b"".join(
        struct.pack("=HBBI", code, distance(here, then), distance(here, other), value)
        for here, (code, then, other, value) in enumerate(lines)
    )
