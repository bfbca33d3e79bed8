"""Pre-trains on plain text with next-token and multi-token prediction, from random weights.

    glm5 run pretrain:tiny

The variant is SIZE for one mixture of texts, or SIZE,PHASE for one of two phases (GLM-5, Figure 5). They have one curve
of the learning rate:

- general: two thirds of the tokens, of a general corpus;
- code: the last third, of code and reasoning, from the weights of the first phase (--checkpoint=WORKDIR).

:tiny    for two CPU cores: Shakespeare and the running Python's standard library. Takes five minutes and ends at
         about 1.90 held-out bits per byte (unigram 3.04, Kneser-Ney bigram 2.00; docs/results/training.md).
:small   for one accelerator: 1.2B parameters. It takes your text, and usually your tokenizer:
         glm5 run pretrain:small --tokenizer=FOLDER --data.sources="[{'kind': 'jsonl', 'path': 'texts/*.jsonl'}]"
:glm5    for 1,024 chips with 95 GB each: the 744B model as the paper pre-trains it, 27T tokens. With your text and
         tokenizer, on Slurm (glm5 gke --help and glm5 rehearse --help have other starts):
         glm5 slurm pretrain:glm5 --hosts=256 --devices=4 --chip=v5p --workdir=DIR --tokenizer=FOLDER
             --data.sources="[{'kind': 'jsonl', 'path': 'texts/*.jsonl'}]" >run.sbatch
         Its phases have 18T and 9T tokens.
"""

import dataclasses

from glm5_jax import presets
from glm5_jax.data.mixture import DataConfig
from glm5_jax.evals.perplexity import HeldOut
from glm5_jax.training.experiment import MODEL_CHANGES, MeshConfig, choose
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig
from glm5_jax.training.schedule import (
    BatchRampConfig,
    ScheduleConfig,
    TwoPhaseConfig,
    num_steps,
    num_tokens,
)
from glm5_jax.training.step_config import StepConfig

evaluator = HeldOut
CHANGES = (*MODEL_CHANGES, "attention")
PHASES = ("", "general", "code")
GENERAL, CODE = PHASES[1:]
GENERAL_SHARE = 18 / 27  # of all tokens (GLM-5, Figure 5)
IDLE = ("indexer/",)  # dense attention does not use indexers, and weight decay would shrink them


def get_config(variant: str = "tiny") -> ExperimentConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5}, kinds=PHASES)


def phase_of(base: ExperimentConfig, phase: str) -> ExperimentConfig:
    """Returns one phase of a run over all tokens; "": the run itself.

    The second phase continues the schedules of the run from the end of the first one, with the batch of the end of the
    ramp. Its optimiser starts without momentum.
    """
    if not phase:
        return base
    ramp, schedule = base.batch, base.schedule
    first = num_steps(ramp, round(GENERAL_SHARE * num_tokens(ramp, schedule.total_steps)))
    name = f"{base.name},{phase}"
    if phase == GENERAL:
        train = dataclasses.replace(base.train, steps=first)
        return dataclasses.replace(base, name=name, train=train)
    seen = num_tokens(ramp, first)
    step = dataclasses.replace(
        base.step,
        mtp_weight=_value_from(base.step.mtp_weight, seen),
        bias_update_rate=_value_from(base.step.bias_update_rate, seen),
    )
    return dataclasses.replace(
        base,
        name=name,
        requires_checkpoint=True,
        batch=constant_batch(ramp.end),
        schedule=dataclasses.replace(schedule, first_step=first),
        step=step,
    )


def _value_from(value: TwoPhaseConfig, tokens_seen: int) -> TwoPhaseConfig:
    """Returns a value of a run that another one continues after these tokens, without counting them."""
    before = value.after if tokens_seen >= value.tokens else value.before
    tokens = max(0.0, value.tokens - tokens_seen)
    return TwoPhaseConfig(before=before, after=value.after, tokens=tokens)


def tiny(phase: str = "") -> ExperimentConfig:
    """Trains 2.9M parameters on two cores; the learning rate is the best of those tried (docs/results/training.md)."""
    base = ExperimentConfig(
        name="pretrain:tiny",
        model_changes=CHANGES,
        model=dataclasses.replace(presets.tiny(), attention="dense"),
        data=DataConfig(sequence_length=128),
        batch=constant_batch(8 * 128),
        # bfloat16 products are emulated on CPU. Muon for the head, as in the report, is worse here by 0.06 nats
        # (docs/results/ablations.md).
        optimizer=OptimizerConfig(frozen=IDLE, ns_dtype="float32", lm_head="adamw"),
        schedule=ScheduleConfig(peak=5e-3, end=1e-4, warmup_steps=20, total_steps=1150),
        step=StepConfig(mtp_steps=1, remat="none"),
        train=TrainConfig(eval_interval=350, sample_interval=350, save_interval=350),
        sample=SampleConfig(prompts=("ROMEO:\n", "def "), tokens=80),
    )
    return phase_of(base, phase)


def small(phase: str = "") -> ExperimentConfig:
    """Trains a 1.2B model on 2.6B tokens on one accelerator."""
    base = ExperimentConfig(
        name="pretrain:small",
        model_changes=CHANGES,
        requires_data=True,
        model=dataclasses.replace(presets.small(), attention="dense"),
        data=DataConfig(sequence_length=4096, num_threads=8),
        batch=constant_batch(32 * 4096),
        optimizer=OptimizerConfig(frozen=IDLE),
        schedule=ScheduleConfig(warmup_steps=200, total_steps=20_000),
        step=StepConfig(rows_per_device=8),
        train=TrainConfig(log_interval=10, eval_interval=500, sample_interval=500),
        sample=SampleConfig(prompts=("Once upon a time",)),
    )
    return phase_of(base, phase)


def glm5(phase: str = "") -> ExperimentConfig:
    """Trains on 27T tokens with dense attention, because DSA starts in mid-training (GLM-5 2.1.1)."""
    rope = dataclasses.replace(presets.glm5().rope_parameters, rope_theta=10_000.0)  # GLM-4.5 2.3
    base = ExperimentConfig(
        name="pretrain:glm5",
        model_changes=CHANGES,
        requires_data=True,
        model=dataclasses.replace(presets.glm5(), attention="dense", rope_parameters=rope),
        mesh=MeshConfig(fsdp=16, expert=64),
        data=DataConfig(sequence_length=4096, num_threads=16),
        optimizer=OptimizerConfig(frozen=IDLE),
        step=StepConfig(
            token_chunk=1024,  # limits a device's receive buffers to 3.2 GB
            rows_per_device=4,  # of up to 16 when a batch has 64M tokens
            vocab_block=40_960,  # 0.5 GB of the embedding and of the head at a time
        ),
        train=TrainConfig(
            log_interval=10, eval_interval=1000, sample_interval=0, save_interval=500, keep=3
        ),
    )
    return phase_of(base, phase)


def constant_batch(tokens: int) -> BatchRampConfig:
    """Returns the schedule of a constant batch size, in tokens."""
    return BatchRampConfig(start=tokens, end=tokens, ramp_tokens=0, multiple=tokens)


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
