"""Describes the limits of a sandbox, and sets those that control groups do not cover, by what the machine supports."""

import logging
from collections.abc import Mapping

from glm5_jax.envs.sandbox.cgroups import has_process_limit_per_namespace
from glm5_jax.envs.sandbox.config import SandboxConfig

log = logging.getLogger(__name__)

_reported: set[tuple] = set()


def describe_limits(
    config: SandboxConfig, groups: Mapping[str, str], *, has_users: bool, has_filter: bool
) -> dict[str, str]:
    """Returns how each resource is limited; a text with "not" says what this machine does not limit.

    Args:
      config: options of the sandbox.
      groups: controller -> how its control group limits it.
      has_users: whether the sandbox has several users.
      has_filter: whether system calls are filtered.
    """
    is_isolated = config.isolation != "none"
    network = "the host's, as configured" if config.network else "empty"
    if "pids" in groups:
        time = "ends all that the command started"
    elif is_isolated:
        time = "ends all that runs in the sandbox, not only what the command started"
    else:
        time = "ends the command's process group, not what has left it"
    return {
        "time": time,
        "memory": groups.get("memory", "rlimit: each process, not all together"),
        "processes": groups.get("pids", "rlimit" if is_isolated else "not limited"),
        "cpus": groups.get("cpu", "not limited"),
        "disk": "tmpfs" if is_isolated else "rlimit: each file, not all together",
        "network": network if is_isolated else "the host's: not limited",
        "users": "65536" if has_users else "one: root and agent are not apart",
        "system calls": "seccomp" if has_filter else "not filtered",
    }


def warn_of_missing_limits(limits: Mapping[str, str]) -> None:
    """Logs the limits that this machine does not provide, once per process."""
    missing = {name: text for name, text in limits.items() if " not " in f" {text} "}
    if missing and tuple(missing.items()) not in _reported:
        _reported.add(tuple(missing.items()))
        log.warning(
            "Sandboxes of this process lack limits that this machine does not provide: %s", missing
        )


def rlimits(config: SandboxConfig, groups: Mapping[str, str]) -> dict[str, int]:
    """Returns the resource limits of each process, by their names in `resource`."""
    is_isolated = config.isolation != "none"
    limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": config.max_open_files}
    if "memory" not in groups:
        limits["RLIMIT_AS"] = config.memory_bytes
    # A control group refuses a fork late, after copying its memory, and holds a kernel lock until then. Joining a
    # group needs that lock, so fork bombs of one sandbox kept other sandboxes from starting commands.
    if is_isolated and ("pids" not in groups or has_process_limit_per_namespace()):
        limits["RLIMIT_NPROC"] = config.max_processes
    if not is_isolated:
        limits["RLIMIT_FSIZE"] = config.disk_bytes
    return limits
