"""Tests of the shards that processes send each other: encodings, pieces, and who requests each from whom."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.inference.shards.client import ShardPiece, in_order, pieces_of
from glm5_jax.inference.shards.offer import ArrayOffer, Offer, join_arrays, named_arrays
from glm5_jax.inference.shards.store import CHANGES, FULL, SAME, EncodedPart, Shards, decode, encode
from glm5_jax.parallel.tree import flatten, unflatten
from pallas_kernels.quantized_weights import Int4, Int8

RNG = np.random.default_rng(0)
BOX = ((0, 40), (0, 25))


@pytest.mark.parametrize("num_changed", [0, 3, 400, 1000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_sends_changes_in_shortest_form(num_changed, dtype):
    base = RNG.integers(-50, 50, (40, 25)).astype(jnp.dtype(dtype))
    new = base.copy()
    new.reshape(-1)[RNG.choice(1000, num_changed, replace=False)] += 1
    encoded = encode(new, base)
    itemsize = new.itemsize
    assert len(encoded.data) == min(new.nbytes, 125 + num_changed * itemsize) * (num_changed > 0)
    assert encoded.form == {0: SAME, 1000: FULL}.get(
        num_changed, CHANGES if 125 + num_changed * itemsize < new.nbytes else FULL
    )
    np.testing.assert_array_equal(decode(encoded, new.shape, new.dtype, base), new)
    full = encode(new[::2], None)
    assert full.form == FULL
    np.testing.assert_array_equal(decode(full, (20, 25), new.dtype, None), new[::2])


def test_tells_zeros_of_different_sign_apart():
    zeros = np.zeros(300, np.float32)
    encoded = encode(-zeros, zeros)
    assert np.signbit(decode(encoded, zeros.shape, zeros.dtype, zeros)).all()
    nans = np.full(300, np.nan, np.float32)
    assert encode(nans.copy(), nans).form == SAME


def test_rejects_damaged_parts():
    base = np.zeros((40, 25), np.float32)
    new = base.copy()
    new[3, 4:9] = 1
    full, changes = encode(new, None), encode(new, base)
    cases = [
        (full._replace(data=bytes(full.data[1:]) + b"x"), base, "another checksum"),
        (encode(new[:39], None), None, "3900 bytes arrived, not 4000"),
        (encode(new[3:4], base[3:4]), base, "bytes arrived, not"),
        (changes, None, "does not fit the weights that are held"),
        (changes, base[:20], "does not fit the weights that are held"),
        (EncodedPart("other", b"", 0), base, "form 'other' does not fit"),
    ]
    for encoded, held, message in cases:
        with pytest.raises(ValueError, match=message):
            decode(encoded, new.shape, new.dtype, held)


def test_shards_are_read_after_they_are_written():
    outer = ((10, 20), (0, 4))
    shards = Shards("c", {"x": {outer: np.empty((10, 4), np.int8)}}, is_complete=False)
    box = ((12, 14), (1, 3))
    assert shards.read("x", box) is None and shards.is_awaited("x", box)
    assert not shards.is_awaited("x", ((9, 11), (0, 1))) and not shards.is_awaited("y", box)
    shards.write("x", outer, box, np.arange(4).reshape(2, 2))
    np.testing.assert_array_equal(shards.read("x", box), [[0, 1], [2, 3]])
    assert shards.read("x", ((12, 13), (1, 3))) is None
    shards.mark_complete()
    np.testing.assert_array_equal(shards.read("x", ((12, 13), (1, 3))), [[0, 1]])
    assert shards.read("x", ((9, 11), (0, 1))) is None and not shards.is_awaited("x", box)
    shards.discard("x")
    assert shards.read("x", box) is None and shards.num_bytes == 0


def offer_of(arrays):
    return Offer(version=1, arithmetic={}, arrays=arrays)


def array_offer(boxes, fingerprint=(1, 2)):
    """Returns the offer of a matrix [8 6] of bfloat16 whose boxes two processes hold in turn."""
    owners = tuple((i % 2,) for i in range(len(boxes)))
    return ArrayOffer(
        dtype="bfloat16", shape=(8, 6), fingerprint=fingerprint, boxes=boxes, owners=owners
    )


def test_checksum_depends_on_numbers_and_not_on_boxes():
    rows = (((0, 4), (0, 6)), ((4, 8), (0, 6)))
    undivided = (((0, 8), (0, 6)),)
    one, other = (offer_of({"x": array_offer(boxes)}) for boxes in (rows, undivided))
    assert one.checksum == other.checksum
    changed = offer_of({"x": array_offer(rows, (1, 3))})
    assert len({one.checksum, changed.checksum, offer_of({"y": one.arrays["x"]}).checksum}) == 3


def test_pieces_make_up_needed_boxes():
    rows = (((0, 4), (0, 6)), ((4, 8), (0, 6)))
    target = ((0, 8), (2, 5))
    pieces = pieces_of(offer_of({"x": array_offer(rows)}), [("x", target)], max_bytes=14)
    count = np.zeros((8, 6), int)
    for piece in pieces:
        count[tuple(slice(*bounds) for bounds in piece.box)] += 1
        assert piece.target == target and piece.owners == (int(piece.box[0][0] >= 4),)
        assert np.prod([b - a for a, b in piece.box]) * 2 <= 14
    assert count[:, 2:5].min() == count[:, 2:5].max() == 1 and count.sum() == 24


def test_each_piece_is_requested_from_trainer_by_one_engine():
    pieces = [ShardPiece("x", ((i, i + 1),), ((0, 900),), (0,)) for i in range(900)]
    first_engines = collections.Counter()
    for engine in range(3):
        ordered = in_order(pieces, engine, 3)
        assert {*ordered} == {*pieces}
        turns = [(piece.number - engine) % 3 for piece in ordered]
        assert turns == sorted(turns)
        first_engines.update(piece.box for piece, turn in zip(ordered, turns) if turn == 0)
        assert 200 < turns.count(0) < 400
    assert {*first_engines.values()} == {1} and len(first_engines) == 900


def test_arrays_of_leaves_have_names():
    leaves = {"a/b": 1, "a/q": Int8(2, 3), "e": Int4(4, 5)}
    arrays = {n: x for path, leaf in leaves.items() for n, x in named_arrays(path, leaf).items()}
    assert arrays == {"a/b": 1, "a/q.q": 2, "a/q.scale": 3, "e.packed": 4, "e.scale": 5}
    joined = flatten(join_arrays(arrays))
    assert joined.keys() == flatten(unflatten(leaves)).keys()
    assert type(joined["a/q"]) is Int8 and type(joined["e"]) is Int4
    for wrong in ({"a.q": 1}, {"a.q": 1, "a.scale": 2, "a": 3}):
        with pytest.raises(ValueError, match="a is offered as"):
            join_arrays(wrong)
