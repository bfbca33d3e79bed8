"""Runs inside a sandbox: tries to get out in several ways, and prints a JSON object {name: outcome}.

An outcome is "worked" or the reason of the failure. Arguments: JSON of the names to try and of the host's properties.
"""

import ctypes
import errno
import json
import os
import platform
import signal
import socket
import sys

INHERITED = {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
INHERITED -= {"0", "1", "2"}
HOST = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": {
        "add_key": 248,
        "bpf": 321,
        "io_uring_setup": 425,
        "clone": 56,
        "perf_event_open": 298,
    },
    "aarch64": {
        "add_key": 217,
        "bpf": 280,
        "io_uring_setup": 425,
        "clone": 220,
        "perf_event_open": 241,
    },
}[platform.machine()]
NEWUSER, NEWNS = 0x10000000, 0x20000


def call(result):
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def system_call(name, *arguments):
    return call(libc.syscall(NUMBERS[name], *arguments))


def in_child(action):
    """Runs the action in a child process, because it may not return."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            action()
            os.write(sending, b"worked")
        except BaseException as error:
            os.write(sending, repr(error).encode())
        os._exit(0)
    os.close(sending)
    os.waitpid(child, 0)
    outcome = os.read(receiving, 1000).decode()
    if outcome != "worked":
        raise OSError(outcome)


def read_host_file():
    with open(HOST["file"]) as file:
        file.read()


def read_host_environment():
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            try:
                with open(f"/proc/{folder}/environ") as file:
                    if HOST["secret"] in file.read():
                        return
            except OSError:
                continue
    assert HOST["secret"] in repr(os.environ)


def list_homes():
    """Lists files in the host's homes; the sandbox's users have no files there."""
    names = []
    for folder in ("/home", "/root"):
        try:
            names += os.listdir(folder)
        except PermissionError:
            names += [] if os.getuid() else [f"{folder} of another root"]
    assert names, "none has a file"


def write_programs():
    with open("/usr/bin/python3-planted", "w") as file:
        file.write("x")


def connect_to_host():
    socket.create_connection(("127.0.0.1", HOST["port"]), timeout=5)


def connect_to_host_by_name():
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + HOST["name"])


def leave_the_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect(("192.0.2.1", 53))


def use_another_interface():
    names = {name for _, name in socket.if_nameindex()}
    assert names - {"lo"}, f"only {names}"


def open_raw_socket():
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()


def open_netlink_of_another_part():
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16).close()


def open_packet_socket():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()


def open_socket_to_the_hypervisor():
    socket.socket(40, socket.SOCK_STREAM).close()


def kill_host_process():
    os.kill(HOST["pid"], 0)


def kill_all_others():
    child = os.fork()
    while not child:
        signal.pause()
    os.kill(-1, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.kill(1, 0)
    raise ProcessLookupError("the first process lives on")


def stop_first_process():
    os.kill(1, signal.SIGSTOP)
    os.kill(1, signal.SIGKILL)
    with open("/proc/1/stat") as file:
        state = file.read().rpartition(")")[2].split()[0]
    assert state not in "SR", f"state {state}: not stopped, not dead"


def trace_first_process():
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    call(libc.ptrace(16, 1, 0, 0))  # PTRACE_ATTACH


def write_first_process():
    os.close(os.open("/proc/1/mem", os.O_RDWR))


def enter_first_process():
    os.listdir("/proc/1/fd")
    os.listdir("/proc/1/root/")
    call(libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0))


def mount():
    call(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))


def unmount():
    call(libc.umount2(b"/usr", 2))


def remount_writable():
    call(libc.mount(None, b"/usr", None, 32 | 4096, None))


def make_device():
    os.mknod("/tmp/disk", 0o60666, HOST["device"])


def write_kernel_setting():
    with open("/proc/sys/kernel/core_pattern", "w") as file:
        file.write("|/tmp/x")


def allow_user_namespaces():
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("10")


def sysrq():
    with open("/proc/sysrq-trigger", "w") as file:
        file.write("h")


def read_kernel_log():
    call(libc.klogctl(3, ctypes.create_string_buffer(1000), 1000))


def chroot_out():
    os.makedirs("/tmp/jail", exist_ok=True)
    os.chroot("/tmp/jail")


def unshare_user():
    in_child(lambda: call(libc.unshare(NEWUSER)))


def unshare_mounts():
    in_child(lambda: call(libc.unshare(NEWNS)))


def clone_user():
    child = system_call("clone", NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def add_key():
    system_call("add_key", b"user", b"probe", b"x", 1, -4)  # the keyring of the user


def load_bpf():
    attributes = ctypes.create_string_buffer(120)
    ctypes.memmove(attributes, (ctypes.c_uint32 * 4)(2, 4, 4, 1), 16)  # an array map of one
    os.close(system_call("bpf", 0, attributes, 120))


def io_uring():
    os.close(system_call("io_uring_setup", 1, ctypes.create_string_buffer(120)))


def gain_capabilities():
    with open("/proc/self/status") as file:
        masks = [
            line.split()[1] for line in file if line.startswith(("CapEff", "CapPrm", "CapBnd"))
        ]
    held = {number for number in range(64) for mask in masks if int(mask, 16) >> number & 1}
    assert held - {0, 1, 2, 3, 4, 5, 6, 7, 10}, f"only {sorted(held)}"


def keep_the_right_to_gain_privileges():
    with open("/proc/self/status") as file:
        assert "NoNewPrivs:\t1" not in file.read(), "no new privileges"


def become_root():
    os.setuid(0)
    os.listdir("/root")


def reboot():
    call(libc.reboot(0))  # CAD off, if anything


def find_other_descriptors():
    assert INHERITED, "none but its own"


def find_host_in_dev():
    usual = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero console"
    assert set(os.listdir("/dev")) - set(usual.split()), "only the usual"


def try_all():
    outcomes = {}
    for name in HOST["attacks"]:
        try:
            globals()[name]()
            outcomes[name] = "worked"
        except (OSError, AssertionError) as error:
            number = getattr(error, "errno", None)
            outcomes[name] = errno.errorcode.get(number) or str(error) or "not found"
    return outcomes


print(json.dumps(try_all()))
