"""Mixes weighted sources into the endless stream of training rows, and into held-out rows.

A source holds documents (sources.py), or records of tasks (long_context.py) or chats (chat_data.py). The weights are
shares of rows, hence of tokens: every source is shuffled and packed separately, and the rows are interleaved in fixed
proportions. Documents are shuffled over the full epoch. Rows are shuffled again over a sliding window, because the rows of
one long document are consecutive and would fill a batch. The result depends on the seed only.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from glm5_jax.data.chat_data import ChatSourceConfig
from glm5_jax.data.document import Document, RandomAccess
from glm5_jax.data.interleave import interleave_records
from glm5_jax.data.long_context import TaskSourceConfig, select_split
from glm5_jax.data.packing import PACKINGS, pack
from glm5_jax.data.record import TokenRecord, plain_record
from glm5_jax.data.sources import SourceConfig, open_documents
from glm5_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # see packing.py
    import grain

AnySourceConfig = SourceConfig | TaskSourceConfig | ChatSourceConfig
# Characters that are tokenised ahead: about a second of work, for which a start and a resume wait.
READ_AHEAD = 2**21
_MAX_QUOTED = 60  # characters of a document in an error


@runtime_checkable
class RecordSource(RandomAccess[TokenRecord], Protocol):
    """Random-access sequence of records."""

    @property
    def mean_tokens(self) -> int:
        """Mean tokens of a record."""
        ...


Items = RandomAccess[Document] | RecordSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data. Raises ValueError if options contradict each other.

    Attributes:
      sources: sources of the mixture; names (kind, path and lengths) must differ. Tasks and chats need best-fit
        packing and rows that hold a full sample.
      sequence_length: tokens of a row (4096 in pre-training: GLM-4.5 report, section 2.3).
      seed: seed of the order of documents and rows.
      shuffle_window: tokens of each source over which rows are shuffled (sliding_shuffle.py). Half as many are held in
        memory, and are read before the first step; all are read again after a resume (about a second at 2**18).
      packing: "concat" or "best_fit" (packing.py).
      open_rows: rows that best-fit packing fills at the same time. More rows mean less padding, but all of them are filled
        before the first is returned. At 4096 tokens, 64 left 4% padding on the shipped texts, 16 left 7%. At 202752
        tokens, 8 left 0.5% within 6 s, and 64 took 37 s.
      num_shards: shards of the data. Each shard has separate documents, order and packing, and provides an equal part of
        every batch's rows. 0: the number of hosts with separate rows at the first step. A run keeps the number, so
        that its batches stay the same on other numbers of hosts: fewer hosts read several shards each, and of more
        hosts several read all of one shard. So set it to the largest number of hosts that the run may have.
      held_out_fraction: share of the documents that is held out for evaluation; 0: train on all.
      num_threads: threads that read and tokenise ahead; 0: read when a batch is requested. With two or more, another
        thread packs up to two shuffle windows of rows ahead.
      prefetch_documents: maximum number of documents of each source that are tokenised ahead; fewer if they are long.
    """

    sources: tuple[AnySourceConfig, ...] = (
        SourceConfig(kind="shakespeare"),
        SourceConfig(kind="stdlib"),
    )
    sequence_length: int = 4096
    seed: int = 0
    shuffle_window: int = 2**18
    packing: str = "concat"
    open_rows: int = 64
    num_shards: int = 0
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
            ("shuffle_window", "num_shards", "num_threads", "prefetch_documents"), 0
        )
        for name, minimum in (minima | {"open_rows": 1}).items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        variants = {s.variant for s in self.sources if isinstance(s, ChatSourceConfig)}
        if len(variants) > 1:
            raise ValueError(f"the chats have layouts {sorted(variants)}; use one layout per model")
        for source in self.sources:
            if isinstance(source, SourceConfig):
                continue
            if self.packing != "best_fit" or source.length > self.sequence_length:
                raise ValueError(
                    f"packing is {self.packing!r} and sequence_length {self.sequence_length}, which "
                    f"split samples of source {source.name!r}, which have up to {source.length} tokens; "
                    "use best_fit, and rows of that length, or shorter samples in the source"
                )

    @property
    def has_user_files(self) -> bool:
        """Whether a source reads files of the user; the others are shipped or generated."""
        return any(
            isinstance(source, ChatSourceConfig)
            and isinstance(source.chats, str)
            or isinstance(source, SourceConfig)
            and bool(source.path)
            for source in self.sources
        )

    @property
    def chat_variant(self) -> str | None:
        """The layout of the chats; None: there are no chats."""
        return next((s.variant for s in self.sources if isinstance(s, ChatSourceConfig)), None)


