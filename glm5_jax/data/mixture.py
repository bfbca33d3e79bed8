"""Weighted mixture of sources: the endless stream of training rows, and the held-out rows.

The weights are shares of rows, so of tokens: every source is shuffled and packed by itself, and the
rows are interleaved in fixed proportions. Documents are shuffled over the whole epoch and rows once
more over a window, since the rows of one long document follow each other and would fill a batch.
All of it follows from the seed alone.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator

import grain

from glm5_jax.data.packing import PACKINGS, pack
from glm5_jax.data.record import TokenRecord, plain_record
from glm5_jax.data.sources import Source, SourceConfig, held_out, open_source
from glm5_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on. Construction refuses contradictory values (ValueError).

    Attributes:
      sources: the mixture; names (kind and path) must differ.
      sequence_length: tokens of a row (4096 in pre-training: GLM-4.5 report, section 2.3).
      seed: of the order of documents and rows.
      shuffle_window: tokens of each source over which rows are shuffled; held in memory, and read
        again on resuming (a second or so at 2**18).
      packing: "concat" or "best_fit" (packing.py).
      open_rows: rows that best-fit packing fills at a time; more pad less. 64 at 4096 tokens left
        4% padding on the shipped texts, 16 left 7%.
      held_out_fraction: share of the documents kept for evaluation; 0 trains on all.
      num_threads: threads that read and tokenise ahead; 0 does it when a batch is asked for.
      prefetch_documents: how many documents of each source are tokenised ahead.
    """

    sources: tuple[SourceConfig, ...] = (SourceConfig("shakespeare"), SourceConfig("stdlib"))
    sequence_length: int = 4096
    seed: int = 0
    shuffle_window: int = 2**18
    packing: str = "concat"
    open_rows: int = 64
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
        minima = {"shuffle_window": 0, "open_rows": 1, "num_threads": 0, "prefetch_documents": 0}
        for name, least in minima.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


def open_training_sources(config: DataConfig) -> dict[str, Source]:
    """Opens the sources by name; ValueError, before any work, if one has no training document."""
    return {source.name: _open(config, source, training=True) for source in config.sources}


def training_rows(
    config: DataConfig,
    sources: dict[str, Source],
    tokenizer: Tokenizer,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """Endless rows (packing.py) of the mixture for one of `process_count` hosts.

    The hosts take disjoint documents of each epoch, and every epoch has an order of its own.
    `sources` are those of `open_training_sources(config)`. ValueError for a host out of range.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index} of process_count {process_count}")
    rows = {}
    for name, source in sources.items():
        seed = zlib.crc32(f"{config.seed} {name}".encode())
        documents = (
            grain.MapDataset.source(source)
            .seed(seed)
            .shuffle()
            .repeat()[process_index::process_count]
            .filter(lambda text: text and not held_out(text, config.held_out_fraction))
        )
        rows[name] = grain.experimental.WindowShuffleIterDataset(
            _pack(config, documents, tokenizer),
            window_size=max(1, config.shuffle_window // config.sequence_length),
            seed=seed,
        )
    weights = {source.name: source.weight for source in config.sources}
    return grain.IterDataset.mix(rows, weights)


def held_out_rows(
    config: DataConfig, source_config: SourceConfig, tokenizer: Tokenizer
) -> grain.IterDataset:
    """Rows of one source's held-out documents, once over, in one order for all seeds.

    Raises ValueError if the source has no held-out document.
    """
    documents = (
        grain.MapDataset.source(_open(config, source_config, training=False))
        .seed(0)  # not the run's seed: runs that differ in it are compared on the same rows
        .shuffle()
        .filter(lambda text: text and held_out(text, config.held_out_fraction))
    )
    return _pack(config, documents, tokenizer)


def training_documents(
    config: DataConfig, source_config: SourceConfig, tokenizer: Tokenizer
) -> Iterator[list[int]]:
    """Token ids of each training document of one source, once, shuffled alike for all seeds."""
    documents = (
        grain.MapDataset.source(_open(config, source_config, training=True))
        .seed(0)
        .shuffle()
        .filter(lambda text: text and not held_out(text, config.held_out_fraction))
        .map(lambda text: document_ids(text, tokenizer))
    )
    with contextlib.closing(iter(_read_ahead(config, documents))) as ids:
        yield from ids


def document_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text and the end-of-document token, which is predicted like any other."""
    return [*tokenizer.encode(text), tokenizer.eos_id]


def _open(config: DataConfig, source_config: SourceConfig, *, training: bool) -> Source:
    """Opens a source and makes sure that the split has a document: an endless filter would hang."""
    source = open_source(source_config)
    fraction = config.held_out_fraction
    for index in range(len(source)):
        text = source[index]
        if text and held_out(text, fraction) != training:
            return source
    split = "training" if training else "held-out"
    raise ValueError(
        f"source {source_config.name!r} has no {split} document: {len(source)} document(s), "
        f"held_out_fraction {fraction}; add documents or change the fraction"
    )


def _pack(
    config: DataConfig, documents: grain.MapDataset, tokenizer: Tokenizer
) -> grain.IterDataset:
    def record(text: str) -> TokenRecord:
        return plain_record(document_ids(text, tokenizer))

    records = _read_ahead(config, documents.map(record))
    return pack(records, config.sequence_length, packing=config.packing, open_rows=config.open_rows)


def _read_ahead(config: DataConfig, documents: grain.MapDataset) -> grain.IterDataset:
    threads = config.num_threads if config.prefetch_documents else 0
    documents = documents.to_iter_dataset(
        grain.ReadOptions(threads, max(config.prefetch_documents, threads))
    )
    # A held-out split is mostly filtered away, which is no reason for a warning.
    options = grain.experimental.DatasetOptions(filter_warn_threshold_ratio=None)
    return grain.experimental.WithOptionsIterDataset(documents, options)
