"""The serving engine's programs for chips that are not there: what reads prompts, and what decodes.

They are those of `inference.steps.Steps`, for weights as `inference.runner.Runner` keeps them, made from shapes alone:
nothing of a model is in memory. On a mesh without chips (`core.mesh.abstract_mesh`) they are lowered only.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from glm5_jax.config import ModelConfig
from glm5_jax.core.flops import work_by_scope
from glm5_jax.core.mesh import abstract_mesh
from glm5_jax.core.tree import map_with_path, path_of, unflatten
from glm5_jax.inference import serving_cost
from glm5_jax.inference.engine import sized
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.runner import computed
from glm5_jax.inference.serving_cost import Serving, TokenCost
from glm5_jax.inference.steps import Shape, Steps, Variant
from glm5_jax.model import glm5
from glm5_jax.model.plan import Plan
from glm5_jax.model.turned import Turned
from launch.programs import Program, gathered
from pallas_kernels.cost import Cost

# The names of `jax.named_scope` in the model, as of `training.step_flops.PARTS`.
PARTS = ("mtp", "indexer", "attention", "router", "experts", "mlp", "head")
LENGTHS = (131_072, 202_752)  # at which costs of tokens are told


def lower_prefill(
    cfg: ModelConfig, mesh, platform: str, engine: EngineConfig, quantised: bool = False
) -> Program:
    """What reads the next `chunk` tokens of a prompt of each group of devices, whose pages hold up to `max_length` of
    them. mesh: of devices, or abstract; None for the first device here. platform: of its chips, as JAX names it.
    quantised: whether weights are rotated and W4A8 (`inference.quantize`), else in the model's dtype. ValueError for what
    an engine would refuse."""
    return _lower("prefill", cfg, mesh, platform, engine, quantised)


def lower_decode(
    cfg: ModelConfig, mesh, platform: str, engine: EngineConfig, quantised: bool = False
) -> Program:
    """What draws the next token of `max_batch` sequences of each group of devices, or drafts and verifies; otherwise as
    `lower_prefill`."""
    return _lower("decode", cfg, mesh, platform, engine, quantised)


def arguments_of(
    name: str, cfg: ModelConfig, mesh, engine: EngineConfig, quantised: bool = False
) -> dict[str, dict]:
    """Returns what goes into a program ("prefill" or "decode"), by kind, as `Program.arguments`, without tracing it."""
    (shape, _), plan = sized(cfg, engine), engine.plan()
    params = abstract_weights(cfg, mesh, quantised, plan)
    _, kinds = _arguments(name, cfg, mesh, shape, params, plan)
    return {kind: plain(tree) for kind, tree in kinds.items()}


def abstract_weights(cfg: ModelConfig, mesh, quantised: bool = False, plan: Plan = Plan()):
    """The parameter tree that an engine keeps, as shapes with shardings. plan: of its forward."""
    params = glm5.abstract(cfg, cfg.dtype)
    if quantised:
        params = jax.eval_shape(lambda params: table.quantise(params, cfg)[0], params)
        params = map_with_path(functools.partial(_rotated, d=cfg.hidden_size), params)
        cfg = dataclasses.replace(cfg, int4_group=None)
    params = jax.eval_shape(functools.partial(computed, cfg=cfg), params)
    if mesh is None:
        return _here(params)
    where = glm5.param_shardings(cfg, mesh, params, plan.replicated)
    return jax.tree.map(_placed, params, where)


def _lower(name: str, cfg, mesh, platform: str, engine: EngineConfig, quantised: bool) -> Program:
    (shape, _), plan = sized(cfg, engine), engine.plan()
    params = abstract_weights(cfg, mesh, quantised, plan)
    traced, kinds, groups = _traced(name, cfg, mesh, shape, params, plan)
    rows = groups * (shape.slots if name == "decode" else 1)
    length = (shape.num_draft + 1) if name == "decode" else shape.chunk
    max_length = engine.max_length or cfg.max_position_embeddings
    least = _least(name, cfg, mesh, shape, quantised, rows, max_length)
    return Program(
        name,
        traced.lower(lowering_platforms=(platform,)),
        {kind: plain(tree) for kind, tree in kinds.items()},
        rows,
        length,
        sum(cost.flops for cost in least),
        _parts(name, cfg, mesh, shape, quantised, traced, plan),
        {} if mesh is None else gathered(cfg, mesh, plan.vocab_block, params),
        least,
        cached=max_length,
        token_costs=functools.partial(_token_costs, cfg, name, rows, max_length),
    )


def _traced(name: str, cfg, mesh, shape: Shape, params, plan: Plan):
    """(the program, its arguments by kind, groups of devices that hold other sequences)."""
    steps, kinds = _arguments(name, cfg, mesh, shape, params, plan)
    function, static = steps.program(name, Variant())
    # Of the host: where they go is the compiler's choice.
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kinds["inputs"])
    return function.trace(params, kinds["cache"], inputs, **static), kinds, steps.groups


def _arguments(name: str, cfg, mesh, shape: Shape, params, plan: Plan) -> tuple[Steps, dict]:
    """(the steps of an engine, the arguments of one of them by kind, in their order)."""
    # As `Runner`: experts are int4 already, not once per token.
    steps = Steps(dataclasses.replace(cfg, int4_group=None), shape, mesh, plan)
    device = steps.abstract_device(cfg.dtype)
    device = _here(device) if mesh is None else device
    if name == "prefill":
        inputs = steps.idle_reads(1, shape.chunk, shape.max_pages)
    else:
        inputs = steps.idle_draws(shape.slots, shape.max_pages)
    # As if every device had them whole.
    everywhere = None if mesh is None else NamedSharding(mesh, P())
    inputs = jax.tree.map(functools.partial(_placed, sharding=everywhere), inputs)
    return steps, {"weights": params, "cache": device, "inputs": inputs}


def _least(
    name: str, cfg, mesh, shape: Shape, quantised: bool, rows: int, max_length: int
) -> tuple[Cost, ...]:
    """What the mathematics needs of one device in a step, the mean over the places that its tokens can have: as the
    kernels tell theirs, which know them at run time."""
    kinds = shape.index_cache, shape.latent_cache
    serving = Serving(cfg.attention, quantised, *kinds)
    if name == "prefill":
        costs = serving_cost.prefill(cfg, serving, max_length, rows, shape.chunk)
    else:
        mean = (max_length + 1) // 2
        costs = serving_cost.decode(cfg, serving, mean, rows, shape.num_draft + 1)
    size = 1 if mesh is None else mesh.size
    return tuple(
        one._replace(flops=one.flops / size, bytes=one.bytes / size)
        for own in costs.values()
        for one in own
    )


def _parts(
    name: str, cfg, mesh, shape: Shape, quantised: bool, traced, plan: Plan
) -> dict[str, int]:
    """FLOPs of one device by part, as the TPU's kernels tell them: those of other chips do the same work. {}: not known,
    on the one device here."""
    if mesh is None:
        return {}
    chip = mesh.abstract_mesh.abstract_device
    if chip is None or chip.platform != "tpu":
        other = abstract_mesh(dict(mesh.shape))
        weights = abstract_weights(cfg, other, quantised, plan)
        traced, _, _ = _traced(name, cfg, other, shape, weights, plan)
    found = work_by_scope(traced.jaxpr, PARTS, while_trips=0)
    return {part: work.flops for part, work in found.items()}


def _token_costs(
    cfg, name: str, batch: int, own: int, chips: tuple[str, ...]
) -> tuple[TokenCost, ...]:
    """At LENGTHS, as far as the model's positions reach, and at the engine's own length."""
    lengths = sorted({own, *(n for n in LENGTHS if n <= cfg.max_position_embeddings)})
    return tuple(TokenCost.of(cfg, chip, name, n, batch) for n in lengths for chip in chips)


def _rotated(path: str, w, d: int):
    """A leaf as rotation leaves it: only those norms change their shape that turn the stream back."""
    if path not in rotation.READ_OUT:
        return w
    return Turned(w, jax.ShapeDtypeStruct((d, d), w.dtype))


def _placed(x, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _here(tree):
    """Shapes of arrays that are bound to the first device, as a `Runner` without a mesh binds its own."""
    one = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(functools.partial(_placed, sharding=one), tree)


def plain(tree) -> dict[str, Any]:
    """Nested dicts of the arrays of a tree, by their paths; of a leaf that is several arrays, each of them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return unflatten({path_of(path): x for path, x in leaves})
