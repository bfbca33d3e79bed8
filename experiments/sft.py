"""Fine-tunes a base model into an assistant that can think before it replies (SFT, GLM-5 3.1).

    glm5 run sft:tiny,mixed --checkpoint=WORKDIR

The variant is SIZE,KIND. Kinds:

- interleaved: thinks before every reply and call, and drops the thinking of earlier turns;
- preserved: as interleaved, and keeps the thinking of all turns;
- turn_level: thinks if the request asks for it;
- mixed: all three, and chats without thinking.

Starts from the sparse model. Routed experts are trained as int4 (QAT; without it: --model.int4_group=None). The loss
covers the assistant's tokens, except its mistakes.

:tiny    for two CPU cores: shipped and generated chats (glm5_jax/data/chat_tasks.py), 1024 tokens, about four
         minutes. experiments/ablations/thinking.py measures the result. It takes your chats too, and a model such as
         that of the quickstart. 100 steps are enough for 50 short chats, and take about two minutes:
         glm5 run sft:tiny,mixed --checkpoint=WORKDIR --data.sources="[{'chats': 'FILE.jsonl'}]" --train.steps=100
:tiny_lora  for two CPU cores, on your chats: LoRA adapters of the model of the checkpoint, 100 steps in about two
         minutes. The adapters are in WORKDIR/adapter, in PEFT's form. They do not change the head. That of a model which
         has never read a chat, such as the quickstart's, gives the markers between messages low probabilities
         (experiments/notebooks/06_finetune_on_my_chats.ipynb): start from a model of :tiny, or sample greedily.
:small   for one accelerator: 32K. It takes your chats, each category with its weight:
         glm5 run sft:small,mixed --checkpoint=WORKDIR
             --data.sources="[{'chats': 'agent/*.jsonl', 'category': 'agent', 'mode': 'preserved'}]"
         glm5 check_chats FILES reports errors in them.
:flash   for one accelerator with 80 GB, on your chats: LoRA adapters of GLM-4.7-Flash, or of the model of any other
         HuggingFace folder of the family (--checkpoint=FOLDER), with its tokenizer. The adapters are in
         WORKDIR/adapter, in PEFT's form. Adapters of another variant: --model.lora.rank=16 --model.int4_group=None
:glm5    for 1,024 chips: up to 202,752 tokens. The paper does not print learning rate, batch, tokens and the
         categories' shares; those used here are ours. On Slurm:
         glm5 slurm sft:glm5,mixed --hosts=256 --devices=4 --chip=v5p --workdir=DIR --checkpoint=WORKDIR
             --data.sources="[{'chats': 'agent/*.jsonl', 'category': 'agent', 'mode': 'preserved'}]" >run.sbatch
"""

import dataclasses

from experiments import dsa_sparse, pretrain
from glm5_jax import presets
from glm5_jax.config import LoraConfig, ModelConfig
from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.chat_tasks import ChatTaskConfig
from glm5_jax.data.mixture import DataConfig
from glm5_jax.text.thinking import MODES
from glm5_jax.training.experiment import MODEL_CHANGES, choose
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig
from glm5_jax.training.schedule import ScheduleConfig, TwoPhaseConfig
from glm5_jax.training.step_config import StepConfig

evaluator = pretrain.evaluator
KINDS = (*MODES, "mixed")
TOKENS = 20e9  # ours
PLAYS, MBPP, GSM8K = (ChatTaskConfig(kind=kind, size=10_000) for kind in ("plays", "mbpp", "gsm8k"))
CHAIN = ChatTaskConfig(kind="chain", size=30_000, steps=5, turns=3)
TOOLS = ChatTaskConfig(kind="tools", size=4_000, mistakes=0.2)


def get_config(variant: str = "tiny,mixed") -> ExperimentConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {"tiny": tiny, "tiny_lora": tiny_lora, "small": small, "flash": flash, "glm5": glm5},
        kinds=KINDS,
    )


def chat_sources(kind: str) -> tuple[ChatSourceConfig, ...]:
    """Returns the chat sources of a kind."""
    if kind != "mixed":
        return (
            ChatSourceConfig(chats=CHAIN, category="reasoning", mode=kind, weight=0.75),
            ChatSourceConfig(chats=GSM8K, category="reasoning", mode=kind, weight=0.05),
            ChatSourceConfig(chats=TOOLS, category="agent", mode=kind, weight=0.2),
        )
    return (
        ChatSourceConfig(chats=PLAYS, category="general", mode="turn_level", weight=0.05),
        ChatSourceConfig(chats=MBPP, category="coding", mode="turn_level", weight=0.05),
        ChatSourceConfig(chats=GSM8K, category="reasoning", mode="turn_level", weight=0.05),
        ChatSourceConfig(chats=CHAIN, category="reasoning", mode="turn_level", weight=0.35),
        ChatSourceConfig(chats=CHAIN, category="reasoning", mode="preserved", weight=0.3),
        ChatSourceConfig(chats=TOOLS, category="agent", mode="interleaved", weight=0.2),
    )


