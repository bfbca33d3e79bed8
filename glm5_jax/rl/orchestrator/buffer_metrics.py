"""Metrics of the group buffer: what became of groups and members, and how stale those are that were taken."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

_COUNTS = (
    *("groups/taken", "groups/repaired", "groups/failed", "groups/rolled_back", "groups/stale"),
    *("groups/cancelled", "groups/given_up", "groups/unknown", "groups/torn"),
    *("members/taken", "members/failed", "members/rolled_back", "members/stale", "members/padded"),
    "members/lost",
    *("attempts/ended", "attempts/failed"),
)


class BufferMetrics:
    """Counts of a group buffer since it was opened, and those of each batch that is not yet trained on."""

    def __init__(self):
        self._counts: collections.Counter[str] = collections.Counter()
        self._counts_at_last_batch = self._counts.copy()
        self._counts_by_step: dict[int, collections.Counter[str]] = {}
        self._staleness: collections.Counter[int] = collections.Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Adds to a count."""
        self._counts[name] += count

    def add_excluded(self, reasons: Iterable[str | None]) -> None:
        """Counts members by why they are excluded; None: not excluded."""
        self._counts.update(f"members/{name}" for name in reasons if name)

    def add_taken(self, reasons: Sequence[str | None], staleness: Sequence[int]) -> None:
        """Counts a group of a new batch, and its members.

        - reasons: why each member is excluded; None: not excluded.
        - staleness: staleness of each valid member, in steps.
        """
        num_padded = len(reasons) - len(staleness)
        self.add_excluded(reasons)
        self._counts["groups/taken"] += 1
        self._counts["groups/repaired"] += num_padded > 0
        self._counts["members/padded"] += num_padded
        self._counts["members/taken"] += len(staleness)
        self._staleness.update(staleness)

    def close_batch(self, step: int) -> None:
        """Assigns the counts since the previous batch to the batch of `step`."""
        self._counts_by_step[step] = self._counts - self._counts_at_last_batch
        self._counts_at_last_batch = self._counts.copy()

    def batch_counts(self, step: int) -> dict[str, int]:
        """Returns the nonzero counts that `close_batch` assigned to a batch; empty for an unknown batch."""
        return dict(self._counts_by_step.get(step, {}))

    def remove_batch(self, step: int) -> None:
        """Removes the counts of a batch that was trained on; an unknown one is ignored."""
        self._counts_by_step.pop(step, None)

    def clear_batches(self) -> None:
        """Removes the counts of all batches."""
        self._counts_by_step.clear()

    def summary(self) -> dict[str, Any]:
        """Returns the metrics by name: all counts, and statistics of the staleness of taken members."""
        counts, histogram = self._counts, self._staleness
        members, padded = counts["members/taken"], counts["members/padded"]
        return {
            **{name: counts[name] for name in _COUNTS},
            "padded_share": padded / max(members + padded, 1),
            "staleness/mean": sum(k * n for k, n in histogram.items()) / max(members, 1),
            "staleness/max": max(histogram, default=0),
            "staleness/histogram": dict(sorted(histogram.items())),
        }