def open_training_sources(config: DataConfig, tokenizer: Tokenizer) -> dict[str, Items]:
    """Opens the sources, and returns them by name. Raises ValueError if one has no training document."""
    return {
        source.name: _open(config, source, tokenizer, training=True) for source in config.sources
    }


def training_rows(
    config: DataConfig,
    sources: dict[str, Items],
    tokenizer: Tokenizer,
    *,
    shard: int = 0,
    num_shards: int = 1,
) -> "grain.IterDataset":
    """Returns the endless rows (packing.py) of one shard of the mixture.

    The shards take disjoint documents of each epoch, and every epoch has a different order. sources: those of
    `open_training_sources`. Raises ValueError for a shard out of range.
    """
    import grain

    from glm5_jax.data.sliding_shuffle import SlidingShuffleIterDataset

    if not 0 <= shard < num_shards:
        raise ValueError(f"shard is {shard}, there are {num_shards}; count from 0")
    rows = {}
    for source in config.sources:
        name, items = source.name, sources[source.name]
        seed = zlib.crc32(f"{config.seed} {name}".encode())
        order = _shuffled(items, seed).repeat()[shard::num_shards]
        records = _records(config, source, items, order, tokenizer, training=True)
        rows[name] = _pack(config, source, records)
        if _is_shuffled(source):
            window = config.shuffle_window // config.sequence_length
            rows[name] = SlidingShuffleIterDataset(rows[name], window=window, seed=seed)
    weights = {source.name: source.weight for source in config.sources}
    mixed = grain.IterDataset.mix(rows, weights)
    window = config.shuffle_window // config.sequence_length
    if config.num_threads < 2 or window < 2 or not any(map(_is_shuffled, config.sources)):
        return mixed
    # One thread shuffles and packs while the devices compute.
    return grain.experimental.ThreadPrefetchIterDataset(mixed, prefetch_buffer_size=2 * window)


def _is_shuffled(source_config) -> bool:
    """Returns True if rows of a source need a shuffle window; consecutive rows of records are independent."""
    return isinstance(source_config, SourceConfig)


def held_out_rows(
    config: DataConfig, source_config: AnySourceConfig, tokenizer: Tokenizer
) -> "grain.IterDataset":
    """Returns the rows of one source's held-out documents, each once, in the same order for all seeds.

    Raises ValueError if the source has no held-out document.
    """
    records = _one_pass(config, source_config, tokenizer, training=False)
    return _pack(config, source_config, records)


def training_documents(
    config: DataConfig, source_config: AnySourceConfig, tokenizer: Tokenizer
) -> Generator[list[int]]:
    """Yields the token ids of each training document of one source, in the same random order for all seeds."""
    records = _one_pass(config, source_config, tokenizer, training=True)
    with contextlib.closing(iter(records)) as opened:
        for record in opened:
            yield record.token_ids.tolist()


