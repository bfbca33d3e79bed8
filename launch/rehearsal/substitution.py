"""Small form of an experiment for a rehearsal: the fields that are replaced, and by what.

launch/rehearse.py writes a `Rehearsal` to a file and names it in GLM5_REHEARSAL. All programs of this package read their
command line by `command_line.parse`, which then calls `replace_sizes`. So the command lines of a rehearsed run are those of
the real one, and this is the only place where a rehearsal changes a program.

Sizes come from the variant :tiny of the same experiment. What is not in `SIZES` stays as in the recipe.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glm5_jax.config import ModelConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import AXES, BATCH_AXES
from glm5_jax.training.experiment import MeshConfig, StageConfig
from glm5_jax.training.schedule import BatchRampConfig
from launch.rehearsal import VARIABLE

ROWS_PER_DEVICE = 2
NUM_LAYERS = 2  # of the model: a dense one, and one of experts
NUM_SEQS = 4  # sequences decoded at once on each data-parallel rank in RL
MAX_LENGTH = 2048  # tokens of a row and of an attempt in RL; prompts with tools need more than the 512 of :tiny
PAGE_SIZE = 512  # tokens; few pages in a row of that length need few programs
NUM_GROUPS = 2  # groups of a step, and groups that are sampled at once
NUM_TASKS = 200  # of each generated or shipped set; a service makes all of them when it starts
TASK_FIELDS = ("tasks", "sft", "reasoning", "agentic", "general")
ENGINE_SIZES = tuple(
    f"engine.{name}"
    for name in (
        "page_size",
        "num_pages",
        "max_num_seqs",
        "max_length",
        "prefill_chunk",
        "max_batched_tokens",
        "min_prefill_bucket",
        "token_chunk",
        "vocab_block",
    )
)
# Fields whose value is that of :tiny.
SIZES = (
    "tokenizer",
    "requires_data",
    "data.sources",  # the user's may be elsewhere, and have samples that need long rows
    "data.sequence_length",
    "data.num_threads",
    "data.open_rows",
    "step.loss_chunk",
    "step.query_block",
    "step.gather_block",
    "step.token_chunk",
    "step.vocab_block",
    *ENGINE_SIZES,
)
# Fields of `TrainConfig` without evaluations, samples and saves between the first and the last step.
SHORT_RUN = {
    "log_interval": 1,
    "eval_interval": 0,
    "sample_interval": 0,
    "save_interval": 0,
    "eval_batches": 1,
    "baseline_tokens": 2**12,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Replacements of a rehearsal in addition to `SIZES`.

    Attributes:
      max_processes: maximum processes of a replica, and replicas of a role.
      devices: emulated devices of the trainer, over all of its processes.
      engine_devices: emulated devices of an engine, in all of its processes.
      steps: last step of the run.
      checkpoint: folder of a checkpoint of the small model, in place of all others; None: not made yet.
      served_checkpoint: the same, quantised.
    """

    max_processes: int
    devices: int = 1
    engine_devices: int = 1
    steps: int = 1
    checkpoint: str | None = None
    served_checkpoint: str | None = None

    def write(self, path: pathlib.Path) -> None:
        """Writes the file that `read_rehearsal` reads, atomically."""
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(dataclasses.asdict(self)))
        os.replace(temporary, path)


def read_rehearsal(environment: Mapping[str, str] = os.environ) -> Rehearsal | None:
    """Returns the rehearsal that this process belongs to; None: it is a real run."""
    path = environment.get(VARIABLE)
    return Rehearsal(**json.loads(pathlib.Path(path).read_text())) if path else None


def replace_sizes(config: Any, get_config: Callable[[str], Any], variant: str) -> Any:
    """Returns the config in its small form if this process belongs to a rehearsal; else unchanged.

    get_config, variant: function of the experiment that returns the config of a variant, and the variant's name.
    """
    rehearsal = read_rehearsal()
    if rehearsal is None:
        return config
    return small_form(config, get_config(tiny_variant(variant)), rehearsal)


def tiny_variant(variant: str) -> str:
    """Returns the variant of the same kind for two CPU cores: tiny,32k for glm5,32k."""
    _, comma, kind = variant.partition(",")
    return f"tiny{comma}{kind}"


