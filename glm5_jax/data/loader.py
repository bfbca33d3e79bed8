"""`Loader`: batches of any size from one stream of rows, resumable to the bit.

The position is a property of the row stream alone, so the batch size may change from step to step
(the paper's batch ramp) and across a restart.
"""

import copy
import itertools
from collections.abc import Iterator

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
        sources = open_training_sources(config, tokenizer)
        self._rows = iter(
            training_rows(
                config,
                sources,
                tokenizer,
                process_index=process_index,
                process_count=process_count,
            )
        )
        # What the position refers to: it means nothing on other data or among other hosts.
        self._stream = {
            "process": f"{process_index} of {process_count}",
            "sequence_length": config.sequence_length,
            "tokenizer": tokenizer.fingerprint,
            "sources": {name: fingerprint(source) for name, source in sources.items()},
        }

    def next(self, batch_size: int) -> Batch:
        """The next `batch_size` rows (of this host) as one batch.

        ValueError, in one line, names a document that holds no text (sources.py).
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        return _stack([next(self._rows) for _ in range(batch_size)])

    def state(self) -> dict:
        """The position after the last batch, as values that JSON can hold."""
        return copy.deepcopy({**self._stream, "rows": self._rows.get_state()})

    def check(self, state: dict) -> None:
        """Refuses what `restore` would refuse; nothing moves.

        ValueError if the `state()` belongs to other data, another tokenizer, row length or host.
        Data that differ only outside of the fingerprints' documents pass.
        """
        for name, have in self._stream.items():
            if state.get(name) != have:
                raise ValueError(
                    f"the data position was saved with {name} {state.get(name)}, this run has "
                    f"{have}; resume with the same data, tokenizer and hosts, or start a new workdir"
                )

    def restore(self, state: dict) -> None:
        """Goes to the position of a `state()`, also of one that went through JSON.

        ValueError as `check`.
        """
        self.check(state)
        self._rows.set_state(_tuples(state["rows"]))

    def close(self) -> None:
        """Stops the reading threads; `next` fails from then on."""
        self._rows.close()


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


def _stack(rows: list[Batch]) -> Batch:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _tuples(state: object) -> object:
    """JSON turns tuples into lists; Grain compares its state with tuples."""
    if isinstance(state, dict):
        return {name: _tuples(value) for name, value in state.items()}
    return tuple(map(_tuples, state)) if isinstance(state, list | tuple) else state
