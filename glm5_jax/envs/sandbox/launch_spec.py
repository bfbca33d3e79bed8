"""Builds the task that starts a sandbox: its file system, the host's programs, and the arguments of bubblewrap."""

import os
import pathlib

from glm5_jax.envs.sandbox.config import Layer, SandboxConfig

AGENT = 1000  # user and group number of the agent inside
HOMES = {"root": "/root", "agent": "/var/agent"}
# Capabilities of the sandbox's root: enough to install and to change users, not to mount, trace or reboot.
# CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE
ROOT_CAPABILITIES = (0, 1, 2, 3, 4, 5, 6, 7, 10)
# Command of the first process. It cannot be killed from inside, and the kernel reaps its children because it ignores
# their deaths. Its one capability, which programs in the sandbox never have, keeps them from tracing it.
HOLDER = (
    *("/bin/sh", "-c"),
    # dash cannot ignore this signal, and only GNU's `env` can.
    'trap "" CHLD; with="env --ignore-signal=CHLD"; $with true 2>/dev/null || with=; '
    "echo ready; exec $with sleep infinity >/dev/null 2>&1",
)
_HOLDER_CAPABILITY = "CAP_SYS_PTRACE"
_PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\n"
    f"agent:x:{AGENT}:{AGENT}:agent:{HOMES['agent']}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_SKELETON = (
    *((f"/{name}", "folder", 0o755, 0, "") for name in ("etc", "usr", "var", "run", "proc", "dev")),
    *((name, "folder", 0o1777, 0, "") for name in ("/tmp", "/var/tmp")),
    ("/root", "folder", 0o700, 0, ""),
    ("/home", "folder", 0o755, 0, ""),
    (HOMES["agent"], "folder", 0o755, AGENT, ""),
    ("/etc/passwd", "file", 0o644, 0, _PASSWD),
    ("/etc/group", "file", 0o644, 0, "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"),
    ("/etc/hosts", "file", 0o644, 0, "127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ("/etc/nsswitch.conf", "file", 0o644, 0, "passwd: files\ngroup: files\nhosts: files\n"),
)
# The only settings of the host that are shown: its programs do not start without them.
HOST_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts")


def _host_programs(base: Layer) -> tuple[list[tuple], list[str]]:
    """Returns links for the skeleton, and arguments for bubblewrap, that show the host's programs."""
    links, binds = [], []
    if not base.host_programs:
        return links, binds
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = pathlib.Path("/", name)
        if path.is_symlink():
            links.append((str(path), "link", 0o777, 0, os.readlink(path)))
        elif path.is_dir():
            binds += ["--ro-bind", str(path), str(path)]
    for path in HOST_SETTINGS:
        binds += ["--ro-bind-try", path, path]
    return links, binds


def launch_task(
    config: SandboxConfig, bwrap: str, owner: int, info: int, seccomp: int | None
) -> dict:
    """Returns the task for `entry` that starts a sandbox.

    Args:
      config: options of the sandbox.
      bwrap: path of bubblewrap.
      owner: see `entry.launch.enter_user_namespace`.
      info: descriptor to which bubblewrap writes its child's process number.
      seccomp: descriptor from which bubblewrap reads the filter; None for no filter.
    """
    links, binds = _host_programs(config.base)
    return {
        "operation": "launch",
        "owner": owner,
        "caller": os.getpid(),
        "layers": [str(folder) for folder in config.base.folders],
        "disk_bytes": config.disk_bytes,
        "max_files": config.max_files,
        "skeleton": [*_SKELETON, *links, (config.workdir, "folder", 0o755, AGENT, "")],
        "keep": [info] if seccomp is None else [info, seccomp],
        "command": [
            *(bwrap, "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *(() if config.network else ("--unshare-net",)),
            *("--unshare-cgroup-try", "--hostname", config.hostname, "--as-pid-1"),
            *("--die-with-parent", "--new-session", "--clearenv"),
            *("--cap-drop", "ALL", "--cap-add", _HOLDER_CAPABILITY),
            *("--bind", "/tmp/root", "/", *binds, "--proc", "/proc", "--dev", "/dev"),
            *("--perms", "1777", "--size", str(config.disk_bytes), "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--chdir", "/"),
            *(() if seccomp is None else ("--seccomp", str(seccomp))),
            *("--info-fd", str(info), "--", *HOLDER),
        ],
    }
