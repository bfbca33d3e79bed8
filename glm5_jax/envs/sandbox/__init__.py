"""Runs untrusted programs in a sandbox: programs that language models wrote, run for a reward.

    async with Sandbox(SandboxConfig(timeout_s=5)) as box:
        await box.put("/app/x.py", b"print(1)")
        result = await box.exec(["python3", "-I", "x.py"])

An `ExecResult` holds what a program did. A `SandboxError` says that the sandbox failed, which is no reward.
Grading is safe only while nothing untrusted has run in a sandbox: to grade an agent's work, stop its
sandbox and copy selected files into a fresh one.
"""

from glm5_jax.envs.sandbox.config import (
    HOST,
    ExecResult,
    Layer,
    RightsPolicy,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
)
from glm5_jax.envs.sandbox.sandbox import Sandbox, run_python

__all__ = [
    "HOST",
    "ExecResult",
    "Layer",
    "RightsPolicy",
    "Sandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxFileError",
    "run_python",
]
