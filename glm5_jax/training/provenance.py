"""Records what a run was started with: command, commit, versions and devices, a line for each start."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import sys
import time

import jax

from glm5_jax.config import ModelConfig
from glm5_jax.metrics.jsonl import append_lines, read_objects
from glm5_jax.runtime.process import ProgramError, run_program

STARTS = "starts.jsonl"
_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy")
_GIT_TIMEOUT_S = 10.0


def record_start(workdir: str | os.PathLike, model: ModelConfig, step: int) -> None:
    """Appends the facts of a start of the run, after `step` steps, to the workdir; they replace older ones at step 0."""
    path = pathlib.Path(workdir) / STARTS
    if not step:
        path.unlink(missing_ok=True)
    facts = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "step": str(step),
        "command": command_line(),
        "commit": source_commit(),
        "versions": package_versions(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": str(jax.process_count()),
        "parameters": f"{model.num_stored_parameters:,}",
        "active": f"{model.num_active_parameters:,}",
    }
    append_lines(path, json.dumps(facts).encode() + b"\n")


def command_line() -> str:
    """Returns the command of this process as a user types it, although Python names the file of a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])
    words = ["glm5"] if spec.name == "launch.glm5" else ["python", "-m", spec.name]
    return shlex.join([*words, *sys.argv[1:]])


def read_starts(workdir: str | os.PathLike) -> list[dict[str, str]]:
    """Returns the facts of all starts of a run, the oldest first."""
    path = pathlib.Path(workdir) / STARTS
    starts = read_objects(path) if path.exists() else ()
    return [{name: str(value) for name, value in start.items()} for start in starts]


def source_commit(root: pathlib.Path = _ROOT) -> str:
    """Returns the commit of the source tree, with a note if files differ from it; "" outside of a git clone."""
    if not (root / ".git").exists():
        return ""
    git = ("git", "-c", f"safe.directory={root}", "-C", str(root))
    with contextlib.suppress(ProgramError):
        commit = run_program([*git, "rev-parse", "HEAD"], timeout_s=_GIT_TIMEOUT_S)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        is_modified = run_program(status, timeout_s=_GIT_TIMEOUT_S)
        return commit.decode().strip() + (", with changes" if is_modified else "")
    return ""


def package_versions() -> str:
    """Returns the versions of Python and of the packages that a run's numbers depend on."""
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(versions)
