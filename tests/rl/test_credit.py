"""Streams of judged groups, and the rows that they are laid out in."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.algorithm.credit import (
    CreditConfig,
    assign_batch_credit,
    assign_credit,
    make_distillation_records,
)
from glm5_jax.rl.trainers.sync_trainer import batch_metrics
from glm5_jax.rl.trajectory import BatchGroup, Group, Trajectory
from glm5_jax.rl.types import Attempt, Reward, Task

TASK = Task(id="t", kind="math", messages=({"role": "user", "content": "?"},))


def record(count, prompt=2, rollout="r"):
    mask = np.arange(prompt + count) >= prompt
    return TokenRecord(
        token_ids=np.arange(prompt + count),
        loss_mask=mask,
        rollout_logp=np.where(mask, -1.0, np.nan),
        weight_version=np.where(mask, 4, -1),
        rollout_id=rollout,
    )


def group(rewards, lengths=None):
    lengths = lengths or [3] * len(rewards)
    failed = Attempt(messages=(), finish_reason="failed", error="lost")
    return Group(
        task=TASK,
        attempts=[failed if reward is None else Attempt(messages=()) for reward in rewards],
        records=[record(n, rollout=str(i)) for i, n in enumerate(lengths)],
        rewards=[Reward(reward, {} if reward is None else {"right": reward}) for reward in rewards],
    )


def test_a_sequence_s_tokens_share_its_weight():
    found = assign_credit([group([1, 0], [2, 4])], CreditConfig(baseline="centred"), 64)
    assert [r.advantage.tolist() for r in found] == [[0, 0, 0.5, 0.5], [0, 0, *[-0.5] * 4]]
    assert [r.rl_weight.tolist() for r in found] == [[0, 0, 0.5, 0.5], [0, 0, *[0.25] * 4]]
    assert all(r.ref_kl_weight is None and r.ce_weight is None for r in found)
    assert found[0].rewards == {"value": 1, "right": 1}


def taken(rewards, copies=(), lengths=None):
    """A group as the buffer gives it out, each member with a branch for every one of its lengths."""
    lengths = lengths or [[3]] * len(rewards)
    members = [
        Trajectory(
            rollout_id=str(i),
            group_id="g",
            task="sums",
            number=0,
            reward=Reward(reward, {"right": reward}),
            records=tuple(record(n, rollout=str(i)) for n in own),
        )
        for i, (reward, own) in enumerate(zip(rewards, lengths))
    ]
    members += [members[i] for i in copies]
    return BatchGroup(
        group_id="g",
        task="sums",
        number=0,
        order=0,
        members=tuple(members),
        baseline=tuple(rewards),
        staleness=0,
    )


def test_groups_of_the_buffer_are_credited_as_those_of_one_process():
    rewards, lengths = [1, 0, 0.5], [2, 4, 3]
    for config in (
        CreditConfig(),
        CreditConfig(baseline="centred", normalisation="token", kl_target="uniform"),
    ):
        wanted = assign_credit([group(rewards, lengths)], config, 64)
        found = assign_batch_credit([taken(rewards, lengths=[[n] for n in lengths])], config, 64)
        for one, other in zip(found, wanted, strict=True):
            assert one.rewards == other.rewards and one.rollout_id == other.rollout_id
            for name, stream in other.streams().items():
                np.testing.assert_array_equal(getattr(one, name), stream)


def test_a_copy_counts_as_a_rollout_and_not_in_the_baseline():
    found = assign_batch_credit(
        [taken([1, 0, 0], copies=[0, 1])], CreditConfig(baseline="centred"), 64
    )
    assert [r.rollout_id for r in found] == ["0", "1", "2", "0+1", "1+1"]
    np.testing.assert_allclose([r.advantage[-1] for r in found], np.array([2, -1, -1, 2, -1]) / 3)
    np.testing.assert_allclose([r.rl_weight.sum() for r in found], 1)


def test_branches_of_a_rollout_share_its_weight_and_its_advantage():
    one = taken([1, 0, 0], copies=[0], lengths=[[2, 4], [3], [3]])
    found = assign_batch_credit([one], CreditConfig(baseline="centred"), 64)
    first, copied = found[:2], found[4:]
    for own in (first, copied):
        np.testing.assert_allclose(np.concatenate([r.rl_weight[2:] for r in own]), 1 / 6)
        np.testing.assert_allclose([r.advantage[-1] for r in own], 2 / 3)


def test_a_flat_group_of_the_buffer_is_left_out_where_flat_ones_are():
    flat = [taken([1, 1], copies=[0])]
    assert not assign_batch_credit(flat, CreditConfig(drop_zero_variance_groups=True), 64)
    assert len(assign_batch_credit(flat, CreditConfig(), 64)) == 3


def test_of_tokens_each_counts_the_same():
    found = assign_credit([group([1, 0], [2, 4])], CreditConfig(normalisation="token"), 64)
    assert [r.rl_weight.tolist() for r in found] == [[0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]


def test_a_rollout_in_several_records_counts_once():
    parted = group([1, 0], [2, 4])
    parted.records[1] = dataclasses.replace(parted.records[1], rollout_id="0")
    found = assign_credit([parted], CreditConfig(), 64)
    np.testing.assert_allclose(found[0].rl_weight[2:], 1 / 6)
    np.testing.assert_allclose(found[1].rl_weight[2:], 1 / 6)


def test_failures_of_the_environment_are_left_out_and_not_zeros():
    found = assign_credit(
        [group([1, None, 0]), group([None, None])], CreditConfig(baseline="centred"), 64
    )
    assert [r.rollout_id for r in found] == ["0", "2"]
    assert [r.advantage[-1] for r in found] == [0.5, -0.5]


def test_groups_that_tell_nothing_are_zeros_or_left_out():
    flat = [group([1, 1]), group([0, 1]), group([1, None, 1])]
    kept = assign_credit(flat, CreditConfig(), 64)
    assert len(kept) == 6 and not kept[0].advantage.any() and kept[0].rl_weight.any()
    assert len(assign_credit(flat, CreditConfig(drop_zero_variance_groups=True), 64)) == 2


def test_a_pull_to_the_reference_has_weights_of_its_own():
    [one, _] = assign_credit([group([1, 0], [2, 4])], CreditConfig(kl_target="reference"), 64)
    assert one.ref_kl_weight.tolist() == one.rl_weight.tolist() == [0, 0, 0.5, 0.5]
    assert one.ref_logp is None  # the teacher's, which reads them later


def test_under_the_uniform_distribution_every_token_is_as_likely():
    """In this process and from the buffer, and on what was sampled alone."""
    pulled = CreditConfig(kl_target="uniform")
    here = assign_credit([group([1, 0], [2, 4])], pulled, 64)
    buffered = assign_batch_credit([taken([1, 0], lengths=[[2], [4]])], pulled, 64)
    for found in (here, buffered):
        np.testing.assert_allclose(found[0].ref_logp, [np.nan, np.nan, *[-6 * np.log(2)] * 2])
        assert found[0].ref_kl_weight.tolist() == found[0].rl_weight.tolist() == [0, 0, 0.5, 0.5]


def test_what_is_distilled_has_no_reward():
    found = make_distillation_records([group([1, None], [2, 4])], CreditConfig())
    assert [r.rollout_id for r in found] == ["0"]
    assert found[0].ref_kl_weight.tolist() == [0, 0, 0.5, 0.5] and found[0].rl_weight is None


def test_what_is_told_of_judged_groups():
    """Groups that tell nothing are counted: a run whose weights stand still has rewards like any other."""
    other = group([0, None, 0.5], [4, 1, 5])
    other.task = dataclasses.replace(TASK, kind="code")
    call, answer, reply = ({"role": role} for role in ("assistant", "tool", "assistant"))
    other.attempts = [
        Attempt(messages=(call, answer, reply)),
        Attempt(messages=(call, answer)),
        Attempt(messages=(reply,), finish_reason="length"),
    ]
    found = batch_metrics([group([1, 1]), other])
    assert found["reward"] == {"mean": 0.625, "math": 1, "code": 0.25}
    assert found["reward_part"] == {"right": 0.625}
    assert found["rollout"] == pytest.approx(
        {
            "tokens": (3 + 3 + 4 + 1 + 5) / 5,
            "truncated": 1 / 5,
            "environment_errors": 1 / 5,
            "used_tools": 1 / 5,
            "zero_variance_groups": 1 / 2,
        }
    )


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="baseline is 'best'"):
        CreditConfig(baseline="best")
    with pytest.raises(
        ValueError, match="kl_target is 'down'; use one of none, reference, uniform"
    ):
        CreditConfig(kl_target="down")
    with pytest.raises(ValueError, match="normalisation is 'group'; use sequence or token"):
        CreditConfig(normalisation="group")


STREAMS = ("token_ids", "loss_mask", "rollout_logp", "rl_weight", "ce_weight")


def test_every_record_is_in_one_row():
    rng = np.random.default_rng(0)
    records = [record(int(n), rollout=str(i)) for i, n in enumerate(rng.integers(1, 15, 40))]
    records = [dataclasses.replace(r, rl_weight=r.loss_mask / 2) for r in records]
    batch, held = pack_records(records, 20, 3, STREAMS)
    rows, length = batch["token_ids"].shape
    assert length == 20 and rows in (24, 48)
    assert sorted(r.rollout_id for own in held for r in own) == sorted(map(str, range(40)))
    for row, own in zip(batch["token_ids"], held):
        ids = np.concatenate([r.token_ids for r in own])
        assert row[: len(ids)].tolist() == ids.tolist()
    found = []
    for i in range(rows):
        for segment in range(1, batch["segment_ids"][i].max() + 1):
            here = batch["segment_ids"][i] == segment
            assert batch["positions"][i, here].tolist() == list(range(here.sum()))
            found.append({name: batch[name][i, here].tolist() for name in STREAMS})
    want = [
        {
            "token_ids": r.token_ids.tolist(),
            "loss_mask": r.loss_mask.tolist(),
            "rollout_logp": np.nan_to_num(r.rollout_logp).tolist(),
            "rl_weight": r.rl_weight.tolist(),
            "ce_weight": [0.0] * len(r),
        }
        for r in records
    ]
    assert sorted(map(str, found)) == sorted(map(str, want))
    padding = batch["segment_ids"] == 0
    assert not any(batch[name][padding].any() for name in STREAMS)
    # Rows are filled, not one for each record.
    assert (batch["segment_ids"] != 0).mean() > 0.4


def test_rows_come_in_few_numbers_and_hold_any_record():
    assert len(pack_records([], 8, 2, STREAMS)[0]["token_ids"]) == 2
    assert [
        len(pack_records([record(6)] * n, 8, 2, STREAMS)[0]["token_ids"]) for n in (2, 3, 5)
    ] == [
        2,
        4,
        8,
    ]
    with pytest.raises(ValueError, match="'r' has 9 tokens, a row 8"):
        pack_records([record(7)], 8, 1, STREAMS)
