"""Lowers the prefill and decode programs of the serving engine for chips that need not exist on this machine.

They are the programs of `inference.steps.Steps`, with the weights of `inference.runner.Runner`, built from shapes only: no
weight is in memory. On a mesh without chips (`parallel.mesh.abstract_mesh`) they can be lowered but not compiled.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from glm5_jax.config import ModelConfig
from glm5_jax.inference import serving_cost
from glm5_jax.inference.engine_weights import to_compute_form
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.serving_cost import Serving, TokenCost
from glm5_jax.inference.shapes import EngineShapes, resolve_shapes
from glm5_jax.inference.step_arrays import SamplingVariant
from glm5_jax.inference.steps import Steps
from glm5_jax.model import glm5
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel.flops import work_by_scope
from glm5_jax.parallel.mesh import abstract_mesh
from glm5_jax.parallel.tree import map_with_path, path_of, unflatten
from launch.aot.programs import Program, gathered_bytes
from pallas_kernels.cost import Cost

# Names of `jax.named_scope` in the model, like `training.step_flops.PARTS`.
PARTS = ("mtp", "indexer", "attention", "router", "experts", "mlp", "head")
LENGTHS = (131_072, 202_752)  # sequence lengths of the reported token costs


def lower_prefill(
    cfg: ModelConfig, mesh, platform: str, engine: EngineConfig, quantised: bool = False
) -> Program:
    """Lowers a prefill step: the next `prefill_chunk` tokens of a prompt on each data-parallel rank, with pages for `max_length`.

    mesh: devices or an abstract mesh; None: the first device of this machine.
    platform: JAX's name of the mesh's platform.
    quantised: rotated W4A8 weights (`inference.quantize`); False: weights in the model's dtype.

    Raises ValueError if the engine would refuse the options.
    """
    return _lower("prefill", cfg, mesh, platform, engine, quantised)


def lower_decode(
    cfg: ModelConfig, mesh, platform: str, engine: EngineConfig, quantised: bool = False
) -> Program:
    """Lowers a decode step: sampling, or drafting and verification, of `max_num_seqs` sequences per data-parallel rank.

    Arguments and errors are those of `lower_prefill`.
    """
    return _lower("decode", cfg, mesh, platform, engine, quantised)


def arguments_of(
    name: str, cfg: ModelConfig, mesh, engine: EngineConfig, quantised: bool = False
) -> dict[str, dict]:
    """Returns the arguments of a program ("prefill" or "decode") by kind, as in `Program`, without tracing it."""
    (shape, _), execution = resolve_shapes(cfg, engine), engine.execution()
    params = abstract_weights(cfg, mesh, quantised, execution, engine.quantization)
    _, kinds = _arguments(name, cfg, mesh, shape, params, execution)
    return {kind: flatten_leaves(tree) for kind, tree in kinds.items()}


def abstract_weights(
    cfg: ModelConfig,
    mesh,
    quantised: bool = False,
    execution: ExecutionConfig = ExecutionConfig(),
    quantization: str | None = None,
):
    """Returns the parameter tree of an engine as shapes with shardings.

    quantised: whether its checkpoint is W4A8. execution: options of its forward. quantization: see `EngineConfig`.
    """
    params = glm5.abstract_params(cfg, cfg.dtype)
    if quantization is not None and not quantised:
        params = jax.eval_shape(
            lambda params: table.quantise(params, cfg, scheme=quantization)[0], params
        )
    if quantised:
        params = jax.eval_shape(lambda params: table.quantise(params, cfg)[0], params)
        params = map_with_path(functools.partial(_rotate_shape, d=cfg.hidden_size), params)
        cfg = dataclasses.replace(cfg, int4_group=None)
    params = jax.eval_shape(functools.partial(to_compute_form, cfg=cfg), params)
    if mesh is None:
        return _on_first_device(params)
    shardings = glm5.param_shardings(cfg, mesh, params, execution.replicated_weights)
    return jax.tree.map(_with_sharding, params, shardings)


def _lower(name: str, cfg, mesh, platform: str, engine: EngineConfig, quantised: bool) -> Program:
    (shape, _), execution = resolve_shapes(cfg, engine), engine.execution()
    params = abstract_weights(cfg, mesh, quantised, execution, engine.quantization)
    traced, kinds, dp_size = _trace(name, cfg, mesh, shape, params, execution)
    rows = dp_size * (shape.max_num_seqs if name == "decode" else 1)
    length = (shape.num_speculative_tokens + 1) if name == "decode" else shape.prefill_chunk
    max_length = engine.max_length or cfg.max_position_embeddings
    weights = table.W4A8 if quantised else engine.quantization
    min_costs = _model_costs(name, cfg, mesh, shape, weights, rows, max_length)
    return Program(
        name=name,
        lowered=traced.lower(lowering_platforms=(platform,)),
        arguments={kind: flatten_leaves(tree) for kind, tree in kinds.items()},
        rows=rows,
        length=length,
        model_flops=sum(cost.flops for cost in min_costs),
        parts=_parts(name, cfg, mesh, shape, weights, traced, execution),
        weight_bytes={}
        if mesh is None
        else gathered_bytes(cfg, mesh, execution.vocab_block, params),
        min_costs=min_costs,
        max_cached_tokens=max_length,
        token_costs=functools.partial(_token_costs, cfg, name, rows, max_length),
    )


def _trace(name: str, cfg, mesh, shape: EngineShapes, params, execution: ExecutionConfig):
    """Returns (traced program, its arguments by kind, data-parallel size)."""
    steps, kinds = _arguments(name, cfg, mesh, shape, params, execution)
    function, static = steps.program(name, SamplingVariant())
    # Inputs have no sharding, because they come from the host and the compiler chooses it.
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kinds["inputs"])
    return function.trace(params, kinds["cache"], inputs, **static), kinds, steps.dp_size


def _arguments(
    name: str, cfg, mesh, shape: EngineShapes, params, execution: ExecutionConfig
) -> tuple[Steps, dict]:
    """Returns (steps of an engine, arguments of one of them by kind, in order)."""
    # Like `Runner`: experts are stored in int4, not quantised for each token.
    steps = Steps(dataclasses.replace(cfg, int4_group=None), shape, mesh, execution)
    cache = steps.abstract_state(cfg.dtype)
    cache = _on_first_device(cache) if mesh is None else cache
    if name == "prefill":
        inputs = steps.dummy_prefill(1, shape.prefill_chunk, shape.max_pages)
    else:
        inputs = steps.dummy_decode(shape.max_num_seqs, shape.max_pages)
    # Inputs are replicated.
    replicated = None if mesh is None else NamedSharding(mesh, P())
    inputs = jax.tree.map(functools.partial(_with_sharding, sharding=replicated), inputs)
    return steps, {"weights": params, "cache": cache, "inputs": inputs}


def _model_costs(
    name: str, cfg, mesh, shape: EngineShapes, weights: str | None, rows: int, max_length: int
) -> tuple[Cost, ...]:
    """Returns the costs that the mathematics needs of one device in a step, as a mean over the positions of its tokens.

    The cost estimates of the kernels are means as well, because positions are known only at run time.
    """
    serving = Serving(
        attention=cfg.attention,
        weights=weights,
        index_cache=shape.index_cache,
        latent_cache=shape.latent_cache,
    )
    if name == "prefill":
        costs = serving_cost.prefill(cfg, serving, max_length, rows, shape.prefill_chunk)
    else:
        mean = (max_length + 1) // 2
        costs = serving_cost.decode(cfg, serving, mean, rows, shape.num_speculative_tokens + 1)
    size = 1 if mesh is None else mesh.size
    return tuple(
        one._replace(flops=one.flops / size, bytes=one.bytes / size)
        for part_costs in costs.values()
        for one in part_costs
    )


def _parts(
    name: str,
    cfg,
    mesh,
    shape: EngineShapes,
    weights: str | None,
    traced,
    execution: ExecutionConfig,
) -> dict[str, int]:
    """Returns the FLOPs of one device by part; {} without a mesh.

    They come from the cost estimates of the TPU kernels; kernels for other chips do the same work.
    """
    if mesh is None:
        return {}
    device_kind = mesh.abstract_mesh.abstract_device
    if device_kind is None or device_kind.platform != "tpu":
        tpu_mesh = abstract_mesh(dict(mesh.shape))
        is_packed = weights == table.W4A8
        params = abstract_weights(cfg, tpu_mesh, is_packed, execution, weights)
        traced, _, _ = _trace(name, cfg, tpu_mesh, shape, params, execution)
    work_by_part = work_by_scope(traced.jaxpr, PARTS, while_trips=0)
    return {part: work.flops for part, work in work_by_part.items()}


def _token_costs(
    cfg, name: str, batch: int, max_length: int, chips: tuple[str, ...]
) -> tuple[TokenCost, ...]:
    """Returns token costs at LENGTHS, up to the model's maximum position, and at the engine's `max_length`."""
    lengths = sorted({max_length, *(n for n in LENGTHS if n <= cfg.max_position_embeddings)})
    return tuple(TokenCost.of(cfg, chip, name, n, batch) for n in lengths for chip in chips)


def _rotate_shape(path: str, w, d: int):
    """Returns the shape of a leaf after rotation, which changes only norms that rotate the residual stream back."""
    if path not in rotation.FINAL_NORMS:
        return w
    back: Any = jax.ShapeDtypeStruct((d, d), w.dtype)  # a shape in place of an array
    return RotatedNorm(w, back)


def _with_sharding(x, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _on_first_device(tree):
    """Returns the shapes bound to the first device, as in a `Runner` without a mesh."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(functools.partial(_with_sharding, sharding=sharding), tree)


def flatten_leaves(tree) -> dict[str, Any]:
    """Returns the arrays of a tree as nested dicts by path, also those inside a leaf of several arrays."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return unflatten({path_of(path): x for path, x in leaves})
