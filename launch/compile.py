"""What a pod's compiler makes of an experiment's train step, found out without the pod.

    python -m launch.compile --experiment=experiments/pretrain.py:glm5 [--target=v5p:8x8x16]

Without --target the step is only lowered, for as many chips as --experiment.mesh names: bytes per
device follow from the shapes, in seconds. --target compiles it for chips that are not there, by the
real compiler (launch/test.sh aot installs them), and adds temporary memory and collectives:

    v5p:8x8x16   a TPU and its topology, as libtpu names it      (744B: 24 GiB of memory, minutes)
    h200:128x8   128 hosts of 8 NVIDIA H200

--hlo=FILE keeps the compiled program's text. Fields of the experiment are set as in launch.run.
"""

import collections
import dataclasses
import math
import os
import pathlib
import sys
import time
from typing import NamedTuple

if __name__ == "__main__":  # the compilers need no device, and a pod's would be taken by jax
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a cloud for its machine
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from glm5_jax.core.mesh import AXES, BATCH_AXES, SEQUENCE_AXES, check_batch, resolve
from glm5_jax.core.sharding import stationary
from glm5_jax.core.tree import flatten
from glm5_jax.data.record import STREAMS
from glm5_jax.model import glm5
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.schedule import make_schedule
from glm5_jax.training.step import make_step
from launch.hlo import KINDS, collectives
from launch.run import parse

GB = 1e9
H200 = pathlib.Path(__file__).parent / "h200.txtpb"


class LoweredStep(NamedTuple):
    """A train step in the compiler's language, and its arguments as shapes with shardings."""

    lowered: jax.stages.Lowered
    state: dict
    batch: dict


def abstract_mesh(axes: dict[str, int]) -> AbstractMesh:
    """A mesh without devices; ValueError if an axis is left open (-1)."""
    if -1 in axes.values():
        raise ValueError(f"mesh {axes} leaves an axis open; set it, or give --target")
    sizes = resolve(axes, math.prod(axes.values()))
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def topology_devices(target: str) -> list:
    """Chips that are not there: "v5p:8x8x16", or "h200:128x8" (hosts x GPUs).

    ValueError if the compiler does not know the target or is not installed.
    """
    name, _, shape = target.partition(":")
    try:
        if name == "h200":
            return topologies.get_topology_desc(
                "", platform="cuda", target_config=H200.read_text(), topology=f"1x{shape}"
            ).devices
        return topologies.get_topology_desc(target, platform="tpu").devices
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"target {target!r}: {reason}; the aot extra holds the compilers"
        ) from None


def topology_mesh(target: str, axes: dict[str, int]) -> Mesh:
    """A mesh of the chips of a target (`topology_devices`); ValueError if the axes do not fit them."""
    devices = topology_devices(target)
    sizes = resolve(axes, len(devices))
    if target.startswith("h200"):
        placed = np.array(devices).reshape(sizes)
    else:  # an axis may take a part of a dimension of the torus
        placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def lower_step(config: StageConfig, mesh, platform: str = "tpu") -> LoweredStep:
    """The train step of a stage on a mesh, for the first batch of its run."""
    rows, length = config.first_rows, config.row_length
    config.model.check_length(length)
    check_batch(rows, length, mesh)
    schedule = make_schedule(config.schedule)
    step = make_step(config.model, config.step, config.optimizer, schedule, mesh, config.token_loss)
    where = NamedSharding(mesh, P(BATCH_AXES, SEQUENCE_AXES))
    dtypes = {k: STREAMS[k] for k in config.streams}
    dtypes |= dict.fromkeys(("segment_ids", "positions"), np.int32)
    batch = {k: jax.ShapeDtypeStruct((rows, length), t, sharding=where) for k, t in dtypes.items()}
    lowered = step.train.trace(step.abstract, batch).lower(lowering_platforms=(platform,))
    return LoweredStep(lowered, step.abstract, batch)


def bytes_on_device(tree) -> dict[str, int]:
    """{path: bytes of one device's part} of arrays, or shapes, with shardings."""
    return {
        path: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for path, x in flatten(tree).items()
    }


