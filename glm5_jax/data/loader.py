"""Loads batches of any size from one stream of rows, with exact resume.

The position depends on the stream of rows only, so the batch size may change from step to step (the paper's batch ramp)
and across a restart. So may the number of hosts: the data have `DataConfig.num_shards` shards (by default the initial
number of hosts), each with an equal part of every batch's rows, and a host reads the shards of its rows.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from glm5_jax.data.mixture import (
    AnySourceConfig,
    DataConfig,
    held_out_rows,
    open_training_sources,
    training_rows,
)
from glm5_jax.data.packing import blank_row
from glm5_jax.data.sources import fingerprint
from glm5_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]


class Loader:
    """Loader of endless training batches for one host.

    A batch is a dict of arrays [b, t]: `token_ids`, `segment_ids`, `positions` int32; `loss_mask`, `ce_weight` float32
    (see packing.py).
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

        process_index, process_count: this host, and the number of hosts with separate rows. Raises ValueError for a
        source without training documents, and for a host out of range.
        """
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is {process_index} of process_count {process_count}")
        self._config, self._tokenizer = config, tokenizer
        self._index, self._count = process_index, process_count
        self._sources = open_training_sources(config, tokenizer)
        # Identity of the data that a position refers to.
        self._source_state = {
            "sequence_length": config.sequence_length,
            "tokenizer": tokenizer.fingerprint,
            "sources": {name: fingerprint(source) for name, source in self._sources.items()},
            "shuffle": "sliding window",  # positions of another shuffle cannot be resumed
        }
        self._rows: dict[int, grain.DatasetIterator] = {}
        self._open(config.num_shards or process_count)

    def _open(self, num_shards: int) -> None:
        """Opens the shards that provide this host's rows."""
        self.close()
        self._rows, self._num_shards = {}, num_shards
        shards = _shards_of_host(num_shards, self._index, self._count)
        config = self._config
        if config.num_threads:
            threads = max(1, config.num_threads // len(shards))
            config = dataclasses.replace(config, num_threads=threads)
        for shard in shards:
            rows = training_rows(
                config,
                self._sources,
                self._tokenizer,
                shard=shard,
                num_shards=num_shards,
            )
            self._rows[shard] = iter(rows)

    def next(self, batch_size: int) -> Batch:
        """Returns the next `batch_size` rows of this host as one batch.

        Raises ValueError, in one line, for an invalid document (sources.py), and if the shards cannot have equal parts
        of the rows of all hosts.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        each, rest = divmod(batch_size * self._count, self._num_shards)
        if rest:
            raise ValueError(
                f"a batch of {batch_size * self._count} rows cannot be divided among the {self._num_shards} shards "
                f"of the data; use a multiple of {self._num_shards} rows, or another data.num_shards from the first "
                "step on"
            )
        # Hosts that share a shard each read all of its rows in the batch.
        rows = [next(shard) for shard in self._rows.values() for _ in range(each)]
        first = batch_size * self._index - each * min(self._rows)
        return _stack(rows[first : first + batch_size])

    def state(self) -> dict:
        """Returns this host's part of the position after the last batch, as JSON-serialisable values.

        `rows` holds the position of each shard by its number, so that the parts of all hosts can be joined.
        """
        rows = {str(shard): rows.get_state() for shard, rows in self._rows.items()}
        return copy.deepcopy({**self._source_state, "streams": self._num_shards, "rows": rows})

    def check(self, state: dict) -> None:
        """Raises the ValueError of `restore`, without changing the position.

        It is raised if the joined `state()`s of all hosts belong to other data, another tokenizer or row length. Data
        that differ only outside of the documents of the fingerprints pass.
        """
        for name, have in self._source_state.items():
            if state.get(name) != have:
                raise ValueError(
                    f"the data position was saved with {name} {state.get(name)}, this run has "
                    f"{have}; resume with the same data and tokenizer, or start a new workdir"
                )
        missing = [n for n in range(state["streams"]) if str(n) not in state["rows"]]
        if missing:
            raise ValueError(
                f"the data position lacks shards {missing} of {state['streams']}; join the states of all hosts"
            )

    def restore(self, state: dict) -> None:
        """Moves to the position of the joined `state()`s of all hosts, also after a round trip through JSON.

        The number of hosts may have changed. Raises the ValueError of `check`.
        """
        self.check(state)
        if state["streams"] != self._num_shards:
            self._open(state["streams"])
        for shard, rows in self._rows.items():
            rows.set_state(_tuples(state["rows"][str(shard)]))

    def close(self) -> None:
        """Stops the reading threads; `next` fails afterwards."""
        for rows in self._rows.values():
            rows.close()


def held_out_batches(
    config: DataConfig,
    source: AnySourceConfig,
    tokenizer: Tokenizer,
    batch_size: int,
    *,
    max_rows: int | None = None,
) -> Iterator[Batch]:
    """Yields the held-out batches of one source: finitely many, the same in every call and for every `config.seed`.

    max_rows: maximum number of rows; None: all. The last batch is filled with rows of padding. Reading them scans the
    source, so keep the batches for later use. Raises ValueError if the source has no held-out document.
    """
    rows = itertools.islice(iter(held_out_rows(config, source, tokenizer)), max_rows)
    while batch := list(itertools.islice(rows, batch_size)):
        yield _stack(batch + [blank_row(batch[0])] * (batch_size - len(batch)))


def take_rows(batch: Batch, part: int, num_parts: int) -> Batch:
    """Returns part `part` of `num_parts` equal parts of a batch's rows, such as those of one process."""
    num_rows = len(next(iter(batch.values()))) // num_parts
    rows = slice(num_rows * part, num_rows * (part + 1))
    return {name: values[rows] for name, values in batch.items()}


def _shards_of_host(num_shards: int, index: int, count: int) -> range:
    """Returns the shards that provide a host's rows of a batch.

    Host `index` has the rows from the share index / count on, shard n those from n / num_shards on.
    """
    return range(index * num_shards // count, -(-(index + 1) * num_shards // count))


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _tuples(state: Any) -> Any:
    """Converts lists back to tuples, because JSON has no tuples, and Grain compares its state with tuples."""
    if isinstance(state, dict):
        return {name: _tuples(value) for name, value in state.items()}
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state
