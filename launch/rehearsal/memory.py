"""Memory of a run at its real size: bytes of a device.

Nothing is compiled. State and cache are counted from shapes with shardings. If experiments/layouts.jsonl has a compiled
program with the same arguments on the same chip, its temporaries are added.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from glm5_jax.config import ModelConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.parallel.mesh import AXES, abstract_mesh, resolve
from glm5_jax.rl.config import RlConfig
from glm5_jax.training.experiment import MeshConfig, StageConfig
from glm5_jax.training.schedule import make_schedule
from glm5_jax.training.step import make_step
from launch import pods
from launch.aot.programs import bytes_on_device
from launch.aot.serving_programs import arguments_of

ROOT = pathlib.Path(__file__).parents[2]
REPORTS = ROOT / "experiments" / "layouts.jsonl"
_PLATFORM_NAMES = {"tpu": "TPU", "cuda": "NVIDIA"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device that a program needs.

    Attributes:
      program: train step, engine, or engine on the trainer's devices.
      parts: bytes by kind: weights, optimizer, teachers, cache.
      temporary_bytes: bytes of the compiled program in addition; None: no compiled program is known.
      usable_bytes: bytes of the device that JAX may use; None: not known.
      source: name of the layout with the compiled program; empty: there is none.
    """

    program: str
    parts: Mapping[str, int]
    temporary_bytes: int | None
    usable_bytes: int | None
    source: str

    @property
    def used_bytes(self) -> int:
        """Bytes of all parts and temporaries."""
        return sum(self.parts.values()) + (self.temporary_bytes or 0)

    @property
    def fits(self) -> bool:
        """Whether the bytes fit the device, as far as both are known."""
        return self.usable_bytes is None or self.used_bytes <= self.usable_bytes


def train_memory(config: StageConfig, chip: str, num_devices: int) -> DeviceMemory:
    """Returns the memory of a train step on `num_devices` JAX devices. Raises ValueError if its mesh does not fit them."""
    mesh = abstract_axes(config.mesh, chip, num_devices)
    schedule = make_schedule(config.schedule)
    step = make_step(config.model, config.step, config.optimizer, schedule, mesh, config.token_loss)
    state = step.abstract
    parts = {name: _num_bytes(state[name]) for name in ("params", "optimizer")}
    if isinstance(config, RlConfig):
        loaded = [teacher for teacher in config.teachers if teacher.url is None]
        if loaded:
            parts["teachers"] = min(len(loaded), config.max_loaded_teachers) * parts["params"]
    rows = {"rows": config.first_batch_rows, "length": config.row_length}
    shape = dict(mesh.shape)
    return _with_compiled("train step", parts, chip, num_devices, shape, rows, config.name)


def engine_memory(
    program: str,
    model: ModelConfig,
    engine: EngineConfig,
    mesh: MeshConfig,
    chip: str,
    num_devices: int,
    is_quantised: bool,
) -> DeviceMemory:
    """Returns the memory of an engine's weights and pages. Raises ValueError if its mesh does not fit its devices."""
    axes = abstract_axes(mesh, chip, num_devices)
    arguments = arguments_of("decode", model, axes, engine, is_quantised)
    parts = {name: _num_bytes(arguments[name]) for name in ("weights", "cache")}
    return _with_compiled(program, parts, chip, num_devices, dict(axes.shape), {})


def abstract_axes(mesh: MeshConfig, chip: str, num_devices: int):
    """Returns the mesh of a config on this many devices, without devices."""
    sizes = resolve(dataclasses.asdict(mesh), num_devices)
    kind = f"{_PLATFORM_NAMES[pods.Pod(chip, ()).platform]} {chip}"
    return abstract_mesh(dict(zip(AXES, sizes)), kind)


def _num_bytes(tree) -> int:
    return sum(bytes_on_device(tree).values())


def _with_compiled(
    program: str,
    parts: Mapping[str, int],
    chip: str,
    num_devices: int,
    mesh: Mapping[str, int],
    batch: Mapping[str, int],
    experiment: str | None = None,
) -> DeviceMemory:
    """Adds the temporaries of the compiled program with the same arguments.

    Of several it is one of `experiment`, if there is one, and then the largest.
    """
    matches = []
    for layout, report in _reports():
        pod = pods.parse(report["topology"])
        if (pod.chip, pod.num_devices, report["mesh"]) != (chip, num_devices, dict(mesh)):
            continue
        has_same_parts = parts.items() <= report["argument_bytes"].items()
        if has_same_parts and batch.items() <= report["batch"].items():
            needed = ("temporary_bytes", "unaliased_result_bytes", "code_bytes")
            is_same = report["experiment"] == experiment
            matches.append((is_same, sum(report[name] for name in needed), layout))
    _, temporaries, source = max(matches, default=(False, None, ""))
    return DeviceMemory(
        program=program,
        parts=parts,
        temporary_bytes=temporaries,
        usable_bytes=pods.Pod(chip, (1, 1)).usable_bytes,
        source=source,
    )


def _reports() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each layout with the report of each of its programs."""
    for line in REPORTS.read_text().splitlines():
        row = json.loads(line)
        yield from ((row["layout"], report) for report in row["reports"])
