"""`Loader`: batches of any size from one stream of rows, resumable to the bit.

The position is a property of the row stream alone, so the batch size may change from step to step
(the paper's batch ramp) and across a restart. So may the number of hosts: the data are dealt out to
streams (as many as there were hosts at first, if `DataConfig.streams` does not say), each with equal
parts of every batch's rows, and a host reads those streams that its own rows are of.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import grain
import numpy as np

from glm5_jax.data.mixture import (
    DataConfig,
    held_out_rows,
    open_training_sources,
    training_rows,
)
from glm5_jax.data.packing import blank_row
from glm5_jax.data.sources import SourceConfig, fingerprint
from glm5_jax.text.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]


class Loader:
    """Endless training batches of one host.

    A batch is a dict of arrays [b, t]: `token_ids`, `segment_ids`, `positions` int32; `loss_mask`,
    `ce_weight` float32 (packing.py says what they hold).
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Opens the sources, and reads some documents of each (`sources.fingerprint`).

        Raises ValueError for a source that has no training document, and for a host out of range.
        """
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is {process_index} of process_count {process_count}")
        self._config, self._tokenizer = config, tokenizer
        self._index, self._count = process_index, process_count
        self._sources = open_training_sources(config, tokenizer)
        # What the position refers to: it means nothing on other data.
        self._stream = {
            "sequence_length": config.sequence_length,
            "tokenizer": tokenizer.fingerprint,
            "sources": {name: fingerprint(source) for name, source in self._sources.items()},
        }
        self._rows: dict[int, grain.DatasetIterator] = {}
        self._open(config.streams or process_count)

    def _open(self, num_streams: int) -> None:
        """Opens those of so many streams that this host's rows are of."""
        self.close()
        self._rows, self._num_streams = {}, num_streams
        own = _own_streams(num_streams, self._index, self._count)
        config = self._config
        if config.num_threads:
            threads = max(1, config.num_threads // len(own))
            config = dataclasses.replace(config, num_threads=threads)
        for stream in own:
            rows = training_rows(
                config,
                self._sources,
                self._tokenizer,
                stream=stream,
                num_streams=num_streams,
            )
            self._rows[stream] = iter(rows)

    def next(self, batch_size: int) -> Batch:
        """The next `batch_size` rows (of this host) as one batch.

        ValueError, in one line, names a document that holds no text (sources.py), or says that the streams cannot
        have equal parts of all hosts' rows.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        each, rest = divmod(batch_size * self._count, self._num_streams)
        if rest:
            raise ValueError(
                f"a batch of {batch_size * self._count} rows cannot be dealt out to the {self._num_streams} streams "
                f"that the data are read in; use a multiple of {self._num_streams} rows, or other data.streams from "
                "the first step on"
            )
        # Where hosts share a stream, each reads all that the batch has of it.
        rows = [next(stream) for stream in self._rows.values() for _ in range(each)]
        first = batch_size * self._index - each * min(self._rows)
        return _stack(rows[first : first + batch_size])

    def state(self) -> dict:
        """The position after the last batch, as values that JSON can hold: this host's part of it, under the streams'
        numbers in `rows`, where hosts' parts are joined."""
        rows = {str(stream): rows.get_state() for stream, rows in self._rows.items()}
        return copy.deepcopy({**self._stream, "streams": self._num_streams, "rows": rows})

    def check(self, state: dict) -> None:
        """Refuses what `restore` would refuse; nothing moves.

        ValueError if the joined `state()`s of all hosts belong to other data, another tokenizer or row length.
        Data that differ only outside of the fingerprints' documents pass.
        """
        for name, have in self._stream.items():
            if state.get(name) != have:
                raise ValueError(
                    f"the data position was saved with {name} {state.get(name)}, this run has "
                    f"{have}; resume with the same data and tokenizer, or start a new workdir"
                )
        missing = [n for n in range(state["streams"]) if str(n) not in state["rows"]]
        if missing:
            raise ValueError(
                f"the data position lacks streams {missing} of {state['streams']}; join the states of all hosts"
            )

    def restore(self, state: dict) -> None:
        """Goes to the position of the joined `state()`s of all hosts, of which there may have been more or fewer, also
        of one that went through JSON.

        ValueError as `check`.
        """
        self.check(state)
        if state["streams"] != self._num_streams:
            self._open(state["streams"])
        for stream, rows in self._rows.items():
            rows.set_state(_tuples(state["rows"][str(stream)]))

    def close(self) -> None:
        """Stops the reading threads; `next` fails from then on."""
        for rows in self._rows.values():
            rows.close()


def held_out_batches(
    config: DataConfig,
    source: SourceConfig,
    tokenizer: Tokenizer,
    batch_size: int,
    *,
    max_rows: int | None = None,
) -> Iterator[Batch]:
    """Held-out batches of one source: finite, the same on every call, whatever `config.seed`.

    At most `max_rows` rows; rows that are all padding fill the last batch. Reading them scans the
    source, so keep the batches if they are needed again. Raises ValueError if the source has no
    held-out document.
    """
    rows = itertools.islice(iter(held_out_rows(config, source, tokenizer)), max_rows)
    while batch := list(itertools.islice(rows, batch_size)):
        yield _stack(batch + [blank_row(batch[0])] * (batch_size - len(batch)))


def _own_streams(num_streams: int, index: int, count: int) -> range:
    """The streams that a host's rows of a batch are of: host `index` has the rows from index / count on, stream n those
    from n / num_streams on."""
    return range(index * num_streams // count, -(-(index + 1) * num_streams // count))


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _tuples(state: object) -> object:
    """JSON turns tuples into lists; Grain compares its state with tuples."""
    if isinstance(state, dict):
        return {name: _tuples(value) for name, value in state.items()}
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state
