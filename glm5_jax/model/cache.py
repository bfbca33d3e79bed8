"""Caches of a forward: latents and index keys, keys and values, or recurrent states.

- MLA stores c_kv and k_rope of every token, c + r numbers per layer.
- A layer with an indexer also stores idx_k, j numbers per token.
- Pages may hold them in 8 bits: c_kv with a scale for each 128 numbers next to an unquantised k_rope,
  and an index key with one scale.

`Cache` is contiguous (plain decoding), `PagedCache` holds pages that sequences share (serving).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm5_jax.config import RECURRENT_KINDS, ModelConfig
from pallas_kernels import backends
from pallas_kernels.numerics import accum_dtype
from pallas_kernels.quantized_vectors import FORMATS, QuantizedVectors, quantize_vectors
from pallas_kernels.scatter_rows import scatter_rows
from pallas_kernels.sparse_flash_attention import LANES, RowLayout, WordRows

# Maximum queries of a row that fetch their own keys from pages. A row with more has its pages gathered
# once. Not yet measured.
FETCHING_QUERIES = 16


class LayerCache(NamedTuple):
    """Cache of one MLA layer.

    Attributes:
      latent: [b s c+r], c_kv followed by k_rope. Pages may hold it as `WordRows`.
      idx_k: index keys [b s j]; None without an indexer. Pages may hold them as `QuantizedVectors`.
    """

    latent: Float[Array, "b s c+r"] | WordRows
    idx_k: Float[Array, "b s j"] | QuantizedVectors | None

    def with_layout(self, layout: RowLayout | None, index_dtype) -> "LayerCache":
        """Returns this cache in another storage format.

        layout: row layout of the latents; None: unchanged.
        index_dtype: 8-bit dtype of the index keys; None: unchanged.
        """
        latent, idx_k = self
        if layout is not None:
            assert not isinstance(latent, WordRows), "the latents have a layout"
            latent = WordRows.encode(latent, layout)
        if index_dtype is not None and idx_k is not None:
            assert not isinstance(idx_k, QuantizedVectors), "the index keys are quantised"
            idx_k = quantize_vectors(idx_k, index_dtype)
        return LayerCache(latent, idx_k)

    def with_layout_of(self, other: "LayerCache") -> "LayerCache":
        """Returns this cache in the layout and dtype of `other`."""
        return self.with_layout(
            other.latent.layout if isinstance(other.latent, WordRows) else None,
            other.idx_k.values.dtype if isinstance(other.idx_k, QuantizedVectors) else None,
        )


class KeyValues(NamedTuple):
    """Cache of grouped-query attention: rotated keys k and values v."""

    k: Float[Array, "b s y h+r"]
    v: Float[Array, "b s y u"]


class RecurrentState(NamedTuple):
    """State of a linear attention layer.

    Attributes:
      state: [b n h+r u] in `accum_dtype`.
      conv: last w - 1 inputs of the short convolution, query, key and value concatenated; None without
        a convolution.
    """

    state: Float[Array, "b n h+r u"]
    conv: Float[Array, "b w-1 n 2*(h+r)+u"] | None


AnyLayerCache = LayerCache | KeyValues | RecurrentState


class Cache(NamedTuple):
    """Contiguous cache of all layers.

    Attributes:
      layers: caches of the layers, in order.
      segments: segment id of every slot; 0: empty or padding.
      length: number of tokens written so far, the same for every row, because shorter prompts are
        padded on the left.
    """

    layers: tuple[AnyLayerCache, ...]
    segments: Int[Array, "b s"]
    length: Int[Array, ""]

    def positions(self, t: int) -> Int[Array, " t"]:
        """Returns the positions of the next t tokens."""
        return self.length + jnp.arange(t, dtype=jnp.int32)

    def advance(self, layers: Sequence, segments: Int[Array, "b t"]) -> "Cache":
        """Returns the cache after t new tokens, with the layers' new caches."""
        return self._replace(layers=tuple(layers), length=self.length + segments.shape[1])


class PagedCache(NamedTuple):
    """Cache whose rows are sequences of any length in pages that they may share.

    Attributes:
      layers: latent [p z c+r] and idx_k [p z j] of p pages with z slots, as `init_pages(cfg, p, z)`
        creates them.
      tables: page indices of each row; entries after its tokens are ignored.
      lengths: number of tokens of each row.
    """

    layers: tuple[LayerCache, ...]
    tables: Int[Array, "b n"]
    lengths: Int[Array, " b"]

    def positions(self, t: int) -> Int[Array, "b t"]:
        """Returns the positions of the next t tokens of each row."""
        return self.lengths[:, None] + jnp.arange(t, dtype=jnp.int32)

    def advance(self, layers: Sequence, segments: Int[Array, "b t"]) -> "PagedCache":
        """Returns the cache after new tokens. Those with segment 0 are padding at the end of a row."""
        new = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
        return self._replace(layers=tuple(layers), lengths=self.lengths + new)


