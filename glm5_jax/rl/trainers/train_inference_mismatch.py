"""What the engine selects where it samples, against what the learner's forward selects for the same tokens.

Keys and experts are discrete: where engine and learner choose others, the log-probs that the loss divides by each
other are of two models, and training of one with sparse attention comes apart within a few steps (GLM-5 3.2). Each
record is read again as the engine reads it (weights as the engine has them, pages, chunks of what was given, tokens
that were sampled one by one) and in a packed row as the learner does.

Scores that are closer than rounding may be ranked either way. Where a choice differs it comes with the gap between
what one side alone has chosen and what the other has, by the learner's scores: a gap of a few times the precision
of the scores is rounding, anything else a fault. A difference in one layer changes the input of the next, where gaps
are of any size: the first layer with one is the one to look at.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.config import ModelConfig
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.runner import Computation
from glm5_jax.inference.shapes import EngineShapes, bucket_size
from glm5_jax.model import glm5
from glm5_jax.model.cache import PagedCache, init_pages
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.indexer import Index
from glm5_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXES, Region
from glm5_jax.rl.algorithm.batch import lay_out
from glm5_jax.training.loss import target_logp
from pallas_kernels.index_scores import index_scores

LEAST_LENGTH = (
    128  # of a row: each power of two above is another program, and so is each of the rows' number
)
TOGETHER = (
    512  # as long is a row for all records, if they fit one: batches of short ones have one program
)
MOST_GAP = 2.0  # of two scores, in units of the largest


class Differing(NamedTuple):
    """By layer, with its number: same, the share of choices that are the same; gap, the largest between scores of those
    that are not, relative to the largest score in the layer. 2 where one side chose more than the other."""

    layer: np.ndarray
    same: np.ndarray
    gap: np.ndarray


class Agreement(NamedTuple):
    """keys: of layers with an indexer (None: no key is left out of a row as long as these); experts: of MoE layers
    (None: there are none). logp: distance of the log-prob of each sampled token; recorded: of what the record
    says of it from what the engine's weights say now, which have drawn it if that is next to nothing."""

    keys: Differing | None
    experts: Differing | None
    logp: np.ndarray
    recorded: np.ndarray

    @property
    def metrics(self) -> dict[str, float]:
        """keys, experts: shares that are the same, over all layers. layer: the first in which any is not, -1 for none; gap:
        there, 0 for none."""
        told = {
            "logp_max": self.logp.max(),
            "logp_mean": self.logp.mean(),
            "recorded_max": self.recorded.max(),
            "recorded_mean": self.recorded.mean(),
        }
        first = [(np.inf, 0.0)]
        for name, choice in (("keys", self.keys), ("experts", self.experts)):
            if choice is not None:
                told[name] = choice.same.mean()
                # Of two in one layer, that of the keys is the first.
                first += zip(choice.layer[choice.same < 1], choice.gap[choice.same < 1])
        layer, gap = min(first, key=lambda found: found[0])
        told |= {"layer": layer if np.isfinite(layer) else -1, "gap": gap}
        return {f"agreement/{name}": float(value) for name, value in told.items()}


