"""Similar documents, interleaved: one long segment in which chunks of each take turns.

Packing interleaves similar texts in GLM-5's mid-training, against the loss of what stands in the
middle of a context (paper 2.3). What follows a chunk of a document is then found a few chunks back,
behind texts that resemble it: the same distractors that NExtLong (arXiv 2501.12766) retrieves to
extend a document. How the paper measures similarity, how many texts it interleaves and in which
pieces is undisclosed.

Similarity is the Jaccard index of two documents' sets of word shingles, estimated by one-permutation
MinHash: hashes are dealt into `bins` by their low bits, and the least of each bin is kept. It depends
on the texts alone.
"""

import dataclasses
import re
import zlib
from collections.abc import Sequence

import numpy as np

from glm5_jax.data.document import Document
from glm5_jax.data.record import TokenRecord

WORD = re.compile(r"[^\W_]+")
EMPTY = np.uint64(2**64 - 1)  # the value of a bin that no shingle fell into
MAX_SHARED = 1000  # a minimum that more documents share tells nothing; looking at it is quadratic


@dataclasses.dataclass(frozen=True)
class InterleaveConfig:
    """How similar documents of a source become one; every number is undisclosed, so ours.

    Attributes:
      documents: at most so many in one segment.
      characters: at most so many together, unless one document has more; None for no limit. About a
        row, so that a segment is as long as it may be and is not cut.
      chunk: tokens of one before the next one's turn.
      min_similarity: documents below it are not put together; one without a partner stays alone.
      shingle: words of a shingle. 1 compares vocabularies, which finds texts on one subject; longer
        ones find copies.
      bins: of the sketch; the estimate's standard error is at most 0.5 / sqrt(bins).
    """

    documents: int = 4
    characters: int | None = None
    chunk: int = 1024
    min_similarity: float = 0.2
    shingle: int = 1
    bins: int = 256

    def __post_init__(self):
        for name, least in {"documents": 2, "chunk": 1, "shingle": 1, "bins": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.characters is not None and self.characters < 1:
            raise ValueError(f"characters is {self.characters}; it must be positive, or None")
        if not 0 < self.min_similarity <= 1:
            raise ValueError(f"min_similarity is {self.min_similarity}; it must be in (0, 1]")


class Interleaved:
    """Documents of similar ones (`group`), for which opening reads every document once.

    It takes a second for 15 MB, and 7 s for 8,000 short documents to be compared, growing with the
    square of their number: interleave a large corpus in shards, a source each. A document that has
    threads already keeps them.
    """

    def __init__(self, documents: Sequence[Document], numbers: Sequence[int], config):
        """numbers: which of the documents to take. config: an `InterleaveConfig`."""
        numbers, sketches, sizes = list(numbers), [], []
        for number in numbers:
            document = documents[number]
            sketches.append(sketch("".join(document.texts()), config))
            sizes.append(document.num_characters)
        self._documents, self._chunk = documents, config.chunk
        self._groups = [[numbers[i] for i in members] for members in group(sketches, sizes, config)]

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Document:
        found = (self._documents[number] for number in self._groups[index])
        return Document(tuple(thread for d in found for thread in d.threads), self._chunk)


def sketch(text: str, config: InterleaveConfig) -> np.ndarray:
    """uint64[bins]: the least hash of each bin, `EMPTY` where there is none."""
    words = WORD.findall(text.lower())
    hashes = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    count = max(0, len(hashes) - config.shingle + 1)
    mixed = np.zeros(count, np.uint64)
    for offset in range(config.shingle):
        mixed = _mix(mixed ^ hashes[offset : offset + count])
    low, high = mixed % np.uint64(config.bins), mixed // np.uint64(config.bins)
    least = np.full(config.bins, EMPTY)
    np.minimum.at(least, low.astype(np.int64), high)
    return least


def similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Estimated Jaccard index of sketches a [..., bins] and b [bins]; 0 where both are empty."""
    used = (a != EMPTY) | (b != EMPTY)
    equal = (a == b) & used
    return equal.sum(-1) / np.maximum(1, used.sum(-1))


def group(
    sketches: Sequence[np.ndarray], sizes: Sequence[int], config: InterleaveConfig
) -> list[list[int]]:
    """Numbers of the documents by group, greedily: every document once. sizes: characters of each.

    The first document that is left is joined by the most similar ones that are left, still fit and
    are not below `min_similarity`; ties go to the lower number.
    """
    if not len(sketches):
        return []
    table = np.stack(sketches)
    hashes = table * np.uint64(config.bins) + np.arange(config.bins, dtype=np.uint64)
    ids = np.unique(hashes, return_inverse=True)[1].reshape(table.shape)
    order = np.argsort(ids, axis=None, kind="stable")
    owners = order // config.bins  # documents by the minimum that they share
    starts = np.searchsorted(ids.ravel()[order], np.arange(ids.max() + 2))
    telling = (np.diff(starts) <= MAX_SHARED)[ids] & (table != EMPTY)
    left, groups = np.ones(len(table), bool), []
    most = config.characters or sum(sizes)
    for number in range(len(table)):
        if not left[number]:
            continue
        left[number] = False
        shared = [owners[starts[i] : starts[i + 1]] for i in ids[number][telling[number]]]
        found = np.bincount(np.concatenate(shared or [[]]).astype(np.int64), minlength=len(table))
        near = np.flatnonzero(left & (found > 0))
        alike = similarity(table[near], table[number])
        members, room = [number], most - sizes[number]
        for i in np.argsort(-alike, kind="stable").tolist():
            if len(members) == config.documents or alike[i] < config.min_similarity:
                break
            if sizes[near[i]] <= room:
                members.append(int(near[i]))
                room -= sizes[near[i]]
        left[members] = False
        groups.append(members)
    return groups


def weave(records: Sequence[TokenRecord], chunk: int) -> TokenRecord:
    """One record of all tokens of the records, whose chunks of `chunk` tokens take turns.

    The order inside a record stays, and so does each token's own loss mask: the first token of a
    record has none, the first of a later chunk has, and is to be found behind the other records.
    A record that has ended is passed over. Spans and names are not kept.
    Raises ValueError if the records have not the same streams.
    """
    streams = [record.streams() for record in records]
    if any(other.keys() != streams[0].keys() for other in streams):
        raise ValueError(
            f"records to interleave have streams {[list(s) for s in streams]}; fill the same ones"
        )
    turns = np.concatenate([np.arange(len(record)) // chunk for record in records])
    order = np.argsort(turns, kind="stable")  # records keep their order within a turn
    return TokenRecord(
        **{name: np.concatenate([s[name] for s in streams])[order] for name in streams[0]}
    )


def _mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads bits (the finaliser of SplitMix64, public domain)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
