"""GLM-5: the weights as an `nnx.Module`, and one forward as pure functions over their tree.

`forward` runs on any mesh, in any stage. Inside a manual region it runs `decoder.trunk`, as the training loss does.
The functions of the parameter tree (`parameters`) are part of this module's interface.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model.cache import Cache, PagedCache
from glm5_jax.model.context import make_context
from glm5_jax.model.decoder import trunk
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.layer_output import LayerStats, reduce_stats
from glm5_jax.model.mtp import mtp_step
from glm5_jax.model.parameters import (
    ParameterTree,
    abstract_params,
    axis_letters,
    init_params,
    layer_of,
    param_shardings,
    params_of,
    stacks,
    unstack,
)
from glm5_jax.model.vocabulary import compute_logits, embed
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region, check_batch
from glm5_jax.parallel.params import values_from

__all__ = [
    "ForwardOutput",
    "Glm5",
    "abstract_params",
    "axis_letters",
    "forward",
    "forward_mtp",
    "init_params",
    "layer_of",
    "param_shardings",
    "params_of",
    "stacks",
    "unstack",
]


class Glm5(ParameterTree):
    """A GLM-5 model: `Glm5(cfg, rngs=nnx.Rngs(0))(tokens)` returns float32 logits [b t v].

    Args:
      rngs: random streams that new weights are drawn from.
      params: existing weights, a nested dict as `params_of` returns. Give rngs or params.
      param_dtype: dtype of the stored weights; default: the config's dtype.
      mesh: mesh on which weights are created sharded by parallel/sharding.py; None: one device.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        params=None,
        param_dtype=None,
        mesh=None,
    ):
        if params is None and rngs is not None:
            params = init_params(cfg, rngs.params(), param_dtype or cfg.dtype, mesh)
        elif params is None or rngs is not None:
            raise ValueError("Glm5 needs either rngs (new weights) or params (existing ones)")
        self.cfg = cfg
        self.mesh = mesh
        super().__init__(cfg, values_from(params), param_dtype or cfg.dtype)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        *,
        positions: Int[Array, "b t"] | None = None,
        segment_ids: Int[Array, "b t"] | None = None,
        execution: ExecutionConfig = ExecutionConfig(),
    ) -> Float[Array, "b t v"]:
        return forward(
            params_of(self),
            tokens,
            self.cfg,
            positions=positions,
            segment_ids=segment_ids,
            mesh=self.mesh,
            execution=execution,
        ).logits


class ForwardOutput(NamedTuple):
    """Result of a forward over all devices.

    Attributes:
      logits: float32 logits.
      hidden: hidden state after the final norm.
      cache: cache with the new tokens; None without one.
      stats: `LayerStats` over all devices.
    """

    logits: Float[Array, "b t v"]
    hidden: Float[Array, "b t d"]
    cache: Cache | PagedCache | None
    stats: LayerStats


