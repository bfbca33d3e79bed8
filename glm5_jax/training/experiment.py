"""`ExperimentConfig`: everything that defines a run, as typed data; and its `config.json`.

An experiment file (experiments/) builds one per variant; the command line may set any field before
the run starts (core/editable.py); the workdir keeps the resolved values.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from glm5_jax import presets
from glm5_jax.config import ModelConfig
from glm5_jax.core.mesh import BATCH_AXES, Region, check_batch
from glm5_jax.data.mixture import DataConfig
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.loss import TokenLoss
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step import StepConfig


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one may be -1, for all the devices that the others leave."""

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The text that a run writes from time to time, to be looked at.

    chat: the prompts are what a user asks, and each is answered with thinking and without.
    """

    prompts: tuple[str, ...] = ()
    tokens: int = 100
    temperature: float = 0.8
    chat: bool = False

    def __post_init__(self):
        if not all(self.prompts):
            raise ValueError(f"prompts is {self.prompts!r}; a prompt must not be empty")
        if self.tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"tokens is {self.tokens} and temperature {self.temperature}; the one must be positive, "
                "the other not negative"
            )


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """What all stages of training have. The defaults are GLM-5's pre-training (paper Appendix A, and GLM-4.5 2.4
    for what it inherits); each part's own file gives the sources of its numbers."""

    name: str = "experiment"
    model: ModelConfig = dataclasses.field(default_factory=presets.glm5)
    mesh: MeshConfig = MeshConfig()
    # A tokenizer.json or its folder, or "bytes"; None: the shipped one. Its end and padding ids are the model's.
    tokenizer: str | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    train: TrainConfig = TrainConfig()
    seed: int = 0
    checkpoint: str | None = None  # initial weights: a workdir, its checkpoints/STEP, an HF folder
    goes_on: bool = False  # whether it makes no sense without a checkpoint
    # Patterns of weights that the checkpoint and the model need not share: what only the model has begins
    # anew, what only the checkpoint has is left behind. ("indexer",) gives a dense model its indexers. And of
    # fields of the model that may change what the others compute: ("rope_theta",).
    unshared: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Where the run ends; by default with its learning-rate schedule."""
        return self.train.steps or self.schedule.total_steps

    @property
    def free(self) -> tuple[str, ...]:
        """How fields begin that a resumed run may change: they alter neither what is trained nor on what."""
        return _FREE

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        raise NotImplementedError

    @property
    def first_rows(self) -> int:
        """Rows of the first batch, at least; ValueError of a stage whose step is not `make_step`'s."""
        raise ValueError(f"{self.name} learns by a step of its own, which is not lowered")

    def check_rows(self, region: Region) -> None:
        """ValueError for batches that cannot be cut over the devices of a region."""
        check_batch(self.first_rows, self.row_length, region)

    @property
    def streams(self) -> tuple[str, ...]:
        """Of a record, that the learner reads."""
        return "token_ids", "loss_mask", "ce_weight"

    @property
    def token_loss(self) -> TokenLoss | None:
        """What sampled tokens are learnt from; None: nothing is sampled."""
        return None

    @property
    def chat_variant(self) -> str | None:
        """The layout of the chats that are learnt; None: there are none."""
        raise NotImplementedError

    def after(self, folders: Mapping[str, str]):
        """This stage behind those in the folders, by their names: it starts from the last one's weights, unless it has a
        checkpoint of its own."""
        if self.checkpoint is not None or not folders:
            return self
        return dataclasses.replace(self, checkpoint=list(folders.values())[-1])

    def stage(self, workdir, evaluator=None, before=None, **options):
        """The `Stage` that trains as this says, checked; evaluator: as `Pretraining` has it; options: as of `Stage`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ExperimentConfig(StageConfig):
    """A run that learns from rows of text."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    batch: BatchRampConfig = dataclasses.field(default_factory=BatchRampConfig)
    sample: SampleConfig = SampleConfig()

    @property
    def row_length(self) -> int:
        return self.data.sequence_length

    @property
    def first_rows(self) -> int:
        return self.batch.start // self.row_length

    def check_rows(self, region: Region) -> None:
        length, shards = self.row_length, region.size(BATCH_AXES)
        for name in ("start", "end", "multiple"):
            tokens = getattr(self.batch, name)
            if tokens % (length * shards) or tokens < length * shards:
                raise ValueError(
                    f"batch.{name} is {tokens} tokens; it must be a multiple of {length * shards} "
                    f"(sequence length {length} * {shards} devices that have rows of their own)"
                )
            if self.data.streams and tokens // length % self.data.streams:
                raise ValueError(
                    f"batch.{name} is {tokens // length} rows, which cannot be dealt out to data.streams "
                    f"{self.data.streams}; use a divisor of the rows"
                )
        super().check_rows(region)

    @property
    def chat_variant(self) -> str | None:
        return self.data.chat_variant

    def stage(self, workdir, evaluator=None, before=None, **options):
        # The module imports this one.
        from glm5_jax.training.pretraining import Pretraining

        return Pretraining(self, workdir, evaluator, before=before, **options)


Config = TypeVar("Config")

_FREE = (
    "name",
    "mesh.",
    "train.",
    "sample.",
    "data.num_threads",
    "data.prefetch_documents",
    "step.rows_per_device",
    "step.loss_chunk",
    "step.query_block",
    "step.gather_block",
    "step.token_chunk",
    "step.vocab_block",
    "step.expert_slices",
    "step.balance_rows",
    "step.accumulate",
    "step.remat",
    "step.reduce_dtype",
    "optimizer.ns_blocks",
)


def choose(variant: str, variants: dict[str, Callable[[], Config]]) -> Config:
    """The variant's config; ValueError with the list of variants if there is none of that name."""
    if variant not in variants:
        between = " or " if any("," in name for name in variants) else ", "
        raise ValueError(f"unknown variant {variant!r}; use one of {between.join(variants)}")
    return variants[variant]()


def write_config(workdir, config) -> None:
    """Writes `config.json` of a workdir, whole or not at all."""
    path = pathlib.Path(workdir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    os.replace(whole, path)


def check_resume(workdir, config) -> None:
    """ValueError if the run in the workdir was another one; it names every field that differs.

    Steps, intervals, mesh and what only costs time or memory may differ.
    """
    path = pathlib.Path(workdir) / "config.json"
    if not path.exists():
        return
    before = dict(_flat(json.loads(path.read_text())))
    now = dict(_flat(json.loads(json.dumps(dataclasses.asdict(config)))))
    names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
    changed = [n for n in names if not n.startswith(config.free)]
    if changed:
        listed = "; ".join(f"{n} was {before.get(n)}, is {now.get(n)}" for n in changed)
        raise ValueError(
            f"{workdir} holds a run of another configuration ({listed}); "
            "use its values, or another --workdir"
        )


def _flat(config: dict, path: str = ""):
    """(path, JSON value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", json.dumps(value)
