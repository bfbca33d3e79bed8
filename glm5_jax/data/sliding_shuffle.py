"""Shuffles an endless stream over a sliding window, with exact resume.

Every element gets a random delay below the window, and elements leave in the order of their index plus delay. So the next
elements always come from the last `window` ones, in the same proportions at every point. A shuffle by separate windows has
no such steady state: all documents change at its border, where the training loss rises, because the model has adapted to
the documents of the window.
"""

import collections
import copy
import dataclasses
import heapq
import math
import random
from typing import Any

import grain

_NUM_BLOCKS = 8  # of a window; a resume reads at most a window and a block again


class SlidingShuffleIterDataset(grain.IterDataset):
    """Shuffles the elements of a dataset over a sliding window.

    window: maximum number of later elements that overtake one; below 2 the order stays. About half as many are held in
    memory, and are read before the first element leaves. The order depends on the window and the seed only.
    """

    def __init__(self, parent: grain.IterDataset, *, window: int, seed: int):
        super().__init__(parent)
        self._window, self._seed = max(1, window), seed

    def __iter__(self) -> grain.DatasetIterator:
        return _SlidingShuffleIterator(iter(self._parent), self._window, self._seed)


@dataclasses.dataclass
class _Block:
    """Consecutive elements of the parent.

    Attributes:
      start: index of the first element.
      state: state of the parent before that element.
      remaining: number of elements that have not left, read or not.
    """

    start: int
    state: dict[str, Any]
    remaining: int


class _SlidingShuffleIterator(grain.DatasetIterator):
    """Iterator of `SlidingShuffleIterDataset`. Its state holds no elements: a resume reads them again."""

    def __init__(self, parent: grain.DatasetIterator, window: int, seed: int):
        super().__init__(parent)
        self._window, self._seed = window, seed
        self._block_size = -(-window // _NUM_BLOCKS)
        self._restart(0, (-1.0, -1))

    def _restart(self, index: int, last: tuple[float, int]) -> None:
        """Continues at the first element of a block, which the parent returns next.

        last: key and index of the last element that left.
        """
        self._next, self._last = index, last
        self._held: list[tuple[float, int, Any]] = []  # heap of (key, index, element)
        self._is_exhausted = False
        self._blocks: collections.deque[_Block] = collections.deque()
        self._add_block()

    def __next__(self):
        self._assert_not_closed()
        # An element leaves once no later one can have a smaller key.
        while not self._is_exhausted and not (self._held and self._held[0][0] <= self._next):
            self._read()
        if not self._held:
            raise StopIteration
        key, index, element = heapq.heappop(self._held)
        self._last = key, index
        self._remove(index)
        return element

    def get_state(self) -> dict[str, Any]:
        first = self._blocks[0]
        return {
            "parent": first.state,
            "start": first.start,
            "next": self._next,
            "last": self._last,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(copy.deepcopy(state["parent"]))
        self._restart(state["start"], tuple(state["last"]))
        while self._next < state["next"] and not self._is_exhausted:
            self._read()

    def _read(self) -> None:
        """Reads the next element, and holds it unless it has left before a resume."""
        try:
            element = next(self._parent)
        except StopIteration:
            self._is_exhausted = True
            return
        index, self._next = self._next, self._next + 1
        if self._next % self._block_size == 0:
            self._add_block()
        key = self._key(index)
        if (key, index) > self._last:
            heapq.heappush(self._held, (key, index, element))
        else:
            self._remove(index)

    def _add_block(self) -> None:
        """Notes that a block begins at the next element."""
        state = copy.deepcopy(self._parent.get_state())
        self._blocks.append(_Block(self._next, state, self._block_size))

    def _remove(self, index: int) -> None:
        """Counts an element that has left, and drops the first blocks if all their elements have left."""
        self._blocks[(index - self._blocks[0].start) // self._block_size].remaining -= 1
        while not self._blocks[0].remaining:
            self._blocks.popleft()

    def _key(self, index: int) -> float:
        """Returns the position at which an element leaves: its index plus its delay."""
        share = random.Random(f"{self._seed} {index}").random()
        first = self._window // 2
        if index >= first:
            return index + self._window * share
        # The first elements stand for those that an earlier stream would have left: half a window, fewer from step to step.
        return first + self._window * (1 - math.sqrt(1 - share))
