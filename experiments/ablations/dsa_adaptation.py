"""Ways from a dense model to a sparse one, as arms of an ablation: with and without a warm-up of the indexers.

dsa_stages.py says what they are compared for.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np

from experiments import midtrain, pretrain
from experiments.ablations import retriever
from experiments.ablations.arms import Arm, Trial
from experiments.dsa_sparse import sparse
from experiments.dsa_warmup import falling, warm
from glm5_jax.checkpoint import store
from glm5_jax.config import ModelConfig
from glm5_jax.data.long_context import TaskSourceConfig
from glm5_jax.evals.ruler import Ruler, RulerConfig, ruler
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import ExperimentConfig, SampleConfig
from glm5_jax.training.pretraining import Setting
from glm5_jax.training.schedule import ScheduleConfig

DENSE, WARM_UP, FULL = "dense", "warm-up only", "full"
AT_ONCE, ANNEALED = "sparse at once", "keys annealed"
LENGTH = 128  # of :tiny


@dataclasses.dataclass(frozen=True)
class Study:
    """What is adapted, and for how long. Construction refuses steps that do not divide (ValueError).

    Attributes:
      dense: the chain of stages that trains the dense model, given a workdir for its tokenizer; the data
        of the last are those of all arms.
      rows: of a batch of all arms.
      keys: that the sparse model attends to.
      length: tokens of a row, a power of two times keys.
      rate: constant, of everything that trains after the warm-up.
      steps, warm_steps: of every arm in all, and of the warm-up before the sparse stage.
      every: steps between two scores; divides both, and each part of the annealing.
      retrieval: what is scored at the end, with the seed of the training added to its own.
      along: samples of the scores along the way.
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

    def served(self, stage: ExperimentConfig) -> ModelConfig:
        """The model as it is scored: with `keys` keys if it has indexers that learn."""
        if not stage.step.index_weight:
            return stage.model
        return dataclasses.replace(stage.model, attention="sparse", index_topk=self.keys)

    def evaluator(self, setting: Setting) -> Ruler:
        """What scores the arms along the way."""
        stage = setting.config
        stage = dataclasses.replace(stage, model=self.served(stage))
        few = dataclasses.replace(self.retrieval, samples=self.along)
        return Ruler(few, dataclasses.replace(setting, config=stage))


def tiny() -> Study:
    """The retriever, 128 tokens and 16 keys."""
    return Study(
        dense=lambda workdir: retriever.stages("retriever", workdir, retriever.model()),
        rows=retriever.LAST["rows"],
        keys=16,
        length=LENGTH,
        rate=1e-3,
        steps=128,
        warm_steps=32,
        every=16,
        retrieval=RulerConfig(("multi_key",), (LENGTH,), 2000, batch_size=100, task=retriever.TASK),
        along=200,
    )


def small() -> Study:
    """Pre-training and mid-training :small, 32K tokens and 512 keys; four kinds of needles in text."""
    stages = ("32k", "128k", "200k")
    kinds = ("needle", "multi_key", "multi_value", "multi_query")
    return Study(
        dense=lambda _: (pretrain.small(), *map(midtrain.small, stages)),
        rows=4,
        keys=512,
        length=32_768,
        rate=1e-5,
        steps=2800,
        warm_steps=1000,
        every=200,
        retrieval=RulerConfig(kinds, (4096, 32_768), 500),
        along=50,
    )


def arms(study: Study, workdir) -> dict[str, Arm]:
    """The arms by name; each begins with the same dense stages."""
    dense = study.dense(pathlib.Path(workdir))
    base = dataclasses.replace(
        dense[-1],
        checkpoint=None,
        unshared=("indexer",),
        batch=pretrain.constant(study.rows * study.length),
        sample=SampleConfig(),
        schedule=ScheduleConfig(
            "constant", peak=study.rate, warmup_steps=0, total_steps=study.steps
        ),
        train=dataclasses.replace(
            dense[-1].train, steps=None, eval_interval=study.every, sample_interval=0, keep=1
        ),
    )
    with_indexers = dataclasses.replace(
        base, model=dataclasses.replace(base.model, index_topk=study.keys)
    )

    def at(stage: ExperimentConfig, first: int) -> ExperimentConfig:
        """The stage, on tasks that none before it has seen; `first` steps after the dense model."""
        sources = tuple(
            dataclasses.replace(
                s, tasks=dataclasses.replace(s.tasks, seed=s.tasks.seed + first + 1)
            )
            if isinstance(s, TaskSourceConfig)
            else s
            for s in stage.data.sources
        )
        # Tasks have no texts to hold out, but a stage that holds nothing out is not scored.
        held_out = stage.data.held_out_fraction or 0.01
        data = dataclasses.replace(stage.data, sources=sources, held_out_fraction=held_out)
        return dataclasses.replace(stage, data=data)

    def warmed(steps: int) -> ExperimentConfig:
        return at(warm(with_indexers, f"warm-up {steps}", schedule=falling(steps)), 0)

    def adapted(keys: int, first: int, steps: int) -> ExperimentConfig:
        stage = sparse(with_indexers, f"sparse {keys} from {first}", study.rate, steps)
        model = dataclasses.replace(stage.model, index_topk=keys)
        return at(dataclasses.replace(stage, model=model), first)

    part = study.steps // len(study.levels)
    annealed = (adapted(keys, i * part, part) for i, keys in enumerate(study.levels))
    after = study.steps - study.warm_steps
    tails = {
        DENSE: (at(dataclasses.replace(base, name=DENSE), 0),),
        WARM_UP: (warmed(study.steps),),
        FULL: (warmed(study.warm_steps), adapted(study.keys, study.warm_steps, after)),
        AT_ONCE: (adapted(study.keys, 0, study.steps),),
        ANNEALED: tuple(annealed),
    }
    return {name: Arm(name, (*dense, *tail)) for name, tail in tails.items()}


def scored(study: Study, trial: Trial, folder: pathlib.Path) -> dict:
    """For the row of a trained arm: its mean exact retrieval, and of every kind and length of
    `study.retrieval` which samples it missed, of how many, and their hash."""
    stage, tokenizer = trial.stages[-1], Tokenizer.load(folder / "tokenizer")
    ids = {"eos_token_id": tokenizer.eos_ids, "pad_token_id": tokenizer.pad_id}
    model = dataclasses.replace(study.served(stage), **ids)
    params = store.load_params(folder, glm5.abstract(model))
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