def compare(
    params,
    records: Sequence[TokenRecord],
    engine: Engine,
    cfg: ModelConfig,
    *,
    execution: ExecutionConfig = ExecutionConfig(),
    chunk: int = 1024,
    temperature: float = 1.0,
    mesh=None,
) -> Agreement | None:
    """The `Agreement` of an engine with a learner on some records, None if no token of them was sampled.

    params, cfg, execution, mesh, chunk: of the learner, the last the rows of its loss; temperature: of the samples. What
    the indexers hold of every token is kept at once, i * j numbers in each layer: use a few records. ValueError if
    the engine serves a model that chooses another number of things.
    """
    made = engine.computation
    for name in ("num_hidden_layers", "full_layers", "index_topk", "num_experts_per_tok"):
        theirs, own = getattr(made.cfg, name), getattr(cfg, name)
        if theirs != own:
            raise ValueError(
                f"{name} is {theirs} in the engine and {own} in the learner; both must have one model"
            )
    records = [record for record in records if is_sampled(record).any()]
    if not records:
        return None
    sizes = _Sizes.of(records, made)
    region = Region() if mesh is None else Region.of(mesh)
    parts = region.size(SEQUENCE_AXES)
    lengths = [len(record) for record in records]
    longest = max(max(lengths), min(sum(lengths), TOGETHER))
    length = -(-bucket_size(longest, 1 << 62, LEAST_LENGTH) // parts) * parts
    batch, rows = lay_out(records, length, region.size(BATCH_AXES), ("token_ids",))
    logp, own = _learner(
        params, batch, cfg=cfg, execution=execution, chunk=chunk, temperature=temperature, mesh=mesh
    )
    read = np.zeros(batch["token_ids"].shape, bool)
    k = None if own.topk is None else own.topk.shape[-1]
    topk = None if k is None else np.full((len(cfg.full_layers), *read.shape, k), -1, np.int32)
    experts = None if own.experts is None else np.zeros(own.experts.shape, np.int32)
    logp, apart, recorded = np.asarray(logp), [], []
    for i, held in enumerate(rows):
        at = 0
        for record in held:
            theirs = _reread(record, made, sizes, temperature, k)
            sampled, count = is_sampled(record), len(record) - 1
            here = slice(at, at + count)
            read[i, here] = True
            if topk is not None:
                topk[:, i, here] = np.where(theirs.topk < 0, -1, theirs.topk + at)
            if experts is not None:
                experts[:, i, here] = theirs.experts
            learnt = logp[i, at : at + len(record)]
            apart.append(np.abs(learnt - theirs.logp)[sampled])
            recorded.append(np.abs(record.rollout_logp - theirs.logp)[sampled])
            at += len(record)
    keys = chosen = None
    if topk is not None:
        found = jax.device_get(_keys(own.topk, Index(*own.queries, own.keys), topk, read))
        keys = Differing(np.array(cfg.full_layers), *found)
    if experts is not None:
        found = jax.device_get(_experts(own.experts, own.scores, experts, read))
        chosen = Differing(np.arange(cfg.first_k_dense_replace, cfg.num_hidden_layers), *found)
    return Agreement(keys, chosen, np.concatenate(apart), np.concatenate(recorded))


def is_sampled(record: TokenRecord) -> np.ndarray:
    """bool [t] of its tokens."""
    if record.rollout_logp is None:
        return np.zeros(len(record), bool)
    return ~np.isnan(record.rollout_logp)


class _Own(NamedTuple):
    """Of the learner: topk int32[l b t k] and the Index [l b ...] behind it, queries and their weights and keys, of
    layers with an indexer; experts int32[l b t a] and the scores wide[l b t e] by which they are chosen. None where
    nothing is."""

    topk: jax.Array | None
    queries: tuple[jax.Array, jax.Array] | None
    keys: jax.Array | None
    experts: jax.Array | None
    scores: jax.Array | None


@functools.partial(jax.jit, static_argnames=("cfg", "execution", "chunk", "temperature", "mesh"))
def _learner(params, batch, *, cfg, execution, chunk, temperature, mesh):
    """(log-probs [b t] of the tokens, _Own) as the learner computes them; the first of a segment has none."""

    def local(region, params, tokens, positions, segments, targets):
        out = glm5.trunk(
            params, tokens, positions, segments, None, cfg, execution, region, capture_choices=True
        )
        weights = glm5.WeightGatherer(cfg, region, execution)
        logp = target_logp(params, weights, out.hidden, targets, temperature, chunk, execution)
        topk, index = _with_indexer(out.stats.selection, cfg)
        q, k = (None, None) if topk is None else (index[:2], index.k)
        routing = out.stats.routing or (None, None, None)
        return logp, _Own(topk, q, k, routing[0], routing[2])

    tokens = batch["token_ids"]
    args = tokens, batch["positions"], batch["segment_ids"], jnp.roll(tokens, -1, axis=1)
    if mesh is None:
        logp, own = local(Region(), params, *args)
    else:
        rows, whole = P(BATCH_AXES, SEQUENCE_AXES), P(None, BATCH_AXES)
        cut = P(None, BATCH_AXES, SEQUENCE_AXES)
        run = jax.shard_map(
            functools.partial(local, Region.of(mesh)),
            mesh=mesh,
            in_specs=(_specs(cfg, mesh, params), rows, rows, rows, rows),
            out_specs=(rows, _Own(cut, cut, whole, cut, cut)),
            check_vma=False,
        )
        logp, own = run(params, *args)
    if own.scores is not None:
        # By groups of experts it is the groups that are chosen first, by these as well.
        bias = params["moe_layers"]["router"]["bias"].astype(own.scores.dtype)
        own = own._replace(scores=own.scores + bias[:, None, None])
    return jnp.roll(logp, 1, axis=1), own


def _with_indexer(selection, cfg):
    """(topk, index) of the layers that have one, of a Selection [l ...]."""
    return jax.tree.map(lambda a: a[np.asarray(cfg.full_layers, int)], tuple(selection))


def _specs(cfg, mesh, params):
    return jax.tree.map(lambda s: s.spec, glm5.param_shardings(cfg, mesh, params))


class _Theirs(NamedTuple):
    """Of the engine, of a record of n tokens: logp [n] (NaN: not looked at); topk int32[l n-1 k] and experts
    int32[l n-1 a] of all that it reads, which the last one is not."""

    logp: np.ndarray
    topk: np.ndarray | None
    experts: np.ndarray | None


class _Run(NamedTuple):
    """Tokens from the one numbered first on that an engine reads at once or, where it drew them, one by one."""

    first: int
    count: int
    drawn: bool


def _runs(record: TokenRecord, chunk: int) -> list[_Run]:
    """What an engine reads of a record: all but the last token."""
    sampled, found = is_sampled(record)[:-1], []
    for drawn, run in itertools.groupby(range(len(sampled)), lambda i: bool(sampled[i])):
        places = list(run)
        found += [
            _Run(first, min(chunk, places[-1] + 1 - first), drawn)
            for first in range(places[0], places[-1] + 1, chunk)
        ]
    return found


class _Sizes(NamedTuple):
    """Of what is compiled to read some records, one program for those given and one for those drawn: pages of the
    table, and tokens of each."""

    pages: int
    tokens: dict[bool, int]

    @classmethod
    def of(cls, records: Sequence[TokenRecord], made: Computation) -> "_Sizes":
        shape, counts = made.shape, {True: 1, False: 1}
        for record in records:
            for run in _runs(record, shape.prefill_chunk):
                counts[run.drawn] = max(counts[run.drawn], run.count)
        longest = max(map(len, records))
        return cls(
            shape.table_width(-(-longest // shape.page_size)),
            {drawn: shape.prefill_tokens(count) for drawn, count in counts.items()},
        )


def _reread(
    record: TokenRecord, made: Computation, sizes: _Sizes, temperature: float, k: int | None
) -> _Theirs:
    """A record as an engine reads it. k: keys that the learner selects, None for all."""
    ids = record.token_ids
    static = {
        "cfg": made.cfg,
        "execution": made.execution,
        "mesh": made.mesh,
        "temperature": temperature,
    }
    layers, tables = _pages(made, sizes.pages)
    logp, topk, experts = np.full(len(ids), np.nan), [], []
    for first, count, drawn in _runs(record, made.shape.prefill_chunk):
        tokens, targets = np.zeros((2, sizes.tokens[drawn]), np.int32)
        tokens[:count], targets[:count] = ids[first:][:count], ids[first + 1 :][:count]
        step = _decode if drawn else _read
        layers, said, (keys, chosen) = step(
            made.params, layers, tables, tokens, targets, first, count, **static
        )
        said = np.asarray(said)
        logp[first + count + 1 - len(said[:count]) : first + count + 1] = said[:count]
        if k is not None:
            topk.append(_listed(keys, first, count, k))
        if chosen is not None:
            experts.append(np.asarray(chosen)[:, :count])
    joined = [np.concatenate(found, axis=1) if found else None for found in (topk, experts)]
    return _Theirs(logp, *joined)


def _listed(keys, first: int, count: int, k: int) -> np.ndarray:
    """int32[l count k] of selected keys; of None all that are visible, from position `first` on."""
    if keys is not None:
        return np.asarray(keys)[:, :count]
    places = np.arange(k, dtype=np.int32)
    visible = places <= np.arange(first, first + count)[:, None]
    return np.where(visible, places, -1)[None]


def _pages(made: Computation, width: int):
    """Empty pages of one sequence, in each group of devices that holds other ones, and their table."""
    groups = 1 if made.mesh is None else Region.of(made.mesh).size(BATCH_AXES)
    tables = np.broadcast_to(np.arange(width, dtype=np.int32), (groups, width))
    return _emptied(made.cfg, made.shape, made.mesh, groups * width)(), tables


@functools.cache
def _emptied(cfg: ModelConfig, shape: EngineShapes, mesh, count: int):
    """Makes so many empty pages; kept, as another function would be another program."""
    empty = functools.partial(
        init_pages,
        cfg,
        count,
        shape.page_size,
        index_cache=shape.index_cache,
        latent_cache=shape.latent_cache,
    )
    spread = None if mesh is None else NamedSharding(mesh, P(BATCH_AXES))
    return jax.jit(empty, out_shardings=spread)


_STATIC = ("cfg", "execution", "mesh", "temperature")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="layers")
def _read(params, layers, tables, tokens, targets, start, count, **static):
    """(layers, log-prob [1] of the target behind the last of `count` tokens int32[t], chosen) of a prefill."""
    layers, said, chosen = _advance(params, layers, tables, tokens, start, count, **static)
    return layers, said[targets[count - 1]][None], chosen


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="layers")
def _decode(params, layers, tables, tokens, targets, start, count, **static):
    """(layers, log-probs [t] of targets, chosen) of tokens int32[t] that are read one by one, `count` of them."""

    def step(layers, args):
        i, token, target = args
        real = (i < count).astype(jnp.int32)
        layers, said, chosen = _advance(
            params, layers, tables, token[None], start + i, real, **static
        )
        return layers, (said[target], chosen)

    args = jnp.arange(len(tokens)), tokens, targets
    layers, (said, chosen) = lax.scan(step, layers, args)
    return layers, said, jax.tree.map(lambda a: jnp.moveaxis(a[:, :, 0], 0, 1), chosen)


def _advance(params, layers, tables, tokens, start, count, *, cfg, execution, mesh, temperature):
    """(layers, log-probs [v] behind the last of `count` tokens, (topk [l t k], experts [l t a])). On a mesh each
    group of devices does the same, and one is looked at."""

    def local(region, params, layers, tables):
        b, t = len(tables), len(tokens)
        cache = PagedCache(layers, tables, jnp.full(b, start, jnp.int32))
        segments = jnp.broadcast_to((jnp.arange(t) < count).astype(jnp.int32), (b, t))
        ids = jnp.broadcast_to(tokens, (b, t))
        out = glm5.trunk(
            params,
            ids,
            cache.positions(t),
            segments,
            cache,
            cfg,
            execution,
            region,
            capture_choices=True,
        )
        only = jnp.full((b, 1), jnp.maximum(count - 1, 0), jnp.int32)
        logits = glm5.compute_logits(
            params, out.hidden, glm5.WeightGatherer(cfg, region, execution), only
        )
        topk, _ = _with_indexer(out.stats.selection, cfg)
        routing = out.stats.routing
        return logits[:, 0], out.cache.layers, topk, None if routing is None else routing[0]

    if mesh is None:
        logits, layers, *chosen = local(Region(), params, layers, tables)
    else:
        groups, chosen = P(BATCH_AXES), P(None, BATCH_AXES)
        run = jax.shard_map(
            functools.partial(local, Region.of(mesh, shard_sequence=False)),
            mesh=mesh,
            in_specs=(_specs(cfg, mesh, params), groups, groups),
            out_specs=(groups, groups, chosen, chosen),
            check_vma=False,
        )
        logits, layers, *chosen = run(params, layers, tables)
    said = jax.nn.log_softmax(logits[0] / temperature)
    return layers, said, tuple(jax.tree.map(lambda a: a[:, 0], chosen))


@jax.jit
def _keys(topk, index: Index, theirs, read):
    """same and gap of `Differing`, of topk int32[l b t k] and theirs, for queries with read bool[b t]."""
    b, t = read.shape
    size = math.gcd(t, 128)

    def blocks(a):
        """[n b size ...] of a [b t ...]."""
        return jnp.moveaxis(a.reshape(b, t // size, size, *a.shape[2:]), 1, 0)

    def layer(args):
        own, others, (q, w, k) = args

        def block(args):
            own, others, q, w, read = args
            # XLA's form: the arrays are on a mesh, and this is no manual region.
            scores = index_scores(q, w, k, implementation="ref")
            return measure_difference(scores, own, others, read)

        same, gap, largest = lax.map(block, tuple(map(blocks, (own, others, q, w, read))))
        return same.sum() / read.sum(), relative_gap(gap.max(), largest.max())

    return lax.map(layer, (topk, theirs, index))


@jax.jit
def _experts(ids, scores, theirs, read):
    """same and gap of `Differing`, of ids int32[l b t a] and theirs, for tokens with read bool[b t]."""

    def layer(args):
        scores, own, others = args
        same, gap, largest = measure_difference(scores, own, others, read)
        return same / read.sum(), relative_gap(gap, largest)

    return lax.map(layer, (scores, ids, theirs))


def measure_difference(scores, own, others, read):
    """Over those with read bool[b t]: (sum of the shares of what is in both lists int32[b t k] (-1: nothing), largest
    gap between the scores [b t s] of what is in one alone, inf for lists of other lengths, largest score)."""
    ours, theirs = (_members(ids, scores.shape[-1]) for ids in (own, others))
    ours_alone, theirs_alone = ours & ~theirs, theirs & ~ours
    most = jnp.maximum(jnp.maximum(ours.sum(-1), theirs.sum(-1)), 1)
    same = (ours & theirs).sum(-1) / most
    best = jnp.max(scores, -1, where=ours_alone, initial=-jnp.inf)
    worst = jnp.min(scores, -1, where=theirs_alone, initial=jnp.inf)
    largest = jnp.max(jnp.abs(scores), -1, where=ours | theirs, initial=0)
    gap = jnp.maximum(best - worst, 0)
    gap = jnp.where(ours_alone.sum(-1) == theirs_alone.sum(-1), gap, jnp.inf)
    return tuple(
        over(jnp.where(read, a, 0))
        for over, a in ((jnp.sum, same), (jnp.max, gap), (jnp.max, largest))
    )


def relative_gap(gap, largest):
    """Returns a gap as a share of the largest number, at most MOST_GAP."""
    return jnp.minimum(gap / jnp.where(largest > 0, largest, 1), MOST_GAP)


def _members(ids, count: int):
    """bool[b t count] of ids int32[b t k] (-1: none)."""
    b, t, _ = ids.shape
    at = jnp.arange(b)[:, None, None], jnp.arange(t)[:, None], jnp.where(ids < 0, count, ids)
    return jnp.zeros((b, t, count), bool).at[at].set(True, mode="drop")