def document_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of a text and the end-of-document token, which is predicted like any other."""
    return [*tokenizer.encode(text), tokenizer.eos_id]


def _open(
    config: DataConfig,
    source_config: AnySourceConfig,
    tokenizer: Tokenizer,
    *,
    training: bool,
) -> Items:
    """Opens a source. Raises ValueError if the split has no document, because an endless filter would hang."""
    fraction = config.held_out_fraction
    if isinstance(source_config, ChatSourceConfig):
        length = config.sequence_length
        return source_config.open(tokenizer, fraction, training=training, row=length)
    if isinstance(source_config, TaskSourceConfig):
        return source_config.open(tokenizer, fraction, training=training)
    documents = open_documents(source_config)
    if source_config.kind == "text" and len(documents) == 1 and fraction:
        # A single text is divided by its passages, because no fraction of one document can be held out.
        documents = open_documents(dataclasses.replace(source_config, kind="books"))
    for index in range(len(documents)):
        if _part_in_split(config, source_config, documents[index], training):
            return documents
    split = "training" if training else "held-out"
    raise ValueError(
        f"source {source_config.name!r} has no {split} document: {len(documents)} document(s), "
        f"{_reason_and_fix(source_config, documents, fraction)}"
    )


def _reason_and_fix(
    source_config: SourceConfig, documents: RandomAccess[Document], fraction: float
) -> str:
    """Returns why a source has no document in a split, and what to change."""
    if not any(documents[index].num_characters for index in range(len(documents))):
        return "all empty; give files with text"
    return f"held_out_fraction {fraction}; add documents, or change the fraction (0: nothing is held out)"


def _part_in_split(config, source_config, document: Document, training: bool) -> Document | None:
    """Returns the part of a document in the split; None: it has none, or the wrong length."""
    if source_config.interleave is None and not source_config.fits(document):
        return None
    return select_split(document, config.held_out_fraction, training=training)


def _records(
    config: DataConfig,
    source_config: AnySourceConfig,
    items: Items,
    order: "grain.MapDataset",
    tokenizer: Tokenizer,
    *,
    training: bool,
) -> "grain.IterDataset":
    """Returns the records of a source's items in an order, with prefetching.

    Documents are reduced to the split and tokenised; records are returned unchanged.
    """
    import grain

    records = order
    if isinstance(source_config, SourceConfig):

        def record(document: Document | None) -> TokenRecord:
            assert document is not None, "the filter drops them"
            try:
                texts = [document_ids(text, tokenizer) for text in document.texts()]
            except ValueError as error:
                start = document.texts()[0][:_MAX_QUOTED]
                raise ValueError(
                    f"source {source_config.name!r}, the document that begins with {start!r}: {error}"
                ) from error
            threads = [plain_record(ids) for ids in texts]
            return threads[0] if len(threads) == 1 else interleave_records(threads, document.chunk)

        records = order.map(lambda item: _part_in_split(config, source_config, item, training))
        records = records.filter(lambda document: document is not None).map(record)
    ahead = min(config.prefetch_documents, _max_prefetch(config, source_config, items))
    threads = config.num_threads if ahead else 0
    records = records.to_iter_dataset(grain.ReadOptions(threads, max(ahead, threads)))
    # A held-out split filters most documents, which should not cause a warning.
    options = grain.experimental.DatasetOptions(filter_warn_threshold_ratio=None)
    return grain.experimental.WithOptionsIterDataset(records, options)


def _max_prefetch(config, source_config, items: Items) -> int:
    """Returns the maximum number of prefetched items: a row of records, or `READ_AHEAD` characters of documents.

    The mean length of documents is estimated from a sample.
    """
    if isinstance(items, RecordSource):
        return max(1, config.sequence_length // items.mean_tokens)
    sample = range(0, len(items), -(-len(items) // 8))
    mean = sum(items[number].num_characters for number in sample) / len(sample)
    return max(1, int(READ_AHEAD / max(mean, source_config.min_characters, 1)))


def _one_pass(config, source_config, tokenizer, *, training: bool) -> "grain.IterDataset":
    """Returns the records of one source, each once."""
    items = _open(config, source_config, tokenizer, training=training)
    # Not the run's seed, because runs with different seeds are compared on the same rows.
    order = _shuffled(items, seed=0)
    return _records(config, source_config, items, order, tokenizer, training=training)


def _shuffled(items: RandomAccess[Document | TokenRecord], seed: int) -> "grain.MapDataset":
    import grain

    return grain.MapDataset.source(items).seed(seed).shuffle()


def _pack(config: DataConfig, source_config, records: "grain.IterDataset") -> "grain.IterDataset":
    # Tasks have one length. A second open row would only create more of them before the first is read.
    open_rows = 1 if isinstance(source_config, TaskSourceConfig) else config.open_rows
    if not isinstance(source_config, SourceConfig):
        records = records.map(functools.partial(_check_fits_row, config.sequence_length))
    return pack(records, config.sequence_length, packing=config.packing, open_rows=open_rows)


def _check_fits_row(length: int, record: TokenRecord) -> TokenRecord:
    """Returns the record. Raises ValueError if a row would split it."""
    if len(record) > length:
        raise ValueError(
            f"a record of {len(record)} tokens exceeds a row of {length}; leave it out"
        )
    return record
