"""The programs of an experiment in the compiler's language, from shapes alone, for devices that need not be there."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.core.flops import jaxprs_of
from glm5_jax.core.mesh import abstract_mesh
from glm5_jax.core.sharding import stationary
from glm5_jax.core.tree import flatten
from glm5_jax.model import glm5
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.step_flops import model_flops, step_flops, trace_step


class Program(NamedTuple):
    """A program that is lowered.

    arguments: what goes in, by kind, as shapes with shardings; rows, length: of a batch; model_flops: what the mathematics
    needs of one device in a step; parts: what the program's products take there, by part ({}: not known); used: by path,
    bytes that a device holds of a weight while it computes with it.
    """

    name: str
    lowered: jax.stages.Lowered
    jaxpr: object
    arguments: dict[str, dict]
    rows: int
    length: int
    model_flops: float
    parts: dict[str, int]
    used: dict[str, int]


def lower_step(config: StageConfig, mesh, platform: str = "tpu") -> Program:
    """The train step of a stage on a mesh (None: the first device here), for the first batch of its run."""
    made = trace_step(config, mesh)
    state = made.step.abstract
    flops, per_device = None, config.first_rows * config.row_length
    if mesh is not None:
        per_device //= mesh.size
        # Kernels for GPUs do not tell what they cost; those for TPUs do the same work.
        counted = (mesh, made) if platform == "tpu" else (abstract_mesh(dict(mesh.shape)), None)
        flops = step_flops(config, *counted)
    return Program(
        "train step",
        made.traced.lower(lowering_platforms=(platform,)),
        made.traced.jaxpr.jaxpr,
        {"params": state["params"], "optimizer": state["optimizer"], "batch": made.batch},
        config.first_rows,
        config.row_length,
        model_flops(config, made.step) * per_device,
        {} if flops is None else {name: work.flops for name, work in flops.parts.items()},
        {} if mesh is None else gathered(config.model, mesh, config.step.vocab_block),
    )


def bytes_on_device(tree) -> dict[str, int]:
    """{path: bytes of one device's part} of arrays, or shapes, with shardings (None: of one device)."""
    return {
        path: math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape)
        * x.dtype.itemsize
        for path, x in flatten(tree).items()
    }


def replicated(tree) -> dict[str, int]:
    """{path: bytes} of the arrays that every device holds as a whole."""
    return {
        path: math.prod(x.shape) * x.dtype.itemsize
        for path, x in flatten(tree).items()
        if x.sharding.is_fully_replicated
    }


def gathered(cfg, mesh, vocab_block: int | None = None) -> dict[str, int]:
    """{path: bytes} that one device holds of a weight (one layer's) while it computes with it; vocab_block: as of
    `StepConfig`."""
    letters = flatten(glm5.letters(cfg))
    out = {}
    for path, x in flatten(glm5.abstract(cfg)).items():
        keep, size = stationary(letters[path]), jnp.dtype(cfg.dtype).itemsize
        for letter, dim in zip(letters[path].split(), x.shape):
            dim = min(dim, vocab_block or dim) if letter == "v" else dim
            own = math.prod(mesh.shape[a] for a in keep.get(letter, ()))
            size *= 1 if letter == "l" else dim // own if dim % own == 0 else dim
        out[path] = size
    return out


def kept_bytes(jaxpr) -> int:
    """Bytes on one device of what manual regions hand on to later ones: what a forward keeps for its backward."""
    made, total = set(), 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "shard_map":
            total += sum(kept_bytes(inner) for inner in jaxprs_of(eqn.params))
            continue
        inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        taken = {id(outer): own.aval for outer, own in zip(eqn.invars, inner.invars)}
        total += sum(
            math.prod(aval.shape) * aval.dtype.itemsize
            for key, aval in taken.items()
            if key in made
        )
        made |= set(map(id, eqn.outvars))
    return total
