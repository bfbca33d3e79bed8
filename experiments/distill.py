"""Distils earlier stages into the policy, on-policy, to restore skills that later stages lost (GLM-5 3.5).

    glm5 run distill:tiny --checkpoint=WORKDIR
        --teachers="[{'checkpoint': 'WORKDIR', 'origin': 'reasoning'}, ...]"

1. The policy attempts tasks of each earlier stage, once each.
2. The final checkpoint of the task's stage, its teacher, scores every sampled token.
3. The advantage of a token is log p_teacher - log p (Eq. 2), with the windows of Eq. 1.

Rewards do not enter the loss. They are logged, and evaluated on held-out tasks. Origins are "sft", "reasoning",
"agentic" and "general".

:tiny  within lifecycle.py:tiny, in four to seven minutes.
:small for one accelerator, from teachers of SFT and of the three stages of reinforcement learning.
:glm5  the same for 1,024 chips: batches of 1,024 attempts. The paper does not print how tasks are mixed.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping

from experiments import rl_agentic, rl_general, rl_reasoning
from experiments.rl_agentic import AgenticConfig
from glm5_jax.envs.hybrid_reward import GeneralConfig, HybridReward
from glm5_jax.envs.instructions.ifeval import KIND as INSTRUCTIONS, Instructions
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.rl.config import RlConfig, Teacher
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Attempt, Reward, Task
from glm5_jax.training.experiment import choose
from glm5_jax.training.stages import Stage

# The stage of each origin.
ORIGINS = {
    "sft": "sft",
    "reasoning": "rl_reasoning",
    "agentic": "rl_agentic",
    "general": "rl_general",
}
EARLIER = "workdir/lifecycle_{}"  # default workdir of lifecycle.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(RlConfig):
    """Configuration of cross-stage distillation.

    Attributes:
      sft, reasoning, agentic, general: the tasks of each earlier stage; its teacher has the origin of that name.
    """

    objective: str = "teachers"
    sft: tuple[rl_reasoning.TaskWeight, ...] = ()
    reasoning: tuple[rl_reasoning.TaskWeight, ...] = ()
    agentic: tuple[rl_reasoning.TaskWeight, ...] = ()
    general: tuple[rl_general.GeneralTaskWeight, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        task_origins = {origin for origin in ORIGINS if getattr(self, origin)}
        teacher_origins = {teacher.origin for teacher in self.teachers}
        if task_origins != teacher_origins and teacher_origins != {""}:
            raise ValueError(
                f"there are tasks of {sorted(task_origins)} and teachers of {sorted(teacher_origins)}; each origin needs both"
            )

    def make_stage(
        self,
        workdir: str | os.PathLike,
        evaluator: object = None,
        previous_stage: Stage | None = None,
        **options,
    ) -> SyncRlTrainer:
        del evaluator
        kinds = self._kinds(evaluation=False)
        known = list(itertools.chain(*kinds.values()))
        return SyncRlTrainer(
            self, workdir, self.make_suite(kinds), known, previous_stage=previous_stage, **options
        )

    def make_suite(self, kinds: Mapping[str, list[Task]] | None = None) -> TaskSuite:
        """Returns the tasks of all origins with their verifiers.

        Args:
          kinds: training tasks by name, if they are loaded already; None: loads them.
        """
        weights = {
            f"{origin}:{share.name}": share.weight
            for origin in ORIGINS
            for share in getattr(self, origin)
        }
        kinds = kinds or self._kinds(evaluation=False)
        verifiers = rl_reasoning.Verifiers(VerifierConfig(), False)
        rules = HybridReward(config=GeneralConfig(orm=0.0, grm=0.0), rules=Instructions("share"))

        async def verify(task: Task, attempt: Attempt) -> Reward:
            return await (rules if task.kind == INSTRUCTIONS else verifiers)(task, attempt)

        return TaskSuite(
            tasks=TaskMixture(kinds, weights, seed=self.seed),
            held_out=self._kinds(evaluation=True),
            verify=verify,
            tools=rl_reasoning.make_toolbox(itertools.chain(*kinds.values())),
            close=verifiers.close,
        )

    def _kinds(self, *, evaluation: bool) -> dict[str, list[Task]]:
        return {
            f"{origin}:{share.name}": [
                dataclasses.replace(task, origin=origin)
                for task in share.tasks_of(evaluation=evaluation)
            ]
            for origin in ORIGINS
            for share in getattr(self, origin)
        }


def get_config(variant: str = "tiny") -> DistillConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def teachers(folder: str) -> tuple[Teacher, ...]:
    """Returns the teacher of each origin: the stage's folder within `folder`."""
    return tuple(
        Teacher(checkpoint=f"{folder}/{stage}", origin=origin) for origin, stage in ORIGINS.items()
    )


def tiny() -> DistillConfig:
    """Uses our own rate, batch and lengths, as rl_reasoning.py does."""
    base, agentic = rl_reasoning.tiny(), rl_agentic.tiny()
    turns = agentic.rollout.max_turns
    return DistillConfig(
        **rl_general.shared_fields(
            base,
            name="distill:tiny",
            objective="teachers",
            schedule=dataclasses.replace(base.schedule, total_steps=30),
            teachers=teachers(EARLIER.format("tiny")),
            # This number nearly fills the rows of one compiled program.
            rollout=dataclasses.replace(base.rollout, prompts=120, group=1, max_turns=turns),
        ),
        sft=(rl_reasoning.TaskWeight(TaskConfig(kind="chain", size=4000, steps=5)),),
        reasoning=_task_sets(base)[:2],
        agentic=_task_sets(agentic)[:1],
        general=rl_general.tiny().tasks,
    )


def small() -> DistillConfig:
    """Distils on one accelerator."""
    return with_shipped_tasks(rl_reasoning.small(), rl_agentic.small(), "small", 256)


def glm5() -> DistillConfig:
    """Uses the paper's group and batch size."""
    return with_shipped_tasks(rl_reasoning.glm5(), rl_agentic.glm5(), "glm5", 1024)  # GLM-5 3.5


def _task_sets(
    config: rl_reasoning.ReasoningConfig | AgenticConfig,
) -> tuple[rl_reasoning.TaskWeight, ...]:
    """Returns the task sets of a stage, without task files and terminal tasks, which are not distilled."""
    return tuple(share for share in config.tasks if isinstance(share, rl_reasoning.TaskWeight))


def with_shipped_tasks(
    base: rl_reasoning.ReasoningConfig, agentic: AgenticConfig, size: str, prompts: int
) -> DistillConfig:
    """Distils from the teachers of all earlier stages on the tasks that are shipped.

    GLM-5 3.5 names the skills of SFT, Reasoning RL and General RL; how tasks are mixed, and whether Agentic RL teaches
    too, is not disclosed.
    """
    turns = agentic.rollout.max_turns
    return DistillConfig(
        **rl_general.shared_fields(
            base,
            name=f"distill:{size}",
            objective="teachers",
            teachers=teachers(EARLIER.format(size)),
            rollout=dataclasses.replace(base.rollout, prompts=prompts, group=1, max_turns=turns),
        ),
        sft=(rl_reasoning.TaskWeight(TaskConfig(kind="chain", size=30_000, steps=5)),),
        reasoning=_task_sets(base),
        agentic=_task_sets(agentic),
        general=tuple(share for share in rl_general.ALL if share.kind == "instructions"),
    )


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
