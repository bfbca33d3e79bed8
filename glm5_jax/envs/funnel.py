"""Counts what each stage of a pipeline keeps and drops, one JSON line per stage.

{"stage": "size", "in": 40, "out": 31, "dropped_by_reason": {"binary hunk": 2, "more than 10 code files": 7}}

The counts of a stage add up, and a stage receives what the one before it let through.
"""

import collections
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

_Item = TypeVar("_Item")


class FunnelStage(
    msgspec.Struct, frozen=True, kw_only=True, rename={"num_in": "in", "num_out": "out"}
):
    """Counts of one stage.

    Attributes:
      stage: name of the stage.
      num_in, num_out: number of items before and after it.
      dropped_by_reason: number of dropped items by reason.
    """

    stage: str
    num_in: int
    num_out: int
    dropped_by_reason: dict[str, int]


class Funnel:
    """Stages that a list of items passes one after the other."""

    def __init__(self):
        self.stages: list[FunnelStage] = []

    def run(
        self, stage: str, items: Iterable[_Item], reason: Callable[[_Item], str | None]
    ) -> list[_Item]:
        """Returns the items for which `reason` is None, and records the counts.

        reason: why an item is dropped, in words without numbers or names of the item, so that equal reasons are equal.
        """
        remaining: list[_Item] = []
        dropped: collections.Counter[str] = collections.Counter()
        num_in = 0
        for item in items:
            num_in += 1
            why = reason(item)
            if why is None:
                remaining.append(item)
            else:
                dropped[why] += 1
        self.add(stage, num_in, len(remaining), dropped)
        return remaining

    def add(self, stage: str, num_in: int, num_out: int, dropped_by_reason) -> None:
        """Records the counts of a stage that ran elsewhere. Raises ValueError if they do not add up."""
        counts = FunnelStage(
            stage=stage,
            num_in=num_in,
            num_out=num_out,
            dropped_by_reason=dict(sorted(dropped_by_reason.items())),
        )
        check_funnel([*self.stages, counts])
        self.stages.append(counts)

    def write(self, path: str | os.PathLike) -> None:
        """Appends the stages to a JSON-lines file."""
        with open(path, "ab") as file:
            file.writelines(msgspec.json.encode(stage) + b"\n" for stage in self.stages)


def read_funnel(path: str | os.PathLike) -> list[FunnelStage]:
    """Reads and checks the stages in a JSON-lines file."""
    with open(path, "rb") as file:
        stages = [msgspec.json.decode(line, type=FunnelStage) for line in file if line.strip()]
    check_funnel(stages)
    return stages


def check_funnel(stages: Sequence[FunnelStage]) -> None:
    """Raises ValueError if the counts of a stage do not add up, or do not follow from the stage before."""
    previous = None
    for stage in stages:
        dropped = sum(stage.dropped_by_reason.values())
        if min(stage.num_in, stage.num_out, dropped) < 0 or stage.num_in != stage.num_out + dropped:
            raise ValueError(
                f"stage {stage.stage}: {stage.num_in} in is not {stage.num_out} out and {dropped} dropped"
            )
        if previous is not None and previous.num_out != stage.num_in:
            raise ValueError(
                f"stage {stage.stage} has {stage.num_in} in, and {previous.stage} has {previous.num_out} out"
            )
        previous = stage
