"""SFT: a base model becomes an assistant that thinks when it should (GLM-5 3.1).

    python -m launch.run --experiment=experiments/sft.py:tiny,mixed --experiment.checkpoint=WORKDIR

SIZE,KIND: interleaved thinks before every reply and call and forgets it with the next turn, preserved keeps it,
turn_level thinks when a request asks for it, and mixed has them all beside chats without any. Goes on
from the sparse model, with routed experts as int4 would have them (QAT); learnt is what the assistant
says, but for its mistakes.

:tiny    for two CPU cores: what is shipped and made (glm5_jax/data/chat_tasks.py), 1024 tokens, about four
         minutes. What it then can do: experiments/ablations/thinking.py.
:small   for one accelerator: 32K. Bring chats of your own, each category with its weight:
         --experiment.data.sources="[{'chats': 'agent/*.jsonl', 'category': 'agent', 'mode': 'preserved'}]"
         python -m experiments.check_chats FILES says what is wrong with them.
:glm5    for 1,024 chips: up to 202,752 tokens. Rate, batch, tokens and the categories' shares are not printed
         in the paper; those here are ours.
"""

import dataclasses
import functools

from experiments import dsa_sparse, pretrain
from glm5_jax.config import ModelConfig
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.chat_tasks import ChatTaskConfig
from glm5_jax.data.mixture import DataConfig
from glm5_jax.text.thinking import MODES
from glm5_jax.training.experiment import ExperimentConfig, SampleConfig, choose
from glm5_jax.training.schedule import ScheduleConfig

evaluator = pretrain.evaluator
KINDS = (*MODES, "mixed")
TOKENS = 20e9  # ours
PLAYS, MBPP, GSM8K = (ChatTaskConfig(kind, size=10_000) for kind in ("plays", "mbpp", "gsm8k"))
CHAIN = ChatTaskConfig("chain", size=30_000, steps=5, turns=3)
TOOLS = ChatTaskConfig("tools", size=4_000, mistakes=0.2)


def get_config(variant: str = "tiny,mixed") -> ExperimentConfig:
    """The variant's experiment; ValueError lists the variants."""
    sizes = {"tiny": tiny, "small": small, "glm5": glm5}
    return choose(
        variant,
        {
            f"{size},{kind}": functools.partial(sizes[size], kind)
            for size in sizes
            for kind in KINDS
        },
    )


def chats(kind: str) -> tuple[ChatSourceConfig, ...]:
    """The sources of a kind."""
    if kind != "mixed":
        return (
            ChatSourceConfig(CHAIN, "reasoning", kind, 0.75),
            ChatSourceConfig(GSM8K, "reasoning", kind, 0.05),
            ChatSourceConfig(TOOLS, "agent", kind, 0.2),
        )
    return (
        ChatSourceConfig(PLAYS, "general", "turn_level", 0.05),
        ChatSourceConfig(MBPP, "coding", "turn_level", 0.05),
        ChatSourceConfig(GSM8K, "reasoning", "turn_level", 0.05),
        ChatSourceConfig(CHAIN, "reasoning", "turn_level", 0.35),
        ChatSourceConfig(CHAIN, "reasoning", "preserved", 0.3),
        ChatSourceConfig(TOOLS, "agent", "interleaved", 0.2),
    )


def finetuned(
    base: ExperimentConfig, name: str, kind: str, schedule: ScheduleConfig, group: int
) -> ExperimentConfig:
    """Trains the sparse stage's model on chats, with int4 experts in groups of `group` rows. That the indexers go on
    learning, as in that stage, is ours. Without int4: --experiment.model.int4_group=None."""
    length = base.data.sequence_length
    return dataclasses.replace(
        base,
        name=f"{name},{kind}",
        model=dataclasses.replace(base.model, int4_group=group),
        data=DataConfig(
            chats(kind),
            sequence_length=length,
            packing="best_fit",
            open_rows=8 if length > 100_000 else base.data.open_rows,  # see DataConfig
            num_threads=base.data.num_threads,
        ),
        schedule=schedule,
    )


def without_int4(model: ModelConfig) -> ModelConfig:
    """Returns SFT's model for the stages after it: GLM-5 2.4.3 has quantisation-aware training in SFT alone."""
    return dataclasses.replace(model, int4_group=None)


def tiny(kind: str) -> ExperimentConfig:
    """At pre-training's rate, as all of it is new to the model."""
    base = dsa_sparse.tiny()
    schedule = ScheduleConfig(kind="linear", peak=5e-3, end=2e-4, warmup_steps=10, total_steps=600)
    config = finetuned(base, "sft:tiny", kind, schedule, 32)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train,
            eval_interval=300,
            sample_interval=300,
            save_interval=300,
            baseline_tokens=2**18,
        ),
        sample=SampleConfig(
            prompts=("a=3+4 b=a*7 c=b+2 d=c*3 e=d+1 e?", "What, is my husband gone?"),
            tokens=60,
            temperature=0.0,
            chat=True,
        ),
    )


def small(kind: str) -> ExperimentConfig:
    """0.3B tokens."""
    schedule = ScheduleConfig(warmup_steps=50, peak=1e-4, end=1e-5, total_steps=2000)
    return finetuned(dsa_sparse.small(), "sft:small", kind, schedule, 128)


def glm5(kind: str) -> ExperimentConfig:
    """From the rate of the sparse stage to a tenth of it."""
    base = dsa_sparse.glm5()
    steps = -(-int(TOKENS) // base.batch.end)
    schedule = ScheduleConfig(warmup_steps=steps // 50, peak=1e-5, end=1e-6, total_steps=steps)
    return finetuned(base, "sft:glm5", kind, schedule, 128)


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
