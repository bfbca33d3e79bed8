"""Runs agentic RL: a policy trains on multi-turn tool use while engines sample for it (GLM-5 4).

    glm5 local rl_agentic:tiny --checkpoint=WORKDIR --workdir=DIR

WORKDIR is a run of sft.py or of a later stage. A run consists of several programs on separate devices:

- engines;
- a gateway, which keeps the sampled token ids of every session;
- an orchestrator, which divides the engines' capacity among the task services;
- the task services;
- the trainer.

launch/local.py starts all of them on this machine and restarts those that fail. launch/on_ray.py, slurm.py and gke.py
do so on several machines. DIR has the report, with a timeline of all programs, and each program's output in DIR/roles.
DIR/run.key is the API key of the run: created at its start with mode 600, sent and required by every program. The same
command resumes a run that was stopped or killed. It is refused while another run uses DIR.

:tiny    two services, on two CPU cores in about ten minutes: products, for which the policy must call a calculator and
         report its answer, and chains of four values
:small   an engine and a trainer on one accelerator each, on your tasks; or, with --requires_data=false, on the shipped
         ones: search, products and programs
         glm5 local rl_agentic:small --checkpoint=WORKDIR --workdir=DIR --tasks="({'folder': 'TASKS'},)"
:glm5    64 engines of 8 chips each, and a trainer on 1,024, on your tasks. On Slurm:
         glm5 slurm rl_agentic:glm5 --chip=v5p --devices_per_node=4 --workdir=DIR --checkpoint=WORKDIR
             --tasks="({'folder': 'TASKS'},)" >run.sbatch

--engine.quantization=fp8 samples from block-wise FP8 weights, which the trainer quantises at each push (GLM-5 3.6.2).
--max_staleness=0 is synchronous training: no sampling during updates.
--tasks="({'folder': 'DIR'},)" selects terminal tasks: folders in Harbor's format in DIR. Each is attempted
with a shell in a sandbox, as in experiments/evaluate.py, for which their program needs root.
--tasks="({'harbor': 'NAME@VERSION'},)" selects terminal tasks of a Harbor registry, which the package harbor downloads.
--tasks="({'verifiers': 'ID'},)" selects an environment of the verifiers library, if it is installed.
--tasks="({'dataset': 'DIR'},)" selects software engineering tasks, the data set that build_environments.py writes in DIR.
--tasks="({'file': 'FILE'},)" selects the tasks of a .jsonl or .py file, as in rl_reasoning.py, with the file's tools.
"""

import dataclasses
from collections.abc import Iterable

from experiments import rl_reasoning, serve as serving
from experiments.rl_reasoning import TaskWeight
from glm5_jax.agents.context import CONTEXTS, ContextConfig
from glm5_jax.agents.loop import LoopConfig
from glm5_jax.envs.reasoning.task_file import TaskFile
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.envs.service import make_loop_config
from glm5_jax.envs.swe.service import SweShare
from glm5_jax.envs.terminal.registry import HarborShare
from glm5_jax.envs.terminal.service import TerminalShare
from glm5_jax.envs.verifiers.service import VerifiersShare
from glm5_jax.inference.request import EngineConfig
from glm5_jax.rl.algorithm.credit import CreditConfig
from glm5_jax.rl.algorithm.losses import PolicyConfig
from glm5_jax.rl.config import EvaluationConfig
from glm5_jax.rl.orchestrator.task_registry import RegistryConfig
from glm5_jax.rl.orchestrator.task_service import ServiceConfig, TaskService
from glm5_jax.rl.programs import servers
from glm5_jax.rl.programs.cluster import ClusterConfig
from glm5_jax.rl.programs.roles import list_roles
from glm5_jax.rl.programs.trainer import AgenticRlConfig
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.schedule import ScheduleConfig

ALL = (
    TaskWeight(TaskConfig(kind="musique", size=10_000, python=True)),
    TaskWeight(TaskConfig(kind="worlds", size=10_000, hops=4, python=True)),
    TaskWeight(TaskConfig(kind="products", size=10_000, digits=6, python=True)),
    TaskWeight(TaskConfig(kind="mbpp", size=10_000)),
)


