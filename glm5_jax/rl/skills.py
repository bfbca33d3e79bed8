"""What a policy can do after each of its stages: every skill, every checkpoint, one table."""

import dataclasses
from collections.abc import Mapping

from glm5_jax.checkpoint import models
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.coroutines import wait_for
from glm5_jax.inference.engine import Engine
from glm5_jax.model import glm5
from glm5_jax.rl.experiment import RlConfig
from glm5_jax.rl.rollout import Rollouts
from glm5_jax.rl.stage import World, judge, mean_reward
from glm5_jax.text.layouts import template
from glm5_jax.text.tokenizer import Tokenizer

Matrix = dict[str, dict[str, float]]  # skill -> stage -> mean reward


def skill_matrix(config: RlConfig, world: World, checkpoints: Mapping[str, str]) -> Matrix:
    """Mean rewards of the world's held-out tasks, by kind, of the policy at each checkpoint, by the stage's name;
    attempted as `config.evaluation`, `rollout` and `engine` say. ValueError for a checkpoint that is none."""
    loads = {
        stage: models.open_weights(path, config.model, unshared=config.unshared)
        for stage, path in checkpoints.items()
    }
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else Tokenizer.default()
    tokenizer = tokenizer.with_chat_template(template(config.chat_variant))
    options = dataclasses.asdict(config.engine)
    options["max_length"] = options["max_length"] or config.length
    found: Matrix = {skill: {} for skill in world.held_out}
    rollouts = engine = None
    with ProgressBar(len(loads) * len(found), unit="skill") as bar:
        for number, (stage, load) in enumerate(loads.items()):
            model = glm5.Glm5(config.model, params=load(), param_dtype="float32")
            if engine is None:
                engine = Engine(model, tokenizer, version=0, **options)
                temperature = config.evaluation.temperature
                rollouts = Rollouts(engine, tokenizer, config.rollout, temperature, world.tools)
            else:
                engine.update_weights(glm5.params_of(model), number)
            for place, (skill, tasks) in enumerate(world.held_out.items()):
                bar.update(number * len(found) + place, f"{skill} after {stage}")
                few = tasks[: config.evaluation.tasks]
                groups = rollouts.sample(few, 0, group=config.evaluation.group)
                wait_for(judge(groups, world, config.judged_at_once))
                found[skill][stage] = mean_reward(groups)
    return found