def small_form(config: Any, tiny: Any, rehearsal: Rehearsal) -> Any:
    """Returns a config with the sizes of `tiny`."""
    if isinstance(config, StageConfig):
        return _small_stage(config, tiny, rehearsal)
    if isinstance(getattr(config, "engine", None), EngineConfig):  # a server
        hosts = min(config.hosts, rehearsal.max_processes)
        changes = {
            "mesh": small_mesh(config.mesh, rehearsal.engine_devices),
            "checkpoint": rehearsal.checkpoint,
            "warm": False,
            "hosts": hosts,
            "topology": small_topology(config.topology, hosts * config.devices),
        }
        changes |= {path: get(tiny, path) for path in ENGINE_SIZES}
        if config.prefill.replicas:
            changes["prefill"] = _small_prefill(config, rehearsal)
            changes["server.prefill_min_tokens"] = 1
        return with_fields(config, changes)
    stages = {
        field.name: small_form(
            getattr(config, field.name),
            getattr(tiny, field.name),
            rehearsal,
        )
        for field in dataclasses.fields(config)
        if isinstance(getattr(config, field.name), StageConfig)
    }
    return dataclasses.replace(config, **stages)


def _small_prefill(config: Any, rehearsal: Rehearsal) -> Any:
    """Returns the small form of a server's engines that only prefill."""
    prefill, limit = config.prefill, rehearsal.max_processes
    hosts = min(prefill.hosts, limit)
    processes = min(config.hosts, limit) * max(1, config.devices)
    num_devices = rehearsal.engine_devices * hosts * max(1, prefill.devices) // processes
    return dataclasses.replace(
        prefill,
        replicas=min(prefill.replicas, limit),
        hosts=hosts,
        mesh=small_mesh(prefill.mesh, num_devices),
        topology=small_topology(prefill.topology, hosts * prefill.devices),
    )


def _small_stage(config: Any, tiny: Any, rehearsal: Rehearsal) -> Any:
    """Returns the small form of a stage of training."""
    mesh = small_mesh(config.mesh, rehearsal.devices)
    shards = math.prod(getattr(mesh, axis) for axis in BATCH_AXES)
    changes: dict[str, Any] = {
        "mesh": mesh,
        "train": dataclasses.replace(config.train, steps=rehearsal.steps, **SHORT_RUN),
        "step.expert_slices": math.gcd(config.step.expert_slices, mesh.expert),
    }
    changes |= {path: get(tiny, path) for path in SIZES if _has(config, path) and _has(tiny, path)}
    changes["model"] = small_model(tiny.model)
    changes["model_of_checkpoint"] = False
    if config.step.rows_per_device is not None:
        changes["step.rows_per_device"] = 1  # several microbatches, as in the recipe
    if config.checkpoint is not None:
        changes["checkpoint"] = rehearsal.checkpoint
    if isinstance(getattr(config, "batch", None), BatchRampConfig):
        tokens = ROWS_PER_DEVICE * shards * tiny.data.sequence_length
        changes["batch"] = BatchRampConfig(start=tokens, end=tokens, ramp_tokens=0, multiple=tokens)
    if _has(config, "rollout"):
        changes |= _rl_changes(config, tiny, shards, rehearsal)
    return with_fields(config, changes)


