"""Mid-trains in three stages, from 4K to 200K tokens of context, with dense attention (GLM-5 2.3, Figure 5).

    glm5 run midtrain:tiny,32k --checkpoint=WORKDIR

The variant is SIZE,STAGE. Each stage starts from the checkpoint of the previous one, the first from pre-training's.
The first stage raises the rotary base to 1M (GLM-4.5 2.3). Packing is best-fit. The content of the rows differs from
stage to stage (glm5_jax/data/long_context.py).

:tiny    for two CPU cores: 256, 512 and 1024 tokens stand for 32K, 128K and 200K. A minute or two each.
:small   for one accelerator: 8K, 16K and 32K. It takes your long texts:
         glm5 run midtrain:small,32k --checkpoint=WORKDIR --tokenizer=FOLDER
             --data.sources="[{'kind': 'books', 'path': 'books/*.txt'}]"
:glm5    for 1,024 chips: 1T, 500B and 50B tokens, of your texts. On Slurm:
         glm5 slurm midtrain:glm5,32k --hosts=256 --devices=4 --chip=v5p --workdir=DIR --checkpoint=WORKDIR
             --tokenizer=FOLDER --data.sources="[{'kind': 'books', 'path': 'books/*.txt'}]" >run.sbatch
"""

import dataclasses
from typing import NamedTuple

from experiments import pretrain
from glm5_jax.data.interleave import InterleaveConfig
from glm5_jax.data.long_context import STAGES as SHARES, mid_training_sources
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.data.synthetic import LongContextTaskConfig
from glm5_jax.training.experiment import MeshConfig, choose
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import ScheduleConfig, TwoPhaseConfig

evaluator = pretrain.evaluator
SHORT = (SourceConfig(kind="shakespeare"), SourceConfig(kind="stdlib"))
LONG = (SourceConfig(kind="shakespeare_book"), SourceConfig(kind="stdlib_packages"))


class MidtrainStage(NamedTuple):
    """A stage of the paper's mid-training.

    Attributes:
      length: tokens of a row.
      tokens: tokens of the stage.
      before: share of all mid-training tokens that precede the stage.
    """

    length: int
    tokens: float
    before: float


STAGES = {
    "32k": MidtrainStage(32_768, 1e12, 0.0),
    "128k": MidtrainStage(131_072, 500e9, 1 / 1.55),
    "200k": MidtrainStage(202_752, 50e9, 1.5 / 1.55),
}


def get_config(variant: str = "tiny,32k") -> ExperimentConfig:
    """Returns the experiment of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"tiny": tiny, "small": small, "glm5": glm5}, kinds=STAGES)


def linear_decay(stage: str, peak: float, end: float, total_steps: int) -> ScheduleConfig:
    """Returns a stage's schedule, whose rate falls linearly over the tokens of all three stages."""
    ends = [s.before for s in STAGES.values()][1:] + [1.0]
    after = dict(zip(STAGES, ends))[stage]
    rates = [peak + (end - peak) * share for share in (STAGES[stage].before, after)]
    return ScheduleConfig(
        kind="linear", peak=rates[0], end=rates[1], warmup_steps=0, total_steps=total_steps
    )


def make_stage(base: ExperimentConfig, size: str, stage: str, **changes) -> ExperimentConfig:
    """Returns a stage with the rotary base of long contexts, 1M (GLM-4.5 2.3, and GLM-5's own config).

    The first stage starts from weights that were trained with another base.
    """
    rope = dataclasses.replace(base.model.rope_parameters, rope_theta=1_000_000.0)
    return dataclasses.replace(
        base,
        requires_checkpoint=True,
        may_differ=("rope_theta",) if stage == "32k" else (),
        model_changes=(*pretrain.CHANGES, "rope_parameters.rope_theta"),
        name=f"midtrain:{size},{stage}",
        model=dataclasses.replace(base.model, rope_parameters=rope),
        **changes,
    )


def make_data(
    data: DataConfig, stage: str, length: int, tasks: LongContextTaskConfig
) -> DataConfig:
    """Returns the data of a stage: its shares of short, long and interleaved documents and of tasks."""
    shares = SHARES[STAGES[stage].length]
    interleave = InterleaveConfig(
        documents=16, characters=4 * length, chunk=min(1024, length // 32)
    )
    # No shipped document is short enough for a lower limit.
    split = max(length, 4096)
    sources = mid_training_sources(SHORT, LONG, shares, split, recall=tasks, interleave=interleave)
    return dataclasses.replace(data, sources=sources, sequence_length=length, packing="best_fit")


def tiny(stage: str) -> ExperimentConfig:
    """Trains at 256, 512 and 1024 tokens; the tiny model has 1024 positions."""
    base, length = pretrain.tiny(), {"32k": 256, "128k": 512, "200k": 1024}[stage]
    tasks = LongContextTaskConfig(
        kind="mrcr", surface="tokens", length=length, reply_tokens=8, loss="all"
    )
    return make_stage(
        base,
        "tiny",
        stage,
        data=make_data(base.data, stage, length, tasks),
        batch=pretrain.constant_batch(2048),
        schedule=linear_decay(stage, 1e-3, 2.5e-4, total_steps=120),
        step=dataclasses.replace(
            base.step, bias_update_rate=TwoPhaseConfig(before=1e-3, after=1e-3)
        ),
        train=dataclasses.replace(
            base.train, eval_interval=60, sample_interval=0, save_interval=60
        ),
    )


def small(stage: str) -> ExperimentConfig:
    """Trains on 0.5B tokens a stage on one accelerator."""
    base, length = pretrain.small(), {"32k": 8192, "128k": 16_384, "200k": 32_768}[stage]
    return make_stage(
        base,
        "small",
        stage,
        data=make_data(base.data, stage, length, LongContextTaskConfig(kind="mrcr", length=length)),
        batch=pretrain.constant_batch(4 * 32_768),
        schedule=linear_decay(stage, 4e-5, 1e-5, total_steps=4000),
    )


def glm5(stage: str) -> ExperimentConfig:
    """Uses the batch of the end of pre-training, or the nearest in whole rows, because the paper does not print it."""
    base, (length, tokens, _) = pretrain.glm5(), STAGES[stage]
    # Rows are sharded over `context`; otherwise a batch would have a row for every chip. experiments/README.md lists the
    # memory of each mesh.
    mesh = {
        "32k": MeshConfig(fsdp=8, expert=64, context=2),
        "128k": MeshConfig(fsdp=2, expert=64, context=8),
        "200k": MeshConfig(fsdp=1, expert=64, context=16),
    }[stage]
    batch = length * mesh.fsdp * mesh.expert * 4
    step = dataclasses.replace(
        base.step,
        rows_per_device=1,
        # Rows of one long document cost a rank more than rows of short ones (GLM-5 2.4.1).
        balance_rows=True,
        token_chunk=1056 if stage == "200k" else 1024,  # 12 whole parts of a device's tokens
        # Both have switched after 15T tokens (GLM-4.5 2.4), which a new run does not count.
        mtp_weight=TwoPhaseConfig(before=0.1, after=0.1),
        bias_update_rate=TwoPhaseConfig(before=0.0, after=0.0),
    )
    return make_stage(
        base,
        "glm5",
        stage,
        mesh=mesh,
        data=make_data(base.data, stage, length, LongContextTaskConfig(kind="mrcr", length=length)),
        batch=pretrain.constant_batch(batch),
        schedule=linear_decay(stage, 4e-5, 1e-5, total_steps=-(-int(tokens) // batch)),
        step=step,
    )


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
