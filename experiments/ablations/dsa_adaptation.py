"""Defines ways from a dense to a sparse model as arms of an ablation, with and without a warm-up of the indexers.

dsa_stages.py explains the comparison.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable

import numpy as np

from experiments import midtrain, pretrain
from experiments.ablations import retriever
from experiments.ablations.arms import Arm, Trial, last_stage
from experiments.dsa_sparse import sparsify_stage
from experiments.dsa_warmup import freeze_trunk, make_warmup_schedule
from glm5_jax.checkpoint import store
from glm5_jax.config import ModelConfig
from glm5_jax.data.long_context import TaskSourceConfig
from glm5_jax.evals.ruler import Ruler, RulerConfig, ruler
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.pretraining import ExperimentConfig, SampleConfig, Setting
from glm5_jax.training.schedule import ScheduleConfig

DENSE, WARM_UP, FULL = "dense", "warm-up only", "full"
AT_ONCE, ANNEALED = "sparse at once", "keys annealed"
LENGTH = 128  # tokens of a row of :tiny


@dataclasses.dataclass(frozen=True, kw_only=True)
class DsaStudy:
    """Model and length of the adaptation. Raises ValueError for steps that do not divide.

    Attributes:
      dense: returns the chain of stages that trains the dense model, given a workdir for its tokenizer; all arms use the
        data of the last one.
      rows: rows of a batch in all arms.
      keys: number of keys that the sparse model attends to.
      length: tokens of a row, a power of two times keys.
      rate: constant learning rate of all training after the warm-up.
      steps, warm_steps: total steps of every arm, and steps of the warm-up before the sparse stage.
      every: steps between two scores; divides both, and each part of the annealing.
      retrieval: final evaluation; the training's seed is added to its seed.
      along: samples of the evaluations during training.
    """

    dense: Callable[[pathlib.Path], tuple[ExperimentConfig, ...]]
    rows: int
    keys: int
    length: int
    rate: float
    steps: int
    warm_steps: int
    every: int
    retrieval: RulerConfig
    along: int

    def __post_init__(self):
        parts = len(self.levels)
        if self.keys << (parts - 1) != self.length:
            raise ValueError(f"length is {self.length}; use keys {self.keys} times a power of two")
        for name, count in (("steps", parts * self.every), ("warm_steps", self.every)):
            if getattr(self, name) % count:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of {count}, or scores of "
                    f"different arms are not at equal tokens (every {self.every}, {parts} numbers of keys)"
                )
        if not 0 < self.warm_steps < self.steps:
            raise ValueError(f"warm_steps is {self.warm_steps}; it must be 1..{self.steps - 1}")

    @property
    def levels(self) -> tuple[int, ...]:
        """Numbers of keys of the annealing, from all of them to `keys`."""
        return tuple(
            self.keys << i for i in reversed(range((self.length // self.keys).bit_length()))
        )

    def evaluated_model(self, stage: ExperimentConfig) -> ModelConfig:
        """Returns the model as it is evaluated: with `keys` keys if it has trainable indexers."""
        if not stage.step.index_weight:
            return stage.model
        return dataclasses.replace(stage.model, attention="sparse", index_topk=self.keys)

    def evaluator(self, setting: Setting) -> Ruler:
        """Returns the evaluator of the arms during training."""
        stage = setting.config
        stage = dataclasses.replace(stage, model=self.evaluated_model(stage))
        few = dataclasses.replace(self.retrieval, samples=self.along)
        return Ruler(few, dataclasses.replace(setting, config=stage))


def tiny() -> DsaStudy:
    """Uses the retriever with 128 tokens and 16 keys."""
    return DsaStudy(
        dense=lambda workdir: retriever.stages("retriever", workdir, retriever.model()),
        rows=retriever.LAST["rows"],
        keys=16,
        length=LENGTH,
        rate=1e-3,
        steps=128,
        warm_steps=32,
        every=16,
        retrieval=RulerConfig(
            kinds=("multi_key",),
            lengths=(LENGTH,),
            samples=2000,
            batch_size=100,
            task=retriever.TASK,
        ),
        along=200,
    )


def small() -> DsaStudy:
    """Uses pre-training and mid-training :small, 32K tokens and 512 keys; four kinds of needles in text."""
    stages = ("32k", "128k", "200k")
    kinds = ("needle", "multi_key", "multi_value", "multi_query")
    return DsaStudy(
        dense=lambda _: (pretrain.small(), *map(midtrain.small, stages)),
        rows=4,
        keys=512,
        length=32_768,
        rate=1e-5,
        steps=2800,
        warm_steps=1000,
        every=200,
        retrieval=RulerConfig(kinds=kinds, lengths=(4096, 32_768), samples=500),
        along=50,
    )


def arms(study: DsaStudy, workdir: str | os.PathLike) -> dict[str, Arm]:
    """Returns the arms by name; each starts with the same dense stages."""
    dense = study.dense(pathlib.Path(workdir))
    base = dataclasses.replace(
        dense[-1],
        checkpoint=None,
        may_differ=("indexer",),
        batch=pretrain.constant_batch(study.rows * study.length),
        sample=SampleConfig(),
        schedule=ScheduleConfig(
            kind="constant", peak=study.rate, warmup_steps=0, total_steps=study.steps
        ),
        train=dataclasses.replace(
            dense[-1].train, steps=None, eval_interval=study.every, sample_interval=0, keep=1
        ),
    )
    with_indexers = dataclasses.replace(
        base, model=dataclasses.replace(base.model, index_topk=study.keys)
    )

    def with_new_tasks(stage: ExperimentConfig, first: int) -> ExperimentConfig:
        """Returns the stage, `first` steps after the dense model, on tasks that no earlier stage had."""
        sources = tuple(
            dataclasses.replace(
                s, tasks=dataclasses.replace(s.tasks, seed=s.tasks.seed + first + 1)
            )
            if isinstance(s, TaskSourceConfig)
            else s
            for s in stage.data.sources
        )
        # Tasks have no texts to hold out, but a stage without held-out data is not evaluated.
        held_out = stage.data.held_out_fraction or 0.01
        data = dataclasses.replace(stage.data, sources=sources, held_out_fraction=held_out)
        return dataclasses.replace(stage, data=data)

    def warmed_up(steps: int) -> ExperimentConfig:
        return with_new_tasks(
            freeze_trunk(with_indexers, f"warm-up {steps}", schedule=make_warmup_schedule(steps)), 0
        )

    def adapted(keys: int, first: int, steps: int) -> ExperimentConfig:
        stage = sparsify_stage(with_indexers, f"sparse {keys} from {first}", study.rate, steps)
        model = dataclasses.replace(stage.model, index_topk=keys)
        return with_new_tasks(dataclasses.replace(stage, model=model), first)

    part = study.steps // len(study.levels)
    annealed = (adapted(keys, i * part, part) for i, keys in enumerate(study.levels))
    after = study.steps - study.warm_steps
    tails = {
        DENSE: (with_new_tasks(dataclasses.replace(base, name=DENSE), 0),),
        WARM_UP: (warmed_up(study.steps),),
        FULL: (warmed_up(study.warm_steps), adapted(study.keys, study.warm_steps, after)),
        AT_ONCE: (adapted(study.keys, 0, study.steps),),
        ANNEALED: tuple(annealed),
    }
    return {name: Arm(name, (*dense, *tail)) for name, tail in tails.items()}


def score_arm(study: DsaStudy, trial: Trial, folder: pathlib.Path) -> dict:
    """Returns values for the row of a trained arm.

    Its mean exact retrieval, and for every kind and length of `study.retrieval` which samples it missed, of how many, and
    their hash.
    """
    stage = last_stage(trial.stages, ExperimentConfig)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    ids = {"eos_token_id": tokenizer.eos_ids, "pad_token_id": tokenizer.pad_id}
    model = dataclasses.replace(study.evaluated_model(stage), **ids)
    params = store.load_params(folder, glm5.abstract_params(model))
    config = dataclasses.replace(study.retrieval, seed=study.retrieval.seed + trial.seed)
    scores = ruler(params, model, tokenizer, config, progress=False)
    return {
        "exact": float(np.mean([score.exact.mean() for score in scores.values()])),
        "scores": {
            name: {
                "missed": np.flatnonzero(~score.exact).tolist(),
                "of": len(score.exact),
                "samples": score.samples,
            }
            for name, score in scores.items()
        },
    }
