"""Configuration of a run as typed data, `StageConfig` and `ExperimentConfig`, and its `config.json`.

An experiment file (experiments/) builds one config per variant. The command line may set any field before
the run starts (runtime/config_flags.py). The workdir stores the resolved values.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from glm5_jax import presets
from glm5_jax.config import ModelConfig
from glm5_jax.data.mixture import DataConfig
from glm5_jax.parallel.mesh import BATCH_AXES, Region, check_batch
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.loss import TokenLoss
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step import StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes. One may be -1: it gets all remaining devices."""

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Sample texts that a run writes at intervals, for people to read.

    chat: whether prompts are user messages, each answered with thinking and without.
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
                f"tokens is {self.tokens} and temperature {self.temperature}; tokens must be positive "
                "and temperature not negative"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Options that all stages of training share.

    The defaults are those of GLM-5's pre-training (paper Appendix A; GLM-4.5 2.4 for inherited values). The
    module of each part gives the sources of its numbers.
    """

    name: str = "experiment"
    model: ModelConfig = dataclasses.field(default_factory=presets.glm5)
    mesh: MeshConfig = MeshConfig()
    # A tokenizer.json or its folder, or "bytes"; None: the one of this project. The model takes its end and
    # padding ids.
    tokenizer: str | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    train: TrainConfig = TrainConfig()
    seed: int = 0
    checkpoint: str | None = None  # initial weights: a workdir, its checkpoints/STEP, an HF folder
    requires_checkpoint: bool = False  # whether the stage makes no sense on random weights
    # Patterns of weights that only the checkpoint or only the model may have: the model's are drawn, the
    # checkpoint's are dropped. ("indexer",) adds indexers to a dense model. Also patterns of model fields
    # that may differ although they change what weights compute: ("rope_theta",).
    may_differ: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Returns the last step of the run; by default that of its learning-rate schedule."""
        return self.train.steps or self.schedule.total_steps

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        """Returns prefixes of fields that a resumed run may change: they affect neither results nor data."""
        return _CHANGEABLE_ON_RESUME

    @property
    def row_length(self) -> int:
        """Returns the tokens of a row."""
        raise NotImplementedError

    @property
    def first_batch_rows(self) -> int:
        """Returns the minimum rows of the first batch.

        Raises ValueError for a stage whose step is not `make_step`'s.
        """
        raise ValueError(f"{self.name} does not train by make_step, so its step is not lowered")

    def check_rows(self, region: Region) -> None:
        """Raises ValueError if the devices of a region cannot shard the batches."""
        check_batch(self.first_batch_rows, self.row_length, region)

    @property
    def streams(self) -> tuple[str, ...]:
        """Returns the streams of a record that the learner reads."""
        return "token_ids", "loss_mask", "ce_weight"

    @property
    def token_loss(self) -> TokenLoss | None:
        """Returns the loss on sampled tokens; None if the stage samples none."""
        return None

    @property
    def chat_variant(self) -> str | None:
        """Returns the layout of the chats that the stage trains on; None if it has no chats."""
        raise NotImplementedError

    def continue_from(self, folders: Mapping[str, str]):
        """Returns this stage, starting from the weights of the last of the earlier stages' folders, {name: folder}.

        A stage with a checkpoint of its own stays unchanged.
        """
        if self.checkpoint is not None or not folders:
            return self
        return dataclasses.replace(self, checkpoint=list(folders.values())[-1])

    def make_stage(self, workdir, evaluator=None, previous_stage=None, **options):
        """Returns the checked `Stage` that trains this config.

        evaluator: as for `Pretraining`. previous_stage, options: as for `Stage`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(StageConfig):
    """Options of a run that trains on rows of text."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    batch: BatchRampConfig = dataclasses.field(default_factory=BatchRampConfig)
    sample: SampleConfig = SampleConfig()

    @property
    def row_length(self) -> int:
        return self.data.sequence_length

    @property
    def first_batch_rows(self) -> int:
        return self.batch.start // self.row_length

    def check_rows(self, region: Region) -> None:
        length, shards = self.row_length, region.size(BATCH_AXES)
        for name in ("start", "end", "multiple"):
            tokens = getattr(self.batch, name)
            if tokens % (length * shards) or tokens < length * shards:
                raise ValueError(
                    f"batch.{name} is {tokens} tokens; it must be a multiple of {length * shards} "
                    f"(sequence length {length} * {shards} devices with different rows)"
                )
            if self.data.num_shards and tokens // length % self.data.num_shards:
                raise ValueError(
                    f"batch.{name} is {tokens // length} rows, which cannot be divided among data.num_shards "
                    f"{self.data.num_shards}; use a divisor of the rows"
                )
        super().check_rows(region)

    @property
    def chat_variant(self) -> str | None:
        return self.data.chat_variant

    def make_stage(self, workdir, evaluator=None, previous_stage=None, **options):
        # The module imports this one.
        from glm5_jax.training.pretraining import Pretraining

        return Pretraining(self, workdir, evaluator, previous_stage=previous_stage, **options)


Config = TypeVar("Config")

_CHANGEABLE_ON_RESUME = (
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
    """Returns the variant's config. Raises ValueError with the list of variants if the name is unknown."""
    if variant not in variants:
        between = " or " if any("," in name for name in variants) else ", "
        raise ValueError(f"unknown variant {variant!r}; use one of {between.join(variants)}")
    return variants[variant]()


def write_config(workdir, config) -> None:
    """Writes `config.json` of a workdir atomically."""
    path = pathlib.Path(workdir) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    os.replace(temporary, path)


def check_resume(workdir, config) -> None:
    """Raises ValueError if the workdir holds a run of another configuration; names every field that differs.

    Steps, intervals, mesh and options that only affect time or memory may differ.
    """
    path = pathlib.Path(workdir) / "config.json"
    if not path.exists():
        return
    before = dict(_flat(json.loads(path.read_text())))
    now = dict(_flat(json.loads(json.dumps(dataclasses.asdict(config)))))
    names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
    changed = [n for n in names if not n.startswith(config.changeable_on_resume)]
    if changed:
        listed = "; ".join(f"{n} was {before.get(n)}, is {now.get(n)}" for n in changed)
        raise ValueError(
            f"{workdir} holds a run of another configuration ({listed}); "
            "use its values, or another --workdir"
        )


def _flat(config: dict, path: str = ""):
    """Yields (path, JSON value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", json.dumps(value)
