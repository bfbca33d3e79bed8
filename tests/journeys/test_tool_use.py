"""A policy learns to call its calculator, from two command lines: SFT on chats that mostly answer from memory, then RL
with the real tool and the real verifier.

This shows that the programs work together, not that the policy generalises. It has four products, which SFT shows too,
each more often without a call and with the answer of another product than with a call. Training on unseen products
needs the full lifecycle: docs/results/reinforcement_learning.md.
"""

import dataclasses
import json

import numpy as np
import pytest

from experiments.rl_reasoning import TaskWeight
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.metrics.metrics_log import column
from glm5_jax.runtime.utilization import read_utilization
from tests.journeys.command import run_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PRODUCTS = TaskConfig(kind="products", size=4, digits=2, held_out_fraction=0.0)
BY_HEART, CALLS = 7, 3  # of ten chats
STEPS, FIRST, LAST = 40, 3, 4
MARGIN = 0.35
# Small, without parts that are not needed.
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
    # At three times that rate the policy loses calls as often as it gains them, depending on the order of requests.
    "schedule.peak": 2.5e-4,
    "schedule.end": 2.5e-5,
    "schedule.warmup_steps": 5,
    "schedule.total_steps": STEPS,
    "tasks": [dataclasses.asdict(TaskWeight(PRODUCTS))],
}


def lines():
    """Yields for each product chats that answer wrongly from memory, and chats that call the calculator."""
    known = list(tasks(PRODUCTS))
    for task, other in zip(known, known[1:] + known[:1]):
        [question] = task.messages
        recalled = [reply("I know it.", content=other.data["answer"])]
        expression = question["content"].removesuffix("?")
        call = {"name": "calculate", "arguments": {"expression": expression}}
        called = [
            reply("I use calculate.", tool_calls=[call]),
            {"role": "tool", "content": task.data["answer"]},
            reply("That is it.", content=task.data["answer"]),
        ]
        for more in [recalled] * BY_HEART + [called] * CALLS:
            yield json.dumps({"messages": [question, *more], "tools": task.tools})


def reply(reasoning, **fields):
    return {"role": "assistant", "reasoning_content": reasoning, **fields}


def gains(rows):
    """Returns by how much the share of right answers, and of attempts that went on after a call, rose."""
    differences = []
    for name in ("reward_part/right", "rollout/used_tools"):
        steps, values = column(rows, name)
        assert steps == [*range(1, STEPS + 1)]
        differences.append(float(np.mean(values[-LAST:]) - np.mean(values[:FIRST])))
    return differences


@pytest.fixture(scope="module")
def sft_workdir(tmp_path_factory):
    """Returns a function that gives the workdir of SFT, which runs once."""
    folder = tmp_path_factory.mktemp("taught")

    def of(env):
        chats, workdir = folder / "chats.jsonl", folder / "sft"
        if not chats.exists():
            chats.write_text("\n".join(lines()))
            sources = [{"chats": str(chats), "category": "agent"}]
            run_experiment(env, "sft.py:tiny,mixed", workdir, SFT | {"data.sources": sources})
        return workdir

    return of


def test_learns_to_use_calculator(sft_workdir, plain_env, tmp_path):
    rows = run_experiment(
        plain_env, "rl_reasoning.py:tools", tmp_path, RL | {"checkpoint": sft_workdir(plain_env)}
    )
    right, used = gains(rows)
    assert right >= MARGIN and used >= MARGIN, (right, used)
    assert column(rows, "rollout/environment_errors")[1] == [0.0] * STEPS


def test_learns_to_use_calculator_asynchronously(sft_workdir, plain_env, tmp_path):
    """Runs experiments/rl_agentic.py with all its programs as processes."""
    changes = {"checkpoint": sft_workdir(plain_env), "max_staleness": 1, "max_running": 8}
    rows = run_experiment(plain_env, "rl_agentic.py:tiny", tmp_path, RL | changes)
    right, used = gains(rows)
    assert right >= MARGIN and used >= MARGIN, (right, used)
    assert np.mean(column(rows, "policy/staleness_mean")[1]) > 0.5
    assert len({life.pid for life in read_utilization(tmp_path)}) == 5


# Rewards of others are noise, which moves the policy in either direction.
@pytest.mark.parametrize(("control", "limit"), [("others", MARGIN / 2), ("reversed", 0.05)])
def test_learns_no_calls_from_wrong_rewards(control, limit, sft_workdir, plain_env, tmp_path):
    rows = run_experiment(
        plain_env,
        "rl_reasoning.py:tools",
        tmp_path,
        RL | {"checkpoint": sft_workdir(plain_env)},
        program=("tests.journeys.tool_use", control),
    )
    right, used = gains(rows)
    assert right < limit and used < limit, (right, used)
