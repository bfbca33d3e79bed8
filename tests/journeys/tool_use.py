"""launch/run.py whose verifier of tools has its rewards as a control of `addition` has them:
python -m tests.journeys.tool_use CONTROL ARGUMENTS"""

import dataclasses
import sys

from glm5_jax.envs.reasoning.verifiers import TirVerifier
from launch import run
from tests.journeys.addition import CONTROLS


def main(control, *arguments):
    """Exit code; what parts of the rewards say is always of the attempt itself."""
    judge, change = TirVerifier.__call__, CONTROLS[control]

    async def judged(self, task, attempt):
        reward = await judge(self, task, attempt)
        return dataclasses.replace(reward, value=change(reward.value))

    TirVerifier.__call__ = judged
    return run.main(["run", *arguments])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
