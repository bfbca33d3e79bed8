"""Prefixes of token ids whose pages are still there: what a request need not compute again.

A tree of whole pages: a node is a page's tokens behind those of its ancestors. The tree holds each of its
pages once (pages.py); a page that nobody else holds can be given back, the least recently used first and
leaves before what they stand on.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Sequence

from glm5_jax.inference.pages import PagePool


@dataclasses.dataclass(eq=False)
class _Node:
    page: int
    tokens: tuple[int, ...]
    parent: "_Node | None"
    children: dict[tuple[int, ...], "_Node"] = dataclasses.field(default_factory=dict)
    used: int = 0  # when it was last matched or inserted


class PrefixCache:
    """Finds and keeps the pages of prefixes. space: prefixes of different spaces (versions of the weights, say)
    share nothing."""

    def __init__(self, pool: PagePool, page_size: int):
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be positive")
        self._pool, self._page_size = pool, page_size
        self._roots: dict[Hashable, _Node] = {}
        self._clock = itertools.count(1)
        # (used, number, leaf); a leaf that was used since has a later entry.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._numbers = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        """Pages that it keeps."""
        return self._size

    def match(self, ids: Sequence[int], space: Hashable = None) -> list[int]:
        """Pages of the longest known beginning of ids in whole pages, held once more for the caller."""
        found = self._walk(ids, space)
        self._touch(found)
        pages = [node.page for node in found]
        self._pool.hold(pages)
        return pages

    def count(self, ids: Sequence[int], space: Hashable = None) -> int:
        """How many pages `match` would find; nothing is held."""
        return len(self._walk(ids, space))

    def insert(self, ids: Sequence[int], pages: Sequence[int], space: Hashable = None) -> list[int]:
        """Keeps the pages of ids, as many as are whole, and returns those that now stand for them: where a
        prefix is known already, its page stays, and the one given is not kept.

        ValueError if there are fewer pages than whole ones in ids.
        """
        parts = self._parts(ids)
        if len(pages) < len(parts):
            raise ValueError(f"{len(parts)} pages of tokens came with {len(pages)} pages; give all")
        node = self._roots.setdefault(space, _Node(-1, (), None))
        path = []
        for part, page in zip(parts, pages):
            child = node.children.get(part)
            if child is None:
                self._pool.hold([page])
                child = node.children[part] = _Node(page, part, node)
                self._size += 1
            path.append(child)
            node = child
        self._touch(path)
        return [node.page for node in path]

    def evict(self, count: int) -> int:
        """Lets go of up to so many pages that nobody else holds; how many those were."""
        held, freed = [], 0
        while freed < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            used, _, node = entry
            if node.children or node.used != used or node.parent is None:
                continue
            if self._pool.holders(node.page) > 1:
                held.append(entry)
                continue
            freed += 1
            self._remove(node)
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return freed

    def clear(self, space: Hashable = None) -> None:
        """Forgets a space; pages that somebody holds stay theirs."""
        root = self._roots.pop(space, None)
        waiting = list(root.children.values()) if root else []
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            node.parent = None
            self._pool.drop([node.page])
            self._size -= 1

    def _parts(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self._page_size
        whole = len(ids) // size * size
        return [tuple(ids[first : first + size]) for first in range(0, whole, size)]

    def _walk(self, ids: Sequence[int], space: Hashable) -> list[_Node]:
        found, node, size = [], self._roots.get(space), self._page_size
        for first in range(0, len(ids) // size * size, size):
            node = node and node.children.get(tuple(ids[first : first + size]))
            if node is None:
                break
            found.append(node)
        return found

    def _touch(self, path: list[_Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.used = now
        if path and not path[-1].children:
            self._push(path[-1])

    def _push(self, node: _Node) -> None:
        if len(self._leaves) > 2 * self._size + 64:  # mostly entries of leaves that were used since
            self._leaves = [
                entry
                for entry in self._leaves
                if entry[2].parent and not entry[2].children and entry[2].used == entry[0]
            ]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.used, next(self._numbers), node))

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        del parent.children[node.tokens]
        node.parent = None
        self._pool.drop([node.page])
        self._size -= 1
        if parent.parent is not None and not parent.children:
            self._push(parent)
