"""Tests the page pool and the prefix cache against plain dictionaries, in random programs."""

import random
import tracemalloc

import pytest

from glm5_jax.inference.pages import OutOfPages, PagePool
from glm5_jax.inference.radix import PrefixCache


@pytest.mark.parametrize("seed", range(5))
def test_page_pool_matches_oracle_in_random_program(seed):
    r, pool, holders = random.Random(seed), PagePool(17), {}
    for _ in range(500):
        held_pages = [page for page, count in holders.items() for _ in range(count)]
        action = r.choice(["take", "take", "hold", "drop", "drop"])
        if action == "take":
            count = r.randrange(5)
            if count > 17 - len(holders):
                with pytest.raises(OutOfPages, match=f"{count} pages are needed"):
                    pool.take(count)
            else:
                new_pages = pool.take(count)
                assert len(set(new_pages)) == count and not set(new_pages) & set(holders)
                holders |= dict.fromkeys(new_pages, 1)
        elif held_pages and action == "hold":
            pages = r.choices(held_pages, k=r.randrange(4))
            pool.hold(pages)
            for page in pages:
                holders[page] += 1
        elif held_pages:
            pages = r.sample(held_pages, r.randrange(min(5, len(held_pages)) + 1))
            pool.drop(pages)
            for page in pages:
                holders[page] -= 1
            holders = {page: count for page, count in holders.items() if count}
        assert pool.num_free == 17 - len(holders)
        assert {page: pool.holders(page) for page in range(17) if pool.holders(page)} == holders


def test_rejects_invalid_use_of_page_pool():
    with pytest.raises(ValueError, match="num_pages is 0"):
        PagePool(0)
    pool = PagePool(2)
    with pytest.raises(ValueError, match="count is -1"):
        pool.take(-1)
    [page] = pool.take(1)
    for wrong in (page + 1, -1, 7):
        for use in (pool.hold, pool.drop):
            with pytest.raises(ValueError, match=f"page {wrong} is not held"):
                use([wrong])
    with pytest.raises(ValueError, match="dropped more often than it is held"):
        pool.drop([page, page])


class Oracle:
    """Prefix cache as a dictionary: {(space, ids): [page, time of last use]}."""

    def __init__(self, size):
        self.size, self.known, self.clock = size, {}, 0

    def prefixes(self, ids):
        return [tuple(ids[:end]) for end in range(self.size, len(ids) + 1, self.size)]

    def match(self, ids, space):
        self.clock += 1
        pages = []
        for prefix in self.prefixes(ids):
            if (space, prefix) not in self.known:
                break
            self.known[space, prefix][1] = self.clock
            pages.append(self.known[space, prefix][0])
        return pages

    def insert(self, ids, pages, space):
        self.clock += 1
        for prefix, page in zip(self.prefixes(ids), pages):
            self.known.setdefault((space, prefix), [page, 0])[1] = self.clock
        return [self.known[space, prefix][0] for prefix in self.prefixes(ids)]

    def evict(self, count, holders):
        freed = []
        while len(freed) < count:
            leaves = [
                (used, key, page)
                for key, (page, used) in self.known.items()
                if holders(page) == 1
                and not any(
                    s == key[0] and len(p) > len(key[1]) and p[: len(key[1])] == key[1]
                    for s, p in self.known
                )
            ]
            if not leaves:
                break
            _, key, page = min(leaves)
            del self.known[key]
            freed.append(page)
        return freed


@pytest.mark.parametrize("seed", range(10))
def test_prefix_cache_matches_oracle_in_random_program(seed):
    r, size = random.Random(seed), 2
    pool, oracle = PagePool(40), Oracle(size)
    cache = PrefixCache(pool, size)
    running = []  # pages that requests hold
    for _ in range(300):
        ids = [r.randrange(3) for _ in range(r.randrange(12))]
        space = r.choice("ab")
        action = r.choice(
            ["request", "request", "end", "evict", "clear"]
            if r.random() < 0.1
            else ["request", "end", "evict"]
        )
        if action == "request":
            pages = cache.match(ids, space)
            assert pages == oracle.match(ids, space)
            more = len(ids) // size - len(pages)
            if more > pool.num_free:
                pool.drop(pages)
                continue
            pages += pool.take(more)
            stored = cache.insert(ids, pages, space)
            assert stored == oracle.insert(ids, pages, space) == pages
            running.append(pages)
        elif action == "end" and running:
            pool.drop(running.pop(r.randrange(len(running))))
        elif action == "evict":
            before, count = pool.num_free, r.randrange(4)
            evicted = oracle.evict(count, pool.holders)
            assert cache.evict(count) == len(evicted) == pool.num_free - before
            assert all(not pool.holders(page) for page in evicted)
        elif action == "clear":
            cache.clear(space)
            oracle.known = {k: v for k, v in oracle.known.items() if k[0] != space}
        assert len(cache) == len(oracle.known)
        held_pages = [page for pages in running for page in pages]
        for page, _ in oracle.known.values():
            assert pool.holders(page) == 1 + held_pages.count(page)
    for pages in running:
        pool.drop(pages)
    cache.evict(40)
    assert pool.num_free == 40 and len(cache) == 0


def test_keeps_first_copy_of_prefix():
    """Two requests may compute the same prefix at the same time."""
    pool = PagePool(4)
    cache = PrefixCache(pool, 2)
    first, second = pool.take(1), pool.take(2)
    assert cache.insert([1, 2], first) == first
    assert cache.insert([1, 2, 3, 4], second) == [first[0], second[1]]
    pool.drop(first + second)
    assert pool.num_free == 2, "the second copy of the first page is free"


def test_repeated_matches_take_no_memory():
    pool = PagePool(4)
    cache = PrefixCache(pool, 2)
    cache.insert([1, 2], pool.take(1))
    tracemalloc.start()
    try:
        for _ in range(3000):
            pool.drop(cache.match([1, 2]))
        assert tracemalloc.get_traced_memory()[0] < 50_000, (
            "bytes; an entry for each match would take 300,000"
        )
    finally:
        tracemalloc.stop()


def test_rejects_invalid_use_of_prefix_cache():
    with pytest.raises(ValueError, match="page_size is 0"):
        PrefixCache(PagePool(1), 0)
    with pytest.raises(ValueError, match="2 pages of tokens came with 1 pages"):
        PrefixCache(PagePool(1), 2).insert([1, 2, 3, 4, 5], [0])
