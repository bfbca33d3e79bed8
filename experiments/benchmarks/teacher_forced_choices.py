"""Runs our forward with the keys and experts that another implementation chose, and measures the score gaps.

Rounding decides a choice between nearly equal scores, and one different key changes all later positions. With the
other implementation's choices, two equal models agree everywhere. Our own choices, layer by layer from the same
inputs, show whether the choices differ for any reason other than rounding.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.model import attention, moe
from pallas_kernels.lightning_indexer import index_scores

BLOCK = 64  # queries whose scores over all keys are in memory at a time


class ChoiceGap(NamedTuple):
    """Differences of the choices in one layer.

    Attributes:
      count: number of choices that only we made.
      gap: best score of these minus the worst score chosen instead, for one query, at most, as a share of the layer's
        largest chosen score.
    """

    count: int
    gap: float


@contextlib.contextmanager
def forced_choices(
    keys: Sequence, experts: Sequence
) -> Iterator[dict[str, list[ChoiceGap | None]]]:
    """Forces choices while tracing inside: yields lists of `ChoiceGap` per layer, which running the program fills.

    The gap of a layer that has not run is None.

    Full layer i attends to keys[i] int32[b t k] (-1 at the end: none). MoE layer i sends its tokens to experts[i]
    int32[m a].
    """
    plain_select, plain_route = attention.lightning_indexer, moe.route
    layers = {"keys": enumerate(keys), "experts": enumerate(experts)}
    gaps: dict[str, list[ChoiceGap | None]] = {
        "keys": [None] * len(keys),
        "experts": [None] * len(experts),
    }

    def following(kind):
        layer, theirs = next(layers[kind])

        def note(count, gap):
            gaps[kind][layer] = ChoiceGap(int(count), float(gap))

        return jnp.asarray(theirs), lambda differences: jax.debug.callback(
            note, *merge_differences(differences)
        )

    def lightning_indexer(idx_q, idx_w, idx_k, *rest, **named):
        ours = plain_select(idx_q, idx_w, idx_k, *rest, **named)
        theirs, note = following("keys")

        def one_query(args):
            q, w, row, ours, theirs = args
            scores = index_scores(q[None, None], w[None, None], idx_k[row][None])[0, 0]
            return choice_differences(scores, ours, theirs)

        b, t = ours.shape[:2]
        row = jnp.broadcast_to(jnp.arange(b)[:, None], (b, t))
        queries = (idx_q, idx_w, row, ours, theirs)
        queries = jax.tree.map(lambda a: a.reshape(b * t, *a.shape[2:]), queries)
        note(lax.map(one_query, queries, batch_size=BLOCK))
        return theirs

    def route(w, x, cfg):
        ours = plain_route(w, x, cfg)
        theirs, note = following("experts")
        scores = ours.probs + w["bias"]
        note(jax.vmap(choice_differences)(scores, ours.expert_ids, theirs))
        # The bias affects only the choice. One per token, above every score, forces their choice.
        wanted = jax.nn.one_hot(theirs, scores.shape[-1]).sum(-2)
        return plain_route(w | {"bias": 2 * wanted}, x, cfg)

    with (
        mock.patch.object(attention, "lightning_indexer", lightning_indexer),
        mock.patch.object(moe, "route", route),
    ):
        yield gaps


def choice_differences(
    scores: jax.Array, ours: jax.Array, theirs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the differences of two choices int[k] (-1: none) by scores [s].

    (number of choices that are only ours, best of them minus worst of those only theirs, largest chosen score).
    """

    def as_mask(ids):
        return jnp.zeros(scores.shape, bool).at[jnp.where(ids < 0, scores.size, ids)].set(True)

    ours, theirs = as_mask(ours), as_mask(theirs)
    only_ours, only_theirs = ours & ~theirs, theirs & ~ours
    count = jnp.sum(only_ours)
    best = jnp.max(jnp.where(only_ours, scores, -jnp.inf))
    worst = jnp.min(jnp.where(only_theirs, scores, jnp.inf))
    largest = jnp.max(jnp.where(ours | theirs, jnp.abs(scores), 0))
    return count, jnp.where(count > 0, best - worst, 0), largest


def merge_differences(
    differences: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns `choice_differences` of many rows as the values of one `ChoiceGap`."""
    count, gap, largest = differences
    return jnp.sum(count), jnp.max(gap) / jnp.max(largest)
