"""A sandbox for programs that nobody vouches for: written by language models, run for a reward.

    async with Sandbox(SandboxConfig(seconds=5)) as box:
        await box.put("/app/x.py", b"print(1)")
        result = await box.exec(["python3", "-I", "x.py"])

What a program does is in the `ExecResult`; that the sandbox failed is a `SandboxError`, and no reward.
It is grade-worthy only while nothing untrusted has run in it: to grade an agent's work, stop its sandbox
and copy chosen files into a fresh one.
"""

from glm5_jax.envs.sandbox.box import Sandbox, run_python
from glm5_jax.envs.sandbox.config import (
    HOST,
    ExecResult,
    Layer,
    RightsPolicy,
    SandboxConfig,
    SandboxError,
    SandboxFileError,
)
from glm5_jax.envs.sandbox.transfer import extract

__all__ = [
    "HOST",
    "ExecResult",
    "Layer",
    "RightsPolicy",
    "Sandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxFileError",
    "extract",
    "run_python",
]
