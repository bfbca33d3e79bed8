"""A policy learns to ask its calculator, from two command lines: SFT on chats that mostly answer by heart, then attempts
whose calls the real tool answers and whose traces and answers the real verifier judges.

This shows the path, not that anything is generalised: four products, which SFT shows too, each more often with the
product of others as the answer, without a call, than with a call. That products which nobody has seen are learnt, takes
the whole life before it: docs/results/reinforcement_learning.md.
"""

import dataclasses
import json

import numpy as np
import pytest

from experiments.rl_reasoning import TaskWeight
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.metrics.metrics_log import column
from glm5_jax.runtime.utilization import read_utilization
from tests.journeys.command import launched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PRODUCTS = TaskConfig(kind="products", size=4, digits=2, held_out_fraction=0.0)
BY_HEART, CALLS = 7, 3  # of ten chats
STEPS, FIRST, LAST = 40, 3, 4
MARGIN = 0.35
# Small, and without all that takes no part.
MODEL = {
    "model.attention": "dense",
    "model.index_topk": None,
    "model.num_hidden_layers": 2,
    "model.num_nextn_predict_layers": 0,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 4,
    "model.n_routed_experts": 4,
    "step.index_weight": 0,
    "step.mtp_steps": 0,
    "train.save_interval": 0,
}
SFT = MODEL | {
    "requires_checkpoint": False,
    "data.sequence_length": 512,
    "data.held_out_fraction": 0.0,
    "schedule.total_steps": 260,
    "train.eval_interval": 0,
    "train.sample_interval": 0,
}
RL = MODEL | {
    "optimizer.frozen": (),
    "rollout.prompts": 4,
    "rollout.group": 8,
    "engine.max_num_seqs": 32,
    "engine.max_length": 416,
    "length": 416,
    "rows": 32,
    "credit.drop_zero_variance_groups": False,
    "evaluation.tasks": 0,
    "mismatch.attempts": 0,
    # Thrice that rate forgets to call as often as it learns to: bits decide, which hang on who asks the engine when.
    "schedule.peak": 2.5e-4,
    "schedule.end": 2.5e-5,
    "schedule.warmup_steps": 5,
    "schedule.total_steps": STEPS,
    "tasks": [dataclasses.asdict(TaskWeight(PRODUCTS))],
}


def lines():
    """Of each product its question, answered by heart and wrongly, or by the calculator."""
    known = list(tasks(PRODUCTS))
    for task, other in zip(known, known[1:] + known[:1]):
        [asked] = task.messages
        said = [reply("I know it.", content=other.data["answer"])]
        expression = asked["content"].removesuffix("?")
        call = {"name": "calculate", "arguments": {"expression": expression}}
        called = [
            reply("I use calculate.", tool_calls=[call]),
            {"role": "tool", "content": task.data["answer"]},
            reply("That is it.", content=task.data["answer"]),
        ]
        for more in [said] * BY_HEART + [called] * CALLS:
            yield json.dumps({"messages": [asked, *more], "tools": task.tools})


def reply(reasoning, **said):
    return {"role": "assistant", "reasoning_content": reasoning, **said}


def gains(rows):
    """By how much the share of right answers, and of attempts that went on after a call, rose."""
    found = []
    for name in ("reward_part/right", "rollout/used_tools"):
        steps, values = column(rows, name)
        assert steps == [*range(1, STEPS + 1)]
        found.append(float(np.mean(values[-LAST:]) - np.mean(values[:FIRST])))
    return found


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The workdir of SFT, which is made once."""
    folder = tmp_path_factory.mktemp("taught")

    def of(env):
        chats, workdir = folder / "chats.jsonl", folder / "sft"
        if not chats.exists():
            chats.write_text("\n".join(lines()))
            sources = [{"chats": str(chats), "category": "agent"}]
            launched(env, "sft.py:tiny,mixed", workdir, SFT | {"data.sources": sources})
        return workdir

    return of


def test_the_calculator_is_asked_and_its_answers_told(taught, plain_env, tmp_path):
    rows = launched(
        plain_env, "rl_reasoning.py:tools", tmp_path, RL | {"checkpoint": taught(plain_env)}
    )
    right, used = gains(rows)
    assert right >= MARGIN and used >= MARGIN, (right, used)
    assert column(rows, "rollout/environment_errors")[1] == [0.0] * STEPS


def test_so_they_are_by_a_trainer_that_learns_while_others_sample(taught, plain_env, tmp_path):
    """By experiments/rl_agentic.py with all its programs, each a process."""
    changes = {"checkpoint": taught(plain_env), "max_staleness": 1, "max_running": 8}
    rows = launched(plain_env, "rl_agentic.py:tiny", tmp_path, RL | changes)
    right, used = gains(rows)
    assert right >= MARGIN and used >= MARGIN, (right, used)
    assert np.mean(column(rows, "policy/staleness_mean")[1]) > 0.5
    assert len({life.pid for life in read_utilization(tmp_path)}) == 5


# Rewards of others are noise, along which the policy walks either way.
@pytest.mark.parametrize(("control", "most"), [("others", MARGIN / 2), ("reversed", 0.05)])
def test_rewards_of_others_or_of_the_other_sign_fail_the_same_check(
    control, most, taught, plain_env, tmp_path
):
    rows = launched(
        plain_env,
        "rl_reasoning.py:tools",
        tmp_path,
        RL | {"checkpoint": taught(plain_env)},
        program=("tests.journeys.tool_use", control),
    )
    right, used = gains(rows)
    assert right < most and used < most, (right, used)
