"""Runs the addition policy in a separate process on one device, with plain rewards or those of a control.

python -m tests.journeys.addition WORKDIR CONTROL STEPS CHANGES-AS-JSON
"""

import dataclasses
import json
import sys

import numpy as np

from experiments import rl_reasoning


def rewards_of_others():
    """Returns a control that replaces each reward by a random one of the last 512; the first is 0."""
    draw, values = np.random.default_rng(0), [0.0]

    def another(value):
        previous = values[draw.integers(max(0, len(values) - 512), len(values))]
        values.append(value)
        return previous

    return another


CONTROLS = {
    "none": lambda value: value,
    "others": rewards_of_others(),
    "reversed": lambda value: -value,
}


def main(workdir, control, steps, changes):
    """Trains with controlled rewards. Parts of the rewards are those of the attempt."""
    judge, change = rl_reasoning.partial_digit_reward, CONTROLS[control]

    def judge_with_control(task, attempt):
        reward = judge(task, attempt)
        return dataclasses.replace(reward, value=change(reward.value))

    rl_reasoning.partial_digit_reward = judge_with_control
    config = dataclasses.replace(rl_reasoning.addition(), **json.loads(changes))
    train = dataclasses.replace(config.train, steps=int(steps) or None, eval_interval=100)
    dataclasses.replace(config, train=train).make_stage(workdir).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
