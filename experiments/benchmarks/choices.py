"""Our forward with the keys and experts that another implementation chose, and how close the choice was.

Rounding turns a choice between nearly equal scores, and one other key changes everything behind it. With
the other's choices in place two equal models agree everywhere; what we would have chosen instead, layer
by layer from the same inputs, shows whether the choices differ for any other reason than rounding.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.model import block
from pallas_kernels.lightning_indexer import index_scores

BLOCK = 64  # queries whose scores over all keys are held at a time


class Apart(NamedTuple):
    """Of one layer: how many choices were ours alone, and how much better the best of these scored than the
    worst that was made instead, for the same query, as a share of the layer's largest chosen score."""

    count: int
    gap: float


@contextlib.contextmanager
def replayed(keys, experts) -> Iterator[dict[str, list[Apart]]]:
    """While tracing inside: full layer i attends to keys[i] int32[b t k] (-1 at the end: none), MoE layer
    i sends its tokens to experts[i] int32[m a]. Yields lists of `Apart` per layer, which running it fills.
    """
    plain_select, plain_route = block.lightning_indexer, block.route
    layers = {"keys": enumerate(keys), "experts": enumerate(experts)}
    apart = {"keys": [None] * len(keys), "experts": [None] * len(experts)}

    def following(kind):
        layer, theirs = next(layers[kind])

        def note(count, gap):
            apart[kind][layer] = Apart(int(count), float(gap))

        return jnp.asarray(theirs), lambda found: jax.debug.callback(note, *together(found))

    def lightning_indexer(idx_q, idx_w, idx_k, *rest, **named):
        own = plain_select(idx_q, idx_w, idx_k, *rest, **named)
        theirs, note = following("keys")

        def one_query(args):
            q, w, row, own, theirs = args
            scores = index_scores(q[None, None], w[None, None], idx_k[row][None])[0, 0]
            return differing(scores, own, theirs)

        b, t = own.shape[:2]
        row = jnp.broadcast_to(jnp.arange(b)[:, None], (b, t))
        queries = (idx_q, idx_w, row, own, theirs)
        queries = jax.tree.map(lambda a: a.reshape(b * t, *a.shape[2:]), queries)
        note(lax.map(one_query, queries, batch_size=BLOCK))
        return theirs

    def route(w, x, cfg):
        own = plain_route(w, x, cfg)
        theirs, note = following("experts")
        scores = own.probs + w["bias"]
        note(jax.vmap(differing)(scores, own.expert_ids, theirs))
        # The bias chooses and never weighs: one per token, above every score, makes the choice theirs.
        wanted = jax.nn.one_hot(theirs, scores.shape[-1]).sum(-2)
        return plain_route(w | {"bias": 2 * wanted}, x, cfg)

    with (
        mock.patch.object(block, "lightning_indexer", lightning_indexer),
        mock.patch.object(block, "route", route),
    ):
        yield apart


def differing(scores, own, theirs):
    """(choices that are ours alone, best of them minus worst of theirs alone, largest chosen score) of
    scores [s] and two choices int[k], -1 for none."""

    def chosen(ids):
        return jnp.zeros(scores.shape, bool).at[jnp.where(ids < 0, scores.size, ids)].set(True)

    own, theirs = chosen(own), chosen(theirs)
    only_own, only_theirs = own & ~theirs, theirs & ~own
    count = jnp.sum(only_own)
    best = jnp.max(jnp.where(only_own, scores, -jnp.inf))
    worst = jnp.min(jnp.where(only_theirs, scores, jnp.inf))
    largest = jnp.max(jnp.where(own | theirs, jnp.abs(scores), 0))
    return count, jnp.where(count > 0, best - worst, 0), largest


def together(found):
    """`differing` of many rows as the values of one `Apart`."""
    count, gap, largest = found
    return jnp.sum(count), jnp.max(gap) / jnp.max(largest)
