"""Loss by position in long documents: whether a model uses the context that it is given.

The loss at a position is that of the token there given all before it. If later context helps, it
goes on falling where the documents are longer; where a model stops using it, the curve lies flat.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.core.mesh import Region
from glm5_jax.data.long_context import OneSide
from glm5_jax.data.mixture import document_ids
from glm5_jax.data.sources import SourceConfig
from glm5_jax.evals.batches import batches
from glm5_jax.evals.columns import aligned
from glm5_jax.evals.intervals import Z
from glm5_jax.model import glm5, vocabulary
from glm5_jax.model.plan import Plan
from glm5_jax.text.tokenizer import Tokenizer
from pallas_kernels.cross_entropy import linear_cross_entropy

CHUNK = 1024  # rows of logits at a time


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Positions start .. end - 1: mean loss in nats per token, and the half-width of its 95% interval
    over documents (NaN for a single document)."""

    start: int
    end: int
    loss: float
    margin: float


def long_documents(
    source: SourceConfig,
    tokenizer: Tokenizer,
    length: int,
    most: int,
    *,
    held_out_fraction: float = 0.05,
) -> np.ndarray:
    """int32[n length], n <= most: the beginnings of the source's first documents that have `length`
    tokens in what training leaves out of them (`long_context.OneSide`: of a book or a repository its
    held-out passages or files).

    ValueError if there is none.
    """
    texts, found, longest = OneSide(source, held_out_fraction, training=False), [], 0
    for index in range(len(texts)):
        ids = document_ids(texts[index], tokenizer)
        longest = max(longest, len(ids))
        if len(ids) >= length:
            found.append(ids[:length])
        if len(found) == most:
            break
    if not found:
        raise ValueError(
            f"source {source.name!r}: no held-out document has {length} tokens, the longest has {longest}; "
            "shorten length, or name a source of longer documents"
        )
    return np.array(found, np.int32)


def loss_by_position(
    params,
    cfg: ModelConfig,
    documents: np.ndarray,
    *,
    batch_size: int = 1,
    edges: Sequence[int] | None = None,
    mesh=None,
    plan: Plan = Plan(),
) -> list[Bucket]:
    """Mean loss of documents int32[n t] by position.

    edges: ascending borders of the buckets within 1 .. t (default: 1, 2, 4, ... t). Positions count
    from 0, and position 0 is not predicted. ValueError for edges out of order or range.
    """
    n, t = documents.shape
    edges = list(edges or [*(2**i for i in range(math.ceil(math.log2(t)))), t])
    if len(edges) < 2 or edges[0] < 1 or edges[-1] > t or (np.diff(edges) <= 0).any():
        raise ValueError(f"edges {edges} must ascend within 1 .. {t}, the documents' length")
    losses = []
    for batch, count in batches(documents, batch_size):
        losses.append(np.asarray(_losses(params, batch, cfg, mesh, plan))[:count])
    nll = np.concatenate(losses).astype(np.float64)
    buckets = []
    for start, end in zip(edges, edges[1:]):
        means = nll[:, start - 1 : end - 1].mean(1)
        margin = Z * means.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
        buckets.append(Bucket(start, end, float(means.mean()), float(margin)))
    return buckets


@functools.partial(jax.jit, static_argnames=("cfg", "mesh", "plan"))
def _losses(params, tokens, cfg, mesh, plan):
    """float32[b t-1]: negative log-likelihood of every token but the first."""
    hidden = glm5.forward(params, tokens, cfg, mesh=mesh, plan=plan).hidden[:, :-1]
    nll, _ = linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        vocabulary.head(params, glm5.Weights(cfg, Region(), plan)),
        jnp.asarray(tokens)[:, 1:].reshape(-1),
        CHUNK,
        # A kernel runs on one device; what XLA splits over a mesh is plain.
        implementation=plan.kernels if mesh is None else "ref",
    )
    return nll.reshape(hidden.shape[:2])


def table(buckets: Sequence[Bucket]) -> str:
    """Plain text, a line per bucket: positions, loss with its interval, perplexity."""
    rows = [("positions", "nats per token", "perplexity")]
    for b in buckets:
        margin = "" if math.isnan(b.margin) else f" +- {b.margin:.3f}"
        rows.append(
            (f"{b.start} .. {b.end - 1}", f"{b.loss:.3f}{margin}", f"{math.exp(b.loss):.2f}")
        )
    return aligned(rows)
