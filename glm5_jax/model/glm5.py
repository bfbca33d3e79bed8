"""GLM-5: the weights as an `nnx.Module`, and one forward as pure functions over their tree.

`forward` is public and runs on any mesh, in any stage. `trunk` is the same computation on one device's
shard; the training loss runs it inside its own manual region.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.model import quant
from glm5_jax.model.block import (
    ForwardContext,
    KindSwitch,
    LayerStats,
    block,
    block_jit,
    initial_selection,
)
from glm5_jax.model.cache import Cache, PagedCache, Paging, write
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Selection, index_loss_weights
from glm5_jax.model.mtp import mtp_step
from glm5_jax.model.parameters import (
    OWNED_BY_SOME_LAYERS,
    abstract_params,
    axis_letters,
    declare_model,
    init_params,
    layers_with,
    param_shardings,
    params_of,
    stacks,
    unstack,
)
from glm5_jax.model.rope import rope_table
from glm5_jax.model.rotated_norm import apply_final_norm
from glm5_jax.model.vocabulary import compute_logits, embed
from glm5_jax.parallel import sharding
from glm5_jax.parallel.mesh import AXES, BATCH_AXES, SEQUENCE_AXES, Region, check_batch
from glm5_jax.parallel.params import values_from
from glm5_jax.parallel.tree import flatten, map_with_path, matches_any


class Glm5(nnx.Module):
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
        if (rngs is None) == (params is None):
            raise ValueError("Glm5 needs either rngs (new weights) or params (existing ones)")
        if params is None:
            params = init_params(cfg, rngs.params(), param_dtype or cfg.dtype, mesh)
        self.cfg = cfg
        self.mesh = mesh
        declare_model(self, cfg, values_from(params), param_dtype or cfg.dtype)

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


class WeightGatherer:
    """Gathers weights inside a manual region: a device's shard becomes the full weight in the compute dtype.

    The router keeps its stored dtype, because its scores are computed in `accum_dtype`. Experts are
    fake-quantised to int4 if cfg says so.
    """

    def __init__(self, cfg: ModelConfig, region: Region, execution: ExecutionConfig):
        self._letters, self._shapes = flatten(axis_letters(cfg)), flatten(abstract_params(cfg))
        self.region, self._sizes = region, {axis: getattr(region, axis) for axis in AXES}
        self._dtype, self._int4_group = jnp.dtype(cfg.dtype), cfg.int4_group
        self._execution = execution
        self._reduce_dtype = execution.reduce_dtype and jnp.dtype(execution.reduce_dtype)

    def vocab_shard(self, name: str, w, dim: int, rows: int):
        """Returns (shard, mesh axes) of a weight that stays sharded along one dimension.

        The shard is gathered along the other dimensions. rows: rows that each device multiplies with it.
        Returns None if the dimension is not sharded, or if gathering the weight sends less.
        """
        letters, spec = sharding.weight_spec(
            w, self._letters[name], self._shapes[name].shape, self._sizes
        )
        entry = spec[dim] if self._execution.keep_vocab_sharded else None
        axes = self.region.nontrivial_axes(
            entry if isinstance(entry, tuple) else (entry,) if entry else ()
        )
        if not axes or self.region.size(axes) * rows > self._shapes[name].shape[dim]:
            return None
        rest = P(*(None if i == dim else part for i, part in enumerate(spec)))
        return sharding.gather(w, letters, rest, self.region, self._dtype), axes

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight over all devices."""
        return self._shapes[name].shape

    def __call__(self, prefix: str, tree: PyTree, sliced: bool = False) -> PyTree:
        """Returns the gathered subtree at prefix. sliced: it is one layer of a stack, without its `l`."""

        def one(path, w):
            name = f"{prefix}/{path}" if path else prefix
            if matches_any(self._execution.pregathered, name):
                return w
            letters, shape = self._letters[name], self._shapes[name].shape
            if sliced:
                letters, shape = letters.removeprefix("l "), shape[1:]
            is_replicated = matches_any(self._execution.replicated_weights, name)
            letters, spec = sharding.weight_spec(w, letters, shape, self._sizes, is_replicated)
            dtype = w.dtype if "router/" in name else self._dtype
            w = quant.fake_quantize(w, name, self._int4_group)
            return sharding.gather(w, letters, spec, self.region, dtype, self._reduce_dtype)

        return map_with_path(one, tree)


class Trunk(NamedTuple):
    """Result of the decoder on one device.

    Attributes:
      hidden: hidden state after the final norm.
      cache: cache with the new tokens; None without one.
      stats: `LayerStats` of this device with a leading l. Fields of experts cover MoE layers only.
      context: inputs for the MTP block.
    """

    hidden: Float[Array, "b t d"]
    cache: Cache | PagedCache | None
    stats: LayerStats
    context: ForwardContext


