"""Trains a small retriever with dense attention, from which ablations of attention start.

Every context is a row of notes, "key value", followed by questions on some keys. Notes differ only in their keys, so
whatever attention leaves out is lost. Three choices make training fast:

- a short first stage;
- many questions a row;
- large initial weights. With an initializer_range of 0.02 all attention is uniform for so long that 400 steps at 18
  tokens taught nothing; with 0.1, 200 to 300 suffice.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from glm5_jax import presets
from glm5_jax.config import ModelConfig, RopeParameters
from glm5_jax.data.long_context import TaskSourceConfig
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SHAKESPEARE
from glm5_jax.data.synthetic import LongContextTaskConfig
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step_config import StepConfig

VOCAB = 320  # few ids, because the output projection dominates the work of such a small model
ROWS = 64
CURRICULUM = ((18, 500), (36, 100), (72, 100), (128, 100))  # tokens of a row, steps
# The last stage, at the last of these lengths. Fewer questions leave more notes to distinguish. Without this stage, half
# of the rows are questions, and a single question after 128 tokens is answered in 94% of the cases.
LAST_STEPS, LAST = 150, {"rows": 16, "questions": 4}
TASK = LongContextTaskConfig(
    kind="multi_key",
    surface="tokens",
    haystack="notes",
    num_keys=48,
    num_values=32,
    num_noise=32,
)


def model(num_layers: int = 2, **changes) -> ModelConfig:
    """Returns a model of 130 thousand parameters in two dense layers of width 64; changes: other fields."""
    base = dataclasses.replace(
        presets.tiny(),
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        intermediate_size=128,
        num_nextn_predict_layers=0,
        index_topk=None,
        attention="dense",
        initializer_range=0.1,
        # With a small base all of the few rotated dimensions turn fast enough to attend to the previous token.
        rope_parameters=RopeParameters(rope_theta=100.0),
    )
    return dataclasses.replace(base, **changes)


def tokenizer(workdir: str | os.PathLike) -> str:
    """Returns the folder of the models' tokenizer, which is trained in the workdir if it is missing."""
    folder = pathlib.Path(workdir) / "tokenizer"
    if not folder.exists():
        Tokenizer.train([SHAKESPEARE.read_text("utf-8")], VOCAB).save(folder)
    return str(folder)


def task(length: int, questions: int | None = None) -> LongContextTaskConfig:
    """Returns the task of notes at a length, followed by `questions` questions; None: half of the row is questions.

    More questions train more per row and leave room for fewer notes. With a single question, as in `ruler`, there are
    almost twice as many notes.
    """
    questions = length // 6 if questions is None else questions
    return dataclasses.replace(TASK, length=length, num_needles=questions, num_questions=questions)


def stage(
    name: str,
    workdir: str | os.PathLike,
    length: int,
    steps: int,
    cfg: ModelConfig,
    *,
    peak: float = 5e-3,
    rows: int = ROWS,
    questions: int | None = None,
    **changes,
) -> ExperimentConfig:
    """Returns `steps` of retrieval at a length, at a constant rate; changes: other fields."""
    tokens = rows * length
    config = ExperimentConfig(
        name=name,
        model=cfg,
        tokenizer=tokenizer(workdir),
        data=DataConfig(
            sources=(TaskSourceConfig(tasks=task(length, questions)),),
            sequence_length=length,
            packing="best_fit",
            held_out_fraction=0.0,
        ),
        batch=BatchRampConfig(start=tokens, end=tokens, ramp_tokens=0, multiple=tokens),
        optimizer=OptimizerConfig(ns_dtype="float32", lm_head="adamw"),
        schedule=ScheduleConfig(kind="constant", peak=peak, warmup_steps=20, total_steps=steps),
        step=StepConfig(mtp_steps=0, remat="none"),
        train=TrainConfig(eval_interval=0, sample_interval=0, save_interval=steps, keep=1),
    )
    return dataclasses.replace(config, **changes)


def tasks_of(config: ExperimentConfig) -> LongContextTaskConfig:
    """Returns the tasks that a stage of `stage` trains on."""
    source = config.data.sources[0]
    assert isinstance(source, TaskSourceConfig), f"stage {config.name!r} does not train on tasks"
    return source.tasks


def stages(
    name: str,
    workdir: str | os.PathLike,
    cfg: ModelConfig,
    curriculum: Sequence[tuple[int, int]] | None = None,
) -> tuple[ExperimentConfig, ...]:
    """Returns the stages from random weights to the task of `ruler` at the curriculum's last length.

    Args:
      name: first part of the stages' names.
      workdir: folder of the tokenizer.
      cfg: the model.
      curriculum: (tokens of a row, steps) of each stage; None: CURRICULUM.
    """
    curriculum = curriculum or CURRICULUM
    learning = [
        stage(f"{name} {length}", workdir, length, steps, cfg) for length, steps in curriculum
    ]
    length = curriculum[-1][0]
    last = stage(f"{name} {length}, fewer questions", workdir, length, LAST_STEPS, cfg, **LAST)
    return *learning, last
