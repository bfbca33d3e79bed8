"""Tests that the token record rejects streams that a learner could not train on."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord, plain_record

NAN = float("nan")


def rollout(**changes):
    """Returns a record of a prompt of two tokens and an answer of two, the last of which is masked."""
    streams = {
        "token_ids": [5, 6, 7, 8],
        "loss_mask": [0, 0, 1, 0],
        "rollout_logp": [NAN, NAN, -0.5, NAN],
        "weight_version": [-1, -1, 3, -1],
        "advantage": [0, 0, 1.5, 0],
        "rl_weight": [0, 0, 1, 0],
    }
    return TokenRecord(**streams | changes)


def test_record_has_typed_read_only_streams():
    record = rollout(group_id="g", rewards={"tests": 1.0, "style": None}, spans=[(2, 4, "answer")])
    assert len(record) == 4
    assert list(record.streams()) == [
        "token_ids", "loss_mask", "rollout_logp", "weight_version", "advantage", "rl_weight",
    ]  # fmt: skip
    assert record.token_ids.dtype == record.weight_version.dtype == np.int32
    assert record.rollout_logp.dtype == np.float32 and record.ce_weight is None
    with pytest.raises(ValueError, match="read-only"):
        record.advantage[2] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.status = "failed"


def test_validates_replaced_streams():
    filled = dataclasses.replace(rollout(), ref_logp=[NAN, NAN, -1, NAN])
    assert filled.ref_logp[2] == -1
    with pytest.raises(ValueError, match="advantage has 3 entries, token_ids has 4"):
        dataclasses.replace(rollout(), advantage=[0, 0, 1])


def test_copies_array_of_caller():
    ids = np.array([1, 2], np.int32)
    record = plain_record(ids)
    ids[0] = 9
    assert record.token_ids[0] == 1


def test_plain_record_masks_first_token_only():
    record = plain_record([3, 1, 2])
    assert record.loss_mask.tolist() == record.ce_weight.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"token_ids": []}, "loss_mask has 4 entries, token_ids has 0"),
        ({"token_ids": [5, -6, 7, 8]}, "no negative id"),
        ({"token_ids": [5.0, 6, 7, 8]}, "token_ids is float64; it must hold integers"),
        ({"token_ids": [[5, 6, 7, 8]]}, r"token_ids has shape \(1, 4\)"),
        ({"loss_mask": [0, 0, 0.5, 0]}, "only 0 and 1"),
        ({"loss_mask": [1, 0, 1, 0]}, r"loss_mask\[0\] is 1"),
        ({"rollout_logp": None, "weight_version": None}, "token 2 is trained by RL"),
        ({"rollout_logp": [NAN] * 4}, "token 2 is trained by RL"),
        ({"rollout_logp": [NAN, NAN, -0.5, -0.1]}, "token 3 has a rollout_logp but loss_mask 0"),
        ({"rollout_logp": [NAN, NAN, -np.inf, NAN]}, "rollout_logp is infinite at 2"),
        ({"rl_weight": [0, 0, NAN, 0]}, "rl_weight holds NaN or infinity at 2"),
        ({"weight_version": [-1, -1, -1, -1]}, "token 2 has weight_version -1"),
        ({"weight_version": [0, -1, 3, -1]}, "token 0 has weight_version 0"),
        ({"status": "done"}, "status is 'done'"),
        ({"spans": [(2, 5, "answer")]}, "leaves the 4 tokens"),
    ],
)
def test_rejects_contradictory_streams(changes, message):
    with pytest.raises(ValueError, match=message):
        rollout(**changes)


def test_rejects_record_without_tokens():
    with pytest.raises(ValueError, match="at least one token"):
        plain_record(np.zeros(0, np.int32))


def test_accepts_token_without_logprob_and_rl_weight():
    mixed = rollout(
        loss_mask=[0, 1, 1, 0], rl_weight=[0, 0, 1, 0], ce_weight=[0, 1, 0, 0]
    )  # imitation on token 1, RL on token 2
    assert mixed.ce_weight[1] == 1
