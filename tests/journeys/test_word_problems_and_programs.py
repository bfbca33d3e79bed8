"""Word problems and programs take the path of all reasoning tasks: SFT, then RL with the real verifiers.

This shows that the programs work together, not that the policy generalises: one of this size solves no unseen problem.
SFT shows it three problems of GSM8K and three of MBPP, each with its shipped solution and, more often, with that of
another problem, so that it answers two times in five rightly. Only the verifiers judge: a process that compares
formulas, and sandboxes that run the programs.
"""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from experiments import rl_reasoning
from experiments.rl_reasoning import TaskWeight
from glm5_jax.data import chat_tasks
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.metrics.metrics_log import column
from glm5_jax.rl.trainers.sync_trainer import judge
from glm5_jax.rl.trajectory import Group
from glm5_jax.rl.types import Attempt
from tests.envs.conftest import _isolation, isolation  # noqa: F401
from tests.journeys.command import run_experiment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("isolation"),
]
# Short problems among the first shipped ones, by their numbers.
CHOSEN = {"gsm8k": (0, 1, 4), "mbpp": (3, 8, 9)}
SHARES = tuple(
    TaskWeight(TaskConfig(kind=kind, size=max(numbers) + 1, held_out_fraction=0.0))
    for kind, numbers in CHOSEN.items()
)
STEPS = 20
SFT = {
    "requires_checkpoint": False,
    "data.sequence_length": 256,
    "data.held_out_fraction": 0.0,
    "schedule.total_steps": 120,
    "train.eval_interval": 0,
    "train.sample_interval": 0,
    "train.save_interval": 0,
}
RL = {
    "rollout.prompts": 6,
    "rollout.group": 12,
    "rollout.max_tokens": 96,
    "engine.max_num_seqs": 72,
    "engine.max_length": 256,
    "evaluation.tasks": 0,
    "mismatch.attempts": 0,
    "schedule.peak": 3e-4,
    "schedule.total_steps": STEPS,
    "train.save_interval": 0,
}


def lines(kind):
    """Yields each chosen problem twice with its solution and three times with that of the next problem."""
    problems = list(tasks(TaskConfig(kind=kind, held_out_fraction=0.0)))
    solutions = [
        json.loads(line)
        for line in chat_tasks.make_lines(chat_tasks.ChatTaskConfig(kind=kind), "preserved")
    ]
    chosen = CHOSEN[kind]
    for number, following in zip(chosen, chosen[1:] + chosen[:1]):
        for other in [number] * 2 + [following] * 3:
            reply = solutions[other]["messages"][-1]
            if kind == "mbpp":
                name = problems[other].data["names"][0]
                reply = {**reply, "reasoning_content": f"I write {name}."}
            yield json.dumps({"messages": [*problems[number].messages, reply]})


def verdicts(path, of_chosen):
    """Writes the pass counts of a policy: `of_chosen` passes of the chosen tasks, none of the others."""
    rows = [
        {
            "task": task.id,
            "passes": of_chosen * (int(task.id.split("-")[-1]) in CHOSEN[share.name]),
            "tries": 8,
        }
        for share in SHARES
        for task in share.tasks_of()
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_learns_both_kinds_from_verifier_rewards(tmp_path, plain_env):
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(line for kind in CHOSEN for line in lines(kind)))
    sources = [{"chats": str(chats), "category": "reasoning"}]
    run_experiment(
        plain_env, "sft.py:tiny,mixed", tmp_path / "sft", SFT | {"data.sources": sources}
    )
    shares = [dataclasses.asdict(share) for share in SHARES]
    rows = run_experiment(
        plain_env,
        "rl_reasoning.py:tiny",
        tmp_path / "rl",
        RL
        | {
            "checkpoint": tmp_path / "sft",
            "tasks": shares,
            "verdicts": verdicts(tmp_path / "own.jsonl", 2),
            "stronger_verdicts": verdicts(tmp_path / "stronger.jsonl", 8),
        },
    )
    for kind in ("math", "code"):
        steps, reward = column(rows, f"reward/{kind}")
        assert steps == [*range(1, STEPS + 1)]
        before, after = np.mean(reward[:2]), np.mean(reward[-4:])
        assert 0.1 <= before <= 0.7 and after >= before + 0.3, (kind, reward)
    assert column(rows, "rollout/environment_errors")[1] == [0.0] * STEPS
    truncated = column(rows, "rollout/truncated")[1]
    assert len(truncated) == STEPS and max(truncated) < 0.5
    flat = column(rows, "rollout/zero_variance_groups")[1]
    assert max(flat[:2]) < 1  # attempts at one task differed in what they were worth


REVERSE = "def reverse_words(s):\n    return ' '.join(reversed(s.split()))\n"
HARM = (
    "while True: pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "import os\nos._exit(0)",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
)


def test_harmful_program_loses_only_its_reward(tmp_path):
    """Runs next to other programs in the verifier of the stage; no file of the machine is removed."""
    mine = tmp_path / "mine"
    mine.write_text("here")
    deletes = f"import shutil\nshutil.rmtree({str(tmp_path)!r}, ignore_errors=True)\n"
    base = rl_reasoning.addition()
    config = dataclasses.replace(
        base,
        partial_credit=False,
        tasks=SHARES,
        verifier=VerifierConfig(code_timeout_s=3, timeout_s=60),
        model=dataclasses.replace(base.model, max_position_embeddings=1024),
        engine=EngineConfig(max_length=1024),
        length=1024,
    )
    stage = config.make_stage(tmp_path / "run")
    words, program = (
        next(t for t in share.tasks_of() if t.id == f"{share.name}-{CHOSEN[share.name][0]}")
        for share in SHARES
    )
    programs = [REVERSE, *HARM, REVERSE + deletes, REVERSE]
    texts_of_task = [words.data["answer"], "1"], [f"```python\n{code}\n```" for code in programs]
    groups = [
        Group(
            task=task,
            attempts=[
                Attempt(messages=({"role": "assistant", "content": text},)) for text in texts
            ],
            records=[],
        )
        for task, texts in zip((words, program), texts_of_task)
    ]
    try:
        asyncio.run(judge(groups, stage.suite, 64))
    finally:
        stage.close()
    math, code = ([reward.value for reward in group.rewards] for group in groups)
    assert math == [1.0, 0.0]
    assert code == [1.0, *[0.0] * len(HARM), 1.0, 1.0]
    assert all(reward.error for reward in groups[1].rewards[1 : 1 + len(HARM)])
    assert mine.read_text() == "here"