def forward(
    params: PyTree,
    tokens: Int[Array, "b t"],
    cfg: ModelConfig,
    *,
    positions: Int[Array, "b t"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    cache: Cache | PagedCache | None = None,
    logit_positions: Int[Array, "b 1"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
) -> ForwardOutput:
    """Computes the logits of tokens; each position predicts the token after it.

    Args:
      positions: position of each token; default: consecutive, starting at the cache's length.
      segment_ids: document of each token, 0 for padding; default: one document per row.
      cache: cache to append the tokens to; it is returned. In a `PagedCache` the tokens of a row come
        first, padding after them.
      logit_positions: the one token of each row whose logits are computed, which are then [b 1 v]; with
        a cache. None: all.
      mesh: mesh to run on; None: one device.

    Raises ValueError if the mesh cannot shard the batch: b, and the number of pages, must divide by
    data * fsdp * expert, and without a cache t by context * tensor.
    """
    inputs = (tokens,) if logit_positions is None else (tokens, logit_positions)
    local = functools.partial(_local_forward, cfg=cfg, execution=execution)
    return _run(local, params, inputs, cfg, positions, segment_ids, cache, mesh, execution)


def _local_forward(
    region: Region,
    params: PyTree,
    inputs: tuple[Array, ...],
    positions: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"] | None,
    cache: Cache | PagedCache | None,
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
) -> ForwardOutput:
    """Runs `forward` on one device. inputs: tokens and, if given, positions of logits."""
    tokens, *logit_positions = inputs
    out = trunk(params, tokens, positions, segment_ids, cache, cfg, execution, region)
    weights = WeightGatherer(cfg, region, execution)
    logits = compute_logits(params, out.hidden, weights, *logit_positions)
    return ForwardOutput(logits, out.hidden, out.cache, reduce_stats(out.stats, region))


def forward_mtp(
    params: PyTree,
    hidden: Float[Array, "b t d"],
    following: Int[Array, "b t"],
    cfg: ModelConfig,
    *,
    positions: Int[Array, "b t"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    cache: Cache | PagedCache | None = None,
    logit_positions: Int[Array, "b 1"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
) -> ForwardOutput:
    """Runs one multi-token-prediction step, for drafting.

    Args:
      hidden: hidden state of the trunk, or of the previous step.
      following: tokens that follow each position. The logits predict the tokens after those.
      cache: the MTP block's cache, from `init_cache(cfg, ..., num_layers=1)`.

    The other arguments are those of `forward`.
    """
    if "mtp" not in params:
        raise ValueError("the model has no MTP layer (num_nextn_predict_layers is 0)")
    inputs = (hidden, following)
    if logit_positions is not None:
        inputs = (hidden, following, logit_positions)
    local = functools.partial(_local_mtp, cfg=cfg, execution=execution)
    return _run(local, params, inputs, cfg, positions, segment_ids, cache, mesh, execution)


def _local_mtp(
    region: Region,
    params: PyTree,
    inputs: tuple[Array, ...],
    positions: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"] | None,
    cache: Cache | PagedCache | None,
    *,
    cfg: ModelConfig,
    execution: ExecutionConfig,
) -> ForwardOutput:
    """Runs `forward_mtp` on one device. inputs: hidden, following and, if given, positions of logits."""
    hidden, following, *logit_positions = inputs
    weights = WeightGatherer(cfg, region, execution)
    context, cache = make_context(positions, segment_ids, cache, cfg, execution, region)
    w = weights("mtp", params["mtp"])
    layer_cache = None if cache is None else cache.layers[0]
    embedded = embed(params, weights, following, execution.vocab_block)
    hidden, layer_cache, stats = mtp_step(w, hidden, embedded, layer_cache, context)
    if cache is not None:
        cache = cache.advance((layer_cache,), context.new_segments)
    stats = reduce_stats(jax.tree.map(lambda a: a[None], stats), region)
    logits = compute_logits(params, hidden, weights, *logit_positions)
    return ForwardOutput(logits, hidden, cache, stats)


def _run(
    local: Callable[..., ForwardOutput],
    params: PyTree,
    inputs: tuple[Array, ...],
    cfg: ModelConfig,
    positions: Int[Array, "b t"] | None,
    segment_ids: Int[Array, "b t"] | None,
    cache: Cache | PagedCache | None,
    mesh: Mesh | AbstractMesh | None,
    execution: ExecutionConfig,
) -> ForwardOutput:
    """Calls local(region, params, inputs [b t ...], positions, segment_ids, cache) on one device or on a mesh.

    On a mesh the call is one manual region over all its axes.
    """
    b, t = inputs[0].shape[:2]
    # The fill of pages is known only at run time; their owner checks it.
    if not isinstance(cache, PagedCache):
        cfg.check_length(t if cache is None else cache.segments.shape[1])
    if positions is None:
        positions = jnp.arange(t, dtype=jnp.int32) if cache is None else cache.positions(t)
        positions = jnp.broadcast_to(positions, (b, t))
    args = (params, inputs, positions, segment_ids, cache)
    if mesh is None:
        return local(Region(), *args)
    region = Region.of(mesh, shard_sequence=cache is None)
    check_batch(b, t, region)
    rows = _batch_spec(region)
    shardings = param_shardings(cfg, mesh, params, execution.replicated_weights)
    params_spec = jax.tree.map(lambda s: s.spec, shardings)
    cache_spec = jax.tree.map(lambda a: P(BATCH_AXES) if a.ndim else P(), cache)
    segments_spec = None if segment_ids is None else rows
    run = jax.shard_map(
        functools.partial(local, region),
        mesh=mesh,
        check_vma=False,
        in_specs=(params_spec, rows, rows, segments_spec, cache_spec),
        out_specs=ForwardOutput._make((rows, rows, cache_spec, P())),
    )
    return run(*args)


def _batch_spec(region: Region) -> P:
    """Returns the PartitionSpec of an array [b t ...]."""
    return P(BATCH_AXES, SEQUENCE_AXES) if region.shard_sequence else P(BATCH_AXES)