def replicated(tree) -> dict[str, int]:
    """{path: bytes} of the arrays that every device holds as a whole."""
    return {
        path: math.prod(x.shape) * x.dtype.itemsize
        for path, x in flatten(tree).items()
        if x.sharding.is_fully_replicated
    }


def gathered(cfg, mesh) -> dict[str, int]:
    """{path: bytes} that one device holds of a weight (one layer's) while it computes with it."""
    letters = flatten(glm5.letters(cfg))
    out = {}
    for path, x in flatten(glm5.abstract(cfg)).items():
        keep, size = stationary(letters[path]), jnp.dtype(cfg.dtype).itemsize
        for letter, dim in zip(letters[path].split(), x.shape):
            own = math.prod(mesh.shape[a] for a in keep.get(letter, ()))
            size *= 1 if letter == "l" else dim // own if dim % own == 0 else dim
        out[path] = size
    return out


def describe(config, mesh, step: LoweredStep) -> str:
    """The report from shapes alone."""
    arguments = {**step.state, "batch": step.batch}
    parts = {name: sum(bytes_on_device(part).values()) for name, part in arguments.items()}
    tokens = config.first_rows * config.row_length
    name = ", ".join(f"{a} {n}" for a, n in mesh.shape.items() if n > 1) or "1 device"
    lines = [
        f"{config.name} on {mesh.size} devices: {name}; batch of {tokens:,} tokens, "
        f"{tokens // mesh.size:,} per device",
        "GB per device: "
        + ", ".join(f"{k} {v / GB:.3f}" for k, v in parts.items() if v > 1e4)
        + f", together {sum(parts.values()) / GB:.3f}",
    ]
    for label, sizes in (
        ("largest part of an array on one device", bytes_on_device(arguments)),
        ("largest array that is whole on every device", replicated(arguments)),
        ("largest weight while it is used", gathered(config.model, mesh)),
    ):
        path = max(sizes, key=sizes.get)
        lines.append(f"{label}: {sizes[path] / GB:.3f} GB ({path})")
    return "\n".join(lines)


def describe_compiled(compiled) -> str:
    """The report of a compiled step: memory, and collectives by kind (a loop counts once)."""
    memory, found = compiled.memory_analysis(), collections.defaultdict(list)
    for one in collectives(compiled.as_text()):
        found[one.kind].append(one)
    lines = [
        f"GB per device: arguments {memory.argument_size_in_bytes / GB:.2f}, of which "
        f"{memory.alias_size_in_bytes / GB:.2f} are reused for results; "
        f"temporaries {memory.temp_size_in_bytes / GB:.2f}"
    ]
    for kind in (k for k in KINDS if k in found):
        inside = [one.num_bytes for one in found[kind] if one.in_loop]
        outside = [one.num_bytes for one in found[kind] if not one.in_loop]
        lines.append(
            f"{kind}: {len(outside)} (largest result {max(outside, default=0) / 1e6:.1f} MB), "
            f"in loops {len(inside)} ({max(inside, default=0) / 1e6:.1f} MB)"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Exit code; the report goes to standard output."""
    values = flags.FlagValues()
    flags.DEFINE_string("target", None, "what to compile for", flag_values=values)
    flags.DEFINE_string("hlo", None, "file for the compiled text", flag_values=values)
    if {"-h", "--help"} & set(argv[1:]):
        print(__doc__)
        return 0
    try:
        config = parse(values(argv, known_only=True)).config
        if not isinstance(config, StageConfig):
            raise ValueError(
                "this experiment is not one stage of training; give the one to compile"
            )
        axes = dataclasses.asdict(config.mesh)
        mesh = topology_mesh(values.target, axes) if values.target else abstract_mesh(axes)
        platform = "cuda" if (values.target or "").startswith("h200") else "tpu"
        began = time.monotonic()
        step = lower_step(config, mesh, platform)
    except (ValueError, flags.Error) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    print(describe(config, mesh, step))
    print(f"lowered for {platform} in {time.monotonic() - began:.0f} s", flush=True)
    if values.target:
        began = time.monotonic()
        compiled = step.lowered.compile()
        print(f"compiled for {values.target} in {time.monotonic() - began:.0f} s")
        print(describe_compiled(compiled))
        if values.hlo:
            pathlib.Path(values.hlo).write_text(compiled.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
