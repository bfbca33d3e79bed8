"""Weighted mixture of sources: the endless stream of training rows, and the held-out rows.

A source holds documents (sources.py), or records: of tasks (long_context.py) or chats (chat_data.py). The weights are
shares of rows, so of tokens: every source is shuffled and packed by itself, and the rows are
interleaved in fixed proportions. Documents are shuffled over the whole epoch and rows once more over
a window, since the rows of one long document follow each other and would fill a batch. All of it
follows from the seed alone.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator, Sequence

import grain

from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.document import Document
from glm5_jax.data.interleave import weave
from glm5_jax.data.long_context import TaskSourceConfig, one_side
from glm5_jax.data.packing import PACKINGS, pack
from glm5_jax.data.record import TokenRecord, plain_record
from glm5_jax.data.sources import SourceConfig, open_documents
from glm5_jax.text.tokenizer import Tokenizer

AnySourceConfig = SourceConfig | TaskSourceConfig | ChatSourceConfig
Items = Sequence[Document] | Sequence[TokenRecord]
# Characters: about a second of tokenising, which a start and a resumption wait for.
READ_AHEAD = 2**21


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on. Construction refuses contradictory values (ValueError).

    Attributes:
      sources: the mixture; names (kind, path and lengths) must differ. Tasks and chats need best-fit
        packing and rows that hold them whole.
      sequence_length: tokens of a row (4096 in pre-training: GLM-4.5 report, section 2.3).
      seed: of the order of documents and rows.
      shuffle_window: tokens of each source over which rows are shuffled; held in memory, and read
        again on resuming (a second or so at 2**18).
      packing: "concat" or "best_fit" (packing.py).
      open_rows: rows that best-fit packing fills at a time; more pad less, and are all filled before
        the first is given out. 64 at 4096 tokens left 4% padding on the shipped texts, 16 left 7%;
        at 202752 tokens 8 left 0.5%, within 6 s where 64 took 37.
      streams: that the data are dealt out to: each has documents, order and packing of its own, and equal parts of every
        batch's rows. 0: as many as hosts with rows of their own at the first step. A run keeps their number, so that its
        batches stay the same on other numbers of hosts: fewer read several streams each, of more some read one stream
        together, each all of it. So set how many hosts there may come to be.
      held_out_fraction: share of the documents kept for evaluation; 0 trains on all.
      num_threads: threads that read and tokenise ahead; 0 does it when a batch is asked for. With two or more, another
        one packs rows ahead, up to two shuffle windows of them.
      prefetch_documents: how many documents of each source are tokenised ahead, at most; fewer if
        they are long.
    """

    sources: tuple[AnySourceConfig, ...] = (
        SourceConfig("shakespeare"),
        SourceConfig("stdlib"),
    )
    sequence_length: int = 4096
    seed: int = 0
    shuffle_window: int = 2**18
    packing: str = "concat"
    open_rows: int = 64
    streams: int = 0
    held_out_fraction: float = 0.05
    num_threads: int = 1
    prefetch_documents: int = 32

    def __post_init__(self):
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources is empty; name at least one source")
        if len(set(names)) < len(names):
            raise ValueError(f"two sources have one name: {sorted(names)}; join them into one")
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length is {self.sequence_length}; it must be at least 2")
        if self.packing not in PACKINGS:
            raise ValueError(f"packing is {self.packing!r}; use one of {', '.join(PACKINGS)}")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction is {self.held_out_fraction}; it must be in [0, 1)")
        minima = dict.fromkeys(
            ("shuffle_window", "streams", "num_threads", "prefetch_documents"), 0
        )
        for name, least in (minima | {"open_rows": 1}).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        variants = {s.variant for s in self.sources if isinstance(s, ChatSourceConfig)}
        if len(variants) > 1:
            raise ValueError(
                f"the chats have layouts {sorted(variants)}; a model learns one of them"
            )
        for source in self.sources:
            if isinstance(source, SourceConfig):
                continue
            if self.packing != "best_fit" or source.length > self.sequence_length:
                raise ValueError(
                    f"packing is {self.packing!r} and sequence_length {self.sequence_length}, which "
                    f"cut what source {source.name!r} asks, up to {source.length} tokens long, from its "
                    "answers; use best_fit, and rows of that length, or shorter ones in the source"
                )

    @property
    def chat_variant(self) -> str | None:
        """The layout of the chats, None without any."""
        return next((s.variant for s in self.sources if isinstance(s, ChatSourceConfig)), None)


def open_training_sources(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Items]:
    """Opens the sources by name; ValueError, before any work, if one has no training document."""
    return {
        source.name: _open(config, source, tokenizer, training=True) for source in config.sources
    }