class Paging(NamedTuple):
    """Destination of the new tokens of a forward over a paged cache.

    Attributes:
      tables: page indices of each row, as in `PagedCache`.
      positions: positions of the new tokens.
      real: False for padding, which is not written.
    """

    tables: Int[Array, "b n"]
    positions: Int[Array, "b t"]
    real: Bool[Array, "b t"]

    @property
    def should_gather_pages(self) -> bool:
        """Returns True for many queries of a single row, as in prefill, where one copy of its pages costs least."""
        b, t = self.positions.shape
        return b == 1 and t > FETCHING_QUERIES

    def gather_row(self, pages):
        """Returns the pages [p z ...] of the only row as [1 s ...]."""
        return pages[self.tables].reshape(1, -1, *pages.shape[2:])

    def write(self, pages, new, kernels):
        """Returns pages [p z ...] with new [b t ...] written into their slots.

        kernels: implementation of the write, as in `ExecutionConfig`.
        """
        slots = pages.shape[1]
        page = jnp.take_along_axis(self.tables, self.positions // slots, axis=1, mode="clip")
        slot = jnp.where(self.real, page * slots + self.positions % slots, -1)
        rows, new = pages.reshape(-1, *pages.shape[2:]), new.reshape(-1, *pages.shape[2:])
        written = scatter_rows(
            rows, new.astype(pages.dtype), slot.reshape(-1), implementation=kernels
        )
        return lax.optimization_barrier(written.reshape(pages.shape))  # as in `write`

    def visible_keys(self, num_keys: int) -> Int[Array, "b t num_keys"]:
        """Returns topk indices that select every key up to the query's position; -1 after it."""
        keys = jnp.arange(num_keys, dtype=jnp.int32)
        return jnp.where(keys <= self.positions[:, :, None], keys, -1)


def init_cache(
    cfg: ModelConfig, batch: int, capacity: int, dtype=None, num_layers: int | None = None
) -> Cache:
    """Returns an empty cache for `capacity` tokens.

    dtype: default: the config's compute dtype.
    num_layers: replaces the depth of cfg (1 for the MTP block).
    """
    dtype = jnp.dtype(dtype or cfg.dtype)

    n, y, u = cfg.num_attention_heads, cfg.num_key_heads, cfg.v_head_dim
    x = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim

    def layer(i):
        kind = "full" if num_layers is not None else cfg.layer_kinds[i]
        if kind in RECURRENT_KINDS:
            past = cfg.linear_conv_kernel_dim - 1
            conv = jnp.zeros((batch, past, n, 2 * x + u), dtype) if kind == "gdn" else None
            return RecurrentState(jnp.zeros((batch, n, x, u), accum_dtype(dtype)), conv)
        if cfg.projections == "gqa":
            sizes = ((batch, capacity, y, width) for width in (x, u))
            return KeyValues(*(jnp.zeros(size, dtype) for size in sizes))
        has_indexer = cfg.attention == "sparse" and (num_layers is not None or i in cfg.full_layers)
        return LayerCache(
            jnp.zeros((batch, capacity, cfg.kv_lora_rank + cfg.qk_rope_head_dim), dtype),
            jnp.zeros((batch, capacity, cfg.index_head_dim), dtype) if has_indexer else None,
        )

    layers = tuple(layer(i) for i in range(num_layers or cfg.num_hidden_layers))
    return Cache(layers, jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((), jnp.int32))


def init_pages(
    cfg: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype=None,
    num_layers: int | None = None,
    index_cache: str | None = None,
    latent_cache: str | None = None,
) -> tuple[LayerCache, ...]:
    """Returns empty pages of every layer of full attention (MLA).

    On a TPU latents are always `WordRows`, because a TPU copies single rows of no other layout.

    Args:
      dtype, num_layers: as for `init_cache`.
      index_cache: "int8" or "fp8" storage of index keys; None: dtype.
      latent_cache: "int8" or "fp8" storage of latents; None: dtype.

    Raises ValueError for other names and for combinations that the model does not support.
    """
    check_formats(index_cache, latent_cache)
    dtype = jnp.dtype(dtype or cfg.dtype)
    if latent_cache and dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"latent_cache is {latent_cache!r} for {dtype}; use bfloat16 or float32")
    if index_cache and cfg.attention != "sparse":
        raise ValueError(f"index_cache is {index_cache!r}, and the model has no indexer; use None")
    layout, c, r = None, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    on_tpu = backends.platform() == "tpu"
    if latent_cache:
        name, multiple = jnp.dtype(FORMATS[latent_cache]).name, LANES if on_tpu else 1
        layout = RowLayout(dtype=name, values=c, rest=r, rest_dtype=dtype.name, multiple=multiple)
    elif on_tpu and dtype in (jnp.bfloat16, jnp.float32):
        layout = RowLayout.exact(c + r, dtype)

    def layers():
        plain = init_cache(cfg, num_pages, page_size, dtype, num_layers).layers
        index_dtype = FORMATS[index_cache] if index_cache else None
        mla = [layer for layer in plain if isinstance(layer, LayerCache)]
        assert len(mla) == len(plain), "pages hold layers of full attention"
        return tuple(layer.with_layout(layout, index_dtype) for layer in mla)

    # Only shapes are computed: pages in the model's dtype never take memory.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(layers))


def check_formats(index_cache: str | None, latent_cache: str | None) -> None:
    """Raises ValueError if a name is not a storage format of `init_pages`."""
    for name, value in (("index_cache", index_cache), ("latent_cache", latent_cache)):
        if value not in (None, *FORMATS):
            raise ValueError(f"{name} is {value!r}; use {', '.join(FORMATS)} or None")


def write(
    buffer: Shaped[Array, "b s ..."], new: Shaped[Array, "b t ..."], length: int | Int[Array, ""]
) -> Shaped[Array, "b s ..."]:
    """Returns buffer with new written at s = length."""
    start = (0, length) + (0,) * (buffer.ndim - 2)
    written = lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), start)
    # Without the barrier XLA:CPU writes once per reader, each time into a copy of the buffer.
    return lax.optimization_barrier(written)
