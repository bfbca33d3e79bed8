"""What layers remember of the tokens before: latents and index keys, keys and values, or a state.

Of MLA: c_kv and k_rope of every token, c + r numbers a layer, and idx_k, j a full one. Pages may hold them in 8
bits: c_kv with a scale for each 128 numbers, beside k_rope as it is, and an index key with one scale.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from glm5_jax.config import RECURRENT_KINDS
from pallas_kernels import dispatch
from pallas_kernels.eight_bits import FORMATS, Scaled, quantize_vectors
from pallas_kernels.numerics import wide
from pallas_kernels.sparse_flash_attention import LANES, Layout, WordRows
from pallas_kernels.write_rows import write_rows

FETCHING_QUERIES = 16  # of a row, above which its pages are copied whole; not yet measured


class LayerCache(NamedTuple):
    """latent [b s c+r]: c_kv, then k_rope; idx_k [b s j], None where the layer has no indexer. Of pages they may
    be `WordRows` and `Scaled`."""

    latent: jax.Array | WordRows
    idx_k: jax.Array | Scaled | None

    def held(self, layout: Layout | None, index_dtype) -> "LayerCache":
        """The same with latents of that layout and index keys of that dtype of 8 bits; None: as they are."""
        latent, idx_k = self
        if layout is not None:
            latent = WordRows.of(latent, layout)
        if index_dtype is not None and idx_k is not None:
            idx_k = quantize_vectors(idx_k, index_dtype)
        return LayerCache(latent, idx_k)

    def like(self, other: "LayerCache") -> "LayerCache":
        """The same, held as another cache is."""
        return self.held(
            other.latent.layout if isinstance(other.latent, WordRows) else None,
            other.idx_k.values.dtype if isinstance(other.idx_k, Scaled) else None,
        )


class KeyValues(NamedTuple):
    """Of grouped-query attention: k [b s y h+r], rotated, and v [b s y u]."""

    k: jax.Array
    v: jax.Array


class State(NamedTuple):
    """Of linear attention. state wide[b n h+r u]; conv [b w-1 n 2(h+r)+u]: the last inputs of the short
    convolution, query, key and value beside each other, or None without one."""

    state: jax.Array
    conv: jax.Array | None


class Cache(NamedTuple):
    """layers: what each layer remembers, in order. segments int[b s] (0: empty or padding). length
    int32[]: tokens written so far, the same for every row (shorter prompts are padded on the left)."""

    layers: tuple[LayerCache | KeyValues | State, ...]
    segments: jax.Array
    length: jax.Array

    def positions(self, t: int) -> jax.Array:
        """int32[t] of the next tokens."""
        return self.length + jnp.arange(t, dtype=jnp.int32)

    def behind(self, layers, segments) -> "Cache":
        """The cache after new tokens, whose segments are [b t]."""
        return self._replace(layers=tuple(layers), length=self.length + segments.shape[1])


class PagedCache(NamedTuple):
    """Sequences of any length in pages that they may share. layers: latent [p z c+r] and idx_k [p z j] of p
    pages with z slots, as `init_pages(cfg, p, z)` makes them; tables int32[b n]: the pages of each row, of
    which those behind its tokens may be anything; lengths int32[b]: tokens of each row."""

    layers: tuple[LayerCache, ...]
    tables: jax.Array
    lengths: jax.Array

    def positions(self, t: int) -> jax.Array:
        """int32[b t] of the next tokens."""
        return self.lengths[:, None] + jnp.arange(t, dtype=jnp.int32)

    def behind(self, layers, segments) -> "PagedCache":
        """The cache after new tokens: those of a row's segments [b t] that are not 0, which come first."""
        new = jnp.sum(segments != 0, axis=1, dtype=jnp.int32)
        return self._replace(layers=tuple(layers), lengths=self.lengths + new)


