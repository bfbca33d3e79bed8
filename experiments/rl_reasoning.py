"""Reasoning RL: math, science, code and reasoning with tools, by what can be checked (GLM-5 3.2).

    python -m launch.run --experiment=experiments/rl_reasoning.py:addition --workdir=DIR

GRPO with IcePop, groups against their own mean, no KL; the indexer stays as it is. Kinds of tasks are kept in
balance, and those that a policy always or never solves can be left out: --experiment.verdicts=STUDENT.jsonl
--experiment.teacher_verdicts=STRONGER.jsonl (envs/difficulty.py).

:addition  a policy of 0.13M parameters learns to add from nothing, in minutes
"""

import contextlib
import dataclasses

from glm5_jax import presets
from glm5_jax.envs.difficulty import DifficultyConfig, keep_hard, read_verdicts
from glm5_jax.envs.reasoning import VerifierConfig, verifier_for
from glm5_jax.envs.reasoning_tasks import TaskConfig, tasks
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.rl.experiment import RlConfig
from glm5_jax.rl.stage import Reinforcement, World
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier
from glm5_jax.training.experiment import choose
