"""GLM-5: the weights as an `nnx.Module`, and the one forward as pure functions over their tree.

`forward` is the public one (any mesh, any stage). `trunk` is the same computation on one device's
shard; the training loss runs it inside its own manual region.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from glm5_jax.config import ModelConfig
from glm5_jax.core import axes, sharding
from glm5_jax.core.mesh import AXES, BATCH_AXES, SEQUENCE_AXES, Region, check_batch
from glm5_jax.core.params import (
    Declare,
    given_values,
    random_values,
    random_values_at_once,
    shapes_only,
)
from glm5_jax.core.tree import flatten, found, map_with_path
from glm5_jax.model import quant
from glm5_jax.model.block import Block, Context, LayerStats, Switch, block, block_once, no_selection
from glm5_jax.model.cache import Cache, PagedCache, Paging, write
from glm5_jax.model.indexer import Selection, index_shares
from glm5_jax.model.mtp import Mtp, mtp_step
from glm5_jax.model.plan import Plan
from glm5_jax.model.rope import rope_table
from glm5_jax.model.turned import read_out
from glm5_jax.model.vocabulary import embed, read_logits

STACKS = ("dense_layers", "moe_layers")
_LAYER = re.compile(r"(?<=_layers)/\d+/")  # in paths of unstacked trees
PARTIAL = ("indexer", "gdn")  # their stacks count only the layers that own them
# What stays cut while it is used: a device that held all of it would add it to the sum once more.
DIVIDED = {
    "tensor": ("intermediate_size", "moe_intermediate_size"),
    "expert": ("n_routed_experts",),
}


class Glm5(nnx.Module):
    """A GLM-5 model: `Glm5(cfg, rngs=nnx.Rngs(0))(tokens)` -> float32 logits [b t v].

    rngs draws new weights; params (a nested dict as `params_of` gives) takes existing ones. With a
    mesh the weights are born sharded by core/sharding.py. param_dtype (default: the config's dtype)
    is how weights are stored.
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
        _declare(self, cfg, given_values(params), param_dtype or cfg.dtype)

    def __call__(self, tokens, *, positions=None, segment_ids=None, plan: Plan = Plan()):
        given = {"positions": positions, "segment_ids": segment_ids, "mesh": self.mesh}
        return forward(params_of(self), tokens, self.cfg, plan=plan, **given).logits


class _Declared(nnx.Module):
    """A parameter tree without behaviour: shapes, letters or fresh values."""

    def __init__(self, cfg, make, dtype):
        _declare(self, cfg, make, dtype)


class _Table(nnx.Module):
    def __init__(self, declare, letters):
        self.weight = declare.normal("weight", letters)


def _declare(module, cfg, make, dtype):
    declare = Declare(axes.sizes(cfg), make, cfg.initializer_range, jnp.dtype(dtype))
    module.embed = _Table(declare.child("embed"), "v d")
    for name, layers in stacks(cfg):
        full = [i for i in cfg.full_layers if i in layers]
        stack = declare.child(name).stack(layers)
        gdn = [i for i in cfg.gdn_layers if i in layers]
        setattr(module, name, Block(stack, cfg, name == "moe_layers", full, gdn))
    if cfg.num_nextn_predict_layers:
        module.mtp = Mtp(declare.child("mtp"), cfg)
    module.final_norm = declare.ones("final_norm", "d")
    if not cfg.tie_word_embeddings:
        module.lm_head = _Table(declare.child("lm_head"), "d v")


def params_of(model: nnx.Module) -> dict[str, Any]:
    """Nested dict of a model's arrays, router biases included; the key space of everything else."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Variable))


@functools.lru_cache(maxsize=32)
def abstract(cfg: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The parameter tree as `jax.ShapeDtypeStruct`s; no memory is touched."""
    return params_of(_Declared(cfg, shapes_only, dtype))


@functools.lru_cache(maxsize=32)
def letters(cfg: ModelConfig) -> dict[str, Any]:
    """The parameter tree with every leaf's axis letters ("l q n hr")."""
    return params_of(_Declared(cfg, lambda weight: weight.letters, "float32"))


@functools.lru_cache(maxsize=8192)
def declared(cfg: ModelConfig, path: str) -> tuple[str, str]:
    """(name, axis letters) of a weight at a path, which may be of an `unstack`ed tree: its name is that of the stack, which its
    letters leave out."""
    name = _LAYER.sub("/", path)
    own = flatten(letters(cfg))[name]
    return name, own if name == path else own.removeprefix("l ")


def param_shardings(cfg: ModelConfig, mesh, params=None, replicated: Sequence[str] = ()):
    """Tree of NamedShardings of the parameters on a mesh; params: such a tree, or its shapes, if some of them are
    quantised, or layers are apart (`unstack`). replicated: as of `Plan`. ValueError if it cannot cut the model."""
    params = abstract(cfg) if params is None else params
    for axis, names in DIVIDED.items():
        for name in names:
            if (size := getattr(cfg, name)) % mesh.shape[axis]:
                raise ValueError(
                    f"mesh axis {axis}={mesh.shape[axis]} does not divide {name} {size}; choose a "
                    "divisor"
                )

    def sharding_of(path, w):
        name, own = declared(cfg, path)
        return sharding.sharding_of(w, own, mesh, found(replicated, name))

    shardings = map_with_path(sharding_of, params)
    quant.check_shards(cfg, params, shardings)
    return shardings


def init_params(cfg: ModelConfig, key, dtype="float32", mesh=None):
    """New weights, each drawn where it lives; the same values on every mesh."""

    def draw(key):
        return params_of(_Declared(cfg, random_values(key), dtype))

    if mesh is None:
        return params_of(_Declared(cfg, random_values_at_once(key), dtype))
    return jax.jit(draw, out_shardings=param_shardings(cfg, mesh))(key)


def unstack(params, cfg: ModelConfig):
    """The same tree, or any part of it, with each layer stack as a list of layers; `forward` accepts both forms.

    A step that slices its weights out of a stack copies them; decoding on CPU is then half as fast, and XLA:TPU has copies of
    18 layers' experts at once.
    """
    out = dict(params)
    for name, layers in stacks(cfg):
        if isinstance(stack := params.get(name), dict):
            body = {k: v for k, v in stack.items() if k not in PARTIAL}
            parts = {k: (stack[k], _owners(cfg, k, layers)) for k in PARTIAL if k in stack}
            out[name] = []
            for position, layer in enumerate(layers):
                own = jax.tree.map(lambda x, i=position: x[i], body)
                for part, (values, owners) in parts.items():
                    if layer in owners:
                        own[part] = jax.tree.map(lambda x, i=owners.index(layer): x[i], values)
                out[name].append(own)
    return out


def _owners(cfg: ModelConfig, part: str, layers: range) -> list[int]:
    """The layers of a stack that own a part of PARTIAL."""
    every = {"indexer": cfg.full_layers, "gdn": cfg.gdn_layers}[part]
    return [i for i in layers if i in every]


def stacks(cfg: ModelConfig) -> list[tuple[str, range]]:
    """The layer stacks that exist, with their absolute layer numbers."""
    first = cfg.first_k_dense_replace
    parts = zip(STACKS, (range(first), range(first, cfg.num_hidden_layers)))
    return [(name, layers) for name, layers in parts if layers]


class Weights:
    """Inside a manual region: this device's whole copy of weights, in the compute dtype; the router keeps its stored
    dtype, as it is computed wide, and experts are as int4 where cfg says so."""

    def __init__(self, cfg: ModelConfig, region: Region, plan: Plan):
        self._letters, self._whole = flatten(letters(cfg)), flatten(abstract(cfg))
        self.region, self._sizes = region, {axis: getattr(region, axis) for axis in AXES}
        self._dtype, self._int4_group = jnp.dtype(cfg.dtype), cfg.int4_group
        self._plan, self._reduce_dtype = plan, plan.reduce_dtype and jnp.dtype(plan.reduce_dtype)

    def by_tokens(self, name: str, w, dim: int, rows: int):
        """(what this device has along a dimension of a weight, gathered along the others; the mesh axes over which that
        is cut), for rows of each device; None if it is not cut there, or the weight had better be gathered."""
        own, spec = sharding.cut_of(w, self._letters[name], self._whole[name].shape, self._sizes)
        entry = spec[dim] if self._plan.few_tokens else None
        axes = self.region.live(entry if isinstance(entry, tuple) else (entry,) if entry else ())
        if not axes or self.region.size(axes) * rows > self._whole[name].shape[dim]:
            return None
        rest = P(*(None if i == dim else part for i, part in enumerate(spec)))
        return sharding.gather(w, own, rest, self.region, self._dtype), axes

    def whole(self, name: str) -> jax.ShapeDtypeStruct:
        """Shape of a weight on all devices together."""
        return self._whole[name]

    def __call__(self, prefix: str, tree, sliced: bool = False):
        """The subtree at prefix, gathered; sliced: it is one layer of a stack, without its `l`."""

        def one(path, w):
            name = f"{prefix}/{path}" if path else prefix
            if found(self._plan.gathered, name):
                return w
            names, shape = self._letters[name], self._whole[name].shape
            if sliced:
                names, shape = names.removeprefix("l "), shape[1:]
            whole = found(self._plan.replicated, name)
            own, spec = sharding.cut_of(w, names, shape, self._sizes, whole)
            dtype = w.dtype if "router/" in name else self._dtype
            w = quant.computed(w, name, self._int4_group)
            return sharding.gather(w, own, spec, self.region, dtype, self._reduce_dtype)

        return map_with_path(one, tree)


class Trunk(NamedTuple):
    """hidden [b t d] after the final norm; stats: `LayerStats` with a leading l (experts' parts: MoE
    layers only), of this device; context: what the MTP block needs to run on."""

    hidden: jax.Array
    cache: Cache | None
    stats: LayerStats
    context: Context


def trunk(
    params,
    tokens,
    positions,
    segments,
    cache: Cache | None,
    cfg,
    plan: Plan,
    region: Region,
    index_weight=None,
    index_served: bool = False,
    watched: bool = False,
):
    """The decoder on one device's tokens int[b t] -> Trunk. See `forward` for the arguments.

    index_weight [b t]: of each query in the indexers' loss (None: it is not computed). index_served: an
    indexer learns from all layers that use its keys, instead of its own alone. watched: as of `Context`.
    """
    weights = Weights(cfg, region, plan)
    context, cache = begin(positions, segments, cache, cfg, plan, region)
    context = dataclasses.replace(context, index_weight=index_weight, watched=watched)
    x = embed(params, weights, tokens, plan.vocab_block)
    layer_caches, stats, before = [], [], None
    shares = index_shares(cfg, index_served)
    selection = Selection(None, None)
    if len(cfg.full_layers) < cfg.num_hidden_layers:
        selection = no_selection(tokens.shape, x.dtype, context)
    for name, layers in stacks(cfg):
        stack = params[name]
        if cache is not None or isinstance(stack, list):
            stack = stack if isinstance(stack, list) else unstack(params, cfg)[name]
            run = block if cache is None else block_once
            for layer, w in zip(layers, stack):
                own = cache and cache.layers[layer]
                if cache is not None and region.live(AXES) and before is not None:
                    # Gathered while the layer before is computed, not earlier: XLA gathers as many as memory holds.
                    w, _ = lax.optimization_barrier((w, before))
                w, kind, before = weights(name, w, sliced=True), cfg.layer_kinds[layer], x
                x, selection, own, s = run(w, x, selection, own, context, True, shares[layer], kind)
                layer_caches.append(own)
                stats.append(jax.tree.map(lambda a: a[None], s))
        else:
            own = [shares[layer] for layer in layers]
            x, selection, s = _scan(name, stack, layers, x, selection, own, weights, context)
            stats.append(s)
    norm = weights("final_norm", params["final_norm"])
    if cache is not None:
        cache = cache.behind(layer_caches, context.segments)
    parts = [[p for p in column if p is not None] for column in zip(*stats)]
    parts = [jax.tree.map(lambda *a: jnp.concatenate(a), *p) if p else None for p in parts]
    return Trunk(read_out(x, norm, cfg.rms_norm_eps), cache, LayerStats(*parts), context)


def _scan(name, stack, layers, x, selection, shares, weights, context):
    """The layers of one stack under `lax.scan`, so that 75 layers compile like one."""
    full = set(context.cfg.full_layers)
    flags = [i in full for i in layers]
    kinds = [context.cfg.layer_kinds[i] for i in layers]
    several = tuple(dict.fromkeys(kinds))
    body, parts, mixed = dict(stack), {}, not all(flags)
    for part in [name for name in PARTIAL if name in stack]:
        owners, values = _owners(context.cfg, part, layers), body.pop(part)
        if part == "indexer" and not (context.selects or context.index_weight is not None):
            continue
        if len(owners) == len(layers):
            body[part] = values
        else:
            parts[part] = (values, np.maximum(np.cumsum([i in owners for i in layers]) - 1, 0))

    # Known when tracing where all are alike.
    alike = shares[0] if len(set(shares)) == 1 else None
    carried = jax.tree.structure(selection)

    def layer(carry, xs):
        x, selection = carry
        w, is_full, kind, positions, share = xs
        w = weights(name, w, sliced=True)
        for part, position in positions.items():
            at = functools.partial(lax.dynamic_index_in_dim, index=position, keepdims=False)
            w[part] = weights(f"{name}/{part}", jax.tree.map(at, parts[part][0]), sliced=True)
        full, share = is_full if mixed else True, share if alike is None else alike
        kind = Switch(several, kind) if len(several) > 1 else several[0]
        x, made, _, stats = block(w, x, selection, None, context, full, share, kind)
        kept = made if jax.tree.structure(made) == carried else selection
        return (x, kept), stats

    positions = {part: jnp.asarray(own, jnp.int32) for part, (_, own) in parts.items()}
    numbers = jnp.asarray([several.index(kind) for kind in kinds], jnp.int32)
    xs = (body, jnp.asarray(flags), numbers, positions, jnp.asarray(shares, jnp.float32))
    (x, selection), stats = lax.scan(context.plan.checkpoint(layer), (x, selection), xs)
    return x, selection, stats


def begin(positions, segments, cache, cfg, plan, region):
    """(Context, cache with the new tokens' segments) of a forward over tokens at these positions."""
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
        key_segments = None if segments is None else region.whole_sequence(segments)
    queries = (cos, sin, start, num_keys, segments, key_segments)
    return Context(cfg, plan, region, *queries, paging=paging), cache


class Output(NamedTuple):
    """logits float32[b t v]; hidden [b t d] after the final norm; stats over all devices."""

    logits: jax.Array
    hidden: jax.Array
    cache: Cache | None
    stats: LayerStats


def forward(
    params,
    tokens,
    cfg: ModelConfig,
    *,
    positions=None,
    segment_ids=None,
    cache: Cache | PagedCache | None = None,
    only=None,
    mesh=None,
    plan: Plan = Plan(),
) -> Output:
    """Logits of tokens int[b t], each predicting the token after it.

    positions int[b t] (default: counting on from the cache), segment_ids int[b t] (0 is padding;
    default: one document per row), cache: written behind its `length`, or each row's of a `PagedCache`, whose
    rows begin with their tokens, and returned. only int[b 1]: the one token of each row whose logits are wanted,
    [b 1 v]; with a cache. On a mesh b, and the pages, must divide by data * fsdp *
    expert, and without a cache t by context * tensor. ValueError otherwise.
    """

    def local(region, params, inputs, positions, segment_ids, cache):
        tokens, *only = inputs
        out = trunk(params, tokens, positions, segment_ids, cache, cfg, plan, region)
        logits = read_logits(params, out.hidden, Weights(cfg, region, plan), *only)
        return Output(logits, out.hidden, out.cache, reduce_stats(out.stats, region))

    inputs = (tokens,) if only is None else (tokens, only)
    return _run(local, params, inputs, cfg, positions, segment_ids, cache, mesh, plan)


def forward_mtp(
    params,
    hidden,
    following,
    cfg: ModelConfig,
    *,
    positions=None,
    segment_ids=None,
    cache: Cache | PagedCache | None = None,
    only=None,
    mesh=None,
    plan: Plan = Plan(),
) -> Output:
    """One multi-token-prediction step, for drafting: hidden [b t d] of the trunk (or of the step
    before) and the tokens int[b t] that follow each position -> logits for the token after those.

    cache: of `init_cache(cfg, ..., num_layers=1)`, the MTP block's own. Otherwise as `forward`.
    """
    if "mtp" not in params:
        raise ValueError("the model has no MTP layer (num_nextn_predict_layers is 0)")

    def local(region, params, inputs, positions, segment_ids, cache):
        hidden, following, *only = inputs
        weights = Weights(cfg, region, plan)
        context, cache = begin(positions, segment_ids, cache, cfg, plan, region)
        w = weights("mtp", params["mtp"])
        own = cache and cache.layers[0]
        embedded = embed(params, weights, following, plan.vocab_block)
        hidden, own, stats = mtp_step(w, hidden, embedded, own, context)
        if cache is not None:
            cache = cache.behind((own,), context.segments)
        stats = reduce_stats(jax.tree.map(lambda a: a[None], stats), region)
        return Output(read_logits(params, hidden, weights, *only), hidden, cache, stats)

    inputs = (hidden, following) if only is None else (hidden, following, only)
    return _run(local, params, inputs, cfg, positions, segment_ids, cache, mesh, plan)


def _run(local, params, inputs, cfg, positions, segment_ids, cache, mesh, plan) -> Output:
    """local(region, params, inputs [b t ...], positions, segment_ids, cache) on one device or as one
    manual region over the mesh."""
    b, t = inputs[0].shape[:2]
    # Pages are known full only at run time; whoever fills them counts.
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
    shardings = param_shardings(cfg, mesh, params, plan.replicated)
    params_spec = jax.tree.map(lambda s: s.spec, shardings)
    cache_spec = jax.tree.map(lambda a: P(BATCH_AXES) if a.ndim else P(), cache)
    segments_spec = None if segment_ids is None else rows
    run = jax.shard_map(
        functools.partial(local, region),
        mesh=mesh,
        check_vma=False,
        in_specs=(params_spec, rows, rows, segments_spec, cache_spec),
        out_specs=Output(rows, rows, cache_spec, P()),
    )
    return run(*args)


def batch_spec(region: Region) -> P:
    """Of an array [b t ...]."""
    return P(BATCH_AXES, SEQUENCE_AXES) if region.shard_sequence else P(BATCH_AXES)


def reduce_stats(stats: LayerStats, region: Region) -> LayerStats:
    """Per-layer statistics over all devices: largest logit, summed loads, summed balance."""
    everyone = region.live(AXES)
    load = balance = index_loss = None
    if stats.load is not None:
        load = region.psum(stats.load, region.token_axes)
        balance = region.psum(stats.balance, region.live(BATCH_AXES))
    if stats.index_loss is not None:
        index_loss = region.psum(stats.index_loss, everyone)
    return LayerStats(region.pmax(stats.max_logit, everyone), load, balance, index_loss)