def trunk(
    params: PyTree,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"] | None,
    cache: Cache | PagedCache | None,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    region: Region,
    index_weight: Float[Array, "b t"] | None = None,
    index_target: str = "own_layer",
    capture_choices: bool = False,
) -> Trunk:
    """Runs the decoder on one device's tokens. See `forward` for the other arguments.

    Args:
      index_weight: weight of each query in the indexers' loss; None: the loss is not computed.
      index_target: layers whose attention an indexer is trained on (`index_loss_weights`).
      capture_choices: as in `ForwardContext`.
    """
    weights = WeightGatherer(cfg, region, execution)
    context, cache = make_context(positions, segments, cache, cfg, execution, region)
    context = dataclasses.replace(
        context, index_weight=index_weight, capture_choices=capture_choices
    )
    x = embed(params, weights, tokens, execution.vocab_block)
    layer_caches, stats, previous_x = [], [], None
    loss_weights = index_loss_weights(cfg, index_target)
    selection = Selection(None, None)
    if len(cfg.full_layers) < cfg.num_hidden_layers:
        selection = initial_selection(tokens.shape, x.dtype, context)
    # Layers: one by one with a cache or unstacked weights, else under a scan.
    for name, layers in stacks(cfg):
        stack = params[name]
        if cache is not None or isinstance(stack, list):
            stack = stack if isinstance(stack, list) else unstack(params, cfg)[name]
            run = block if cache is None else block_jit
            for layer, w in zip(layers, stack):
                layer_cache = cache and cache.layers[layer]
                if cache is not None and region.nontrivial_axes(AXES) and previous_x is not None:
                    # Starts gathering when the previous layer has begun: XLA would gather as many layers
                    # ahead as fit into memory.
                    w, _ = lax.optimization_barrier((w, previous_x))
                w, kind, previous_x = weights(name, w, sliced=True), cfg.layer_kinds[layer], x
                x, selection, layer_cache, s = run(
                    w, x, selection, layer_cache, context, True, loss_weights[layer], kind
                )
                layer_caches.append(layer_cache)
                stats.append(jax.tree.map(lambda a: a[None], s))
        else:
            stack_weights = [loss_weights[layer] for layer in layers]
            x, selection, s = _scan(
                name, stack, layers, x, selection, stack_weights, weights, context
            )
            stats.append(s)
    # Final norm; statistics of the stacks concatenated.
    norm = weights("final_norm", params["final_norm"])
    if cache is not None:
        cache = cache.advance(layer_caches, context.segments)

    def joined(field):
        values = [value for s in stats if (value := getattr(s, field)) is not None]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *values) if values else None

    joined_stats = LayerStats(**{field: joined(field) for field in LayerStats._fields})
    return Trunk(apply_final_norm(x, norm, cfg.rms_norm_eps), cache, joined_stats, context)


def _scan(name, stack, layers, x, selection, loss_weights, weights, context):
    """Runs the layers of one stack under `lax.scan`, so that 75 layers compile like one.

    loss_weights: weight of each layer in the loss of its index.
    """
    # Weights of the scan: those of all layers are scanned over; those of some are indexed in each step.
    full = set(context.cfg.full_layers)
    flags = [i in full for i in layers]
    kinds = [context.cfg.layer_kinds[i] for i in layers]
    kind_names = tuple(dict.fromkeys(kinds))
    body, parts, mixed = dict(stack), {}, not all(flags)
    for part in [name for name in OWNED_BY_SOME_LAYERS if name in stack]:
        owners, values = layers_with(context.cfg, part, layers), body.pop(part)
        if part == "indexer" and not (context.is_sparse or context.index_weight is not None):
            continue
        if len(owners) == len(layers):
            body[part] = values
        else:
            parts[part] = (values, np.maximum(np.cumsum([i in owners for i in layers]) - 1, 0))

    # A weight that all layers share is static.
    static_weight = loss_weights[0] if len(set(loss_weights)) == 1 else None
    carried = jax.tree.structure(selection)

    def layer(carry, xs):
        x, selection = carry
        w, is_full, kind, positions, loss_weight = xs
        w = weights(name, w, sliced=True)
        for part, position in positions.items():
            at = functools.partial(lax.dynamic_index_in_dim, index=position, keepdims=False)
            w[part] = weights(f"{name}/{part}", jax.tree.map(at, parts[part][0]), sliced=True)
        is_full = is_full if mixed else True
        loss_weight = loss_weight if static_weight is None else static_weight
        kind = KindSwitch(kind_names, kind) if len(kind_names) > 1 else kind_names[0]
        x, new, _, stats = block(w, x, selection, None, context, is_full, loss_weight, kind)
        selection = new if jax.tree.structure(new) == carried else selection
        return (x, selection), stats

    positions = {part: jnp.asarray(index, jnp.int32) for part, (_, index) in parts.items()}
    numbers = jnp.asarray([kind_names.index(kind) for kind in kinds], jnp.int32)
    xs = (body, jnp.asarray(flags), numbers, positions, jnp.asarray(loss_weights, jnp.float32))
    (x, selection), stats = lax.scan(context.execution.checkpoint(layer), (x, selection), xs)
    return x, selection, stats