class Paging(NamedTuple):
    """Where the new tokens of a forward go: tables int32[b n] as of the cache, positions int32[b t], and
    real bool[b t], false for padding, which is not written."""

    tables: jax.Array
    positions: jax.Array
    real: jax.Array

    @property
    def one_row(self) -> bool:
        """Whether the row's pages are brought together: for many queries of one row, as in a prefill, that is
        less than what each of them would fetch."""
        b, t = self.positions.shape
        return b == 1 and t > FETCHING_QUERIES

    def row(self, pages):
        """[1 s ...] of the only row's pages."""
        return pages[self.tables].reshape(1, -1, *pages.shape[2:])

    def write(self, pages, new, kernels):
        """pages [p z ...] with new [b t ...] in their slots; kernels: the implementation."""
        slots = pages.shape[1]
        page = jnp.take_along_axis(self.tables, self.positions // slots, axis=1, mode="clip")
        place = jnp.where(self.real, page * slots + self.positions % slots, -1)
        rows, new = pages.reshape(-1, *pages.shape[2:]), new.reshape(-1, *pages.shape[2:])
        written = write_rows(
            rows, new.astype(pages.dtype), place.reshape(-1), implementation=kernels
        )
        return lax.optimization_barrier(written.reshape(pages.shape))  # as in `write`

    def visible(self, num_keys: int):
        """topk int32[b t num_keys]: every key up to a query's own, -1 behind."""
        keys = jnp.arange(num_keys, dtype=jnp.int32)
        return jnp.where(keys <= self.positions[:, :, None], keys, -1)


def init_cache(cfg, batch: int, capacity: int, dtype=None, num_layers: int | None = None) -> Cache:
    """An empty cache for `capacity` tokens; dtype defaults to the config's compute dtype.

    num_layers overrides the depth (1 for the MTP block).
    """
    dtype = jnp.dtype(dtype or cfg.dtype)

    n, y, u = cfg.num_attention_heads, cfg.num_key_heads, cfg.v_head_dim
    x = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim

    def layer(i):
        kind = "full" if num_layers is not None else cfg.layer_kinds[i]
        if kind in RECURRENT_KINDS:
            past = cfg.linear_conv_kernel_dim - 1
            conv = jnp.zeros((batch, past, n, 2 * x + u), dtype) if kind == "gdn" else None
            return State(jnp.zeros((batch, n, x, u), wide(dtype)), conv)
        if cfg.projections == "gqa":
            sizes = ((batch, capacity, y, width) for width in (x, u))
            return KeyValues(*(jnp.zeros(size, dtype) for size in sizes))
        indexed = cfg.attention == "sparse" and (num_layers is not None or i in cfg.full_layers)
        return LayerCache(
            jnp.zeros((batch, capacity, cfg.kv_lora_rank + cfg.qk_rope_head_dim), dtype),
            jnp.zeros((batch, capacity, cfg.index_head_dim), dtype) if indexed else None,
        )

    layers = tuple(layer(i) for i in range(num_layers or cfg.num_hidden_layers))
    return Cache(layers, jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((), jnp.int32))


def init_pages(
    cfg,
    num_pages: int,
    page_size: int,
    dtype=None,
    num_layers: int | None = None,
    index_cache: str | None = None,
    latent_cache: str | None = None,
) -> tuple[LayerCache, ...]:
    """Empty pages of every layer of full attention (MLA); dtype and num_layers as for `init_cache`.

    index_cache, latent_cache: "int8" or "fp8", in which index keys and latents are held; None: in dtype. On a TPU
    latents are `WordRows` in any case: it copies single rows of no other form.
    ValueError for other names, and for what cannot be.
    """
    check_formats(index_cache, latent_cache)
    dtype = jnp.dtype(dtype or cfg.dtype)
    if latent_cache and dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"latent_cache is {latent_cache!r} for {dtype}; use bfloat16 or float32")
    if index_cache and cfg.attention != "sparse":
        raise ValueError(f"index_cache is {index_cache!r}, and the model has no indexer; use None")
    layout, c, r = None, cfg.kv_lora_rank, cfg.qk_rope_head_dim
    on_tpu = dispatch.platform() == "tpu"
    if latent_cache:
        name, multiple = jnp.dtype(FORMATS[latent_cache]).name, LANES if on_tpu else 1
        layout = Layout(name, c, r, dtype.name, multiple)
    elif on_tpu and dtype in (jnp.bfloat16, jnp.float32):
        layout = Layout.exact(c + r, dtype)

    def layers():
        plain = init_cache(cfg, num_pages, page_size, dtype, num_layers).layers
        return tuple(layer.held(layout, FORMATS.get(index_cache)) for layer in plain)

    # Nothing in the model's own dtype is ever there.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(layers))


def check_formats(index_cache: str | None, latent_cache: str | None) -> None:
    """ValueError if one of them is no name of `init_pages`."""
    for name, value in (("index_cache", index_cache), ("latent_cache", latent_cache)):
        if value not in (None, *FORMATS):
            raise ValueError(f"{name} is {value!r}; use {', '.join(FORMATS)} or None")


def write(buffer, new, length):
    """buffer [b s ...] with new [b t ...] at s = length."""
    start = (0, length) + (0,) * (buffer.ndim - 2)
    written = lax.dynamic_update_slice(buffer, new.astype(buffer.dtype), start)
    # Without the barrier XLA:CPU writes once for every reader, each time into a copy of the buffer.
    return lax.optimization_barrier(written)
