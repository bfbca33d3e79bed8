"""Page table of each slot, on the host. A step sends the device the rows that it reads.

In an engine of several processes only the first one schedules; the others apply the changes of its tables.
"""

import numpy as np
from jaxtyping import Int32

from glm5_jax.inference.scheduler import Sequence
from glm5_jax.inference.shapes import EngineShapes


class PageTables:
    """Page tables of the slots of all data-parallel ranks."""

    def __init__(self, shape: EngineShapes, dp_size: int):
        size = (dp_size, shape.max_num_seqs + 1)
        self._tables = np.zeros((*size, shape.max_pages), np.int32)
        self._num_listed = np.zeros(size, int)  # pages of each slot that are listed
        self._changes: list[np.ndarray] = []  # that are not taken yet

    def list_pages(self, dp_rank: int, sequence: Sequence) -> int:
        """Records a sequence's new pages as changes; returns the number of all its pages."""
        slot, count = sequence.device_slot, len(sequence.pages)
        first = self._num_listed[dp_rank, slot]
        if first < count:
            changes = np.empty((count - first, 4), np.int32)
            changes[:, 0], changes[:, 1] = dp_rank, slot
            changes[:, 2], changes[:, 3] = np.arange(first, count), sequence.pages[first:]
            self._changes.append(changes)
            self._num_listed[dp_rank, slot] = count
        return count

    def restart(self, dp_rank: int, sequence: Sequence) -> int:
        """Records all pages of a sequence in a slot that was another sequence's; returns their number."""
        self._num_listed[dp_rank, sequence.device_slot] = 0
        return self.list_pages(dp_rank, sequence)

    def take_changes(self) -> Int32[np.ndarray, "m 4"]:
        """Returns the recorded changes, (rank, slot, column, page) each, and forgets them."""
        changes, self._changes = self._changes, []
        return np.concatenate(changes) if changes else np.zeros((0, 4), np.int32)

    def apply(self, changes: Int32[np.ndarray, "m 4"]) -> None:
        """Writes changes into the tables."""
        rank, slot, column, page = changes.T
        self._tables[rank, slot, column] = page

    def of_slots(self, slot: Int32[np.ndarray, "x b"], width: int) -> Int32[np.ndarray, "x b n"]:
        """Returns the first `width` columns of the tables of slots."""
        return self._tables[np.arange(len(slot))[:, None], slot, :width]