def make_context(
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"] | None,
    cache: Cache | PagedCache | None,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    region: Region,
) -> tuple[ForwardContext, Cache | PagedCache | None]:
    """Returns the context of a forward at these positions, and the cache with the new tokens' segments."""
    b, t = positions.shape
    cos, sin = rope_table(
        cfg.rope_parameters, cfg.qk_rope_head_dim, positions, jnp.dtype(cfg.dtype)
    )
    paging, start = None, 0
    if cache is not None and segments is None:
        segments = jnp.ones((b, t), jnp.int32)
    if isinstance(cache, PagedCache):
        paging = Paging(cache.tables, cache.positions(t), segments != 0)
        num_keys = cache.tables.shape[1] * cache.layers[0].latent.shape[1]
        start, key_segments = cache.lengths[0], jnp.ones((b, num_keys), jnp.int32)
    elif cache is not None:
        key_segments = write(cache.segments, segments, cache.length)
        cache = cache._replace(segments=key_segments)
        start, num_keys = cache.length, key_segments.shape[1]
    else:
        axes_ = region.sequence_axes
        start = region.index(axes_) * t if axes_ else 0
        num_keys = t * region.size(axes_)
        key_segments = None if segments is None else region.gather_sequence(segments)
    context = ForwardContext(
        cfg=cfg,
        execution=execution,
        region=region,
        cos=cos,
        sin=sin,
        start=start,
        num_keys=num_keys,
        segments=segments,
        key_segments=key_segments,
        paging=paging,
    )
    return context, cache


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

    def local(region, params, inputs, positions, segment_ids, cache):
        tokens, *logit_positions = inputs
        out = trunk(params, tokens, positions, segment_ids, cache, cfg, execution, region)
        logits = compute_logits(
            params, out.hidden, WeightGatherer(cfg, region, execution), *logit_positions
        )
        return ForwardOutput(logits, out.hidden, out.cache, reduce_stats(out.stats, region))

    inputs = (tokens,) if logit_positions is None else (tokens, logit_positions)
    return _run(local, params, inputs, cfg, positions, segment_ids, cache, mesh, execution)


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

    def local(region, params, inputs, positions, segment_ids, cache):
        hidden, following, *logit_positions = inputs
        weights = WeightGatherer(cfg, region, execution)
        context, cache = make_context(positions, segment_ids, cache, cfg, execution, region)
        w = weights("mtp", params["mtp"])
        layer_cache = cache and cache.layers[0]
        embedded = embed(params, weights, following, execution.vocab_block)
        hidden, layer_cache, stats = mtp_step(w, hidden, embedded, layer_cache, context)
        if cache is not None:
            cache = cache.advance((layer_cache,), context.segments)
        stats = reduce_stats(jax.tree.map(lambda a: a[None], stats), region)
        return ForwardOutput(
            compute_logits(params, hidden, weights, *logit_positions), hidden, cache, stats
        )

    inputs = (
        (hidden, following) if logit_positions is None else (hidden, following, logit_positions)
    )
    return _run(local, params, inputs, cfg, positions, segment_ids, cache, mesh, execution)


def _run(
    local, params, inputs, cfg, positions, segment_ids, cache, mesh, execution
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
    rows = batch_spec(region)
    shardings = param_shardings(cfg, mesh, params, execution.replicated_weights)
    params_spec = jax.tree.map(lambda s: s.spec, shardings)
    cache_spec = jax.tree.map(lambda a: P(BATCH_AXES) if a.ndim else P(), cache)
    segments_spec = None if segment_ids is None else rows
    run = jax.shard_map(
        functools.partial(local, region),
        mesh=mesh,
        check_vma=False,
        in_specs=(params_spec, rows, rows, segments_spec, cache_spec),
        out_specs=ForwardOutput(rows, rows, cache_spec, P()),
    )
    return run(*args)


def batch_spec(region: Region) -> P:
    """Returns the PartitionSpec of an array [b t ...]."""
    return P(BATCH_AXES, SEQUENCE_AXES) if region.shard_sequence else P(BATCH_AXES)


def reduce_stats(stats: LayerStats, region: Region) -> LayerStats:
    """Reduces per-layer statistics over all devices: largest logit, summed loads, balance and index losses."""
    all_axes = region.nontrivial_axes(AXES)
    load = balance = index_loss = None
    if stats.load is not None:
        load = region.psum(stats.load, region.token_axes)
        balance = region.psum(stats.balance, region.nontrivial_axes(BATCH_AXES))
    if stats.index_loss is not None:
        index_loss = region.psum(stats.index_loss, all_axes)
    return LayerStats(region.pmax(stats.max_logit, all_axes), load, balance, index_loss)
