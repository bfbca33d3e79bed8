"""Evaluates a policy after each of its training stages: the rewards of every checkpoint on every skill."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from glm5_jax.checkpoint import models
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5
from glm5_jax.model.lora import without_adapters
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.rollouts.rollout import Rollouts
from glm5_jax.rl.trainers.sync_trainer import TaskSuite, judge, mean_reward
from glm5_jax.rl.types import Attempt, Reward, Task
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.text.layouts import template
from glm5_jax.text.tokenizer import Tokenizer

FORM_KIND = "form"  # kind of the tasks that `judge_form` judges
MAX_SAMPLE_CHARS = 600


class SkillMatrix(NamedTuple):
    """Rewards and sample replies of a policy after its stages.

    Attributes:
      rewards: {skill: {stage: mean reward}}.
      samples: {skill: {"prompt": a held-out task, stage: the reply to it}}.
    """

    rewards: dict[str, dict[str, float]]
    samples: dict[str, dict[str, str]]


def evaluate_skills(
    config: RlConfig, suite: TaskSuite, checkpoints: Mapping[str, str]
) -> SkillMatrix:
    """Returns the rewards of each checkpoint, by its stage's name, on each kind of the suite's held-out tasks.

    Two more skills are the form of replies to the tasks of the first kind, with thinking and without. Attempts are
    sampled by the config's `evaluation`, `rollout` and `engine`. Raises ValueError if a path is not a checkpoint.
    """
    cfg = without_adapters(config.model)
    loads = {
        stage: models.open_weights(path, cfg, may_differ=config.may_differ)
        for stage, path in checkpoints.items()
    }
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else Tokenizer.default()
    tokenizer = tokenizer.with_chat_template(template(config.chat_variant))
    engine_config = dataclasses.replace(
        config.engine, max_length=config.engine.max_length or config.length
    )
    skills = {skill: tasks[: config.evaluation.tasks] for skill, tasks in suite.held_out.items()}
    skills |= in_both_modes(next(iter(skills.values())))

    async def verify(task: Task, attempt: Attempt) -> Reward:
        return (
            judge_form(task, attempt)
            if task.kind == FORM_KIND
            else await suite.verify(task, attempt)
        )

    suite_with_forms = dataclasses.replace(suite, verify=verify)
    matrix = SkillMatrix(
        {skill: {} for skill in skills},
        {s: {"prompt": _shorten(tasks[0].messages[-1]["content"])} for s, tasks in skills.items()},
    )
    engine: Engine | None = None
    with ProgressBar(len(loads) * len(skills), unit="skill") as bar:
        for number, (stage, load) in enumerate(loads.items()):
            model = glm5.Glm5(cfg, params=load(), param_dtype="float32")
            # One engine serves all checkpoints, so that its programs compile once.
            if engine is None:
                engine = Engine(model, tokenizer, engine_config, version=0)
            else:
                engine.update_weights(glm5.params_of(model), number)
            rollouts = Rollouts(
                engine,
                tokenizer,
                config.rollout,
                config.evaluation.temperature,
                suite.tools,
                top_p=config.evaluation.top_p,
            )
            for i, (skill, tasks) in enumerate(skills.items()):
                bar.update(number * len(skills) + i, f"{skill} after {stage}")
                groups = rollouts.sample(tasks, 0, group=config.evaluation.group)
                run_sync(judge(groups, suite_with_forms, config.reward_concurrency))
                matrix.rewards[skill][stage] = mean_reward(groups)
                matrix.samples[skill][stage] = _shorten(_render_attempt(groups[0].attempts[0]))
    return matrix


def in_both_modes(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Returns copies of the tasks with thinking and without, by name, which `judge_form` judges."""
    tasks = list(tasks)
    return {
        name: [
            dataclasses.replace(t, id=f"{name}:{t.id}", kind=FORM_KIND, thinking=thinking)
            for t in tasks
        ]
        for name, thinking in (("form with thinking", True), ("form without", False))
    }


def judge_form(task: Task, attempt: Attempt) -> Reward:
    """Returns 1 if a reply ends by itself, is not empty, and has reasoning exactly where the task wants it.

    A reply to a task without thinking must have none. A thinking tag inside the answer gives 0.
    """
    last = attempt.messages[-1] if attempt.messages else {}
    has_reasoning = bool(last.get("reasoning_content"))
    has_ended = attempt.finish_reason == "stop" and bool(attempt.reply.strip())
    has_clean_answer = has_ended and "think>" not in attempt.reply
    return Reward(float(has_clean_answer and has_reasoning == (task.thinking is not False)))


def _render_attempt(attempt: Attempt) -> str:
    """Returns all replies of an attempt and the tools' results, as text."""
    parts = []
    for message in attempt.messages:
        if reasoning := message.get("reasoning_content"):
            parts.append(f"<think>{reasoning}</think>")
        parts += [str(call) for call in message.get("tool_calls", ())]
        parts.append(message.get("content") or "")
    return "\n".join(filter(None, parts))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[:MAX_SAMPLE_CHARS] + " ..."
