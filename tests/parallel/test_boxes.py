"""Tests that the boxes of one sharding are assembled, number by number, from those of another."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.parallel import boxes
from glm5_jax.parallel.fingerprint import fingerprint
from glm5_jax.parallel.mesh import make_mesh


@st.composite
def grids(draw, shape):
    """Draws a division of an array into boxes by cuts along each dimension."""
    axes = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        axes.append(list(itertools.pairwise([0, *cuts, size])))
    return draw(st.permutations([*itertools.product(*axes)]))


@st.composite
def reshardings(draw):
    """Draws the shape of an array with two divisions into boxes."""
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
    return shape, draw(grids(shape)), draw(grids(shape))


@settings(max_examples=60, deadline=None)
@given(reshardings(), st.integers(1, 40))
def test_assembles_boxes_of_any_division(resharding, max_size):
    shape, offered, needed = resharding
    array = np.arange(int(np.prod(shape))).reshape(shape)
    parts = [array[boxes.slices_in(box, tuple((0, n) for n in shape))] for box in offered]
    for box in needed:
        received = np.full([stop - start for start, stop in box], -1)
        for i, common in boxes.cover(box, offered):
            for piece in boxes.split(common, max_size):
                assert boxes.size_of(piece) <= max_size
                assert boxes.parse_box(boxes.format_box(piece)) == piece
                target = boxes.slices_in(piece, box)
                assert np.all(received[target] == -1)  # no number arrives twice
                received[target] = parts[i][boxes.slices_in(piece, offered[i])]
        np.testing.assert_array_equal(
            received, array[boxes.slices_in(box, tuple((0, n) for n in shape))]
        )


def test_rejects_boxes_that_do_not_cover():
    offered = [((0, 2), (0, 4)), ((2, 4), (0, 3))]
    assert boxes.cover(((0, 4), (1, 3)), offered) == [
        (0, ((0, 2), (1, 3))),
        (1, ((2, 4), (1, 3))),
    ]
    with pytest.raises(ValueError, match="0:4,1:4 is not covered"):
        boxes.cover(((0, 4), (1, 4)), offered)
    with pytest.raises(ValueError, match="0:3 is not inside 1:4"):
        boxes.slices_in(((0, 3),), ((1, 4),))


@pytest.mark.parametrize("text", ["1", "2:1", "0:1:2", "a:b", "0:1,", "-1:2", ":"])
def test_rejects_text_that_is_no_box(text):
    with pytest.raises(ValueError, match="is no box"):
        boxes.parse_box(text)


SPECS = [
    ({"fsdp": 2, "expert": 2}, P("fsdp", "expert")),
    ({"data": 2, "expert": 2, "tensor": 2}, P(("expert", "tensor"), None)),
    ({"data": 4}, P()),
]


@pytest.mark.parametrize(("axes", "spec"), SPECS)
def test_boxes_of_sharding_divide_array_and_place_it(axes, spec):
    mesh = make_mesh(axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])
    sharding = NamedSharding(mesh, spec)
    array = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    reads = []

    def read(ranges):
        reads.append(ranges)
        return array[tuple(ranges)]

    placed = boxes.place(array.shape, read, sharding)
    np.testing.assert_array_equal(placed, array)
    assert placed.sharding == sharding
    divided = boxes.process_boxes(sharding, array.shape)
    assert len(reads) == len(divided) and {*map(tuple, divided.values())} == {(0,)}
    assert sum(map(boxes.size_of, divided)) == array.size
    assert divided.keys() == boxes.local_boxes(sharding, array.shape).keys()
    np.testing.assert_array_equal(fingerprint(placed), fingerprint(array))


@pytest.mark.parametrize("max_numbers", [7, 16, 1000])
def test_places_array_in_bounded_parts(monkeypatch, max_numbers):
    monkeypatch.setattr(boxes, "MAX_PLACED", max_numbers)
    array = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    sizes = []

    def read(ranges):
        part = array[tuple(ranges)]
        sizes.append(part.size)
        return part

    sharding = NamedSharding(make_mesh(data=2, fsdp=4), P(None, None, "fsdp"))
    placed = boxes.place(array.shape, read, sharding)
    np.testing.assert_array_equal(placed, array)
    assert placed.sharding == sharding
    assert sum(sizes) == array.size and max(sizes) <= max_numbers  # once for two devices
