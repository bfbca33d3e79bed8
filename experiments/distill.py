"""On-policy cross-stage distillation: what the last stages forgot is learnt again from what the earlier ones were
(GLM-5 3.5).

    python -m launch.run --experiment=experiments/distill.py:tiny --experiment.checkpoint=WORKDIR
        --experiment.teachers="[{'checkpoint': 'WORKDIR', 'origin': 'reasoning'}, ...]"

The policy attempts tasks of each earlier stage, once each, and the checkpoint that this stage ended with scores what it
wrote, token by token: the advantage is log p_teacher - log p of each (Eq. 2), with the windows of Eq. 1. No reward takes
part; rewards are told, and evaluated on held-out tasks. Origins are "sft", "reasoning", "agentic"
and "general".

:tiny  within lifecycle.py:tiny, in four to seven minutes.
:small for one accelerator, from teachers of SFT and of the three stages of reinforcement learning.
:glm5  the same for 1,024 chips: batches of 1,024 attempts. The paper does not print how tasks are mixed.
"""

import dataclasses
import itertools
from collections.abc import Mapping

from experiments import rl_agentic, rl_general, rl_reasoning
from experiments.rl_agentic import AgenticConfig
from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.general import General, GeneralConfig
from glm5_jax.envs.instructions import KIND as INSTRUCTIONS, Instructions
from glm5_jax.envs.reasoning import VerifierConfig
from glm5_jax.envs.reasoning_tasks import TaskConfig
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.rl.experiment import RlConfig, Teacher
from glm5_jax.rl.stage import Reinforcement, World
from glm5_jax.rl.types import Attempt, Reward, Task
from glm5_jax.training.experiment import choose

# And their stages.
ORIGINS = {
    "sft": "sft",
    "reasoning": "rl_reasoning",
    "agentic": "rl_agentic",
    "general": "rl_general",
}
EARLIER = "workdir/lifecycle_{}"  # where lifecycle.py trains by default


@dataclasses.dataclass(frozen=True)
class DistillConfig(RlConfig):
    """Attributes:
    sft, reasoning, agentic, general: the tasks of each earlier stage, whose teacher has the origin of that name.
    """

    learns: str = "teachers"
    sft: tuple[rl_reasoning.Share, ...] = ()
    reasoning: tuple[rl_reasoning.Share, ...] = ()
    agentic: tuple[rl_reasoning.Share, ...] = ()
    general: tuple[rl_general.Share, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        own = {origin for origin in ORIGINS if getattr(self, origin)}
        taught = {teacher.origin for teacher in self.teachers}
        if own != taught and taught != {""}:
            raise ValueError(
                f"there are tasks of {sorted(own)} and teachers of {sorted(taught)}; each origin needs both"
            )

    def stage(self, workdir, evaluator=None, before=None, **options) -> Reinforcement:
        del evaluator
        kinds = self._kinds(evaluation=False)
        known = list(itertools.chain(*kinds.values()))
        return Reinforcement(self, workdir, self.world(kinds), known, before=before, **options)

    def world(self, kinds: Mapping[str, list[Task]] | None = None) -> World:
        """The tasks of all origins, and what judges them; kinds: those to learn from, if they are known."""
        weights = {
            f"{origin}:{share.name}": share.weight
            for origin in ORIGINS
            for share in getattr(self, origin)
        }
        kinds = kinds or self._kinds(evaluation=False)
        verifiers = rl_reasoning.Verifiers(VerifierConfig(), False)
        rules = General(GeneralConfig(orm=0.0, grm=0.0), Instructions("share"))

        async def verify(task: Task, attempt: Attempt) -> Reward:
            return await (rules if task.kind == INSTRUCTIONS else verifiers)(task, attempt)

        return World(
            TaskMixture(kinds, weights, seed=self.seed),
            self._kinds(evaluation=True),
            verify,
            Toolbox(rl_reasoning.TOOLS, itertools.chain(*kinds.values())),
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
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def teachers(folder: str) -> tuple[Teacher, ...]:
    """Of each origin, the stage in the folder."""
    return tuple(Teacher(f"{folder}/{stage}", origin) for origin, stage in ORIGINS.items())


def tiny() -> DistillConfig:
    """Rate, batch and lengths are ours, as those of rl_reasoning.py."""
    base, agentic = rl_reasoning.tiny(), rl_agentic.tiny()
    turns = agentic.rollout.max_turns
    return DistillConfig(
        **rl_general.shared(
            base,
            name="distill:tiny",
            learns="teachers",
            schedule=dataclasses.replace(base.schedule, total_steps=30),
            teachers=teachers(EARLIER.format("tiny")),
            # As many as nearly fill the rows of one program.
            rollout=dataclasses.replace(base.rollout, prompts=120, group=1, max_turns=turns),
        ),
        sft=(rl_reasoning.Share(TaskConfig("chain", size=4000, steps=5)),),
        reasoning=base.tasks[:2],
        agentic=agentic.tasks[:1],
        general=rl_general.tiny().tasks,
    )


def small() -> DistillConfig:
    """For one accelerator."""
    return of_shipped(rl_reasoning.small(), rl_agentic.small(), "small", 256)


def glm5() -> DistillConfig:
    """Group and batch of the paper."""
    return of_shipped(rl_reasoning.glm5(), rl_agentic.glm5(), "glm5", 1024)  # GLM-5 3.5


def of_shipped(
    base: rl_reasoning.ReasoningConfig, agentic: AgenticConfig, size: str, prompts: int
) -> DistillConfig:
    """Distils from the teachers of all earlier stages on the tasks that are shipped.

    GLM-5 3.5 names the skills of SFT, Reasoning RL and General RL; how tasks are mixed, and whether Agentic RL teaches
    too, is not disclosed.
    """
    turns = agentic.rollout.max_turns
    return DistillConfig(
        **rl_general.shared(
            base,
            name=f"distill:{size}",
            learns="teachers",
            teachers=teachers(EARLIER.format(size)),
            rollout=dataclasses.replace(base.rollout, prompts=prompts, group=1, max_turns=turns),
        ),
        sft=(rl_reasoning.Share(TaskConfig("chain", size=30_000, steps=5)),),
        reasoning=base.tasks,
        agentic=agentic.tasks,
        general=tuple(share for share in rl_general.ALL if share.kind == "instructions"),
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
