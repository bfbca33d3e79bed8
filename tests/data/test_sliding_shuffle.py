"""Tests the sliding shuffle: its reach, its steady mixture and its resume."""

import itertools
import json

import grain
import numpy as np
import pytest

from glm5_jax.data.sliding_shuffle import SlidingShuffleIterDataset


def shuffled(count, window, seed=0):
    parent = grain.MapDataset.range(count).to_iter_dataset(grain.ReadOptions(0, 0))
    return SlidingShuffleIterDataset(parent, window=window, seed=seed)


@pytest.mark.parametrize("window", [0, 1, 2, 7, 64, 5000])
def test_moves_each_element_about_a_window(window):
    order = list(shuffled(1000, window))
    assert sorted(order) == list(range(1000))
    moves = np.abs(np.array(order) - np.arange(1000))
    assert moves.max() <= (1.5 * window if window > 1 else 0)
    assert window < 64 or moves.mean() > min(window, 1000) / 8


def test_order_depends_on_seed_only():
    once, again, other = (list(shuffled(300, 50, seed)) for seed in (1, 1, 2))
    assert once == again and once != other


def test_mixes_equally_at_every_position():
    """After the first window, the ages of the elements are uniform over a window at every position."""
    ages = []
    for seed in range(20):
        order = np.array(list(itertools.islice(shuffled(4000, 128, seed), 640)))
        # An element leaves after half a window more has been read.
        ages.append(np.arange(640) + 64 - order)
    parts = np.stack(ages).reshape(20, 10, 64).transpose(1, 0, 2).reshape(10, -1)[2:]
    np.testing.assert_allclose(parts.mean(1), 64, atol=6)
    np.testing.assert_allclose(parts.std(1), 128 / 12**0.5, atol=4)


def test_shares_documents_across_window_borders():
    """Separate windows would have no document in common at their border."""
    documents = np.array(list(shuffled(2048, 128))) // 16
    for border in range(32, 1900, 32):
        before, after = (
            set(documents[slice(*ends)]) for ends in ((border - 32, border), (border, border + 32))
        )
        assert len(before & after) >= 3, border


@pytest.mark.parametrize("window, count", [(1, 40), (6, 60), (40, 120), (100, 60)])
def test_resumes_at_every_position(window, count):
    rows, states, order = iter(shuffled(count, window)), [], []
    states.append(json.dumps(rows.get_state()))
    for element in rows:
        order.append(element)
        states.append(json.dumps(rows.get_state()))
    resumed = iter(shuffled(count, window))
    for start, state in enumerate(states):
        resumed.set_state(json.loads(state))
        assert json.dumps(resumed.get_state()) == state
        assert list(resumed) == order[start:]


def test_reads_about_a_window_again_on_resume():
    read = []
    parent = grain.MapDataset.range(4000).map(lambda x: read.append(x) or x)
    rows = SlidingShuffleIterDataset(
        parent.to_iter_dataset(grain.ReadOptions(0, 0)), window=80, seed=0
    )
    before = iter(rows)
    next(before)
    assert len(read) <= 50
    for _ in range(1000):
        next(before)
    after = iter(rows)
    read.clear()
    after.set_state(before.get_state())
    assert len(read) <= 90
    assert next(after) == next(before)
