"""Reasoning RL: math, science, code and reasoning with tools, by what can be checked (GLM-5 3.2).

    python -m launch.run --experiment=experiments/rl_reasoning.py:addition --workdir=DIR

GRPO with IcePop: groups of attempts against their own mean, no KL; the indexer stays as it is. Kinds of tasks are
kept in balance. Those that the policy solves often or nobody ever can be left out, by what it and a stronger one made
of them: --experiment.verdicts=OWN.jsonl --experiment.stronger_verdicts=OTHER.jsonl (envs/difficulty.py).

:addition  a policy of 0.13M parameters begins with random weights and is rewarded for the digits of a sum. With these
           rates it learns what a number looks like, and then settles on one answer: they are not tuned yet.
"""

import dataclasses
import itertools
import math

from glm5_jax import presets
from glm5_jax.envs.difficulty import DifficultyConfig, keep_hard, read_verdicts
from glm5_jax.envs.reasoning import VerifierConfig, verifier_for
from glm5_jax.envs.reasoning_tasks import TaskConfig, tasks
from glm5_jax.envs.task_mixture import TaskMixture
from glm5_jax.inference.request import EngineConfig
from glm5_jax.rl.experiment import EvaluationConfig, RlConfig, policy_alone
from glm5_jax.rl.losses import PolicyConfig
from glm5_jax.rl.rollout import RolloutConfig
from glm5_jax.rl.stage import Reinforcement, World
from glm5_jax.rl.streams import CreditConfig
from glm5_jax.rl.types import Attempt, Reward, Task
from glm5_jax.training.experiment import choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig

DIGITS = "0123456789"
NEAR = 3.0  # how far off a number is worth 1 / e of a right one


@dataclasses.dataclass(frozen=True)
class Share:
    """Tasks, and how much of all that is learnt from they are to be."""

    tasks: TaskConfig = TaskConfig()
    weight: float = 1.0


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
        names = [share.tasks.name for share in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the tasks have one name: {sorted(names)}; join them into one")
        if (self.verdicts is None) != (self.stronger_verdicts is None):
            raise ValueError("verdicts and stronger_verdicts belong together; give both or none")

    def stage(self, workdir, evaluator=None, before=None) -> Reinforcement:
        del evaluator
        kinds = {share.tasks.name: list(tasks(share.tasks)) for share in self.tasks}
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
        weights = {share.tasks.name: share.weight for share in self.tasks}
        verifiers = Verifiers(self.verifier, self.partly)
        world = World(
            TaskMixture(kinds, weights, seed=self.seed),
            {share.tasks.name: list(tasks(share.tasks, evaluation=True)) for share in self.tasks},
            verifiers,
            close=verifiers.close,
        )
        return Reinforcement(
            self, workdir, world, list(itertools.chain(*kinds.values())), before=before
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
    """What of a number is right: a tenth each for being digits and for ending, a fifth each for digits in their places
    and for how near it is, the rest for all of it."""
    want, got, ends = task.data["answer"], attempt.reply, attempt.finish_reason == "stop"
    exact = float(ends and got == want)
    places = sum(a == b for a, b in zip(got, want)) / max(len(want), len(got))
    digits = sum(c in DIGITS for c in got) / max(len(got), 1)
    near = math.exp(-abs(int(got) - int(want)) / NEAR) if digits == 1 else 0.0
    value = 0.1 * digits + 0.1 * ends + 0.2 * places + 0.2 * near + 0.4 * exact
    parts = {"exact": exact, "places": places, "near": near, "digits": digits, "ends": float(ends)}
    return Reward(value, parts)


def get_config(variant: str = "addition") -> ReasoningConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"addition": addition})


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
            kind="linear", peak=5e-3, end=5e-4, warmup_steps=10, total_steps=500
        ),
        step=dataclasses.replace(policy_alone(), remat="none"),
        policy=PolicyConfig(ref_kl=0.15),
        credit=CreditConfig(pull="uniform"),
        train=TrainConfig(eval_interval=50, sample_interval=0, save_interval=250),
        rollout=RolloutConfig(prompts=32, group=16, max_tokens=4, max_turns=1, thinking=False),
        engine=EngineConfig(page_size=16, max_batch=512, chunk=16_384, max_length=32),
        evaluation=EvaluationConfig(tasks=100, temperature=0.0),
        length=128,
        rows=16,
        tasks=(Share(TaskConfig("addition", size=20_000, digits=1, held_out_fraction=0.2)),),
        partly=True,
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
