"""Divides a stage's train step into parts of the model, and compares its FLOPs on one device with the model's.

`trace_step` traces the step of a config on a mesh, `parallel.flops` counts the trace by part, and `training.flops`
gives the model's FLOPs. The ratio of both bounds the MFU. The count exceeds the model's FLOPs by:

- recomputation (`StepConfig.remat`; the attention's backward always recomputes its logits),
- Newton-Schulz,
- work that is not distributed, which every device of an axis does alike.

tests/pod/test_step_flops.py takes the 744B step apart, product by product. Nothing is compiled and no device
is needed: 744B parameters on 1,024 chips take seconds.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from glm5_jax.data.record import STREAMS
from glm5_jax.parallel.flops import Work, work_by_scope
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.flops import train_flops
from glm5_jax.training.schedule import make_schedule
from glm5_jax.training.step import Step, make_step

# Names of `jax.named_scope` in the model and the optimiser. Nested work counts for the first match in this
# list, so "mtp" holds a full layer, and "head" the output projection of all MTP steps too.
PARTS = ("mtp", "indexer", "attention", "router", "experts", "mlp", "head", "newton_schulz")


class TracedStep(NamedTuple):
    """Train step, traced for its state (`step.abstract`) and a batch of shapes."""

    step: Step
    batch: dict[str, jax.ShapeDtypeStruct]
    traced: jax.stages.Traced


class StepFlops(NamedTuple):
    """FLOPs of one device.

    Attributes:
      parts: work of each part, REST among them.
      model: FLOPs that the model needs for the device's tokens.
    """

    parts: dict[str, Work]
    model: float

    @property
    def total(self) -> int:
        """Returns the FLOPs of the step."""
        return sum(work.flops for work in self.parts.values())

    @property
    def ratio(self) -> float:
        """Returns the step's FLOPs over the model's. Its inverse bounds the MFU at full utilisation."""
        return self.total / self.model

    def share(self, part: str) -> float:
        """Returns the share of the step's FLOPs that a part has."""
        return self.parts[part].flops / self.total

    def describe(self) -> str:
        """Returns one line for each part, the largest first."""
        lines = [
            f"{self.total / 1e12:,.1f} TFLOP per device, {self.ratio:.3f} times the model's "
            f"{self.model / 1e12:,.1f}"
        ]
        for part, work in sorted(self.parts.items(), key=lambda item: -item[1].flops):
            if any(work):
                gigabytes = work.kernel_bytes / 1e9
                lines.append(
                    f"{part:>14} {work.flops / 1e12:10,.2f} TFLOP {self.share(part):7.2%}"
                    + (f", kernels move {gigabytes:,.1f} GB" if gigabytes else "")
                )
        return "\n".join(lines)


def trace_step(config: StageConfig, mesh: Mesh | AbstractMesh | None) -> TracedStep:
    """Traces the train step of a stage on a mesh, for the first batch of its run.

    mesh: None: the first device.

    Raises ValueError if config and mesh do not fit.
    """
    rows, length = config.first_batch_rows, config.row_length
    config.model.check_length(length)
    config.check_rows(Region() if mesh is None else Region.of(mesh))
    schedule = make_schedule(config.schedule)
    step = make_step(config.model, config.step, config.optimizer, schedule, mesh, config.token_loss)
    if mesh is None:  # a run binds its state to the device
        state_sharding, batch_sharding = SingleDeviceSharding(jax.devices()[0]), None
        state = jax.tree.map(lambda x: x.update(sharding=state_sharding), step.abstract)
        step = step._replace(abstract=state)
    else:
        batch_sharding = NamedSharding(mesh, P(BATCH_AXES, SEQUENCE_AXES))
    dtypes = {k: STREAMS[k] for k in config.streams}
    dtypes |= dict.fromkeys(("segment_ids", "positions"), np.int32)
    batch = {
        k: jax.ShapeDtypeStruct((rows, length), t, sharding=batch_sharding)
        for k, t in dtypes.items()
    }
    return TracedStep(step, batch, step.train.trace(step.abstract, batch))


def step_flops(
    config: StageConfig, mesh: Mesh | AbstractMesh, traced: TracedStep | None = None
) -> StepFlops:
    """Counts the FLOPs of one device in a train step of a stage, for the first batch of its run.

    - Each row counts as one document, and experts as evenly loaded.
    - Where the sequence is sharded over `context`, attention counts the mean over its devices. The last of
      them does nearly twice as much.

    Args:
      mesh: mesh of TPUs, real or abstract (`parallel.mesh.abstract_mesh(axes, "TPU v5p")`). The program then
        contains the TPU kernels (`parallel.flops`).
      traced: the step's `trace_step`; None: traced here.

    Raises ValueError if config and mesh do not fit.
    """
    traced = traced or trace_step(config, mesh)
    tokens = config.first_batch_rows * config.row_length / mesh.size
    parts = work_by_scope(traced.traced.jaxpr, PARTS)
    return StepFlops(parts, model_flops(config, traced.step) * tokens)


def model_flops(config: StageConfig, step: Step) -> float:
    """Returns the FLOPs that the mathematics needs for one token of a step of the stage."""
    return train_flops(
        config.model,
        config.row_length,
        config.step.mtp_runs(config.model),
        trains_trunk=step.trains_trunk,
        trains_indexers=config.step.index_weight > 0,
    )
