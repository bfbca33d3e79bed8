"""Runs launch/run.py with the rewards of the tool verifier changed by a control of `addition`.

python -m tests.journeys.tool_use CONTROL ARGUMENTS
"""

import dataclasses
import sys

from glm5_jax.envs.reasoning.verifiers import TirVerifier
from launch import run
from tests.journeys.addition import CONTROLS


def main(control, *arguments):
    """Returns the exit code. Parts of the rewards are those of the attempt."""
    judge, change = TirVerifier.__call__, CONTROLS[control]

    async def judge_with_control(self, task, attempt):
        reward = await judge(self, task, attempt)
        return dataclasses.replace(reward, value=change(reward.value))

    TirVerifier.__call__ = judge_with_control
    return run.main(["run", *arguments])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
