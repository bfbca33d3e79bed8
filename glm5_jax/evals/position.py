"""Measures the loss by position in long documents, which shows whether a model uses its context.

The loss at a position is that of its token given all tokens before it. As long as more context helps, the loss falls with
the position. Where a model stops using the context, the curve is flat.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from glm5_jax.config import ModelConfig
from glm5_jax.data.long_context import SplitView
from glm5_jax.data.mixture import document_ids
from glm5_jax.data.sources import SourceConfig
from glm5_jax.evals.batches import batches
from glm5_jax.evals.columns import align_columns
from glm5_jax.evals.intervals import Z
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.execution import ExecutionConfig
from glm5_jax.model.weight_gathering import WeightGatherer
from glm5_jax.parallel.mesh import Region
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.cross_entropy import linear_cross_entropy

CHUNK = 1024  # rows of logits that are computed in one step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Loss at the positions start .. end - 1.

    Attributes:
      start, end: borders of the positions.
      loss: mean loss, in nats per token.
      margin: half-width of its 95% interval over documents; NaN for a single document.
    """

    start: int
    end: int
    loss: float
    margin: float


def long_documents(
    source: SourceConfig,
    tokenizer: Tokenizer,
    length: int,
    max_documents: int,
    *,
    held_out_fraction: float = 0.05,
) -> np.ndarray:
    """Returns the beginnings of held-out documents, int32[n length] with n <= max_documents.

    They are the source's first documents whose held-out part has `length` tokens. The held-out part of a book or a
    repository consists of its held-out passages or files (`long_context.SplitView`). Raises ValueError if there is no such
    document.
    """
    texts, documents, longest = SplitView(source, held_out_fraction, training=False), [], 0
    for index in range(len(texts)):
        ids = document_ids(texts[index], tokenizer)
        longest = max(longest, len(ids))
        if len(ids) >= length:
            documents.append(ids[:length])
        if len(documents) == max_documents:
            break
    if not documents:
        raise ValueError(
            f"source {source.name!r}: no held-out document has {length} tokens, the longest has {longest}; "
            "shorten length, or name a source of longer documents"
        )
    return np.array(documents, np.int32)


def loss_by_position(
    params: PyTree,
    cfg: ModelConfig,
    documents: np.ndarray,
    *,
    batch_size: int = 1,
    edges: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
) -> list[Bucket]:
    """Computes the mean loss of documents int32[n t] by position.

    edges: ascending borders of the buckets within 1 .. t; None: 1, 2, 4, ... t. Positions count from 0, and position 0 is
    not predicted. Raises ValueError for edges out of order or range.
    """
    n, t = documents.shape
    edges = list(edges or [*(2**i for i in range(math.ceil(math.log2(t)))), t])
    if len(edges) < 2 or edges[0] < 1 or edges[-1] > t or (np.diff(edges) <= 0).any():
        raise ValueError(f"edges {edges} must ascend within 1 .. {t}, the documents' length")
    losses = []
    for batch, count in batches(documents, batch_size):
        losses.append(np.asarray(_losses(params, batch, cfg, mesh, execution))[:count])
    nll = np.concatenate(losses).astype(np.float64)
    buckets = []
    for start, end in zip(edges, edges[1:]):
        means = nll[:, start - 1 : end - 1].mean(1)
        margin = Z * means.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
        buckets.append(Bucket(start=start, end=end, loss=float(means.mean()), margin=float(margin)))
    return buckets


@functools.partial(jax.jit, static_argnames=("cfg", "mesh", "execution"))
def _losses(params, tokens, cfg, mesh, execution):
    """Returns float32[b t-1], the negative log-likelihood of every token except the first."""
    hidden = glm5.forward(params, tokens, cfg, mesh=mesh, execution=execution).hidden[:, :-1]
    nll, _ = linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        vocabulary.head_weight(params, WeightGatherer(cfg, Region(), execution)),
        jnp.asarray(tokens)[:, 1:].reshape(-1),
        CHUNK,
        # A kernel runs on one device. XLA can split only the reference over a mesh.
        implementation=execution.kernels if mesh is None else "xla",
    )
    return nll.reshape(hidden.shape[:2])


def table(buckets: Sequence[Bucket]) -> str:
    """Formats a text table with a line per bucket: positions, loss with its interval, perplexity."""
    rows = [("positions", "nats per token", "perplexity")]
    for b in buckets:
        margin = "" if math.isnan(b.margin) else f" +- {b.margin:.3f}"
        rows.append(
            (f"{b.start} .. {b.end - 1}", f"{b.loss:.3f}{margin}", f"{math.exp(b.loss):.2f}")
        )
    return align_columns(rows)
