"""Configuration of a stage of training as typed data, and its `config.json`.

An experiment file (experiments/) builds one config per variant. The command line may set any field before
the run starts (runtime/config_flags.py). The workdir stores the resolved values.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from glm5_jax import presets
from glm5_jax.config import ModelConfig
from glm5_jax.parallel.mesh import Region, check_batch
from glm5_jax.runtime.config_fields import unknown_variant
from glm5_jax.runtime.files import replace_text
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.loss import TokenLoss
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig
from glm5_jax.training.step_config import StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes. One may be -1: it gets all remaining devices.

    Attributes:
      data: replicas of the weights, each with its own rows.
      fsdp: shards of the weights, each with its own rows.
      expert: shards of the routed experts, each with its own rows.
      context: shards of the sequence.
      tensor: shards of heads and feed-forward columns.
    """

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1


# Fields of a model that belong to its training: new adapters, and quantisation-aware training.
MODEL_CHANGES = ("lora", "int4_group")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Options that all stages of training share.

    The defaults are those of GLM-5's pre-training (paper Appendix A; GLM-4.5 2.4 for inherited values). The
    module of each part gives the sources of its numbers.

    Attributes:
      name: name of the run, in logs and reports.
      model: shapes and constants of the model.
      mesh: sizes of the mesh axes.
      tokenizer: a tokenizer.json or its folder, or "bytes"; None: the one of this project. The model takes its end and
        padding ids.
      optimizer: constants of the optimiser.
      schedule: learning rate by step.
      step: options of a train step.
      train: length of the run and its intervals.
      seed: seed of new weights and of sampling.
      checkpoint: initial weights: a workdir, one of its checkpoints/STEP, a HuggingFace folder, or owner/name[@revision] of the
        hub; None: random weights.
      requires_checkpoint: whether the stage makes no sense on random weights.
      requires_data: whether the stage refuses to start without data of the user, that is on shipped and generated data only.
      may_differ: patterns of weights that only the checkpoint or only the model may have: the model's are drawn, the
        checkpoint's are dropped. ("indexer",) adds indexers to a dense model. Also patterns of model fields that may
        differ although they change what weights compute: ("rope_theta",).
      model_of_checkpoint: whether the model and, unless it is set, the tokenizer are those of the checkpoint. Of `model`,
        only the fields of `model_changes` count then. A command line that names a checkpoint, and no field of the model
        other than these, sets it (launch/command_line.py).
      model_changes: fields of `model`, or GROUP.FIELD, that the stage changes, whichever model it trains.
    """

    name: str = "experiment"
    model: ModelConfig = dataclasses.field(default_factory=presets.glm5)
    mesh: MeshConfig = MeshConfig()
    tokenizer: str | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    step: StepConfig = dataclasses.field(default_factory=StepConfig)
    train: TrainConfig = TrainConfig()
    seed: int = 0
    checkpoint: str | None = None
    requires_checkpoint: bool = False
    requires_data: bool = False
    may_differ: tuple[str, ...] = ()
    model_of_checkpoint: bool = False
    model_changes: tuple[str, ...] = MODEL_CHANGES

    @property
    def steps(self) -> int:
        """Returns the last step of the run; by default that of its learning-rate schedule."""
        return self.train.steps or self.schedule.num_steps

    def change_model(self, model: ModelConfig) -> ModelConfig:
        """Returns the model that the stage trains, of a checkpoint's model: with the fields of `model_changes`."""
        return _with_fields_of(self.model, model, self.model_changes)

    @property
    def changeable_on_resume(self) -> tuple[str, ...]:
        """Returns prefixes of fields that a resumed run may change: they affect neither results nor data."""
        return _CHANGEABLE_ON_RESUME

    @property
    def row_length(self) -> int:
        """Returns the tokens of a row."""
        raise NotImplementedError

    @property
    def row_length_field(self) -> str:
        """Returns the field that sets the tokens of a row."""
        return "length"

    def check_length(self) -> None:
        """Raises ValueError, with the flag to change, if a row is longer than the model's positions."""
        try:
            self.model.check_length(self.row_length)
        except ValueError as error:
            flag = f"--experiment.{self.row_length_field}={self.model.max_position_embeddings}"
            raise ValueError(f"{error} ({flag})") from None

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
    def data_example(self) -> str:
        """Returns an example of the flag that adds data of the user; empty if the config has such data, or takes none."""
        return ""

    def check_data(self) -> None:
        """Raises ValueError, with the flag to give, if `requires_data` is set and the config has no data of the user."""
        if self.requires_data and (example := self.data_example):
            raise ValueError(
                f"{self.name} has only the small data sets of this repository; give yours, as in --experiment.{example} "
                "(or --experiment.requires_data=false)"
            )

    @property
    def max_processes(self) -> int | None:
        """Returns the maximum number of processes that train the stage; None: any number."""
        return None

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


CONFIG = "config.json"  # in the workdir
Config = TypeVar("Config")

_CHANGEABLE_ON_RESUME = (
    "name",
    "mesh.",
    "train.",
    "sample.",
    "requires_data",
    "model_of_checkpoint",  # the fields of the model are compared
    "model_changes",
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


def _with_fields_of(source: Config, target: Config, paths: Collection[str]) -> Config:
    """Returns a dataclass with the values that another one has at some paths, FIELD or GROUP.FIELD."""
    changes: dict[str, Any] = {}
    for path in paths:
        name, _, rest = path.partition(".")
        value = getattr(source, name)
        if rest:
            value = _with_fields_of(value, changes.get(name, getattr(target, name)), (rest,))
        changes[name] = value
    # All at once, because the dataclass refuses some combinations of new and old values.
    return dataclasses.replace(target, **changes)  # pyright: ignore[reportArgumentType]


def choose(
    variant: str, variants: Mapping[str, Callable[..., Config]], kinds: Collection[str] = ("",)
) -> Config:
    """Returns the variant's config. Raises ValueError with the list of variants if the name is unknown.

    Write the names as literals: launch/experiment_files.py reads them from source.

    Args:
      variant: name of the variant, SIZE or SIZE,KIND.
      variants: function that makes the config of each SIZE.
      kinds: names of the kinds, with which that function is called; "" stands for SIZE without a kind.
    """
    names = {
        f"{size},{kind}" if kind else size: (size, kind) for size in variants for kind in kinds
    }
    if variant not in names:
        raise ValueError(unknown_variant(variant, names))
    size, kind = names[variant]
    return variants[size](kind) if any(kinds) else variants[size]()


def write_config(workdir, config) -> None:
    """Writes `config.json` of a workdir atomically."""
    path = pathlib.Path(workdir) / CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(dataclasses.asdict(config), indent=1) + "\n")


def check_resume(workdir, config) -> None:
    """Raises ValueError if the workdir holds a run of another configuration; names every field that differs.

    Steps, intervals, mesh and options that only affect time or memory may differ.
    """
    path = pathlib.Path(workdir) / CONFIG
    if not path.exists():
        return
    try:
        before = dict(_flat(json.loads(path.read_text())))
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the configuration of a run ({error}); restore it, or use another --workdir"
        ) from error
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
