"""What a policy can do after each of its stages: every skill, every checkpoint, one table."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from glm5_jax.checkpoint import models
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.rollouts.rollout import Rollouts
from glm5_jax.rl.trainers.sync_trainer import World, judge, mean_reward
from glm5_jax.rl.types import Attempt, Reward, Task
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.text.layouts import template
from glm5_jax.text.tokenizer import Tokenizer

FORM = "form"  # kind of tasks of which only `well_formed` is asked
LONGEST = 600  # characters of a sample


class Skills(NamedTuple):
    """rewards: {skill: {stage: mean reward}}; samples: {skill: {"asked": a held-out task, stage: the reply to it}}."""

    rewards: dict[str, dict[str, float]]
    samples: dict[str, dict[str, str]]


def skill_matrix(config: RlConfig, world: World, checkpoints: Mapping[str, str]) -> Skills:
    """What the policy at each checkpoint, by the stage's name, gets of the world's held-out tasks, by kind, and whether
    its replies to those of the first kind are well formed, with thinking and without; attempted as `config.evaluation`,
    `rollout` and `engine` say. ValueError for a checkpoint that is none."""
    loads = {
        stage: models.open_weights(path, config.model, may_differ=config.may_differ)
        for stage, path in checkpoints.items()
    }
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else Tokenizer.default()
    tokenizer = tokenizer.with_chat_template(template(config.chat_variant))
    options = dataclasses.asdict(config.engine)
    options["max_length"] = options["max_length"] or config.length
    known = {skill: tasks[: config.evaluation.tasks] for skill, tasks in world.held_out.items()}
    known |= in_both_modes(next(iter(known.values())))

    async def verify(task: Task, attempt: Attempt) -> Reward:
        return (
            well_formed(task, attempt) if task.kind == FORM else await world.verify(task, attempt)
        )

    judged = dataclasses.replace(world, verify=verify)
    found = Skills(
        {skill: {} for skill in known},
        {s: {"asked": _shown(tasks[0].messages[-1]["content"])} for s, tasks in known.items()},
    )
    rollouts = engine = None
    with ProgressBar(len(loads) * len(known), unit="skill") as bar:
        for number, (stage, load) in enumerate(loads.items()):
            model = glm5.Glm5(config.model, params=load(), param_dtype="float32")
            if engine is None:
                engine = Engine(model, tokenizer, version=0, **options)
                temperature = config.evaluation.temperature
                rollouts = Rollouts(engine, tokenizer, config.rollout, temperature, world.tools)
            else:
                engine.update_weights(glm5.params_of(model), number)
            for place, (skill, tasks) in enumerate(known.items()):
                bar.update(number * len(known) + place, f"{skill} after {stage}")
                groups = rollouts.sample(tasks, 0, group=config.evaluation.group)
                run_sync(judge(groups, judged, config.judged_at_once))
                found.rewards[skill][stage] = mean_reward(groups)
                found.samples[skill][stage] = _shown(_said(groups[0].attempts[0]))
    return found


def in_both_modes(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """The tasks with thinking and without, asked for nothing but `well_formed` replies."""
    tasks = list(tasks)
    return {
        name: [
            dataclasses.replace(t, id=f"{name}:{t.id}", kind=FORM, thinking=thinking) for t in tasks
        ]
        for name, thinking in (("form with thinking", True), ("form without", False))
    }


def well_formed(task: Task, attempt: Attempt) -> Reward:
    """Whether a reply ends by itself, says something, and has reasoning in its place, which is none where the task asks
    for no thinking."""
    last = attempt.messages[-1] if attempt.messages else {}
    thinks = bool(last.get("reasoning_content"))
    ends = attempt.finish_reason == "stop" and bool(attempt.reply.strip())
    inside = ends and "think>" not in attempt.reply
    return Reward(float(inside and thinks == (task.thinking is not False)))


def _said(attempt: Attempt) -> str:
    """All replies of an attempt and what tools answered, one behind the other."""
    parts = []
    for message in attempt.messages:
        if reasoning := message.get("reasoning_content"):
            parts.append(f"<think>{reasoning}</think>")
        parts += [str(call) for call in message.get("tool_calls", ())]
        parts.append(message.get("content") or "")
    return "\n".join(filter(None, parts))


def _shown(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."
