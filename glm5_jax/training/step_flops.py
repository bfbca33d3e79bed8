"""FLOPs of a stage's train step on one device: counted in the program, by part, beside what the mathematics needs.

What the count has beyond the model's FLOPs is recomputation (`StepConfig.remat`; the attention's backward
always makes its logits again), Newton-Schulz, and work that is not shared out: what every device of an axis
does alike; tests/pod/test_step_flops.py takes the 744B step apart, product by product. Nothing is compiled,
nor a device needed: 744B parameters on 1,024 chips take seconds.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from glm5_jax.core.flops import Work, work_by_scope
from glm5_jax.core.mesh import BATCH_AXES, SEQUENCE_AXES, Region
from glm5_jax.data.record import STREAMS
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.flops import train_flops
from glm5_jax.training.schedule import make_schedule
from glm5_jax.training.step import Step, make_step

# The names of `jax.named_scope` in the model and the optimiser; what has several counts to the first of them,
# so that "mtp" holds a whole layer, and "head" the output projection of all its runs too.
PARTS = ("mtp", "indexer", "attention", "router", "experts", "mlp", "head", "newton_schulz")


class TracedStep(NamedTuple):
    """A train step, traced for its state (`step.abstract`) and this batch of shapes."""

    step: Step
    batch: dict[str, jax.ShapeDtypeStruct]
    traced: jax.stages.Traced


class StepFlops(NamedTuple):
    """Of one device: the work of each part, REST among them, and the FLOPs that the model needs for its tokens."""

    parts: dict[str, Work]
    model: float

    @property
    def total(self) -> int:
        """FLOPs of the step."""
        return sum(work.flops for work in self.parts.values())

    @property
    def ratio(self) -> float:
        """Of what is done to what the model needs: the bound of MFU at full use is its inverse."""
        return self.total / self.model

    def share(self, part: str) -> float:
        """The part of the step's FLOPs that it has."""
        return self.parts[part].flops / self.total

    def describe(self) -> str:
        """A line for each part, the largest first."""
        lines = [
            f"{self.total / 1e12:,.1f} TFLOP per device, {self.ratio:.3f} times the model's "
            f"{self.model / 1e12:,.1f}"
        ]
        for part, work in sorted(self.parts.items(), key=lambda item: -item[1].flops):
            if any(work):
                moved = work.kernel_bytes / 1e9
                lines.append(
                    f"{part:>14} {work.flops / 1e12:10,.2f} TFLOP {self.share(part):7.2%}"
                    + (f", kernels move {moved:,.1f} GB" if moved else "")
                )
        return "\n".join(lines)


def trace_step(config: StageConfig, mesh) -> TracedStep:
    """The train step of a stage on a mesh (None: the first device here), for the first batch of its run; ValueError if
    they do not fit."""
    rows, length = config.first_rows, config.row_length
    config.model.check_length(length)
    config.check_rows(Region() if mesh is None else Region.of(mesh))
    schedule = make_schedule(config.schedule)
    step = make_step(config.model, config.step, config.optimizer, schedule, mesh, config.token_loss)
    if mesh is None:  # a run binds its state to the device
        bound, where = SingleDeviceSharding(jax.devices()[0]), None
        state = jax.tree.map(lambda x: x.update(sharding=bound), step.abstract)
        step = step._replace(abstract=state)
    else:
        where = NamedSharding(mesh, P(BATCH_AXES, SEQUENCE_AXES))
    dtypes = {k: STREAMS[k] for k in config.streams}
    dtypes |= dict.fromkeys(("segment_ids", "positions"), np.int32)
    batch = {k: jax.ShapeDtypeStruct((rows, length), t, sharding=where) for k, t in dtypes.items()}
    return TracedStep(step, batch, step.train.trace(step.abstract, batch))


def step_flops(config: StageConfig, mesh, made: TracedStep | None = None) -> StepFlops:
    """What one device of a mesh does in a train step of a stage, for the first batch of its run.

    mesh: of TPUs, real ones or not (`core.mesh.abstract_mesh(axes, "TPU v5p")`), for which the program holds the
    TPU kernels (`core.flops`). made: its `trace_step`, if there is one. Rows are taken to be one document, experts to be
    loaded evenly. Where the sequence is cut over `context`, attention counts the mean over its devices, of which the last
    does nearly twice as much. ValueError if config and mesh do not fit.
    """
    made = made or trace_step(config, mesh)
    tokens = config.first_rows * config.row_length / mesh.size
    parts = work_by_scope(made.traced.jaxpr, PARTS)
    return StepFlops(parts, model_flops(config, made.step) * tokens)


def model_flops(config: StageConfig, step: Step) -> float:
    """That the mathematics needs for one token of a step of the stage."""
    return train_flops(
        config.model,
        config.row_length,
        config.step.mtp_runs(config.model),
        trunk=step.trains_trunk,
        indexers=config.step.index_weight > 0,
    )
