"""Computes bits per byte, and the two baselines that a language model has to beat: unigram and bigram.

Bits per byte does not depend on the tokenizer's granularity: it is the loss of the predicted tokens in
bits, divided by the bytes of their text. The baselines are scored on the same tokens of the
same rows as the model (`loss_mask`), so the three figures compare directly.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

CHUNK = 2**20  # tokens that are buffered before they are counted


def bits_per_byte(nll: float, num_bytes: float) -> float:
    """Converts a summed negative log-likelihood in nats of so much text to bits per byte.

    Raises ValueError if there are no bytes.
    """
    if not num_bytes > 0:
        raise ValueError(f"num_bytes is {num_bytes}: the predicted tokens have no text")
    return nll / math.log(2) / num_bytes


def predicted_bytes(batch: Mapping[str, np.ndarray], token_bytes: np.ndarray) -> int:
    """Returns the bytes of the tokens that a batch predicts; `token_bytes` int[v] comes from the tokenizer."""
    return int((token_bytes[batch["token_ids"]] * (batch["loss_mask"] > 0)).sum())


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class NgramCounts:
    """Counts of the tokens of a text, and of the pairs of adjacent tokens inside its documents.

    Attributes:
      tokens: count of each token, int64[v].
      pairs: u * v + w of the pairs (u, w) that occur, ascending.
      pair_counts: counts of these pairs.
      is_truncated: whether `max_tokens` left out some of the text.
    """

    tokens: np.ndarray
    pairs: np.ndarray
    pair_counts: np.ndarray
    is_truncated: bool = False

    @classmethod
    def of(
        cls,
        documents: Iterable[Sequence[int]],
        vocab_size: int,
        max_tokens: int = sys.maxsize,
    ) -> "NgramCounts":
        """Counts the first `max_tokens` tokens of documents; stores the pairs, not the text."""
        empty = np.zeros(0, np.int64)
        counts = cls(tokens=np.zeros(vocab_size, np.int64), pairs=empty, pair_counts=empty)
        buffer, size, remaining, is_truncated = [], 0, max_tokens, False
        for document in documents:
            ids = np.asarray(document[:remaining], np.int64)
            buffer.append(ids)
            size, remaining = size + len(ids), remaining - len(ids)
            # Buffering as many tokens as there are pairs keeps the time of sorting proportional to the text.
            if size >= max(CHUNK, len(counts.pairs)):
                counts, buffer, size = counts._add(buffer), [], 0
            if is_truncated := len(ids) < len(document):
                break
        return dataclasses.replace(counts._add(buffer), is_truncated=is_truncated)

    def _add(self, documents: Sequence[np.ndarray]) -> "NgramCounts":
        vocab_size = len(self.tokens)
        text = np.concatenate([np.zeros(0, np.int64), *documents])
        tokens = self.tokens + np.bincount(text, minlength=vocab_size)
        new = [ids[:-1] * vocab_size + ids[1:] for ids in documents]
        pairs = np.concatenate([self.pairs, *new])
        counts = np.ones(len(pairs), np.int64)
        counts[: len(self.pairs)] = self.pair_counts
        order = np.argsort(pairs, kind="stable")
        pairs, counts = pairs[order], counts[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        return NgramCounts(
            tokens=tokens, pairs=pairs[starts], pair_counts=np.add.reduceat(counts, starts)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Unigram:
    """Token frequencies with absolute discounting, interpolated with the uniform distribution.

    p(w) = (max(c(w) - D, 0) + D N / V) / c, where N tokens occur and c is the sum of counts.
    """

    log_probs: np.ndarray  # [v], nats

    @classmethod
    def fit(cls, counts: NgramCounts) -> "Unigram":
        """Fits the model to the counts of a text. Raises ValueError if there are no tokens."""
        return cls(np.log(_discounted(counts.tokens)))

    def log_prob(self, previous: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the log-probabilities of `tokens`; `previous` is ignored."""
        del previous
        return self.log_probs[tokens]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KneserNeyBigram:
    """Interpolated Kneser-Ney bigram (Chen and Goodman 1999, section 2.7).

    p(w | u) = max(c(u w) - D, 0) / c(u .) + D N(u .) / c(u .) p_cont(w), where N(u .) counts the
    distinct successors of u and p_cont is the discounted frequency of w among the distinct bigrams,
    interpolated with the uniform distribution. After an unseen u it is p_cont.
    """

    discount: float  # D
    pairs: np.ndarray  # u * vocab_size + w of the bigrams that occur, ascending
    counts: np.ndarray  # c(u w) of these bigrams
    context_counts: np.ndarray  # [v], c(u .)
    context_types: np.ndarray  # [v], N(u .)
    continuation: np.ndarray  # [v], p_cont

    @classmethod
    def fit(cls, counts: NgramCounts) -> "KneserNeyBigram":
        """Fits the model to the counts of a text. Raises ValueError if there are no bigrams."""
        vocab_size = len(counts.tokens)
        contexts, tokens = np.divmod(counts.pairs, vocab_size)
        return cls(
            discount=_discount(counts.pair_counts),
            pairs=counts.pairs,
            counts=counts.pair_counts,
            context_counts=np.bincount(contexts, counts.pair_counts, vocab_size),
            context_types=np.bincount(contexts, minlength=vocab_size),
            continuation=_discounted(np.bincount(tokens, minlength=vocab_size)),
        )

    def log_prob(self, previous: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the log-probability, in nats, of each of `tokens` after its predecessor in `previous`."""
        vocab_size = len(self.continuation)
        pairs = np.asarray(previous, np.int64) * vocab_size + tokens
        at = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        counts = np.where(self.pairs[at] == pairs, self.counts[at], 0)
        total = self.context_counts[previous]
        seen = total > 0
        total = np.where(seen, total, 1)
        rest = np.where(seen, self.discount * self.context_types[previous] / total, 1.0)
        direct = np.maximum(counts - self.discount, 0) / total
        return np.log(direct + rest * self.continuation[tokens])


def baseline_bits_per_byte(
    model: Unigram | KneserNeyBigram,
    batches: Iterable[Mapping[str, np.ndarray]],
    token_bytes: np.ndarray,
) -> float:
    """Returns the bits per byte of a baseline on the predicted tokens of batches."""
    nll, num_bytes = 0.0, 0
    for batch in batches:
        tokens = batch["token_ids"]
        log_prob = model.log_prob(tokens[:, :-1], tokens[:, 1:])
        nll -= float((log_prob * (batch["loss_mask"][:, 1:] > 0)).sum())
        num_bytes += predicted_bytes(batch, token_bytes)
    return bits_per_byte(nll, num_bytes)


def _discount(counts: np.ndarray) -> float:
    """Returns Ney's estimate n1 / (n1 + 2 n2), or 0.5 if no count is 1.

    The latter gives some mass to unseen tokens.
    """
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def _discounted(counts: np.ndarray) -> np.ndarray:
    """Applies absolute discounting to counts[v], and spreads the removed mass evenly over all v."""
    if not counts.any():
        raise ValueError("no tokens to count: the documents are empty or have one token each")
    discount = _discount(counts)
    spread = discount * (counts > 0).sum() / len(counts)
    return (np.maximum(counts - discount, 0) + spread) / counts.sum()
