"""The smallest RL stages: one dense layer, one device, and compiled programs that all runs share."""

import dataclasses

import jax
import numpy as np

from glm5_jax.checkpoint import models
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.algorithm.losses import PolicyConfig
from glm5_jax.rl.config import policy_step_config
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.types import Reward
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import report, stages
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig
from glm5_jax.training.step import make_step
from tests.model.small import one_layer

TOKENIZER = Tokenizer.load("bytes")
SCHEDULE = ScheduleConfig(kind="constant", peak=1e-2, end=0.0, warmup_steps=0, total_steps=4)
COMMON = dict(
    model=one_layer(vocab_size=292, max_position_embeddings=128, model_type="glm4_moe_lite"),
    requires_checkpoint=False,
    optimizer=OptimizerConfig(weight_decay=0.0, lm_head="adamw"),  # as in the recipes `:tiny`
    schedule=SCHEDULE,
    step=dataclasses.replace(policy_step_config(), remat="none"),
    policy=PolicyConfig(temperature=0.8),
    rollout=RolloutConfig(prompts=4, group=4, max_tokens=6, thinking=False),
    engine=EngineConfig(page_size=32, max_num_seqs=16, prefill_chunk=64, max_length=32),
    length=64,
    rows=8,
)


class SequentialTasks:
    """Task source that repeats its tasks in their order."""

    def __init__(self, tasks):
        self.tasks, self.num_drawn, self.accepted, self.dropped = tasks, 0, [], []

    def draw(self, count):
        tasks = [self.tasks[(self.num_drawn + i) % len(self.tasks)] for i in range(count)]
        self.num_drawn += count
        return tasks

    def accept(self, task):
        self.accepted.append(task.id)

    def drop(self, task):
        self.dropped.append(task.id)

    def state(self):
        return {"num_drawn": self.num_drawn}

    def restore(self, state):
        self.num_drawn = state["num_drawn"]


async def reward_low_bytes(task, attempt):
    """Rewards the share of bytes below 64 in a reply."""
    text = attempt.reply.encode()
    value = sum(byte < 64 for byte in text) / max(len(text), 1)
    return Reward(value, {"low": value})


def train_on_one_device(monkeypatch):
    """Makes stages train on one device without a report page, which takes seconds in every run."""
    monkeypatch.setattr(report, "write_page", lambda workdir: None)
    monkeypatch.setattr(
        stages, "make_mesh", lambda axes, **_: make_mesh(axes, devices=jax.devices()[:1])
    )


STEPS = {}


def shared_train_step(cfg, step, optimizer, schedule, mesh, token_loss):
    """Returns a step that is compiled once for all runs of equal arguments.

    The learning rate is the same in all of them. No run lowers the step again for the hash of its
    program.
    """
    key = repr((cfg, step, optimizer, token_loss, mesh))
    if key not in STEPS:
        train_step = make_step(cfg, step, optimizer, schedule, mesh, token_loss)
        STEPS[key] = train_step._replace(train=lambda state, batch: train_step.train(state, batch))
    return STEPS[key]


def final_weights(workdir, model=COMMON["model"]):
    """Returns the final weights of a run as a list of arrays."""
    return jax.tree.leaves(jax.device_get(models.open_weights(workdir, model)()))


def all_equal(a, b):
    """Returns whether two lists of arrays are equal bit by bit."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
