"""Lowers the programs of an experiment from shapes only, for devices that need not exist on this machine."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from glm5_jax.inference.serving_cost import TokenCost
from glm5_jax.model import glm5, parameters
from glm5_jax.model.expert_dispatch import crossing_share
from glm5_jax.parallel.flops import jaxprs_of, scan_counts
from glm5_jax.parallel.mesh import abstract_mesh
from glm5_jax.parallel.sharding import kept_sharded_axes
from glm5_jax.parallel.tree import flatten, matches_any
from glm5_jax.training.accumulation import PREGATHERED
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.step_flops import model_flops, step_flops, trace_step
from pallas_kernels.cost import Cost


class Program(NamedTuple):
    """Lowered program. FLOPs and bytes are those of one device and one step.

    Attributes:
      name: name in reports.
      lowered: the program.
      arguments: shapes with shardings of its arguments, by kind.
      rows: rows of a batch, over all devices.
      length: tokens of a row.
      model_flops: FLOPs that the mathematics needs.
      parts: FLOPs of the program's matrix products, recomputation included, by part; {}: not known.
      weight_bytes: bytes of each weight while the device computes with it, by path.
      min_costs: lower bounds of its FLOPs and memory traffic, one for each dtype.
      saved_activation_bytes: bytes that a forward saves for its backward; None: not known.
      max_cached_tokens: tokens that a row may have in pages; None: no cache.
      token_costs: function from names of chips to the minimum costs of tokens on them.
      expert_slices: as in `StepConfig`.
      crossing: share of the tokens that are sent to a given expert slice.
    """

    name: str
    lowered: jax.stages.Lowered
    arguments: dict[str, dict]
    rows: int
    length: int
    model_flops: float
    parts: dict[str, int]
    weight_bytes: dict[str, int]
    min_costs: tuple[Cost, ...]
    saved_activation_bytes: int | None = None
    max_cached_tokens: int | None = None
    token_costs: Callable[[tuple[str, ...]], tuple[TokenCost, ...]] | None = None
    expert_slices: int = 1
    crossing: float = 1.0


def lower_step(config: StageConfig, mesh, platform: str = "tpu") -> Program:
    """Lowers the train step of a stage for the first batch of its run; mesh None: the first device of this machine."""
    traced_step = trace_step(config, mesh)
    state = traced_step.step.abstract
    flops, per_device = None, config.first_batch_rows * config.row_length
    if mesh is not None:
        per_device //= mesh.size
        # GPU kernels have no cost estimates; the TPU kernels do the same work.
        flops_arguments = (
            (mesh, traced_step) if platform == "tpu" else (abstract_mesh(dict(mesh.shape)), None)
        )
        flops = step_flops(config, *flops_arguments)
    arguments = {
        "params": state["params"],
        "optimizer": state["optimizer"],
        "batch": traced_step.batch,
    }
    needed_flops = model_flops(config, traced_step.step) * per_device
    parts = {} if flops is None else {name: work.flops for name, work in flops.parts.items()}
    weight_bytes = {}
    if mesh is not None:
        pregathered = PREGATHERED[config.step.accumulate]
        weight_bytes = gathered_bytes(
            config.model, mesh, config.step.vocab_block, pregathered=pregathered
        )
    state_bytes = sum(sum(bytes_on_device(part).values()) for part in arguments.values())
    return Program(
        name="train step",
        lowered=traced_step.traced.lower(lowering_platforms=(platform,)),
        arguments=arguments,
        rows=config.first_batch_rows,
        length=config.row_length,
        model_flops=needed_flops,
        parts=parts,
        weight_bytes=weight_bytes,
        # The state is read once and written once.
        min_costs=(Cost(sum(parts.values()) or needed_flops, 2 * state_bytes),),
        saved_activation_bytes=None
        if mesh is None
        else saved_activation_bytes(traced_step.traced.jaxpr.jaxpr),
        expert_slices=config.step.expert_slices,
        crossing=crossing_share(
            config.model.n_routed_experts,
            config.model.num_experts_per_tok,
            config.step.expert_slices,
        ),
    )


def bytes_on_device(tree) -> dict[str, int]:
    """Returns {path: bytes of a device's shard} of arrays or shapes; sharding None: on one device."""
    return {
        path: math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape)
        * x.dtype.itemsize
        for path, x in flatten(tree).items()
    }


