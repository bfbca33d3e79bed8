"""The programs of an experiment in the compiler's language, from shapes alone, for devices that need not be there."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from glm5_jax.core.flops import jaxprs_of, scan_counts
from glm5_jax.core.mesh import abstract_mesh
from glm5_jax.core.sharding import stationary
from glm5_jax.core.tree import flatten, found
from glm5_jax.inference.serving_cost import TokenCost
from glm5_jax.model import glm5
from glm5_jax.model.dispatch import crossing_share
from glm5_jax.training.accumulation import WHOLE
from glm5_jax.training.experiment import StageConfig
from glm5_jax.training.step_flops import model_flops, step_flops, trace_step
from pallas_kernels.cost import Cost


class Program(NamedTuple):
    """A program that is lowered.

    arguments: what goes in, by kind, as shapes with shardings; rows, length: of a batch; model_flops: what the mathematics
    needs of one device in a step; parts: what the program's products take there, by part ({}: not known); used: by path,
    bytes that a device holds of a weight while it computes with it; least: what its products and memory do at least, by
    dtype; kept: bytes that a forward keeps for its backward (None: not known); cached: tokens that a row may have in pages;
    token_costs: for the names of chips, the least that tokens cost there; expert_slices: as of `StepConfig`;
    crossing: share of the tokens that go to a given one of them.
    """

    name: str
    lowered: jax.stages.Lowered
    arguments: dict[str, dict]
    rows: int
    length: int
    model_flops: float
    parts: dict[str, int]
    used: dict[str, int]
    least: tuple[Cost, ...]
    kept: int | None = None
    cached: int | None = None
    token_costs: Callable[[tuple[str, ...]], tuple[TokenCost, ...]] | None = None
    expert_slices: int = 1
    crossing: float = 1.0


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
    arguments = {"params": state["params"], "optimizer": state["optimizer"], "batch": made.batch}
    needed = model_flops(config, made.step) * per_device
    parts = {} if flops is None else {name: work.flops for name, work in flops.parts.items()}
    used = {}
    if mesh is not None:
        whole = WHOLE[config.step.accumulate]
        used = gathered(config.model, mesh, config.step.vocab_block, whole=whole)
    state_bytes = sum(sum(bytes_on_device(part).values()) for part in arguments.values())
    return Program(
        "train step",
        made.traced.lower(lowering_platforms=(platform,)),
        arguments,
        config.first_rows,
        config.row_length,
        needed,
        parts,
        used,
        # The state is read once and written once.
        (Cost(sum(parts.values()) or needed, 2 * state_bytes),),
        None if mesh is None else kept_bytes(made.traced.jaxpr.jaxpr),
        expert_slices=config.step.expert_slices,
        crossing=crossing_share(
            config.model.n_routed_experts,
            config.model.num_experts_per_tok,
            config.step.expert_slices,
        ),
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


def gathered(
    cfg, mesh, vocab_block: int | None = None, params=None, whole: Sequence[str] = ()
) -> dict[str, int]:
    """{name: bytes} that one device holds of a weight (one layer's) while it computes with it; vocab_block: as of
    `StepConfig`. params: shapes (default: all in the compute dtype), of which a quantised one is several arrays. whole:
    patterns of those of which it holds all layers, and the whole vocabulary, for all of a step."""
    out = {}
    for path, w in flatten(glm5.abstract(cfg, cfg.dtype) if params is None else params).items():
        name, letters = glm5.declared(cfg, path)
        keep, always = stationary(letters), found(whole, name)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(w))
        for letter, dim in zip(letters.split(), w.shape):
            if letter == "v" and not always:
                size = size // dim * min(dim, vocab_block or dim)
            own = math.prod(mesh.shape[a] for a in keep.get(letter, ()))
            layers = 1 if always else dim
            size //= layers if letter == "l" else own if dim % own == 0 else 1
        out[name] = size
    return out


def kept_bytes(jaxpr) -> int:
    """Bytes on one device of what a forward keeps there for its backward: what manual regions hand on to later ones,
    or, where a region has both (`training.accumulation`), what loops hand on to later loops turn by turn."""
    made, total = set(), 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "shard_map":
            total += sum(kept_bytes(inner) for inner in jaxprs_of(eqn.params))
            continue
        inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        taken = {id(outer): own.aval for outer, own in zip(eqn.invars, inner.invars)}
        total += _bytes_of(aval for key, aval in taken.items() if key in made)
        made |= set(map(id, eqn.outvars))
    return total or max((_handed_on(inner) for inner in _regions(jaxpr)), default=0)


def _handed_on(jaxpr) -> int:
    """Bytes that loops hand on turn by turn to loops behind them, of the outermost computation with such loops."""
    made, taken = set(), {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        num_consts, num_carry = scan_counts(eqn)
        taken.update((id(x), x.aval) for x in eqn.invars[num_consts + num_carry :] if id(x) in made)
        made |= set(map(id, eqn.outvars[num_carry:]))
    if taken:
        return _bytes_of(taken.values())
    inner = (jaxpr for eqn in jaxpr.eqns for jaxpr in jaxprs_of(eqn.params))
    return max(map(_handed_on, inner), default=0)


def _regions(jaxpr):
    for eqn in jaxpr.eqns:
        for inner in jaxprs_of(eqn.params):
            yield from [inner] if eqn.primitive.name == "shard_map" else _regions(inner)


def _bytes_of(avals) -> int:
    """Those on the device: what is in the host's memory says so in its type."""
    return sum(
        math.prod(aval.shape) * aval.dtype.itemsize
        for aval in avals
        if "host" not in str(getattr(aval, "memory_space", None)).lower()
    )
