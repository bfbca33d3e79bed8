"""Runs reasoning RL: math, science, code and tool use with verifiable rewards (GLM-5 3.2).

    glm5 run rl_reasoning:addition --workdir=DIR

The loss is GRPO with IcePop: the baseline is the group's mean, there is no KL term, and the indexer is frozen. Kinds
of tasks are kept in balance. Tasks that the policy solves often, and those that nobody solves, can be left out by the
pass rates of the policy and of a stronger one, which task_pass_rates.py writes:
--verdicts=OWN.jsonl --stronger_verdicts=OTHER.jsonl.

--tasks="({'file': 'FILE'},)" selects the tasks of a .jsonl file (question, answer) or of a .py file with functions `tasks`
and `verify`, such as experiments/tasks/reverse.py; glm5_jax/envs/reasoning/task_file.py describes both.

:addition  a policy of 0.13M parameters, from random weights, trains to add a digit to a number of two digits from
           rewards only, on two CPU cores in about five minutes. A KL penalty to the uniform distribution keeps it
           exploring: without one it settles on the answer that is right most often.
:tiny      from the lifecycle's SFT checkpoint (--checkpoint=WORKDIR), in about three minutes: chains of
           three and four values after SFT on five, and multiple choice. Code is too hard for it: see :small.
:tools     from the same checkpoint: products, for which the policy must call a calculator and report its answer.
:small     for one accelerator, from an SFT run: math, science, code and tools (`calculate`, `python`). It takes your tasks,
           as `tasks` above, or trains on shipped ones with --requires_data=false:
           glm5 run rl_reasoning:small --checkpoint=WORKDIR --tasks="({'file': 'tasks.jsonl'},)"
:flash     the same for one machine with 8 accelerators of 80 GB: LoRA adapters of GLM-4.7-Flash, from its HuggingFace
           folder (--experiment.checkpoint=FOLDER). The adapters are in WORKDIR/adapter, in PEFT's form.
:glm5      the same for 1,024 chips, with 64 engines of 8 chips each in processes of their own, on your tasks. On Slurm:
           glm5 slurm rl_reasoning:glm5 --chip=v5p --devices_per_node=4 --workdir=DIR --checkpoint=WORKDIR
               --tasks="({'file': 'tasks.jsonl'},)" >run.sbatch

--engine_placement=separate runs the engines of any variant in processes of their own, as in rl_agentic.py, which
describes the programs. launch/local.py starts them on this machine, launch/on_ray.py, slurm.py and gke.py on several:
glm5 local rl_reasoning:tiny --checkpoint=WORKDIR --engine_placement=separate --mismatch.attempts=0 --workdir=DIR
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from experiments import serve as serving, sft
from glm5_jax import presets
from glm5_jax.agents.loop import LoopConfig
from glm5_jax.agents.tools import Toolbox, calculate
from glm5_jax.envs.reasoning.difficulty import DifficultyConfig, keep_hard, read_verdicts
from glm5_jax.envs.reasoning.python_tool import PYTHON, Python
from glm5_jax.envs.reasoning.task_file import LoadedTasks, TaskFile
from glm5_jax.envs.reasoning.task_sources import BOXED, TaskConfig, tasks
from glm5_jax.envs.reasoning.verifiers import VerifierConfig, verifier_for
from glm5_jax.envs.search.tools import search_tools
from glm5_jax.envs.service import AgentService, make_loop_config
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.inference.request import EngineConfig
from glm5_jax.rl.algorithm.credit import CreditConfig
from glm5_jax.rl.algorithm.losses import PolicyConfig
from glm5_jax.rl.config import (
    EvaluationConfig,
    RlConfig,
    adam_optimizer_config,
    policy_step_config,
)
from glm5_jax.rl.orchestrator.task_service import ServiceConfig, TaskService
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.cluster import ClusterConfig
from glm5_jax.rl.programs.on_policy import SEPARATE, OnPolicyRlConfig
from glm5_jax.rl.programs.roles import list_roles
from glm5_jax.rl.rollouts.rollout import RolloutConfig, ToolError
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Attempt, Reward, Task, Verifier
from glm5_jax.runtime.coroutines import run_sync
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import MeshConfig, choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig
from glm5_jax.training.stages import Stage
from glm5_jax.training.step_config import StepConfig

DIGITS = "0123456789"
NEAR = 5.0  # distance at which a number is worth 1 / e of a right one

# The small lifecycle's RL stages share these engine options, and so its few compiled programs.
ENGINE = EngineConfig(
    page_size=128, max_num_seqs=128, prefill_chunk=1024, max_length=512, min_prefill_bucket=128
)


@dataclasses.dataclass(frozen=True)
class TaskWeight:
    """A task set and its share of the training data.

    Attributes:
      tasks: generator or source of the tasks.
      weight: weight of the set among all sets.
    """

    tasks: TaskConfig = TaskConfig()
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.tasks.name

    def tasks_of(self, *, evaluation: bool = False) -> list[Task]:
        """Returns the tasks of one side of the split."""
        return list(tasks(self.tasks, evaluation=evaluation))


TASKS_EXAMPLE = "tasks=\"({'file': 'tasks.jsonl'},)\""
ALL = (
    TaskWeight(TaskConfig(kind="gsm8k", size=10_000, instruction=BOXED)),
    TaskWeight(TaskConfig(kind="choices", size=10_000)),
    TaskWeight(TaskConfig(kind="mbpp", size=10_000)),
    TaskWeight(TaskConfig(kind="products", size=10_000, digits=6, python=True)),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningConfig(OnPolicyRlConfig):
    """Configuration of reasoning RL.

    Attributes:
      tasks: the domains, of roughly equal weight (GLM-5 3.2).
      verifier: options of the verifiers.
      verdicts, stronger_verdicts: files with the pass rates of two policies, for `difficulty`; None: no task is left out.
        Both or neither.
      difficulty: rule that selects tasks by these pass rates.
      partial_credit: whether to reward the right digits of an answer, for a policy that starts from random weights.
    """

    tasks: tuple[TaskWeight | TaskFile, ...] = (TaskWeight(),)
    verifier: VerifierConfig = VerifierConfig()
    verdicts: str | None = None
    stronger_verdicts: str | None = None
    difficulty: DifficultyConfig = DifficultyConfig()
    partial_credit: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.partial_credit and self.has_engine_processes:
            raise ValueError(
                "partial_credit is true, and engines in processes of their own do not count an attempt's tokens, which it "
                "needs; set it to false, or engine_placement to in_process"
            )
        if (self.verdicts is None) != (self.stronger_verdicts is None):
            raise ValueError("verdicts and stronger_verdicts belong together; give both or none")

    @property
    def data_example(self) -> str:
        return "" if any(isinstance(share, TaskFile) for share in self.tasks) else TASKS_EXAMPLE

    @property
    def task_shares(self) -> tuple[TaskWeight | TaskFile, ...]:
        return self.tasks

    def training_tasks(self, shares: Iterable[TaskWeight | TaskFile]) -> dict[str, list[Task]]:
        """Returns the training tasks of some sets by name, without those that their pass rates leave out."""
        kinds = {share.name: share.tasks_of() for share in shares}
        if self.verdicts is None or self.stronger_verdicts is None:
            return kinds
        hard_tasks, report = keep_hard(
            list(itertools.chain(*kinds.values())),
            read_verdicts(self.verdicts),
            read_verdicts(self.stronger_verdicts),
            self.difficulty,
        )
        print(report)
        hard_ids = {task.id for task in hard_tasks}
        return {name: [t for t in tasks if t.id in hard_ids] for name, tasks in kinds.items()}

    def make_sync_trainer(
        self, workdir: str | os.PathLike, previous_stage: Stage | None = None, **options
    ) -> SyncRlTrainer:
        kinds = self.training_tasks(self.tasks)
        suite = make_task_suite(
            self, kinds, Verifiers(self.verifier, self.partial_credit, self.tasks)
        )
        all_tasks = list(itertools.chain(*kinds.values()))
        return SyncRlTrainer(
            self, workdir, suite, all_tasks, previous_stage=previous_stage, **options
        )

    def make_task_service(self, service: ServiceConfig, tokenizer: Tokenizer) -> TaskService:
        share = self.tasks[self.program.number]
        return make_agent_service(
            self,
            service,
            tokenizer,
            self.training_tasks([share])[share.name],
            share.tasks_of(evaluation=True),
            loop=make_loop_config(self, self.max_attempt_tokens),
            verifier=Verifiers(self.verifier, self.partial_credit, [share]),
            shares=[share],
        )

    def programs(self) -> tuple[str, ...]:
        """Returns the flags of launch/local.py that start this run; empty if it is one program."""
        return self.start_flags(__file__, get_config)


# What launchers call: the roles of a run, the server of a role, and the check before any starts.
roles, serve = list_roles, servers.serve


def check(config: ReasoningConfig) -> None:
    """Raises ValueError for a missing checkpoint, missing tasks or an invalid schedule, before any program starts."""
    servers.check(config)
    check_tasks(config.tasks)


def check_tasks(shares: Iterable[object]) -> None:
    """Reads the tasks of files. Raises ValueError if they are missing or invalid."""
    for share in shares:
        if isinstance(share, TaskFile):
            share.tasks_of()


def make_agent_service(
    config: RlConfig,
    service: ServiceConfig,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    *,
    loop: LoopConfig,
    verifier: Verifier,
    shares: Iterable[object] = (),
    judging: Callable[[], AbstractAsyncContextManager] = contextlib.nullcontext,
) -> AgentService:
    """Returns the service of a set of tasks: with its agent, the agent's tools and the verifier.

    Args:
      loop: limits of an attempt.
      shares: sets that the tasks come from; the tools of task files are among those of the agent.
      judging: context that is open while the service runs.
    """
    return AgentService(
        service,
        tasks,
        held_out,
        make_toolbox((*tasks, *held_out), shares),
        verifier,
        tokenizer,
        loop,
        variant=config.rollout.variant,
        thinking=config.rollout.thinking,
        judging=judging,
    )


class WeightedTasks(Protocol):
    """Configuration with task sets, such as `ReasoningConfig`."""

    @property
    def tasks(self) -> Sequence[TaskWeight | TaskFile]: ...

    @property
    def seed(self) -> int: ...


def make_task_suite(
    config: WeightedTasks, kinds: Mapping[str, Sequence[Task]], verifiers: "Verifiers"
) -> TaskSuite:
    """Returns the tasks by kind, the held-out ones and the tools of all. `config` has the task weights and the seed."""
    weights = {share.name: share.weight for share in config.tasks}
    return TaskSuite(
        tasks=TaskMixture(kinds, weights, seed=config.seed),
        held_out={share.name: share.tasks_of(evaluation=True) for share in config.tasks},
        verify=verifiers,
        tools=make_toolbox(itertools.chain(*kinds.values()), config.tasks),
        close=verifiers.close,
    )


def load_files(shares: Iterable[object]) -> list[LoadedTasks]:
    """Returns the contents of the task files among sets of tasks."""
    return [share.load() for share in shares if isinstance(share, TaskFile)]


def make_toolbox(tasks: Iterable[Task], shares: Iterable[object] = ()) -> Toolbox:
    """Returns the tools of tasks.

    Raises ValueError for an unknown tool, and if `python` is needed and no sandbox starts.

    Args:
      shares: sets that the tasks come from; the tools of task files are among the result.
    """
    tasks, python = list(tasks), Python()
    tools = {"calculate": calculate, "python": python, **search_tools()}
    for loaded in load_files(shares):
        tools |= loaded.tools
    box = Toolbox(tools, tasks)
    if any(PYTHON in task.tools for task in tasks):
        try:
            run_sync(python.check())
        except ToolError as error:
            raise ValueError(
                f"tasks offer the tool python, which does not run: {error}; set python=False for them"
            ) from error
    return box


class Verifiers:
    """Verifiers of all domains, created at first use, and those of task files.

    Args:
      partial_credit: whether to reward the right digits of an answer.
      shares: sets of tasks; the verifiers of task files among them judge those tasks.
    """

    def __init__(self, config: VerifierConfig, partial_credit: bool, shares: Iterable[object] = ()):
        self._config, self._partial_credit, self._by_kind = config, partial_credit, {}
        self._of_files = {k: v for one in load_files(shares) for k, v in one.verifiers.items()}

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        if task.kind in self._of_files:
            return await self._of_files[task.kind](task, attempt)
        if self._partial_credit:
            return partial_digit_reward(task, attempt)
        if task.kind not in self._by_kind:
            self._by_kind[task.kind] = verifier_for(task.kind, self._config)
        return await self._by_kind[task.kind](task, attempt)

    def close(self) -> None:
        for verifier in self._by_kind.values():
            verifier.close()


def partial_digit_reward(task: Task, attempt: Attempt) -> Reward:
    """Rewards the right parts of a number.

    - a tenth for digits, and a tenth for ending;
    - two fifths for digits in their places;
    - a fifth for being near, and a fifth for being exact.

    Tokens that are not text count as wrong digits.
    """
    expected, reply, is_ended = task.data["answer"], attempt.reply, attempt.finish_reason == "stop"
    exact = float(is_ended and reply == expected)
    written = max(len(reply), attempt.num_sampled_tokens - is_ended)
    in_place = sum(a == b for a, b in zip(reply, expected)) / max(len(expected), written)
    count = sum(c in DIGITS for c in reply)
    digits = count / max(written, 1)
    near = (
        math.exp(-abs(int(reply) - int(expected)) / NEAR) if reply and count == len(reply) else 0.0
    )
    value = 0.1 * digits + 0.1 * is_ended + 0.4 * in_place + 0.2 * near + 0.2 * exact
    parts = {
        "exact": exact,
        "places": in_place,
        "near": near,
        "digits": digits,
        "ends": float(is_ended),
    }
    return Reward(value, parts)


def get_config(variant: str = "addition") -> ReasoningConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {
            "addition": addition,
            "tiny": tiny,
            "tools": tools,
            "small": small,
            "flash": flash,
            "glm5": glm5,
        },
    )


def addition() -> ReasoningConfig:
    """Uses our own rate, batch and reward, and Muon on the matrices, because it needs few steps."""
    base = presets.tiny()
    return ReasoningConfig(
        name="rl_reasoning:addition",
        model=dataclasses.replace(
            base,
            vocab_size=292,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            intermediate_size=128,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_nextn_predict_layers=0,
            attention="dense",
            index_topk=None,
            max_position_embeddings=128,
        ),
        tokenizer="bytes",
        requires_checkpoint=False,
        optimizer=OptimizerConfig(weight_decay=0.0, ns_dtype="float32", lm_head="adamw"),
        schedule=ScheduleConfig(
            kind="linear", peak=5e-3, end=5e-4, warmup_steps=10, total_steps=700
        ),
        step=dataclasses.replace(policy_step_config(), remat="none"),
        policy=PolicyConfig(ref_kl=0.12),
        credit=CreditConfig(kl_target="uniform"),
        train=TrainConfig(eval_interval=50, sample_interval=0, save_interval=250),
        rollout=RolloutConfig(prompts=32, group=16, max_tokens=4, max_turns=1, thinking=False),
        engine=EngineConfig(
            page_size=16, max_num_seqs=512, prefill_chunk=8192, max_length=32, min_prefill_bucket=16
        ),
        evaluation=EvaluationConfig(tasks=100, temperature=0.0),
        length=32,
        rows=16,
        tasks=(
            TaskWeight(
                TaskConfig(kind="addition", size=20_000, digits=2, fewer=1, held_out_fraction=0.2)
            ),
        ),
        partial_credit=True,
    )


def tiny() -> ReasoningConfig:
    """Uses our own rate, batch and lengths, chosen so that a small policy improves within minutes."""
    return ReasoningConfig(
        name="rl_reasoning:tiny",
        model=sft.without_int4(sft.tiny("mixed").model),
        optimizer=dataclasses.replace(adam_optimizer_config(), weight_decay=0.0),
        schedule=ScheduleConfig(kind="linear", peak=2e-4, end=2e-5, warmup_steps=5, total_steps=40),
        step=dataclasses.replace(policy_step_config(), remat="none"),
        train=TrainConfig(eval_interval=10, sample_interval=0, save_interval=20),
        rollout=RolloutConfig(prompts=8, group=16, max_tokens=80, max_turns=2),
        engine=ENGINE,
        evaluation=EvaluationConfig(tasks=64),
        length=512,
        rows=8,
        tasks=(
            TaskWeight(TaskConfig(kind="chain", size=20_000, steps=3), 0.45),
            TaskWeight(TaskConfig(kind="chain", size=20_000, steps=4), 0.45),
            TaskWeight(TaskConfig(kind="choices", size=2000), 0.1),
        ),
    )


def tools() -> ReasoningConfig:
    """Uses our own rate, batch and lengths. The third turn allows a second call after wrongly copied numbers."""
    base = tiny()
    return dataclasses.replace(
        base,
        name="rl_reasoning:tools",
        schedule=ScheduleConfig(kind="linear", peak=3e-4, end=3e-5, warmup_steps=5, total_steps=40),
        # Without microbatches the rows would need 3 to 6 GB and half as much time again.
        step=dataclasses.replace(base.step, rows_per_device=8),
        rollout=RolloutConfig(prompts=8, group=16, max_tokens=64, max_turns=3),
        credit=CreditConfig(drop_zero_variance_groups=True),
        length=512,
        rows=64,
        tasks=(TaskWeight(TaskConfig(kind="products", size=20_000, digits=2)),),
    )


def small() -> ReasoningConfig:
    """Samples replies of up to 4K tokens."""
    base = sft.small("mixed")
    return ReasoningConfig(
        name="rl_reasoning:small",
        requires_data=True,
        model=sft.without_int4(base.model),
        mesh=base.mesh,
        schedule=ScheduleConfig(
            kind="constant", peak=1e-6, end=0.0, warmup_steps=0, total_steps=200
        ),
        step=policy_only(base.step),
        rollout=RolloutConfig(prompts=16, group=16, max_tokens=4096, max_turns=4),
        engine=EngineConfig(max_num_seqs=256, prefill_chunk=8192, max_length=8192),
        length=8192,
        tasks=ALL,
    )


def flash() -> ReasoningConfig:
    """Trains adapters of rank 16; learner and engine both have the weights, sharded over the machine."""
    return dataclasses.replace(
        small(),
        name="rl_reasoning:flash",
        model=sft.flash("mixed").model,
        mesh=MeshConfig(fsdp=1, expert=-1),
        optimizer=dataclasses.replace(adam_optimizer_config(), weight_decay=0.0),
        schedule=ScheduleConfig(
            kind="constant", peak=2e-5, end=0.0, warmup_steps=0, total_steps=200
        ),
        step=dataclasses.replace(policy_step_config(), rows_per_device=1),
        engine=EngineConfig(max_num_seqs=32, prefill_chunk=2048, max_length=8192),
    )


def glm5() -> ReasoningConfig:
    """Runs the trainer on the mesh of the sparse stage, one pod slice of v5p, and engines as W4A8 on 8 chips each.

    The W4A8 checkpoint is --experiment.served_checkpoint=FOLDER of quantise.py. The paper does not disclose the number of
    engines.
    """
    base, serve_config = sft.glm5("mixed"), serving.glm5()
    length = ReasoningConfig().length
    return ReasoningConfig(
        name="rl_reasoning:glm5",
        requires_data=True,
        model=sft.without_int4(base.model),
        mesh=base.mesh,
        step=dataclasses.replace(policy_only(base.step), token_chunk=1088),
        engine=dataclasses.replace(serve_config.engine, max_length=length),
        length=length,
        rows=256,
        tasks=ALL,
        engine_placement=SEPARATE,
        mismatch=MismatchConfig(attempts=0),
        cluster=ClusterConfig(
            engines=64,
            ranks=8,
            engine_hosts=2,
            engine_devices=4,
            engine_mesh=serve_config.mesh,
            engine_topology="2x2x2",
            hosts=256,
            devices=4,
            topology="8x8x16",
            port=7000,
        ),
    )


def policy_only(step: StepConfig) -> StepConfig:
    """Returns the step of an earlier stage with only the policy trained."""
    policy_step = policy_step_config()
    names = ("mtp_steps", "balance_weight", "bias_update_rate", "index_weight")
    return dataclasses.replace(step, **{name: getattr(policy_step, name) for name in names})


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
