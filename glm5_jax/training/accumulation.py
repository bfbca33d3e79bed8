"""Gradient accumulation: sums gradients over microbatches, inside one manual region over the mesh.

    sharded  When a layer's backward has ended, its gradient is reduce-scattered to the devices that hold
             shards of the weight. The sum over microbatches is stored there in float32, sharded like the
             weight. Two layers have full gradients at a time: the current one, and the one that is being
             scattered. These are GLM-5's two rotating buffers (2.4, ZeRO-2 along the pipeline), with a layer
             in place of a stage. Every microbatch gathers every weight, twice with rematerialisation.
    local    Weights are gathered once per step, and their gradients reduce-scattered once per step. Until
             then every device holds full weights in the compute dtype, full gradient sums in float32, and
             one microbatch's gradients in the compute dtype.
    experts  Routed experts as in "local", all other weights as in "sharded".

"Full" excludes dimensions that stay sharded in the computation (experts, over the `expert` axis). In every
mode, devices that hold copies of a shard sum their gradients once per step.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.vocabulary import num_parts
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel import sharding
from glm5_jax.parallel.mesh import AXES, Region
from glm5_jax.parallel.tree import flatten, matches_any, unflatten
from pallas_kernels.numerics import accum_dtype

# Patterns of the weights that stay gathered for a full step, by mode.
PREGATHERED = {"sharded": (), "experts": (r"(^|/)experts/",), "local": ("",)}


def check_vocab_block(
    cfg: ModelConfig, vocab_block: int | None, mode: str, mesh: Mesh | AbstractMesh | None = None
) -> None:
    """Raises ValueError if embedding or head cannot be split into parts of vocab_block (`model.vocabulary`)."""
    if vocab_block is None:
        return
    sizes = {axis: 1 for axis in AXES} if mesh is None else mesh.shape
    letters, shapes = flatten(glm5.axis_letters(cfg)), flatten(glm5.abstract_params(cfg))
    for path in sorted({"embed/weight", "lm_head/weight"} & letters.keys()):
        shape, dim = shapes[path].shape, letters[path].split().index("v")
        entry = sharding.spec_of(letters[path], shape, sizes)[dim] or ()
        axes = () if matches_any(PREGATHERED[mode], path) else np.atleast_1d(entry)
        num_parts(shape[dim], math.prod(sizes[axis] for axis in axes), vocab_block)


def accumulate_gradients(
    objective: Callable,
    trainable: dict[str, Array],
    frozen: dict[str, Array],
    microbatches: PyTree,
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    region: Region,
    mode: str,
):
    """Returns (objective, LossParts, {path: gradient}), summed over microbatches and devices.

    Args:
      objective: objective(params, microbatch, execution) -> (value, LossParts). Both cover all devices and
        add up over microbatches.
      trainable, frozen: {path: this device's shard} of the weights with and without gradients.
      microbatches: tree of this device's arrays with a leading dimension for microbatches.
      mode: one of PREGATHERED.
    """
    # Gather the weights that stay gathered for the full step.
    weights, shards = WeightGatherer(cfg, region, execution), trainable
    execution = dataclasses.replace(execution, pregathered=PREGATHERED[mode])

    def gather(path, w):
        return weights(path, w) if matches_any(execution.pregathered, path) else w

    trainable = {path: gather(path, w) for path, w in trainable.items()}
    frozen = {path: gather(path, w) for path, w in frozen.items()}

    # Sum over microbatches.
    def device_share(trainable, microbatch):
        value, parts = objective(unflatten(trainable | frozen), microbatch, execution)
        # Every device computes the sum over devices, so its gradient reaches all devices' summands.
        return value / region.size(AXES), (value, parts)

    gradient_of = jax.grad(device_share, has_aux=True)

    def step(sums, microbatch):
        gradients, (value, parts) = gradient_of(trainable, microbatch)
        sum_of_gradients, sum_of_values, sum_of_parts = sums
        top = jnp.maximum(sum_of_parts.max_logit, parts.max_logit)
        return (
            {path: total + gradients[path] for path, total in sum_of_gradients.items()},
            sum_of_values + value,
            jax.tree.map(jnp.add, sum_of_parts, parts)._replace(max_logit=top),
        ), None

    _, shapes = jax.eval_shape(gradient_of, trainable, jax.tree.map(lambda x: x[0], microbatches))
    value, parts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    parts = parts._replace(max_logit=jnp.full_like(parts.max_logit, -jnp.inf))
    zeros = {path: jnp.zeros(w.shape, accum_dtype(w.dtype)) for path, w in trainable.items()}
    (gradients, value, parts), _ = lax.scan(step, (zeros, value, parts), microbatches)

    # Reduce over devices.

    letters, shapes = flatten(glm5.axis_letters(cfg)), flatten(glm5.abstract_params(cfg))
    sizes = {axis: getattr(region, axis) for axis in AXES}

    def reduce(path, gradient):
        spec = sharding.spec_of(letters[path], shapes[path].shape, sizes)
        if matches_any(execution.pregathered, path):
            dtype = execution.reduce_dtype or trainable[path].dtype
            gradient = sharding.scatter(gradient, letters[path], spec, region, dtype)
        sharded_axes = {axis for entry in spec if entry for axis in np.atleast_1d(entry)}
        gradient = gradient.astype(shards[path].dtype)
        return region.psum(gradient, tuple(axis for axis in AXES if axis not in sharded_axes))

    return value, parts, {path: reduce(path, gradient) for path, gradient in gradients.items()}
