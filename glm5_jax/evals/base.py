"""Bits per byte, and the two baselines that a language model has to beat: unigram and bigram.

Bits per byte does not depend on the tokenizer's granularity: the loss of the predicted tokens in
bits over the bytes that these tokens stand for. The baselines are scored on the same tokens of the
same rows as the model (`loss_mask`), so the three figures compare directly.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np


def bits_per_byte(nll: float, num_bytes: float) -> float:
    """From a summed negative log-likelihood in nats and the bytes it was paid for.

    Raises ValueError if there are no bytes.
    """
    if not num_bytes > 0:
        raise ValueError(f"num_bytes is {num_bytes}: no predicted token stands for any text")
    return nll / math.log(2) / num_bytes


def predicted_bytes(batch: Mapping[str, np.ndarray], token_bytes: np.ndarray) -> int:
    """Bytes of the tokens that a batch predicts; `token_bytes` int[v] as of the tokenizer."""
    return int((token_bytes[batch["token_ids"]] * (batch["loss_mask"] > 0)).sum())


@dataclasses.dataclass(frozen=True, eq=False)
class Unigram:
    """Token frequencies with absolute discounting, interpolated with the uniform distribution.

    p(w) = (max(c(w) - D, 0) + D N / V) / c, where N tokens occur and c is the sum of counts.
    """

    log_probs: np.ndarray  # [v], nats

    @classmethod
    def fit(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> "Unigram":
        """Counts the tokens of `documents`; ValueError if there are none."""
        counts = np.zeros(vocab_size, np.int64)
        for document in documents:
            counts += np.bincount(document, minlength=vocab_size)
        return cls(np.log(_discounted(counts)))

    def log_prob(self, previous: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Log-probability of `tokens`; `previous` plays no part."""
        del previous
        return self.log_probs[tokens]


@dataclasses.dataclass(frozen=True, eq=False)
class KneserNeyBigram:
    """Interpolated Kneser-Ney bigram (Chen and Goodman 1999, section 2.7).

    p(w | u) = max(c(u w) - D, 0) / c(u .) + D N(u .) / c(u .) p_cont(w), where N(u .) counts the
    distinct successors of u and p_cont is the discounted frequency of w among the distinct bigrams,
    interpolated with the uniform distribution. After an unseen u it is p_cont.
    """

    discount: float  # D
    pairs: np.ndarray  # u * vocab_size + w of the bigrams seen, ascending
    counts: np.ndarray  # c(u w) of them
    context_counts: np.ndarray  # [v], c(u .)
    context_types: np.ndarray  # [v], N(u .)
    continuation: np.ndarray  # [v], p_cont

    @classmethod
    def fit(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> "KneserNeyBigram":
        """Counts the bigrams inside each of `documents`; ValueError if there are none."""
        pairs = [np.zeros(0, np.int64)]
        for document in documents:
            ids = np.asarray(document, np.int64)
            pairs.append(ids[:-1] * vocab_size + ids[1:])
        pairs, counts = np.unique(np.concatenate(pairs), return_counts=True)
        contexts, tokens = np.divmod(pairs, vocab_size)
        return cls(
            discount=_discount(counts),
            pairs=pairs,
            counts=counts,
            context_counts=np.bincount(contexts, counts, vocab_size),
            context_types=np.bincount(contexts, minlength=vocab_size),
            continuation=_discounted(np.bincount(tokens, minlength=vocab_size)),
        )

    def log_prob(self, previous: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Log-probability, in nats, of each of `tokens` after the token before it."""
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
    """Bits per byte of a baseline on the predicted tokens of `batches`."""
    nll, num_bytes = 0.0, 0
    for batch in batches:
        tokens = batch["token_ids"]
        log_prob = model.log_prob(tokens[:, :-1], tokens[:, 1:])
        nll -= float((log_prob * (batch["loss_mask"][:, 1:] > 0)).sum())
        num_bytes += predicted_bytes(batch, token_bytes)
    return bits_per_byte(nll, num_bytes)


def _discount(counts: np.ndarray) -> float:
    """Ney's estimate n1 / (n1 + 2 n2); a half where nothing was seen once, to keep mass for it."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def _discounted(counts: np.ndarray) -> np.ndarray:
    """Absolute discounting of counts[v], the mass taken off spread evenly over all v."""
    if not counts.any():
        raise ValueError("no token to count: the documents are empty or hold one token each")
    discount = _discount(counts)
    spread = discount * (counts > 0).sum() / len(counts)
    return (np.maximum(counts - discount, 0) + spread) / counts.sum()
