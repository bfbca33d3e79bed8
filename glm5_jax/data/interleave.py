"""Interleaves similar documents into one long segment with alternating chunks.

GLM-5's mid-training interleaves similar texts in packing, so that the model does not lose information in the middle of a
context (paper 2.3). The next chunk of a document then comes a few chunks later, after similar texts. These are the
distractors that NExtLong (arXiv 2501.12766) retrieves to extend a document. The paper does not disclose its measure of
similarity, the number of texts or the size of chunks.

Similarity is the Jaccard index of two documents' sets of word shingles, estimated by one-permutation MinHash: the low bits
of a hash select one of `bins`, and the minimum of each bin is stored. It depends on the texts only.
"""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from glm5_jax.data.document import Document, RandomAccess
from glm5_jax.data.record import TokenRecord

WORD = re.compile(r"[^\W_]+")
EMPTY = np.uint64(2**64 - 1)  # value of a bin without shingles
MAX_SHARED = 1000  # a minimum shared by more documents is ignored: it is uninformative, and comparing is quadratic


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterleaveConfig:
    """Options of interleaving the similar documents of a source. The paper discloses none of these numbers.

    Attributes:
      documents: maximum number of documents in one segment.
      characters: maximum characters of a segment, unless a single document has more; None: no limit. Set it to about a
        row, so that a segment is as long as possible without being split.
      chunk: tokens of a document before the next one continues.
      min_similarity: minimum similarity of documents in a segment; a document without a partner stays separate.
      shingle: words of a shingle. 1 compares vocabularies, which finds texts on one subject; longer ones find copies.
      bins: bins of the sketch; the standard error of the estimate is at most 0.5 / sqrt(bins).
    """

    documents: int = 4
    characters: int | None = None
    chunk: int = 1024
    min_similarity: float = 0.2
    shingle: int = 1
    bins: int = 256

    def __post_init__(self):
        for name, minimum in {"documents": 2, "chunk": 1, "shingle": 1, "bins": 1}.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.characters is not None and self.characters < 1:
            raise ValueError(f"characters is {self.characters}; it must be positive, or None")
        if not 0 < self.min_similarity <= 1:
            raise ValueError(f"min_similarity is {self.min_similarity}; it must be in (0, 1]")


class Interleaved:
    """Sequence of documents that each combine similar documents (`group_similar`); opening reads all of them once.

    Reading takes a second for 15 MB. Comparing takes 7 s for 8,000 short documents, and grows with the square of their
    number, so interleave a large corpus in shards, one source each. A document that has threads already keeps them.
    """

    def __init__(
        self, documents: RandomAccess[Document], numbers: Sequence[int], config: InterleaveConfig
    ):
        """Groups the documents with these numbers; config: an `InterleaveConfig`."""
        numbers, sketches, sizes = list(numbers), [], []
        for number in numbers:
            document = documents[number]
            sketches.append(sketch("".join(document.texts()), config))
            sizes.append(document.num_characters)
        self._documents, self._chunk = documents, config.chunk
        self._groups = [
            [numbers[i] for i in members] for members in group_similar(sketches, sizes, config)
        ]

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Document:
        documents = (self._documents[number] for number in self._groups[index])
        return Document(tuple(thread for d in documents for thread in d.threads), self._chunk)


def sketch(text: str, config: InterleaveConfig) -> np.ndarray:
    """Returns the MinHash sketch of a text, uint64[bins]: the minimum hash of each bin, `EMPTY` without any."""
    words = WORD.findall(text.lower())
    hashes = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    count = max(0, len(hashes) - config.shingle + 1)
    mixed = np.zeros(count, np.uint64)
    for offset in range(config.shingle):
        mixed = _mix(mixed ^ hashes[offset : offset + count])
    low, high = mixed % np.uint64(config.bins), mixed // np.uint64(config.bins)
    minima = np.full(config.bins, EMPTY)
    np.minimum.at(minima, low.astype(np.int64), high)
    return minima


def similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the estimated Jaccard index of sketches a [..., bins] and b [bins]; 0 where both are empty."""
    used = (a != EMPTY) | (b != EMPTY)
    equal = (a == b) & used
    return equal.sum(-1) / np.maximum(1, used.sum(-1))


def group_similar(
    sketches: Sequence[np.ndarray], sizes: Sequence[int], config: InterleaveConfig
) -> list[list[int]]:
    """Groups similar documents greedily, and returns the numbers of the documents of each group.

    sketches, sizes: sketch and characters of each document. The first remaining document is joined with the most similar
    remaining ones that fit and reach `min_similarity`; ties go to the lower number. Each document is in one group.
    """
    # Documents by the minima that they share.
    if not len(sketches):
        return []
    table = np.stack(sketches)
    hashes = table * np.uint64(config.bins) + np.arange(config.bins, dtype=np.uint64)
    ids = np.unique(hashes, return_inverse=True)[1].reshape(table.shape)
    order = np.argsort(ids, axis=None, kind="stable")
    owners = order // config.bins
    starts = np.searchsorted(ids.ravel()[order], np.arange(ids.max() + 2))
    is_informative = (np.diff(starts) <= MAX_SHARED)[ids] & (table != EMPTY)
    # Groups, from each remaining document.
    remaining, groups = np.ones(len(table), bool), []
    max_characters = config.characters or sum(sizes)
    for number in range(len(table)):
        if not remaining[number]:
            continue
        remaining[number] = False
        shared = [owners[starts[i] : starts[i + 1]] for i in ids[number][is_informative[number]]]
        num_shared = np.bincount(
            np.concatenate(shared or [[]]).astype(np.int64), minlength=len(table)
        )
        near = np.flatnonzero(remaining & (num_shared > 0))
        alike = similarity(table[near], table[number])
        members, room = [number], max_characters - sizes[number]
        for i in np.argsort(-alike, kind="stable").tolist():
            if len(members) == config.documents or alike[i] < config.min_similarity:
                break
            similar = int(near[i])
            if sizes[similar] <= room:
                members.append(similar)
                room -= sizes[similar]
        remaining[members] = False
        groups.append(members)
    return groups


def interleave_records(records: Sequence[TokenRecord], chunk: int) -> TokenRecord:
    """Interleaves records into one record, with alternating chunks of `chunk` tokens.

    The order inside a record stays, and so does the loss mask of each token: it is 0 for the first token of a record, but
    1 for the first token of a later chunk, which the model predicts from far back. A record that has ended is skipped.
    Spans and names are dropped. Raises ValueError if the records have different streams.
    """
    streams = [record.streams() for record in records]
    if any(other.keys() != streams[0].keys() for other in streams):
        raise ValueError(
            f"records to interleave have streams {[list(s) for s in streams]}; fill the same ones"
        )
    turns = np.concatenate([np.arange(len(record)) // chunk for record in records])
    order = np.argsort(turns, kind="stable")  # records keep their order within a turn
    interleaved: dict[str, Any] = {
        name: np.concatenate([s[name] for s in streams])[order] for name in streams[0]
    }
    return TokenRecord(**interleaved)


def _mix(values: np.ndarray) -> np.ndarray:
    """Applies a bijection of uint64 that mixes bits (the finaliser of SplitMix64, public domain)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
