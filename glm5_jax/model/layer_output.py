"""Results of a layer: hidden states, selection of keys, cache and statistics, and sums of these over devices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax.model.cache import AnyLayerCache
from glm5_jax.model.indexer import Selection
from glm5_jax.model.router import Routing
from glm5_jax.parallel.mesh import AXES, BATCH_AXES, Region


class LayerStats(NamedTuple):
    """Statistics of one layer on one device, or of several layers with a leading l.

    Attributes:
      max_logit: largest attention logit; 0 where there are none.
      load: tokens per expert, float32; None if dense.
      balance: sum over rows of the sequence-level balance loss; None if dense.
      index_loss: weighted loss of the layer's indexer; None if indexers are not trained.
      selection: keys that the layer attends to; None unless the forward captures choices.
      routing: expert choice of the tokens [b t ...]; None if dense, or unless choices are captured.
    """

    max_logit: Float[Array, "*l"]
    load: Float[Array, "*l e"] | None = None
    balance: Float[Array, "*l"] | None = None
    index_loss: Float[Array, "*l"] | None = None
    selection: Selection | None = None
    routing: Routing | None = None


class LayerOutput(NamedTuple):
    """Result of a layer, or of its attention.

    Attributes:
      x: output hidden states.
      selection: selected keys for the following layers.
      cache: cache of the layer with the new tokens; None without one.
      stats: statistics of the layer.
    """

    x: Float[Array, "b t d"]
    selection: Selection
    cache: AnyLayerCache | None
    stats: LayerStats


def concatenate_stats(stats: Sequence[LayerStats]) -> LayerStats:
    """Concatenates statistics along their leading l. Layers without a field are left out of it."""

    def joined(field: str) -> Any:
        values = [value for s in stats if (value := getattr(s, field)) is not None]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *values) if values else None

    return LayerStats(**{field: joined(field) for field in LayerStats._fields})


def reduce_stats(stats: LayerStats, region: Region) -> LayerStats:
    """Reduces per-layer statistics over all devices: largest logit, summed loads, balance and index losses."""
    all_axes = region.nontrivial_axes(AXES)
    load = balance = index_loss = None
    if stats.load is not None and stats.balance is not None:
        load = region.psum(stats.load, region.token_axes)
        balance = region.psum(stats.balance, region.nontrivial_axes(BATCH_AXES))
    if stats.index_loss is not None:
        index_loss = region.psum(stats.index_loss, all_axes)
    return LayerStats(region.pmax(stats.max_logit, all_axes), load, balance, index_loss)
