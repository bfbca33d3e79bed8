"""Emulated hosts on this machine: network namespaces with addresses and host names, connected by a bridge.

`enter_namespaces` moves the program into namespaces of its own, which end with it. There `EmulatedHosts` adds one network
namespace for each host. Every host has all ports to itself, and finds the others by name.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Self

_INSIDE = "GLM5_REHEARSAL_NAMESPACES"  # set in the namespaces
_NETWORK, _BRIDGE = "10.77.{}.{}", "rehearsal"


def enter_namespaces(argv: Sequence[str]) -> None:
    """Runs `python ARGV` in new namespaces and exits with its code; returns if this program already runs in them.

    The processes of the namespaces are killed with the program, also by SIGTERM. Raises ValueError if this machine does
    not allow it.
    """
    if os.environ.get(_INSIDE):
        return
    if reason := missing_support():
        raise ValueError(f"{reason}, or use --check_only")
    # Proxies are outside of the namespaces.
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {_INSIDE: "1", "PATH": _search_path(), "JAX_PLATFORMS": "cpu"}
    command = [*_namespace_command(), sys.executable, *argv]
    with subprocess.Popen(command, env=environment) as child:
        # unshare ignores SIGTERM, and its end kills all. Ctrl-C reaches the program inside too, which then ends.
        signal.signal(signal.SIGTERM, lambda number, frame: child.kill())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)


def missing_support() -> str | None:
    """Returns why this machine cannot emulate hosts, with the fix; None: it can."""
    for tool in ("unshare", "nsenter", "mount", "ip"):
        if shutil.which(tool, path=_search_path()) is None:
            return f"there is no program {tool}; install util-linux, mount and iproute2"
    environment = {**os.environ, "PATH": _search_path()}
    command = [*_namespace_command(), "ip", "link", "add", _BRIDGE, "type", "bridge"]
    attempt = subprocess.run(command, capture_output=True, text=True, env=environment)
    if attempt.returncode:
        reason = attempt.stderr.strip()
        return f"this machine allows no network namespaces ({reason}); rehearse as root"
    return None


def _namespace_command() -> list[str]:
    """Returns the command that runs another one in new namespaces."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    flags = ["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
    return ["unshare", *as_root, *flags]


def _search_path() -> str:
    """Returns PATH with the folders of system programs, which users may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class EmulatedHosts:
    """Hosts of a cluster, from entering to leaving the context.

    - aliases_by_name: host names, each with further names for it.
    - folder: receives the file of host names that replaces /etc/hosts in the namespaces.

    Attributes:
      pids: process that holds the namespaces of each host.
    """

    def __init__(self, aliases_by_name: Mapping[str, Sequence[str]], folder: pathlib.Path):
        self._aliases, self._folder = aliases_by_name, folder
        self._holders: dict[str, subprocess.Popen] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: holder.pid for name, holder in self._holders.items()}

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs `argv` on a host."""
        return enter_command(self._holders[name].pid, argv)

    def __enter__(self) -> Self:
        addresses = {
            name: _NETWORK.format(number // 250, number % 250 + 1)
            for number, name in enumerate(self._aliases)
        }
        # Names, for this program and all that it starts.
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [
            f"{addresses[name]} {' '.join([name, *self._aliases[name]])}" for name in addresses
        ]
        file = self._folder / "hosts"
        file.write_text("\n".join(lines) + "\n")
        _run("mount", "--bind", str(file), "/etc/hosts")
        # The bridge has an address too, so that this program reaches the hosts.
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{_NETWORK.format(255, 254)}/16", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for number, name in enumerate(addresses):
            self._holders[name] = _hold_host(name)
            self._connect(name, f"host{number}", addresses[name])
        return self

    def _connect(self, name: str, link: str, address: str) -> None:
        pid = str(self._holders[name].pid)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _run("ip", "link", "set", link, "master", _BRIDGE, "up")
        _run(*self.command(name, ["ip", "link", "set", "lo", "up"]))
        _run(*self.command(name, ["ip", "address", "add", f"{address}/16", "dev", "eth0"]))
        _run(*self.command(name, ["ip", "link", "set", "eth0", "up"]))

    def __exit__(self, kind, error, trace) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        _run("ip", "link", "delete", _BRIDGE)
        _run("umount", "/etc/hosts")


def enter_command(pid: int, argv: Sequence[str]) -> list[str]:
    """Returns the command that runs `argv` in the network and host name of a process."""
    return ["nsenter", f"--target={pid}", "--net", "--uts", "--", *argv]


def _hold_host(name: str) -> subprocess.Popen:
    """Returns a process that sleeps in a new network namespace, with the host name `name`."""
    script = f"echo {name} >/proc/sys/kernel/hostname && echo ready && exec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None, "it is a pipe"
    if holder.stdout.readline() != "ready\n":
        raise OSError(f"host {name} could not be made; its process ended with {holder.wait()}")
    return holder


def _run(*command: str) -> None:
    """Runs a command. Raises OSError with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
