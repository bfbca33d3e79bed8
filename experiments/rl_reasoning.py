"""Reasoning RL: math, science, code and reasoning with tools, by what can be checked (GLM-5 3.2).

    python -m launch.run --experiment=experiments/rl_reasoning.py:addition --workdir=DIR

GRPO with IcePop: groups of attempts against their own mean, no KL; the indexer stays as it is. Kinds of tasks are
kept in balance. Those that the policy solves often or nobody ever can be left out, by what it and a stronger one made
of them: --experiment.verdicts=OWN.jsonl --experiment.stronger_verdicts=OTHER.jsonl, which verdicts.py writes.

:addition  a policy of 0.13M parameters begins with random weights and learns to add a digit to a number of two from
           rewards alone, on two CPU cores in about five minutes. A pull towards the uniform distribution keeps it
           trying: without one it settles on the answer that is right most often.
:tiny      from the lifecycle's SFT checkpoint (--experiment.checkpoint=WORKDIR), in about three minutes: chains of three
           and four values after SFT on five, and a choice of letters. Code is beyond it: see :small.
:tools     from the same checkpoint: products, by a calculator that must be called and whose answer must be told.
:small     for one accelerator, from an SFT run: math, science, code and tools.
:glm5      the same for 1,024 chips. Bring tasks of your own; those that are shipped here are few.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from experiments import sft
from glm5_jax import presets
from glm5_jax.agents.tools import Toolbox, calculate
from glm5_jax.envs.difficulty import DifficultyConfig, keep_hard, read_verdicts
from glm5_jax.envs.reasoning import VerifierConfig, verifier_for
from glm5_jax.envs.reasoning_tasks import BOXED, TaskConfig, tasks
from glm5_jax.envs.search.tools import search_tools
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.inference.request import EngineConfig
from glm5_jax.rl.experiment import EvaluationConfig, RlConfig, adam, policy_alone
from glm5_jax.rl.losses import PolicyConfig
from glm5_jax.rl.rollout import RolloutConfig
from glm5_jax.rl.stage import Reinforcement, World
from glm5_jax.rl.streams import CreditConfig
from glm5_jax.rl.types import Attempt, Reward, Task
from glm5_jax.training.experiment import choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig
from glm5_jax.training.step import StepConfig

DIGITS = "0123456789"
TOOLS = {"calculate": calculate, **search_tools()}
NEAR = 5.0  # how far off a number is worth 1 / e of a right one

# Of all stages of the small life, which have its few programs in common.
ENGINE = EngineConfig(page_size=128, max_batch=128, chunk=1024, max_length=512, short_prompt=128)


@dataclasses.dataclass(frozen=True)
class Share:
    """Tasks, and how much of all that is learnt from they are to be."""

    tasks: TaskConfig = TaskConfig()
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.tasks.name

    def tasks_of(self, *, evaluation: bool = False) -> list[Task]:
        """Those of one side of the split."""
        return list(tasks(self.tasks, evaluation=evaluation))


ALL = (
    Share(TaskConfig("gsm8k", size=10_000, instruction=BOXED)),
    Share(TaskConfig("choices", size=10_000)),
    Share(TaskConfig("mbpp", size=10_000)),
    Share(TaskConfig("products", size=10_000, digits=6)),
)


@dataclasses.dataclass(frozen=True)
class ReasoningConfig(RlConfig):
    """Attributes:
    tasks: the domains, of roughly equal weight (GLM-5 3.2).
    verdicts, stronger_verdicts: what two policies made of the tasks, for `difficulty`; both or none.
    partly: rewards what is right of an answer, digit by digit: for a policy that begins with nothing.
    """

    tasks: tuple[Share, ...] = (Share(),)
    verifier: VerifierConfig = VerifierConfig()
    verdicts: str | None = None
    stronger_verdicts: str | None = None
    difficulty: DifficultyConfig = DifficultyConfig()
    partly: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not self.tasks:
            raise ValueError("tasks is empty; name at least one kind")
        names = [share.name for share in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the tasks have one name: {sorted(names)}; join them into one")
        if (self.verdicts is None) != (self.stronger_verdicts is None):
            raise ValueError("verdicts and stronger_verdicts belong together; give both or none")

    def stage(self, workdir, evaluator=None, before=None, **options) -> Reinforcement:
        del evaluator
        kinds = {share.name: share.tasks_of() for share in self.tasks}
        if self.verdicts is not None:
            known, report = keep_hard(
                list(itertools.chain(*kinds.values())),
                read_verdicts(self.verdicts),
                read_verdicts(self.stronger_verdicts),
                self.difficulty,
            )
            print(report)
            kept = {task.id for task in known}
            kinds = {name: [t for t in own if t.id in kept] for name, own in kinds.items()}
        world = world_of(self, kinds, Verifiers(self.verifier, self.partly))
        known = list(itertools.chain(*kinds.values()))
        return Reinforcement(self, workdir, world, known, before=before, **options)


def world_of(config, kinds: Mapping[str, Sequence[Task]], verifiers: "Verifiers") -> World:
    """Tasks by kind, those that are held out, and the tools of all. config: has the shares as `tasks`, and the seed."""
    weights = {share.name: share.weight for share in config.tasks}
    return World(
        TaskMixture(kinds, weights, seed=config.seed),
        {share.name: share.tasks_of(evaluation=True) for share in config.tasks},
        verifiers,
        Toolbox(TOOLS, itertools.chain(*kinds.values())),
        close=verifiers.close,
    )


class Verifiers:
    """Those of all domains, made when they are first needed."""

    def __init__(self, config: VerifierConfig, partly: bool):
        self._config, self._partly, self._made = config, partly, {}

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        if self._partly:
            return digits_right(task, attempt)
        if task.kind not in self._made:
            self._made[task.kind] = verifier_for(task.kind, self._config)
        return await self._made[task.kind](task, attempt)

    def close(self) -> None:
        for verifier in self._made.values():
            verifier.close()


def digits_right(task: Task, attempt: Attempt) -> Reward:
    """What of a number is right: a tenth each for being digits and for ending, two fifths for digits in their places, a
    fifth each for being near and for being all right. Tokens that are no text stand where digits should."""
    want, got, ends = task.data["answer"], attempt.reply, attempt.finish_reason == "stop"
    exact = float(ends and got == want)
    written = max(len(got), attempt.sampled - ends)
    places = sum(a == b for a, b in zip(got, want)) / max(len(want), written)
    count = sum(c in DIGITS for c in got)
    digits = count / max(written, 1)
    near = math.exp(-abs(int(got) - int(want)) / NEAR) if got and count == len(got) else 0.0
    value = 0.1 * digits + 0.1 * ends + 0.4 * places + 0.2 * near + 0.2 * exact
    parts = {"exact": exact, "places": places, "near": near, "digits": digits, "ends": float(ends)}
    return Reward(value, parts)


def get_config(variant: str = "addition") -> ReasoningConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(
        variant, {"addition": addition, "tiny": tiny, "tools": tools, "small": small, "glm5": glm5}
    )


def addition() -> ReasoningConfig:
    """Rate, batch and reward are ours; Muon on the matrices, as it learns from few steps."""
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
        goes_on=False,
        optimizer=OptimizerConfig(weight_decay=0.0, ns_dtype="float32"),
        schedule=ScheduleConfig(
            kind="linear", peak=5e-3, end=5e-4, warmup_steps=10, total_steps=700
        ),
        step=dataclasses.replace(policy_alone(), remat="none"),
        policy=PolicyConfig(ref_kl=0.12),
        credit=CreditConfig(pull="uniform"),
        train=TrainConfig(eval_interval=50, sample_interval=0, save_interval=250),
        rollout=RolloutConfig(prompts=32, group=16, max_tokens=4, max_turns=1, thinking=False),
        engine=EngineConfig(
            page_size=16, max_batch=512, chunk=8192, max_length=32, short_prompt=16
        ),
        evaluation=EvaluationConfig(tasks=100, temperature=0.0),
        length=32,
        rows=16,
        tasks=(
            Share(TaskConfig("addition", size=20_000, digits=2, fewer=1, held_out_fraction=0.2)),
        ),
        partly=True,
    )


def tiny() -> ReasoningConfig:
    """Rate, batch and lengths are ours: what moves a small policy within minutes."""
    return ReasoningConfig(
        name="rl_reasoning:tiny",
        model=sft.without_int4(sft.tiny("mixed").model),
        optimizer=dataclasses.replace(adam(), weight_decay=0.0),
        schedule=ScheduleConfig(kind="linear", peak=2e-4, end=2e-5, warmup_steps=5, total_steps=40),
        step=dataclasses.replace(policy_alone(), remat="none"),
        train=TrainConfig(eval_interval=10, sample_interval=0, save_interval=20),
        rollout=RolloutConfig(prompts=8, group=16, max_tokens=80, max_turns=2),
        engine=ENGINE,
        evaluation=EvaluationConfig(tasks=64),
        length=512,
        rows=8,
        tasks=(
            Share(TaskConfig("chain", size=20_000, steps=3), 0.45),
            Share(TaskConfig("chain", size=20_000, steps=4), 0.45),
            Share(TaskConfig("choices", size=2000), 0.1),
        ),
    )


def tools() -> ReasoningConfig:
    """Rate, batch and lengths are ours. A second call is left for who did not copy the numbers rightly in the first."""
    base = tiny()
    return dataclasses.replace(
        base,
        name="rl_reasoning:tools",
        schedule=ScheduleConfig(kind="linear", peak=3e-4, end=3e-5, warmup_steps=5, total_steps=40),
        # At once, its rows would hold 3 to 6 GB, and take half as long again.
        step=dataclasses.replace(base.step, rows_per_device=8),
        rollout=RolloutConfig(prompts=8, group=16, max_tokens=64, max_turns=3),
        credit=CreditConfig(drop_flat=True),
        length=512,
        rows=64,
        tasks=(Share(TaskConfig("products", size=20_000, digits=2)),),
    )


def small() -> ReasoningConfig:
    """Replies of 4K tokens."""
    base = sft.small("mixed")
    return ReasoningConfig(
        name="rl_reasoning:small",
        model=sft.without_int4(base.model),
        mesh=base.mesh,
        schedule=ScheduleConfig("constant", 1e-6, 0.0, 0, 200),
        step=alone(base.step),
        rollout=RolloutConfig(prompts=16, group=16, max_tokens=4096, max_turns=4),
        engine=EngineConfig(max_batch=256, chunk=8192, max_length=8192),
        length=8192,
        tasks=ALL,
    )


def glm5() -> ReasoningConfig:
    """On the mesh of the sparse stage, whose rows are longer still."""
    base = sft.glm5("mixed")
    return ReasoningConfig(
        name="rl_reasoning:glm5",
        model=sft.without_int4(base.model),
        mesh=base.mesh,
        step=dataclasses.replace(alone(base.step), token_chunk=1088),
        engine=EngineConfig(max_batch=512, chunk=8192),
        rows=256,
        tasks=ALL,
    )


def alone(step: StepConfig) -> StepConfig:
    """The step of an earlier stage, of which only the policy learns."""
    own = policy_alone()
    names = ("mtp_steps", "balance_weight", "bias_update_rate", "index_weight")
    return dataclasses.replace(step, **{name: getattr(own, name) for name in names})


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
