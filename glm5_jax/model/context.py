"""Inputs that all layers of a forward share: rotations, visibility of keys, destination of cached tokens.

`make_context` returns them for each of the three modes of a forward: without a cache, over a contiguous
`Cache`, and over a `PagedCache`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm5_jax.config import ModelConfig
from glm5_jax.model.cache import Cache, LayerCache, PagedCache, Paging, write
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.rope import rope_table
from glm5_jax.parallel.mesh import Region


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """Inputs that all layers of one forward share.

    Attributes:
      cos, sin: rotations of the queries' positions.
      start: key index of query 0, an int where known. With paging: that of the only row, if there is one.
      num_keys: number of key slots, which may be more than the keys of a row.
      segments: segment ids of the queries; None: one document per row.
      key_segments: segment ids of the keys; None: one document per row.
      index_weight: weight of each query in the indexers' loss; None: indexers are not trained.
      paging: destination of new tokens in a paged cache; None: no paged cache.
      capture_choices: whether `LayerStats` hold the chosen keys and experts.
    """

    cfg: ModelConfig
    execution: ExecutionConfig
    region: Region
    cos: Float[Array, "b t r/2"]
    sin: Float[Array, "b t r/2"]
    start: int | Int[Array, ""]
    num_keys: int
    segments: Int[Array, "b t"] | None
    key_segments: Int[Array, "b s"] | None
    index_weight: Float[Array, "b t"] | None = None
    paging: Paging | None = None
    capture_choices: bool = False

    @property
    def is_sparse(self) -> bool:
        """Returns True if some key is left out: up to index_topk keys, sparse attention equals dense attention."""
        return self.cfg.attention == "sparse" and self.num_keys > self.index_topk

    @property
    def index_topk(self) -> int:
        """Returns the number of keys that an indexer selects; ValueError for a model without indexers."""
        if self.cfg.index_topk is None:
            raise ValueError("index_topk is None: the model has no indexers; set index_topk")
        return self.cfg.index_topk

    @property
    def new_segments(self) -> Int[Array, "b t"]:
        """Returns the segment ids of the tokens that a cache takes."""
        assert self.segments is not None, "make_context sets them with a cache"
        return self.segments

    @property
    def should_keep_index(self) -> bool:
        """Returns True if a `Selection` carries the index that its keys were chosen by."""
        return self.capture_choices or self.index_weight is not None


jax.tree_util.register_dataclass(
    ForwardContext,
    ("cos", "sin", "start", "segments", "key_segments", "index_weight", "paging"),
    ("cfg", "execution", "region", "num_keys", "capture_choices"),
)


def make_context(
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"] | None,
    cache: Cache | PagedCache | None,
    cfg: ModelConfig,
    execution: ExecutionConfig,
    region: Region,
) -> tuple[ForwardContext, Cache | PagedCache | None]:
    """Returns the context of a forward at these positions, and the cache with the new tokens' segments."""
    dtype = jnp.dtype(cfg.dtype)
    cos, sin = rope_table(cfg.rope_parameters, cfg.qk_rope_head_dim, positions, dtype)
    make = functools.partial(
        ForwardContext, cfg=cfg, execution=execution, region=region, cos=cos, sin=sin
    )
    if cache is None:
        return _context_without_cache(make, positions.shape[1], segments, region), None
    if segments is None:
        segments = jnp.ones(positions.shape, jnp.int32)
    if isinstance(cache, PagedCache):
        return _context_of_pages(make, segments, cache), cache
    return _context_of_contiguous_cache(make, segments, cache)


def _context_without_cache(
    make: Callable[..., ForwardContext], t: int, segments, region: Region
) -> ForwardContext:
    """Returns the context where the keys are those of all devices' t tokens."""
    axes = region.sequence_axes
    return make(
        start=region.index(axes) * t if axes else 0,
        num_keys=t * region.size(axes),
        segments=segments,
        key_segments=None if segments is None else region.gather_sequence(segments),
    )


def _context_of_contiguous_cache(
    make: Callable[..., ForwardContext], segments, cache: Cache
) -> tuple[ForwardContext, Cache]:
    """Returns the context where the keys are the cache's slots, and the cache with the new segments."""
    cache = cache._replace(segments=write(cache.segments, segments, cache.length))
    context = make(
        start=cache.length,
        num_keys=cache.segments.shape[1],
        segments=segments,
        key_segments=cache.segments,
    )
    return context, cache


def _context_of_pages(
    make: Callable[..., ForwardContext], segments, cache: PagedCache
) -> ForwardContext:
    """Returns the context where the keys are the slots of each row's pages."""
    b, t = segments.shape
    paging = Paging(cache.tables, cache.positions(t), segments != 0)
    first: LayerCache = cache.layers[0]
    num_keys = cache.tables.shape[1] * first.latent.shape[1]
    return make(
        start=cache.lengths[0],
        num_keys=num_keys,
        segments=segments,
        key_segments=jnp.ones((b, num_keys), jnp.int32),
        paging=paging,
    )