def _rl_changes(config: Any, tiny: Any, shards: int, rehearsal: Rehearsal) -> dict[str, Any]:
    """Returns the changes to a stage of reinforcement learning."""
    model = small_model(tiny.model)
    changes: dict[str, Any] = {
        "model": dataclasses.replace(model, max_position_embeddings=MAX_LENGTH),
        "length": MAX_LENGTH,
        "rows": shards,
        "engine.max_length": MAX_LENGTH,
        "engine.max_num_seqs": NUM_SEQS,
        "engine.page_size": PAGE_SIZE,
        "engine.num_pages": NUM_SEQS * MAX_LENGTH // PAGE_SIZE,
        "engine.min_prefill_bucket": tiny.engine.prefill_chunk,
        "rollout.prompts": NUM_GROUPS,
        "rollout.group": min(2, config.rollout.group),
        "rollout.max_tokens": 16,
        "rollout.max_turns": 2,
        "evaluation.tasks": min(1, config.evaluation.tasks),
    }
    changes |= {
        name: tuple(map(_small_share, getattr(config, name)))
        for name in TASK_FIELDS
        if _has(config, name)
    }
    if rehearsal.checkpoint is not None:
        changes["teachers"] = tuple(
            dataclasses.replace(teacher, checkpoint=rehearsal.checkpoint, url=None, key_file=None)
            for teacher in config.teachers
        )
    if config.has_engine_processes:
        cluster, limit = config.cluster, rehearsal.max_processes
        if config.served_checkpoint is not None:
            changes["served_checkpoint"] = rehearsal.served_checkpoint
        changes["max_running"] = NUM_GROUPS
        changes["cluster"] = dataclasses.replace(
            cluster,
            engines=min(cluster.engines, limit),
            engine_hosts=min(cluster.engine_hosts, limit),
            engine_mesh=small_mesh(cluster.engine_mesh, rehearsal.engine_devices),
            engine_topology=small_topology(
                cluster.engine_topology, min(cluster.engine_hosts, limit) * cluster.engine_devices
            ),
            hosts=min(cluster.hosts, limit),
            topology=small_topology(cluster.topology, min(cluster.hosts, limit) * cluster.devices),
            warm=False,
        )
    return changes


def small_model(tiny: ModelConfig) -> ModelConfig:
    """Returns the model of a rehearsal: that of :tiny with fewer layers."""
    return dataclasses.replace(tiny, num_hidden_layers=NUM_LAYERS)


def _small_share(share: Any) -> Any:
    """Returns a set of tasks with at most `NUM_TASKS` of them; those of files stay."""
    if not _has(share, "tasks.size"):
        return share
    return with_fields(share, {"tasks.size": min(NUM_TASKS, share.tasks.size)})


def small_mesh(mesh: MeshConfig, num_devices: int) -> MeshConfig:
    """Returns a mesh of `num_devices` on the axes of `mesh` that are larger than 1.

    Each gets a factor of 2 in turn, the largest first, so that as many as possible stay larger than 1.
    """
    large = [axis for axis in AXES if getattr(mesh, axis) != 1]
    # -1, all remaining devices, counts as the largest.
    large.sort(key=lambda axis: getattr(mesh, axis) % 2**30, reverse=True)
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    remaining = num_devices
    while large and remaining % 2 == 0:
        for axis in large:
            if remaining % 2 == 0:
                sizes[axis], remaining = sizes[axis] * 2, remaining // 2
    sizes[large[0] if large else "fsdp"] *= remaining
    return MeshConfig(**sizes)


def small_topology(topology: str, chips: int) -> str:
    """Returns a TPU topology with as many dimensions and `chips` chips; empty for an empty one."""
    return "x".join([str(chips), *["1"] * topology.count("x")]) if topology else ""


def with_fields(config: Any, changes: Mapping[str, Any]) -> Any:
    """Returns a config with the fields at these paths replaced."""
    direct = {path: value for path, value in changes.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, dot, rest = path.partition(".")
        if dot:
            nested.setdefault(name, {})[rest] = value
    parts = {name: with_fields(getattr(config, name), inner) for name, inner in nested.items()}
    return dataclasses.replace(config, **direct, **parts)


def get(config: Any, path: str) -> Any:
    """Returns the value of the field at a path."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _has(config: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(config, name):
            return False
        config = getattr(config, name)
    return True


def differences(config: Any, small: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields the path, the value and the small value of each replaced field."""
    for field in dataclasses.fields(config):
        before, after = getattr(config, field.name), getattr(small, field.name)
        name = f"{path}{field.name}"
        if before == after:
            continue
        if isinstance(before, ModelConfig):
            yield name, f"{before.num_parameters:,} parameters", f"{after.num_parameters:,}"
        elif dataclasses.is_dataclass(before) and type(before) is type(after):
            yield from differences(before, after, f"{name}.")
        else:
            yield name, str(before), str(after)