# A dict on the command line becomes the first class that has its fields.
Share = TaskWeight | TaskFile | TerminalShare | HarborShare | SweShare | VerifiersShare


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgenticConfig(AgenticRlConfig):
    """Configuration of asynchronous RL with agents.

    Replies and turns of an attempt are limited by `rollout`, its tokens by `length`. `rollout.tool_timeout_s` applies too,
    except in terminals.

    Attributes:
      tasks: task services, each with its weight in the training data.
      verifier: options of the verifiers.
      context: part of a conversation that each request sends; all of it by default. GLM-5 4.2.4 shortens it for search
        agents at inference; 3.1 keeps the thinking of coding agents. A shortened turn is a training record of its own.
      ends_on_broken_call: see `LoopConfig`; False in terminals, where the work until then is graded.
    """

    policy: PolicyConfig = PolicyConfig(correction="double_sided")  # GLM-5 4.1.2
    credit: CreditConfig = CreditConfig(baseline="centred")  # GLM-5 3.3
    tasks: tuple[Share, ...] = rl_reasoning.ALL
    verifier: VerifierConfig = VerifierConfig()
    context: ContextConfig = CONTEXTS["everything"]
    ends_on_broken_call: bool = True  # GLM-4.5 3.2

    def __post_init__(self):
        super().__post_init__()
        self.loop()

    @property
    def data_example(self) -> str:
        is_shipped = all(isinstance(share, TaskWeight) for share in self.tasks)
        return rl_reasoning.TASKS_EXAMPLE if is_shipped else ""

    def loop(self) -> LoopConfig:
        """Returns the limits of an attempt."""
        loop = make_loop_config(self, self.length, self.context)
        return dataclasses.replace(loop, ends_on_broken_call=self.ends_on_broken_call)

    @property
    def task_shares(self) -> tuple[Share, ...]:
        return self.tasks

    def make_task_service(self, service: ServiceConfig, tokenizer: Tokenizer) -> TaskService:
        """Returns the service of a set of tasks: with its agent, the agent's tools and the verifier."""
        share = self.tasks[self.program.number]
        if isinstance(share, VerifiersShare):
            return share.make_service(service, self.loop())
        if isinstance(share, TerminalShare | SweShare):
            options = {"variant": self.rollout.variant, "thinking": self.rollout.thinking}
            return share.make_service(service, tokenizer, self.loop(), **options)
        return rl_reasoning.make_agent_service(
            self,
            service,
            tokenizer,
            share.tasks_of(),
            share.tasks_of(evaluation=True),
            loop=self.loop(),
            verifier=rl_reasoning.Verifiers(self.verifier, False, (share,)),
            shares=(share,),
        )

    def programs(self) -> tuple[str, ...]:
        """Returns the flags of launch/local.py that start this run. Empty for a process that is one of its programs."""
        return self.start_flags(__file__, get_config)


# What launchers call: the roles of a run, the server of a role, and the check before any starts.
roles, serve = list_roles, servers.serve


def check(config: AgenticConfig) -> None:
    """Raises ValueError for a missing checkpoint, missing tasks or an invalid schedule, before any program starts."""
    servers.check(config)
    check_tasks(config.tasks)


def check_tasks(shares: Iterable[object]) -> None:
    """Reads the tasks of folders and files. Raises ValueError if they are missing or invalid."""
    shares = list(shares)
    for share in shares:
        if isinstance(share, TerminalShare | SweShare | VerifiersShare):
            share.load()
    rl_reasoning.check_tasks(shares)


def get_config(variant: str = "tiny") -> AgenticConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5})


def tiny() -> AgenticConfig:
    """Uses our own rate, batch and lengths, as rl_reasoning.py does.

    Few batch shapes suffice for an engine whose requests arrive one by one, so that little is compiled.
    """
    base = rl_reasoning.tools()
    return AgenticConfig(
        name="rl_agentic:tiny",
        model=base.model,
        optimizer=base.optimizer,
        schedule=ScheduleConfig(kind="linear", peak=3e-4, end=3e-5, warmup_steps=5, total_steps=40),
        step=base.step,
        train=TrainConfig(eval_interval=10, sample_interval=0, save_interval=10),
        credit=CreditConfig(baseline="centred", drop_zero_variance_groups=True),
        rollout=dataclasses.replace(base.rollout, prompts=8),
        engine=EngineConfig(
            page_size=128,
            num_pages=1024,
            max_num_seqs=64,
            prefill_chunk=256,
            max_length=512,
            min_prefill_bucket=64,
        ),
        evaluation=EvaluationConfig(tasks=32),
        length=base.length,
        rows=64,
        max_staleness=2,
        # Adam's first step after a reset of its moments uses only the gradient's signs: too coarse for so short a run.
        reset_optimizer=False,
        max_running=24,
        agent_timeout_s=600.0,
        judge_timeout_s=60.0,
        batch_timeout_s=1500.0,
        registry=RegistryConfig(heartbeat_timeout_s=60.0),
        tasks=(
            TaskWeight(TaskConfig(kind="products", size=4000, digits=2), 0.75),
            TaskWeight(TaskConfig(kind="chain", size=4000, steps=4), 0.25),
        ),
        cluster=ClusterConfig(warm=False),
    )


def small() -> AgenticConfig:
    """Runs on two accelerators."""
    base = rl_reasoning.small()
    return AgenticConfig(
        name="rl_agentic:small",
        requires_data=True,
        model=base.model,
        mesh=base.mesh,
        schedule=base.schedule,
        step=base.step,
        rollout=RolloutConfig(prompts=16, group=8, max_tokens=4096, max_turns=32),
        engine=EngineConfig(max_num_seqs=128, prefill_chunk=8192, max_length=32_768),
        length=32_768,
        tasks=ALL,
        cluster=ClusterConfig(engine_devices=1, devices=1),
    )


def glm5() -> AgenticConfig:
    """Runs trainer and engines on the chips of rl_reasoning.py:glm5, with the context of the served model."""
    base = rl_reasoning.glm5()
    return AgenticConfig(
        name="rl_agentic:glm5",
        requires_data=True,
        model=base.model,
        mesh=base.mesh,
        step=base.step,
        rollout=RolloutConfig(prompts=32, group=8, max_turns=100),
        engine=serving.glm5().engine,
        length=202_752,  # GLM-5 B.2
        rows=base.rows,
        max_running=256,  # 2,048 rollouts at most; GLM-5 4.1.1: more than 1,000
        tasks=ALL,
        # GLM-5 4.1.1: a batch is sent once enough trajectories exist, and stale ones are dropped.
        pacing=False,
        cluster=base.cluster,
    )


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
