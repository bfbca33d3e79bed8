"""Gradients of a step summed over its microbatches, inside one manual region over the mesh.

    sharded  As soon as a layer's backward is done its gradient is reduce-scattered to the devices that own
             parts of the weight, and the sum over microbatches is kept there in float32, cut like the
             weight. Whole are the gradients of the layer at work and of the one that is being scattered:
             GLM-5's two rotating buffers (2.4, ZeRO-2 along the pipeline), with a layer in a stage's place.
             Every microbatch gathers every weight, under rematerialisation twice.
    local    Weights are gathered once per step, and their gradients reduce-scattered once per step. Until then
             every device holds whole weights in the compute dtype, whole sums of gradients in float32, and
             one microbatch's gradients in the compute dtype.
    experts  Routed experts as "local" has it, all else "sharded".

Whole means all but what is cut while it is used (experts, over the `expert` axis). Devices that hold
copies of a weight's part add up their gradients once per step, however that is.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glm5_jax.core import sharding
from glm5_jax.core.mesh import AXES, Region
from glm5_jax.core.tree import flatten, found, unflatten
from glm5_jax.model import glm5
from glm5_jax.model.plan import Plan
from glm5_jax.model.vocabulary import num_parts
from pallas_kernels.numerics import wide

# Patterns of the weights that are whole for all of a step.
WHOLE = {"sharded": (), "experts": (r"(^|/)experts/",), "local": ("",)}


def check_vocab_block(cfg, vocab_block: int | None, mode: str, mesh=None) -> None:
    """ValueError if the embedding or the head cannot be gone through in such parts (`model.vocabulary`)."""
    if vocab_block is None:
        return
    sizes = {axis: 1 for axis in AXES} if mesh is None else mesh.shape
    letters, shapes = flatten(glm5.letters(cfg)), flatten(glm5.abstract(cfg))
    for path in sorted({"embed/weight", "lm_head/weight"} & letters.keys()):
        shape, dim = shapes[path].shape, letters[path].split().index("v")
        cut = sharding.spec_of(letters[path], shape, sizes)[dim] or ()
        axes = () if found(WHOLE[mode], path) else np.atleast_1d(cut)
        num_parts(shape[dim], math.prod(sizes[axis] for axis in axes), vocab_block)


def accumulated(
    objective: Callable, moving, still, microbatches, *, cfg, plan: Plan, region: Region, mode: str
):
    """(objective, LossParts, {path: gradient}) of microbatches, from this device's parts of them all.

    objective(params, microbatch, plan) -> (value, LossParts), which are those of all devices and add up over
    microbatches; microbatches: a tree of arrays with a leading dimension for them. moving, still: {path: this
    device's part} of the weights that learn, and of those that do not. mode: of WHOLE.
    """
    weights, shards = glm5.Weights(cfg, region, plan), moving
    plan = dataclasses.replace(plan, gathered=WHOLE[mode])

    def brought(path, w):
        return weights(path, w) if found(plan.gathered, path) else w

    moving = {path: brought(path, w) for path, w in moving.items()}
    still = {path: brought(path, w) for path, w in still.items()}

    def share(moving, microbatch):
        value, parts = objective(unflatten(moving | still), microbatch, plan)
        # Each device has the sum of all, and its gradient reaches all others' summands.
        return value / region.size(AXES), (value, parts)

    take = jax.grad(share, has_aux=True)

    def one(sums, microbatch):
        gradients, (value, parts) = take(moving, microbatch)
        sum_of_gradients, sum_of_values, sum_of_parts = sums
        top = jnp.maximum(sum_of_parts.max_logit, parts.max_logit)
        return (
            {path: total + gradients[path] for path, total in sum_of_gradients.items()},
            sum_of_values + value,
            jax.tree.map(jnp.add, sum_of_parts, parts)._replace(max_logit=top),
        ), None

    _, told = jax.eval_shape(take, moving, jax.tree.map(lambda x: x[0], microbatches))
    value, parts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), told)
    told = value, parts._replace(max_logit=jnp.full_like(parts.max_logit, -jnp.inf))
    zeros = {path: jnp.zeros(w.shape, wide(w.dtype)) for path, w in moving.items()}
    (gradients, value, parts), _ = lax.scan(one, (zeros, *told), microbatches)

    letters, shapes = flatten(glm5.letters(cfg)), flatten(glm5.abstract(cfg))
    sizes = {axis: getattr(region, axis) for axis in AXES}

    def reduced(path, gradient):
        spec = sharding.spec_of(letters[path], shapes[path].shape, sizes)
        if found(plan.gathered, path):
            dtype = plan.reduce_dtype or moving[path].dtype
            gradient = sharding.scatter(gradient, letters[path], spec, region, dtype)
        own = {axis for entry in spec if entry for axis in np.atleast_1d(entry)}
        gradient = gradient.astype(shards[path].dtype)
        return region.psum(gradient, tuple(axis for axis in AXES if axis not in own))

    return value, parts, {path: reduced(path, gradient) for path, gradient in gradients.items()}
