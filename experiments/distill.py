"""Distils earlier stages into the policy, on-policy, to restore skills that later stages lost (GLM-5 3.5).

    glm5 run distill:tiny --checkpoint=WORKDIR
        --teachers="[{'checkpoint': 'WORKDIR', 'origin': 'reasoning'}, ...]"

1. The policy attempts tasks of each earlier stage, once each.
2. The final checkpoint of the task's stage, its teacher, scores every sampled token.
3. The advantage of a token is log p_teacher - log p (Eq. 2), with the windows of Eq. 1.

Rewards do not enter the loss. They are logged, and evaluated on held-out tasks. Origins are "sft", "reasoning",
"agentic" and "general".

:tiny  within lifecycle.py:tiny, in four to seven minutes.
:small for one accelerator, from teachers of SFT and of the three stages of reinforcement learning. It takes your tasks,
       or the shipped ones with --requires_data=false:
       glm5 run distill:small --checkpoint=WORKDIR --reasoning="({'file': 'tasks.jsonl'},)"
:glm5  the same with the programs of rl_reasoning.py:glm5, in batches of 1,024 attempts. One teacher at a time is in the
       trainer's memory. The paper does not print how tasks are mixed. On Slurm, after the earlier stages in workdir:
       glm5 slurm distill:glm5 --chip=v5p --devices_per_node=4 --workdir=DIR --checkpoint=WORKDIR
           --reasoning="({'file': 'tasks.jsonl'},)" >run.sbatch
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping

from experiments import rl_agentic, rl_general, rl_reasoning
from experiments.rl_agentic import AgenticConfig
from experiments.rl_general import GeneralTaskWeight
from glm5_jax.envs.hybrid_reward import GeneralConfig, HybridReward
from glm5_jax.envs.instructions.ifeval import KIND as INSTRUCTIONS, Instructions
from glm5_jax.envs.reasoning.task_file import TaskFile
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.envs.service import make_loop_config
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.rl.config import Teacher
from glm5_jax.rl.orchestrator.task_service import ServiceConfig, TaskService
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.on_policy import OnPolicyRlConfig
from glm5_jax.rl.programs.roles import list_roles
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier
from glm5_jax.text.tokenizer import Tokenizer
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


AnyShare = rl_reasoning.TaskWeight | TaskFile | GeneralTaskWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class OriginShare:
    """Task set of an earlier stage.

    Attributes:
      origin: origin of its tasks, which selects their teacher.
      share: task set of that stage.
    """

    origin: str
    share: AnyShare

    @property
    def name(self) -> str:
        """Returns the name of the set, which is different for each origin."""
        return f"{self.origin}.{self.share.name}"

    @property
    def weight(self) -> float:
        return self.share.weight

    def tasks_of(self, *, evaluation: bool = False) -> list[Task]:
        """Returns the tasks of one side of the split, with their origin."""
        tasks = self.share.tasks_of(evaluation=evaluation)
        return [dataclasses.replace(task, origin=self.origin) for task in tasks]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(OnPolicyRlConfig):
    """Configuration of cross-stage distillation.

    Attributes:
      sft, reasoning, agentic, general: the tasks of each earlier stage; its teacher has the origin of that name.
    """

    objective: str = "teachers"
    sft: tuple[rl_reasoning.TaskWeight | TaskFile, ...] = ()
    reasoning: tuple[rl_reasoning.TaskWeight | TaskFile, ...] = ()
    agentic: tuple[rl_reasoning.TaskWeight | TaskFile, ...] = ()
    general: tuple[GeneralTaskWeight, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        task_origins = {origin for origin in ORIGINS if getattr(self, origin)}
        teacher_origins = {teacher.origin for teacher in self.teachers}
        if task_origins != teacher_origins and teacher_origins != {""}:
            raise ValueError(
                f"there are tasks of {sorted(task_origins)} and teachers of {sorted(teacher_origins)}; each origin needs both"
            )

    @property
    def task_shares(self) -> tuple[OriginShare, ...]:
        return tuple(
            OriginShare(origin=origin, share=share)
            for origin in ORIGINS
            for share in getattr(self, origin)
        )

    @property
    def shares(self) -> tuple[AnyShare, ...]:
        """The task sets of all origins."""
        return tuple(one.share for one in self.task_shares)

    @property
    def data_example(self) -> str:
        has_file = any(
            isinstance(share, TaskFile)
            or isinstance(share, GeneralTaskWeight)
            and share.has_user_file
            for share in self.shares
        )
        return "" if has_file else rl_reasoning.TASKS_EXAMPLE.replace("tasks=", "reasoning=", 1)

    def origin_of(self, task: str) -> str:
        return next(share.origin for share in self.task_shares if share.name == task)

    def make_sync_trainer(
        self, workdir: str | os.PathLike, previous_stage: Stage | None = None, **options
    ) -> SyncRlTrainer:
        kinds = {share.name: share.tasks_of() for share in self.task_shares}
        suite, known = self.make_suite(kinds), list(itertools.chain(*kinds.values()))
        return SyncRlTrainer(self, workdir, suite, known, previous_stage=previous_stage, **options)

    def make_suite(self, kinds: Mapping[str, list[Task]] | None = None) -> TaskSuite:
        """Returns the tasks of all origins with their verifiers.

        Args:
          kinds: training tasks by name, if they are loaded already; None: loads them.
        """
        shares = self.task_shares
        kinds = kinds or {share.name: share.tasks_of() for share in shares}
        verifiers = rl_reasoning.Verifiers(VerifierConfig(), False, self.shares)
        return TaskSuite(
            tasks=TaskMixture(kinds, {one.name: one.weight for one in shares}, seed=self.seed),
            held_out={share.name: share.tasks_of(evaluation=True) for share in shares},
            verify=with_rules(verifiers),
            tools=rl_reasoning.make_toolbox(itertools.chain(*kinds.values()), self.shares),
            close=verifiers.close,
        )

    def make_task_service(self, service: ServiceConfig, tokenizer: Tokenizer) -> TaskService:
        one = self.task_shares[self.program.number]
        verifiers = rl_reasoning.Verifiers(VerifierConfig(), False, [one.share])
        return rl_reasoning.make_agent_service(
            self,
            service,
            tokenizer,
            one.tasks_of(),
            one.tasks_of(evaluation=True),
            loop=make_loop_config(self, self.max_attempt_tokens),
            verifier=with_rules(verifiers),
            shares=[one.share],
        )

    def programs(self) -> tuple[str, ...]:
        """Returns the flags of launch/local.py that start this run; empty if it is one program."""
        return self.start_flags(__file__, get_config)


# What launchers call: the roles of a run, the server of a role, and the check before any starts.
roles, serve = list_roles, servers.serve


def check(config: DistillConfig) -> None:
    """Raises ValueError for a missing checkpoint, missing tasks or an invalid schedule, before any program starts."""
    servers.check(config)
    rl_reasoning.check_tasks(config.shares)


def with_rules(verifiers: Verifier) -> Verifier:
    """Returns a verifier of all tasks of distillation: instructions are checked by rules, other tasks by `verifiers`."""
    rules = HybridReward(config=GeneralConfig(orm=0.0, grm=0.0), rules=Instructions("share"))

    async def verify(task: Task, attempt: Attempt) -> Reward:
        return await (rules if task.kind == INSTRUCTIONS else verifiers)(task, attempt)

    return verify


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
            max_loaded_teachers=1,
            rollout=dataclasses.replace(base.rollout, prompts=prompts, group=1, max_turns=turns),
            max_running=prompts,
        ),
        sft=(rl_reasoning.TaskWeight(TaskConfig(kind="chain", size=30_000, steps=5)),),
        reasoning=_task_sets(base),
        agentic=_task_sets(agentic),
        general=tuple(share for share in rl_general.ALL if share.kind == "instructions"),
    )


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