def training_rows(
    config: DataConfig,
    sources: dict[str, Items],
    tokenizer: Tokenizer,
    *,
    stream: int = 0,
    num_streams: int = 1,
) -> grain.IterDataset:
    """Endless rows (packing.py) of the mixture, one of `num_streams` parts of it.

    The streams take disjoint documents of each epoch, and every epoch has an order of its own.
    `sources` are those of `open_training_sources`. ValueError for a stream out of range.
    """
    if not 0 <= stream < num_streams:
        raise ValueError(f"stream is {stream}, there are {num_streams}; count from 0")
    rows = {}
    for source in config.sources:
        name, items = source.name, sources[source.name]
        seed = zlib.crc32(f"{config.seed} {name}".encode())
        order = grain.MapDataset.source(items).seed(seed).shuffle()
        order = order.repeat()[stream::num_streams]
        records = _records(config, source, items, order, tokenizer, training=True)
        rows[name] = _pack(config, source, records)
        if _is_shuffled(source):
            rows[name] = grain.experimental.WindowShuffleIterDataset(
                rows[name],
                window_size=max(1, config.shuffle_window // config.sequence_length),
                seed=seed,
            )
    weights = {source.name: source.weight for source in config.sources}
    mixed = grain.IterDataset.mix(rows, weights)
    window = config.shuffle_window // config.sequence_length
    if config.num_threads < 2 or window < 2 or not any(map(_is_shuffled, config.sources)):
        return mixed
    # A shuffle window is filled as a whole: without rows ahead, a step in several waits for all of one.
    return grain.experimental.ThreadPrefetchIterDataset(mixed, prefetch_buffer_size=2 * window)


def _is_shuffled(source_config) -> bool:
    """Whether rows of a source go through a shuffle window: rows of records are independent as they come."""
    return isinstance(source_config, SourceConfig)


def held_out_rows(
    config: DataConfig, source_config: AnySourceConfig, tokenizer: Tokenizer
) -> grain.IterDataset:
    """Rows of one source's held-out documents, once over, in one order for all seeds.

    Raises ValueError if the source has no held-out document.
    """
    records = _one_pass(config, source_config, tokenizer, training=False)
    return _pack(config, source_config, records)


def training_documents(
    config: DataConfig, source_config: AnySourceConfig, tokenizer: Tokenizer
) -> Iterator[list[int]]:
    """Token ids of each training document of one source, once, shuffled alike for all seeds."""
    records = _one_pass(config, source_config, tokenizer, training=True)
    with contextlib.closing(iter(records)) as found:
        for record in found:
            yield record.token_ids.tolist()


def document_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text and the end-of-document token, which is predicted like any other."""
    return [*tokenizer.encode(text), tokenizer.eos_id]


def _open(
    config: DataConfig,
    source_config: AnySourceConfig,
    tokenizer: Tokenizer,
    *,
    training: bool,
) -> Items:
    """Opens a source and makes sure that the split has a document: an endless filter would hang."""
    fraction = config.held_out_fraction
    if isinstance(source_config, ChatSourceConfig):
        length = config.sequence_length
        return source_config.open(tokenizer, fraction, training=training, row=length)
    if isinstance(source_config, TaskSourceConfig):
        return source_config.open(tokenizer, fraction, training=training)
    documents = open_documents(source_config)
    for index in range(len(documents)):
        if _readable(config, source_config, documents[index], training):
            return documents
    split = "training" if training else "held-out"
    raise ValueError(
        f"source {source_config.name!r} has no {split} document: {len(documents)} document(s), "
        f"held_out_fraction {fraction}; add documents or change the fraction"
    )


def _readable(config, source_config, document: Document, training: bool) -> Document | None:
    """What of a document may be read; None if nothing."""
    if source_config.interleave is None and not source_config.fits(document):
        return None
    return one_side(document, config.held_out_fraction, training=training)


def _records(
    config: DataConfig,
    source_config: AnySourceConfig,
    items: Items,
    order: grain.MapDataset,
    tokenizer: Tokenizer,
    *,
    training: bool,
) -> grain.IterDataset:
    """Records of what may be read of a source's items in an order, read ahead; records as they are."""
    records = order
    if isinstance(source_config, SourceConfig):

        def record(document: Document) -> TokenRecord:
            found = [plain_record(document_ids(text, tokenizer)) for text in document.texts()]
            return found[0] if len(found) == 1 else weave(found, document.chunk)

        records = order.map(lambda item: _readable(config, source_config, item, training))
        records = records.filter(lambda document: document is not None).map(record)
    ahead = min(config.prefetch_documents, _most_ahead(config, source_config, items))
    threads = config.num_threads if ahead else 0
    records = records.to_iter_dataset(grain.ReadOptions(threads, max(ahead, threads)))
    # A held-out split is mostly filtered away, which is no reason for a warning.
    options = grain.experimental.DatasetOptions(filter_warn_threshold_ratio=None)
    return grain.experimental.WithOptionsIterDataset(records, options)


def _most_ahead(config, source_config, items: Items) -> int:
    """How many of a source's items may be read ahead: of records a row, else `READ_AHEAD`, by a sample."""
    if not isinstance(source_config, SourceConfig):
        return max(1, config.sequence_length // items.mean_tokens)
    sample = range(0, len(items), -(-len(items) // 8))
    mean = sum(items[number].num_characters for number in sample) / len(sample)
    return max(1, int(READ_AHEAD / max(mean, source_config.min_characters, 1)))


def _one_pass(config, source_config, tokenizer, *, training: bool) -> grain.IterDataset:
    """Records of one source, once over."""
    items = _open(config, source_config, tokenizer, training=training)
    # Not the run's seed: runs that differ in it are compared on the same rows.
    order = grain.MapDataset.source(items).seed(0).shuffle()
    return _records(config, source_config, items, order, tokenizer, training=training)


def _pack(config: DataConfig, source_config, records: grain.IterDataset) -> grain.IterDataset:
    # Tasks have one length: a second open row would only make more of them before the first is read.
    open_rows = 1 if isinstance(source_config, TaskSourceConfig) else config.open_rows
    if not isinstance(source_config, SourceConfig):
        records = records.map(functools.partial(_whole, config.sequence_length))
    return pack(records, config.sequence_length, packing=config.packing, open_rows=open_rows)


def _whole(length: int, record: TokenRecord) -> TokenRecord:
    """The record; ValueError if a row would cut it."""
    if len(record) > length:
        raise ValueError(
            f"a record of {len(record)} tokens exceeds a row of {length}; leave it out"
        )
    return record