def replicated_bytes(tree) -> dict[str, int]:
    """Returns {path: bytes} of the fully replicated arrays."""
    return {
        path: math.prod(x.shape) * x.dtype.itemsize
        for path, x in flatten(tree).items()
        if x.sharding.is_fully_replicated
    }


def gathered_bytes(
    cfg, mesh, vocab_block: int | None = None, params=None, pregathered: Sequence[str] = ()
) -> dict[str, int]:
    """Returns {name: bytes} of each weight on a device while it is used, of one layer for stacked weights.

    vocab_block: as in `StepConfig`.
    params: shapes of the weights; a quantised one is several arrays. None: all in the compute dtype.
    pregathered: patterns of the weights that are gathered for a full step, with all layers and the full vocabulary.
    """
    sizes = {}
    for path, w in flatten(
        glm5.abstract_params(cfg, cfg.dtype) if params is None else params
    ).items():
        name, letters = parameters.weight_letters(cfg, path)
        sharded_axes, is_pregathered = kept_sharded_axes(letters), matches_any(pregathered, name)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(w))
        for letter, dim in zip(letters.split(), w.shape):
            if letter == "v" and not is_pregathered:
                size = size // dim * min(dim, vocab_block or dim)
            num_shards = math.prod(mesh.shape[a] for a in sharded_axes.get(letter, ()))
            layers = 1 if is_pregathered else dim
            size //= layers if letter == "l" else num_shards if dim % num_shards == 0 else 1
        sizes[name] = size
    return sizes


def saved_activation_bytes(jaxpr) -> int:
    """Returns the bytes on one device that a forward saves for its backward.

    These are the outputs of manual regions that later regions read. Where one region holds forward and backward
    (`training.accumulation`), they are the outputs of scans, stacked over iterations, that later scans read.
    """
    produced, total = set(), 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "shard_map":
            total += sum(saved_activation_bytes(inner) for inner in jaxprs_of(eqn.params))
            continue
        inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        consumed = {id(outer): inner_var.aval for outer, inner_var in zip(eqn.invars, inner.invars)}
        total += _bytes_of(aval for key, aval in consumed.items() if key in produced)
        produced |= set(map(id, eqn.outvars))
    return total or max((_scan_residual_bytes(inner) for inner in _regions(jaxpr)), default=0)


def _scan_residual_bytes(jaxpr) -> int:
    """Returns the bytes of stacked scan outputs that later scans read, in the outermost computation that has any."""
    produced, consumed = set(), {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        num_consts, num_carry = scan_counts(eqn)
        consumed.update(
            (id(x), x.aval) for x in eqn.invars[num_consts + num_carry :] if id(x) in produced
        )
        produced |= set(map(id, eqn.outvars[num_carry:]))
    if consumed:
        return _bytes_of(consumed.values())
    inner = (jaxpr for eqn in jaxpr.eqns for jaxpr in jaxprs_of(eqn.params))
    return max(map(_scan_residual_bytes, inner), default=0)


def _regions(jaxpr):
    for eqn in jaxpr.eqns:
        for inner in jaxprs_of(eqn.params):
            yield from [inner] if eqn.primitive.name == "shard_map" else _regions(inner)


def _bytes_of(avals) -> int:
    """Returns the bytes of the values in device memory; values in host memory have another memory space."""
    return sum(
        math.prod(aval.shape) * aval.dtype.itemsize
        for aval in avals
        if "host" not in str(getattr(aval, "memory_space", None)).lower()
    )
