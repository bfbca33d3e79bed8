"""Mid-training: from 4K to 200K tokens in three stages (GLM-5 2.3, Figure 5), attention still dense.

    python -m launch.run --experiment=experiments/midtrain.py:tiny,32k --experiment.checkpoint=WORKDIR

SIZE,STAGE: each stage goes on from the checkpoint of the one before, the first from pre-training's. The
rotary base is raised to 1M with the first one (GLM-4.5 2.3), packing is best-fit, and what the rows
hold changes from stage to stage (glm5_jax/data/long_context.py).

:tiny    for two CPU cores: 256, 512 and 1024 tokens stand for 32K, 128K and 200K. A minute or two each.
:small   for one accelerator: 8K, 16K and 32K. Bring long texts of your own:
         --experiment.data.sources="[{'kind': 'books', 'path': 'books/*.txt'}]"
:glm5    for 1,024 chips: 1T, 500B and 50B tokens.
"""

import dataclasses
import functools
from typing import NamedTuple

from experiments import pretrain
from glm5_jax.data.interleave import InterleaveConfig
from glm5_jax.data.long_context import STAGES as SHARES, mid_training
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.data.synthetic import TaskConfig
from glm5_jax.training.experiment import ExperimentConfig, MeshConfig, choose
from glm5_jax.training.schedule import ScheduleConfig, SwitchConfig

evaluator = pretrain.evaluator
SHORT = (SourceConfig("shakespeare"), SourceConfig("stdlib"))
LONG = (SourceConfig("shakespeare_book"), SourceConfig("stdlib_packages"))


class Stage(NamedTuple):
    """Tokens of a row in the paper, tokens in all, and the share of mid-training that lies before."""

    length: int
    tokens: float
    before: float


STAGES = {
    "32k": Stage(32_768, 1e12, 0.0),
    "128k": Stage(131_072, 500e9, 1 / 1.55),
    "200k": Stage(202_752, 50e9, 1.5 / 1.55),
}


def get_config(variant: str = "tiny,32k") -> ExperimentConfig:
    """The variant's experiment; ValueError lists the variants."""
    sizes = {"tiny": tiny, "small": small, "glm5": glm5}
    return choose(
        variant,
        {
            f"{size},{stage}": functools.partial(sizes[size], stage)
            for size in sizes
            for stage in STAGES
        },
    )


def falling(stage: str, peak: float, end: float) -> dict[str, float]:
    """peak and end of a stage's learning rate, which falls linearly over the tokens of all three."""
    ends = [s.before for s in STAGES.values()][1:] + [1.0]
    after = dict(zip(STAGES, ends))[stage]
    rates = [peak + (end - peak) * share for share in (STAGES[stage].before, after)]
    return {"kind": "linear", "peak": rates[0], "end": rates[1], "warmup_steps": 0}


def lengthened(base: ExperimentConfig, size: str, stage: str, **changes) -> ExperimentConfig:
    """A stage that goes on from the one before, with the rotary base of long contexts: 1M (GLM-4.5 2.3, and GLM-5's
    own config), which the first stage meets with weights of another."""
    rope = dataclasses.replace(base.model.rope_parameters, rope_theta=1_000_000.0)
    return dataclasses.replace(
        base,
        goes_on=True,
        unshared=("rope_theta",) if stage == "32k" else (),
        name=f"midtrain:{size},{stage}",
        model=dataclasses.replace(base.model, rope_parameters=rope),
        **changes,
    )


def best_fit(data: DataConfig, stage: str, length: int, tasks: TaskConfig) -> DataConfig:
    """Rows of a stage: its shares of short, long and interleaved documents and of tasks."""
    shares = SHARES[STAGES[stage].length]
    weave = InterleaveConfig(documents=16, characters=4 * length, chunk=min(1024, length // 32))
    # Rows shorter than these would find no short document among the shipped ones.
    split = max(length, 4096)
    sources = mid_training(SHORT, LONG, shares, split, recall=tasks, interleave=weave)
    return dataclasses.replace(data, sources=sources, sequence_length=length, packing="best_fit")


def tiny(stage: str) -> ExperimentConfig:
    """The last of the three ends at the 1024 positions that the tiny model has."""
    base, length = pretrain.tiny(), {"32k": 256, "128k": 512, "200k": 1024}[stage]
    tasks = TaskConfig(kind="mrcr", surface="tokens", length=length, reply_tokens=8, loss="all")
    return lengthened(
        base,
        "tiny",
        stage,
        data=best_fit(base.data, stage, length, tasks),
        batch=pretrain.constant(2048),
        schedule=ScheduleConfig(**falling(stage, 1e-3, 2.5e-4), total_steps=120),
        step=dataclasses.replace(base.step, bias_update_rate=SwitchConfig(1e-3, 1e-3)),
        train=dataclasses.replace(
            base.train, eval_interval=60, sample_interval=0, save_interval=60
        ),
    )


def small(stage: str) -> ExperimentConfig:
    """0.5B tokens a stage for one accelerator."""
    base, length = pretrain.small(), {"32k": 8192, "128k": 16_384, "200k": 32_768}[stage]
    return lengthened(
        base,
        "small",
        stage,
        data=best_fit(base.data, stage, length, TaskConfig(kind="mrcr", length=length)),
        batch=pretrain.constant(4 * 32_768),
        schedule=ScheduleConfig(**falling(stage, 4e-5, 1e-5), total_steps=4000),
    )


def glm5(stage: str) -> ExperimentConfig:
    """The batch is not printed: pre-training's last one, or what is nearest in whole rows."""
    base, (length, tokens, _) = pretrain.glm5(), STAGES[stage]
    # Rows are cut over `context`, or a batch would have a row for every chip. What fits of each: experiments/README.md.
    mesh = {
        "32k": MeshConfig(fsdp=8, expert=64, context=2),
        "128k": MeshConfig(fsdp=2, expert=64, context=8),
        "200k": MeshConfig(fsdp=1, expert=64, context=16),
    }[stage]
    batch = length * mesh.fsdp * mesh.expert * 4
    step = dataclasses.replace(
        base.step,
        rows_per_device=1,
        token_chunk=1056 if stage == "200k" else 1024,  # 12 whole parts of a device's tokens
        # Both have switched after 15T tokens (GLM-4.5 2.4), which a new run does not count.
        mtp_weight=SwitchConfig(0.1, 0.1),
        bias_update_rate=SwitchConfig(0.0, 0.0),
    )
    return lengthened(
        base,
        "glm5",
        stage,
        mesh=mesh,
        data=best_fit(base.data, stage, length, TaskConfig(kind="mrcr", length=length)),
        batch=pretrain.constant(batch),
        schedule=ScheduleConfig(**falling(stage, 4e-5, 1e-5), total_steps=-(-int(tokens) // batch)),
        step=step,
    )


if __name__ == "__main__":
    print(__doc__.split("\n\n")[1].strip())
