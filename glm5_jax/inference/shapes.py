"""Sizes of an engine's arrays on the device, from its options.

Numbers of rows, tokens and pages are rounded up to buckets, so that few programs serve all shapes.
"""

import dataclasses

from glm5_jax.config import ModelConfig
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.scheduler import Limits

MAX_BIAS = 300  # as OpenAI's logit_bias
# Minimum rows of a decode. Fewer are no faster (on a CPU 1 row takes 8 times as long as 4), and each number of rows
# needs its own program.
MIN_DECODE_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineShapes:
    """Sizes of the arrays on the device.

    Attributes:
      num_pages: pages of each data-parallel rank.
      page_size: tokens of a page.
      max_num_seqs: slots of each data-parallel rank.
      max_pages: maximum pages of a sequence.
      prefill_chunk: maximum tokens of a prompt in one step.
      max_bias: maximum tokens in a request's logit_bias.
      min_prefill_bucket: minimum tokens of a row of a prefill.
      num_speculative_tokens: tokens that a decode drafts.
      batch_invariant: whether rows are computed one by one in one shape, so that no row's bits depend on the others.
      index_cache, latent_cache: formats of the pages, see `init_pages`.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_pages: int
    prefill_chunk: int
    max_bias: int
    min_prefill_bucket: int = 32
    num_speculative_tokens: int = 0
    batch_invariant: bool = False
    index_cache: str | None = None
    latent_cache: str | None = None

    def decode_rows(self, count: int) -> int:
        """Returns the rows of a decode of `count` sequences."""
        if self.batch_invariant:
            return self.max_num_seqs
        return bucket_size(count, self.max_num_seqs, MIN_DECODE_ROWS)

    @property
    def max_prefill_rows(self) -> int:
        """Maximum short prompts of one prefill."""
        if self.batch_invariant:
            return 1
        return max(1, min(self.max_num_seqs, self.prefill_chunk // self.min_prefill_bucket))

    def prefill_rows(self, count: int) -> int:
        """Returns the rows of a prefill of `count` sequences."""
        return bucket_size(count, self.max_prefill_rows, 1, 4)

    @property
    def pages_per_part(self) -> int:
        """Maximum pages that are moved between engines at once: those of one chunk of a prompt."""
        return max(1, self.prefill_chunk // self.page_size)

    def table_width(self, count: int) -> int:
        """Returns the columns of a table of `count` pages."""
        return self.max_pages if self.batch_invariant else bucket_size(count, self.max_pages, 4, 4)

    def prefill_tokens(self, count: int) -> int:
        """Returns the padded length of a prefill of `count` tokens."""
        if self.batch_invariant:
            return self.prefill_chunk
        return bucket_size(count, self.prefill_chunk, self.min_prefill_bucket)


def resolve_shapes(cfg: ModelConfig, options: EngineConfig) -> tuple[EngineShapes, Limits]:
    """Returns the array sizes and step limits of each data-parallel rank.

    Raises ValueError for options or models that the engine does not support.
    """
    page_size, drafts = options.page_size, options.num_speculative_tokens
    max_length = options.max_length or cfg.max_position_embeddings
    cfg.check_length(max_length)
    if cfg.projections != "mla" or {*cfg.layer_kinds} != {"full"}:
        raise ValueError(
            f"the model has {cfg.projections} projections and layers {sorted({*cfg.layer_kinds})}; the engine "
            "serves only full attention (MLA), use model.generate"
        )
    if min(page_size, options.min_prefill_bucket) < 1:
        sizes = f"page_size is {page_size}, min_prefill_bucket {options.min_prefill_bucket}"
        raise ValueError(f"{sizes}; both must be positive")
    if drafts and not cfg.num_nextn_predict_layers:
        raise ValueError(
            f"num_speculative_tokens is {drafts}, and the model has no MTP layer; use 0"
        )
    limits = Limits(
        max_num_seqs=options.max_num_seqs,
        prefill_chunk=options.prefill_chunk,
        max_batched_tokens=options.max_batched_tokens or options.prefill_chunk,
        batch_invariant=options.batch_invariant,
        num_speculative_tokens=drafts,
    )
    max_pages = -(-max_length // page_size)
    shapes = EngineShapes(
        num_pages=options.num_pages or options.max_num_seqs * max_pages,
        page_size=page_size,
        max_num_seqs=options.max_num_seqs,
        max_pages=max_pages,
        prefill_chunk=options.prefill_chunk,
        max_bias=MAX_BIAS,
        min_prefill_bucket=options.min_prefill_bucket,
        num_speculative_tokens=drafts,
        batch_invariant=options.batch_invariant,
        index_cache=options.index_cache,
        latent_cache=options.latent_cache,
    )
    return shapes, limits


def bucket_size(count: int, maximum: int, minimum: int = 1, factor: int = 2) -> int:
    """Returns the smallest of minimum, minimum * factor, ... that holds `count`, or `maximum` if that is smaller."""
    size = minimum
    while size < count:
        size *= factor
    return min(size, maximum)
