"""A run of the addition policy in a process of its own, on one device, with rewards as they are or as a control has
them:  python -m tests.journeys.addition WORKDIR CONTROL STEPS CHANGES-AS-JSON"""

import dataclasses
import json
import sys

import numpy as np

from experiments import rl_reasoning


def of_others():
    """Each reward is one of the 512 before it, drawn by chance; the first one has none."""
    draw, values = np.random.default_rng(0), [0.0]

    def another(value):
        found = values[draw.integers(max(0, len(values) - 512), len(values))]
        values.append(value)
        return found

    return another


CONTROLS = {"none": lambda value: value, "others": of_others(), "reversed": lambda value: -value}


def main(workdir, control, steps, changes):
    """Trains; what parts of the rewards say is always of the attempt itself."""
    judge, change = rl_reasoning.partial_digit_reward, CONTROLS[control]

    def judged(task, attempt):
        reward = judge(task, attempt)
        return dataclasses.replace(reward, value=change(reward.value))

    rl_reasoning.partial_digit_reward = judged
    config = dataclasses.replace(rl_reasoning.addition(), **json.loads(changes))
    train = dataclasses.replace(config.train, steps=int(steps) or None, eval_interval=100)
    dataclasses.replace(config, train=train).make_stage(workdir).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
