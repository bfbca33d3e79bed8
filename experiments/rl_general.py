"""Runs general RL: instruction following, correctness and quality of replies (GLM-5 3.4).

    glm5 run rl_general:tiny --checkpoint=WORKDIR

Rewards have three sources:

- rules that a program checks;
- an outcome reward model (--reward_model=WORKDIR of experiments/reward_model.py);
- a judge, any model with OpenAI's API (--judge=http://HOST:PORT, with --judge_key_file=FILE if
  it needs a key).

With a model, a reply must pass the rules first. Without a model, rules are the only reward, and tasks without rules
are refused. Either way, guards detect replies that are too long, repeat themselves or mix languages. Human replies are
the other side of a comparison (tasks of kind "anchors"). They may also be trained on as text
(--anchors=FILE --sft_rows=8).

Shipped are the instructions of IFEval, and 34 prompts on safety and 30 on creativity, which were written for this project.
Human replies and human preferences are not shipped: anchors, and the pairs of reward_model.py, are yours.

:tiny  from the lifecycle's last checkpoint, in about three minutes: constraints on a reply in a play, by rules.
:small for one accelerator: instructions, safety and creativity by both models. It takes your tasks, or the shipped ones
       with --requires_data=false:
       glm5 run rl_general:small --checkpoint=WORKDIR --judge=http://HOST:PORT
           --tasks="[{'kind': 'prompts', 'file': 'prompts.jsonl'}]"
:glm5  the same with the programs of rl_reasoning.py:glm5, on your tasks. The paper prints neither tasks nor weights.
       On Slurm:
       glm5 slurm rl_general:glm5 --chip=v5p --devices_per_node=4 --workdir=DIR --checkpoint=WORKDIR
           --judge=http://HOST:PORT --tasks="[{'kind': 'prompts', 'file': 'prompts.jsonl'}]" >run.sbatch
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from experiments import rl_reasoning
from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.judge import Judge
from glm5_jax.data.conversation import Conversation, parse_line
from glm5_jax.data.preferences import PROMPTS, Anchor, read_anchors
from glm5_jax.data.sources import is_held_out
from glm5_jax.envs.hybrid_reward import GeneralConfig, HybridReward, anchor_tasks, prompt_tasks
from glm5_jax.envs.instructions import generated_tasks, ifeval
from glm5_jax.envs.instructions.generated_tasks import ConstraintTaskConfig
from glm5_jax.envs.instructions.ifeval import Instructions
from glm5_jax.envs.service import make_loop_config
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.config import RlConfig
from glm5_jax.rl.orchestrator.task_service import ServiceConfig, TaskService
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.on_policy import OnPolicyRlConfig
from glm5_jax.rl.programs.roles import list_roles
from glm5_jax.rl.reward_model.outcome_model import BatchedScorer, OutcomeModel
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.stages import Stage

KINDS = ("demands", "instructions", "prompts", "anchors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneralTaskWeight:
    """A task set of general RL and its share of the training data.

    Attributes:
      kind: "demands" (generated), or of a file: "instructions" as IFEval writes them, "prompts" with their rubrics, or
        "anchors" with human replies (data/preferences.py).
      file: path, or a name of `PROMPTS`; None: none, for instructions the shipped ones.
      demands: generator of tasks of that kind.
      rubric: rubric by which anchors are compared.
      weight: weight of the set among all sets.
      held_out_fraction: share of a file's prompts that is held out for evaluation.
    """

    kind: str = "demands"
    file: str | None = None
    demands: ConstraintTaskConfig = ConstraintTaskConfig()
    rubric: str = "general"
    weight: float = 1.0
    held_out_fraction: float = (
        0.05  # as in SFT: a prompt must be on one side of the split in all stages
    )

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if (self.file is None) != (self.kind == "demands") and self.kind != "instructions":
            raise ValueError(
                f"tasks of kind {self.kind!r} have the file {self.file!r}; prompts and anchors come from one, demands "
                "from none"
            )
        if not 0 <= self.held_out_fraction <= 1:
            raise ValueError(f"held_out_fraction is {self.held_out_fraction}; use 0 to 1")

    @property
    def name(self) -> str:
        if self.kind == "demands":
            return self.demands.name
        return f"{self.kind}.{pathlib.Path(self.file).stem if self.file else 'shipped'}"

    @property
    def has_user_file(self) -> bool:
        """Whether the tasks are those of a file of the user; the others are shipped or generated."""
        return self.file is not None and self.file not in PROMPTS

    def tasks_of(self, *, evaluation: bool = False) -> list[Task]:
        """Returns the tasks of one side of the split. Raises ValueError for an invalid file."""
        if self.kind == "demands":
            return list(generated_tasks.tasks(self.demands, evaluation=evaluation))
        if self.kind == "instructions":
            all_tasks = list(ifeval.tasks(self.file or ifeval.SHIPPED))
        else:
            assert self.file is not None, "prompts and anchors come from a file"
            if self.kind == "prompts":
                all_tasks = prompt_tasks(PROMPTS.get(self.file, self.file))
            else:
                all_tasks = anchor_tasks(self.file, self.rubric)
        return [
            task
            for task in all_tasks
            if is_held_out(str(task.messages[-1]["content"]).strip(), self.held_out_fraction)
            == evaluation
        ]


ALL = (
    GeneralTaskWeight(kind="instructions"),
    GeneralTaskWeight(kind="prompts", file="safety"),
    GeneralTaskWeight(kind="prompts", file="creativity"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneralRlConfig(OnPolicyRlConfig):
    """Configuration of general RL.

    Attributes:
      tasks: task sets of all kinds, with their weights.
      rules: "all" if a reply must follow all instructions, "share" if the fraction counts; with a model, "all".
      reward: weights that combine rules, models and guards; a missing model has weight 0.
      reward_model: workdir of the outcome reward model; None: not used.
      judge, judge_model: URL of the judge's server, and the model there; None: no judge, and the server's default.
      judge_key_file: file with the server's API key, so that the key appears in no log; None: the server needs no key.
      anchors: file of human replies, of which every batch trains on `sft_rows`; None: none.
    """

    tasks: tuple[GeneralTaskWeight, ...] = (GeneralTaskWeight(),)
    rules: str = "all"
    reward: GeneralConfig = GeneralConfig()
    reward_model: str | None = None
    judge: str | None = None
    judge_model: str | None = None
    judge_key_file: str | None = None
    anchors: str | None = None

    def __post_init__(self):
        super().__post_init__()
        Instructions(self.rules)
        if (self.anchors is None) != (self.sft_rows == 0):
            raise ValueError(
                f"anchors is {self.anchors!r} and sft_rows {self.sft_rows}; give both the file and the number in a batch, or neither"
            )
        if self.reward_model is not None and self.has_engine_processes:
            raise ValueError(
                f"reward_model is {self.reward_model!r}, which is scored on the trainer's devices, and the task services run in "
                "other processes; give a judge, or set engine_placement to in_process"
            )
        if self.judge is None and self.judge_key_file is not None:
            raise ValueError(
                f"judge_key_file is {self.judge_key_file!r} and judge None; name the server that wants the key"
            )

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        return *super().changeable_on_resume, "judge_key_file"

    @property
    def data_example(self) -> str:
        if any(share.has_user_file for share in self.tasks):
            return ""
        return "tasks=\"[{'kind': 'prompts', 'file': 'prompts.jsonl'}]\""

    @property
    def task_shares(self) -> tuple[GeneralTaskWeight, ...]:
        return self.tasks

    def conversations(self) -> Sequence[Conversation]:
        return (
            [anchor_conversation(one) for one in read_anchors(self.anchors)] if self.anchors else ()
        )

    def make_sync_trainer(
        self, workdir: str | os.PathLike, previous_stage: Stage | None = None, **options
    ) -> SyncRlTrainer:
        verify, judging = make_verifier(self)
        kinds = {share.name: share.tasks_of() for share in self.tasks}
        suite = TaskSuite(
            tasks=TaskMixture(
                kinds, {share.name: share.weight for share in self.tasks}, seed=self.seed
            ),
            held_out={share.name: share.tasks_of(evaluation=True) for share in self.tasks},
            verify=verify,
            judging=judging,
            conversations=self.conversations(),
        )
        known = list(itertools.chain(*kinds.values()))
        return SyncRlTrainer(self, workdir, suite, known, previous_stage=previous_stage, **options)

    def make_task_service(self, service: ServiceConfig, tokenizer: Tokenizer) -> TaskService:
        share = self.tasks[self.program.number]
        verify, judging = make_verifier(self)
        return rl_reasoning.make_agent_service(
            self,
            service,
            tokenizer,
            share.tasks_of(),
            share.tasks_of(evaluation=True),
            loop=make_loop_config(self, self.max_attempt_tokens),
            verifier=verify,
            judging=judging,
        )

    def programs(self) -> tuple[str, ...]:
        """Returns the flags of launch/local.py that start this run; empty if it is one program."""
        return self.start_flags(__file__, get_config)


# What launchers call: the roles of a run, the server of a role, and the check before any starts.
roles, serve = list_roles, servers.serve


def check(config: GeneralRlConfig) -> None:
    """Raises ValueError for tasks without a model that judges them, and as `servers.check`, before any program starts."""
    check_models(config)
    servers.check(config)


def check_models(config: GeneralRlConfig) -> list[str]:
    """Returns the names of the tasks without rules. Raises ValueError if there is no model to judge them."""
    names = [share.name for share in config.tasks if share.kind in ("prompts", "anchors")]
    if config.reward_model is None and config.judge is None and names:
        raise ValueError(
            f"tasks {names} are judged by models, and none is shipped; give --experiment.judge=URL or "
            "--experiment.reward_model=WORKDIR"
        )
    return names


def make_verifier(
    config: GeneralRlConfig,
) -> tuple[Verifier, Callable[[], AbstractAsyncContextManager]]:
    """Returns the verifier of attempts and its context manager.

    Raises ValueError for tasks without rules if there is no model, and for an invalid model.
    """
    unruled_names = check_models(config)
    judge_client = outcomes = None
    if config.judge is not None:
        file = config.judge_key_file
        key = None if file is None else read_key(file, "judge_key_file")
        judge_client = ChatClient(config.judge, config.judge_model, api_key=key)
    if config.reward_model is not None:
        mesh = make_mesh(dataclasses.asdict(config.mesh), expert_slices=config.step.expert_slices)
        mesh = mesh if mesh.size > 1 else None
        # The same number of rows as the learner's, which the mesh divides.
        outcomes = BatchedScorer(
            OutcomeModel.load(config.reward_model, rows=config.rows, mesh=mesh)
        )
    models = {"orm": outcomes, "grm": judge_client and Judge(client=judge_client)}
    missing = {name: 0.0 for name, model in models.items() if model is None}
    reward = dataclasses.replace(config.reward, **missing)
    with_rules = HybridReward(
        config=reward, rules=Instructions(config.rules), orm=models["orm"], judge=models["grm"]
    )
    without_rules = dataclasses.replace(with_rules, rules=None) if unruled_names else with_rules

    async def verify(task: Task, attempt: Attempt) -> Reward:
        return await (with_rules if task.kind == ifeval.KIND else without_rules)(task, attempt)

    return verify, (lambda: judge_client) if judge_client else contextlib.nullcontext


def anchor_conversation(anchor: Anchor) -> Conversation:
    """Returns the conversation that ends with an anchor's human reply."""
    line = {"messages": [*anchor.messages, anchor.anchor], "tools": list(anchor.tools)}
    return parse_line(line)


def get_config(variant: str = "tiny") -> GeneralRlConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def tiny() -> GeneralRlConfig:
    """Uses our own rate, batch and lengths, as rl_reasoning.py does."""
    base = rl_reasoning.tiny()
    return GeneralRlConfig(
        **shared_fields(
            base,
            name="rl_general:tiny",
            rollout=RolloutConfig(prompts=16, group=8, max_tokens=64, max_turns=1),
        ),
        tasks=(GeneralTaskWeight(demands=ConstraintTaskConfig(max_characters=200)),),
        rules="share",
    )


def small() -> GeneralRlConfig:
    """Samples replies of up to 4K tokens."""
    return GeneralRlConfig(
        **shared_fields(rl_reasoning.small(), name="rl_general:small"), tasks=ALL
    )


def glm5() -> GeneralRlConfig:
    """Uses the group and batch size of reasoning RL, because those of general RL are not printed."""
    return GeneralRlConfig(**shared_fields(rl_reasoning.glm5(), name="rl_general:glm5"), tasks=ALL)


def shared_fields(config: RlConfig, kind: type[RlConfig] = OnPolicyRlConfig, **changes) -> dict:
    """Returns the fields of `kind` that an experiment has, with changes."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(kind)}
    return fields | changes


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
