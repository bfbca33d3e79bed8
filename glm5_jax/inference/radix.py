"""Cache of prefixes: a radix tree that maps token ids to the pages of sequences computed before.

A node is one full page of tokens, after those of its ancestors. The tree holds each of its pages once (pages.py). Pages
without another holder can be evicted: the least recently used first, and children before their parents.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Sequence

from glm5_jax.inference.pages import PagePool


@dataclasses.dataclass(eq=False, kw_only=True)
class _Node:
    """Page of the tree."""

    page: int
    tokens: tuple[int, ...]
    parent: "_Node | None"
    children: dict[tuple[int, ...], "_Node"] = dataclasses.field(default_factory=dict)
    last_used: int = 0  # time of the last match or insertion


class PrefixCache:
    """Cache of the pages of prefixes. Prefixes of different namespaces, such as weight versions, share nothing."""

    def __init__(self, pool: PagePool, page_size: int):
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be positive")
        self._pool, self._page_size = pool, page_size
        self._roots: dict[Hashable, _Node] = {}
        self._clock = itertools.count(1)
        # (last_used, number, leaf). An entry is stale if its leaf was used after it.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._numbers = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        """Returns the number of pages of the tree."""
        return self._size

    def match(self, ids: Sequence[int], namespace: Hashable = None) -> list[int]:
        """Returns the pages of the longest cached prefix of ids, with one more holder: the caller."""
        path = self._walk(ids, namespace)
        self._touch(path)
        pages = [node.page for node in path]
        self._pool.hold(pages)
        return pages

    def count(self, ids: Sequence[int], namespace: Hashable = None) -> int:
        """Returns the number of pages that `match` would return."""
        return len(self._walk(ids, namespace))

    def insert(
        self, ids: Sequence[int], pages: Sequence[int], namespace: Hashable = None
    ) -> list[int]:
        """Adds the full pages of ids and returns the tree's pages of them.

        Where a prefix is cached already, its page stays and the argument's is not added. Raises ValueError if there are
        fewer pages than ids fill.
        """
        parts = self._parts(ids)
        if len(pages) < len(parts):
            raise ValueError(f"{len(parts)} pages of tokens came with {len(pages)} pages; give all")
        node = self._roots.setdefault(namespace, _Node(page=-1, tokens=(), parent=None))
        path = []
        for part, page in zip(parts, pages):
            child = node.children.get(part)
            if child is None:
                self._pool.hold([page])
                child = node.children[part] = _Node(page=page, tokens=part, parent=node)
                self._size += 1
            path.append(child)
            node = child
        self._touch(path)
        return [node.page for node in path]

    def evict(self, count: int) -> int:
        """Evicts up to `count` pages without another holder. Returns how many were evicted."""
        held, num_evicted = [], 0
        while num_evicted < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            last_used, _, node = entry
            if node.children or node.last_used != last_used or node.parent is None:
                continue
            if self._pool.holders(node.page) > 1:
                held.append(entry)
                continue
            num_evicted += 1
            self._remove(node)
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return num_evicted

    def clear(self, namespace: Hashable = None) -> None:
        """Removes a namespace. Pages with other holders stay allocated."""
        root = self._roots.pop(namespace, None)
        stack = list(root.children.values()) if root else []
        while stack:
            node = stack.pop()
            stack += node.children.values()
            node.parent = None
            self._pool.drop([node.page])
            self._size -= 1

    def _parts(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self._page_size
        end = len(ids) // size * size
        return [tuple(ids[first : first + size]) for first in range(0, end, size)]

    def _walk(self, ids: Sequence[int], namespace: Hashable) -> list[_Node]:
        path, node, size = [], self._roots.get(namespace), self._page_size
        for first in range(0, len(ids) // size * size, size):
            node = node and node.children.get(tuple(ids[first : first + size]))
            if node is None:
                break
            path.append(node)
        return path

    def _touch(self, path: list[_Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.last_used = now
        if path and not path[-1].children:
            self._push(path[-1])

    def _push(self, node: _Node) -> None:
        if len(self._leaves) > 2 * self._size + 64:  # most entries are stale
            self._leaves = [
                entry
                for entry in self._leaves
                if entry[2].parent and not entry[2].children and entry[2].last_used == entry[0]
            ]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.last_used, next(self._numbers), node))

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None, "a root has no page"
        del parent.children[node.tokens]
        node.parent = None
        self._pool.drop([node.page])
        self._size -= 1
        if parent.parent is not None and not parent.children:
            self._push(parent)