def finetune(
    base: ExperimentConfig, name: str, kind: str, schedule: ScheduleConfig, group: int
) -> ExperimentConfig:
    """Returns `base` changed to train the sparse stage's model on chats, with int4 experts in groups of `group` rows.

    The indexers stay trainable, as in the sparse stage; this choice is ours. To train without int4:
    --experiment.model.int4_group=None.
    """
    length = base.data.sequence_length
    return dataclasses.replace(
        base,
        name=f"{name},{kind}",
        model=dataclasses.replace(base.model, int4_group=group),
        model_changes=MODEL_CHANGES,
        data=DataConfig(
            sources=chat_sources(kind),
            sequence_length=length,
            packing="best_fit",
            open_rows=8 if length > 100_000 else base.data.open_rows,  # see DataConfig
            num_threads=base.data.num_threads,
        ),
        schedule=schedule,
    )


def without_int4(model: ModelConfig) -> ModelConfig:
    """Returns SFT's model for the stages after it: GLM-5 2.4.3 has quantisation-aware training only in SFT."""
    return dataclasses.replace(model, int4_group=None)


def tiny(kind: str) -> ExperimentConfig:
    """Uses pre-training's learning rate, because all of the data is new to the model."""
    base = dsa_sparse.tiny()
    schedule = ScheduleConfig(kind="linear", peak=5e-3, end=2e-4, warmup_steps=10, total_steps=600)
    config = finetune(base, "sft:tiny", kind, schedule, 32)
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
    """Trains on 0.3B tokens."""
    schedule = ScheduleConfig(warmup_steps=50, peak=1e-4, end=1e-5, total_steps=2000)
    return finetune(dsa_sparse.small(), "sft:small", kind, schedule, 128)


def flash(kind: str) -> ExperimentConfig:
    """Trains adapters of rank 16 next to bfloat16 weights of 61 GB. Rank, rate and batch are ours.

    A step takes 67 GB of an H100 (python -m launch.compile --experiment=experiments/sft.py:flash,mixed
    --topology=h100:1x1x1).
    """
    base, length = small(kind), 8192
    return dataclasses.replace(
        base,
        name=f"sft:flash,{kind}",
        model=dataclasses.replace(presets.glm4_7_flash(), lora=LoraConfig(rank=16)),
        data=dataclasses.replace(base.data, sequence_length=length),
        batch=pretrain.constant_batch(8 * length),
        optimizer=OptimizerConfig(weight_decay=0.0),
        schedule=ScheduleConfig(peak=2e-4, end=2e-5, warmup_steps=20, total_steps=1000),
        # No losses of what is frozen: MTP layer and routers.
        step=StepConfig(
            mtp_steps=0,
            balance_weight=0.0,
            bias_update_rate=TwoPhaseConfig(before=0.0, after=0.0),
            rows_per_device=1,
        ),
        sample=SampleConfig(),  # `generate` would copy the weights
    )


def tiny_lora(kind: str) -> ExperimentConfig:
    """Trains adapters of a model like that of the quickstart on some dozens of chats of the user.

    The rate is high, because such a model has never read a chat.
    """
    base, adapted = tiny(kind), flash(kind)
    return dataclasses.replace(
        base,
        name=f"sft:tiny_lora,{kind}",
        requires_data=True,
        model=dataclasses.replace(presets.tiny(), lora=adapted.model.lora),
        optimizer=dataclasses.replace(base.optimizer, weight_decay=0.0),
        schedule=ScheduleConfig(peak=1e-2, end=1e-3, warmup_steps=10, total_steps=100),
        step=dataclasses.replace(adapted.step, rows_per_device=None, remat=base.step.remat),
        sample=SampleConfig(),
        train=dataclasses.replace(
            base.train, eval_interval=50, sample_interval=0, save_interval=50
        ),
    )


def glm5(kind: str) -> ExperimentConfig:
    """Decays from the learning rate of the sparse stage to a tenth of it."""
    base = dsa_sparse.glm5()
    steps = -(-int(TOKENS) // base.batch.end)
    schedule = ScheduleConfig(warmup_steps=steps // 50, peak=1e-5, end=1e-6, total_steps=steps)
    return finetune(base, "sft:glm5", kind, schedule, 128)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
