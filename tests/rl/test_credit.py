"""Token streams of judged groups, and the rows that they are packed into."""

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
    """Returns a record of `prompt` prompt tokens and `count` sampled tokens."""
    mask = np.arange(prompt + count) >= prompt
    return TokenRecord(
        token_ids=np.arange(prompt + count),
        loss_mask=mask,
        rollout_logp=np.where(mask, -1.0, np.nan),
        weight_version=np.where(mask, 4, -1),
        rollout_id=rollout,
    )


def group(rewards, lengths=None):
    """Returns a judged group; a reward of None: the environment failed."""
    lengths = lengths or [3] * len(rewards)
    failed = Attempt(messages=(), finish_reason="failed", error="lost")
    return Group(
        task=TASK,
        attempts=[failed if reward is None else Attempt(messages=()) for reward in rewards],
        records=[record(n, rollout=str(i)) for i, n in enumerate(lengths)],
        rewards=[Reward(reward, {} if reward is None else {"right": reward}) for reward in rewards],
    )


def test_tokens_of_sequence_share_its_weight():
    records = assign_credit([group([1, 0], [2, 4])], CreditConfig(baseline="centred"), 64)
    assert [r.advantage.tolist() for r in records] == [[0, 0, 0.5, 0.5], [0, 0, *[-0.5] * 4]]
    assert [r.rl_weight.tolist() for r in records] == [[0, 0, 0.5, 0.5], [0, 0, *[0.25] * 4]]
    assert all(r.ref_kl_weight is None and r.ce_weight is None for r in records)
    assert records[0].rewards == {"value": 1, "right": 1}


def make_batch_group(rewards, copies=(), lengths=None):
    """Returns a group as the buffer releases it; a member has one branch for each of its lengths."""
    lengths = lengths or [[3]] * len(rewards)
    members = [
        Trajectory(
            rollout_id=str(i),
            group_id="g",
            task="sums",
            number=0,
            reward=Reward(reward, {"right": reward}),
            records=tuple(record(n, rollout=str(i)) for n in branch_lengths),
        )
        for i, (reward, branch_lengths) in enumerate(zip(rewards, lengths))
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


def test_buffer_groups_get_same_credit_as_local_groups():
    rewards, lengths = [1, 0, 0.5], [2, 4, 3]
    for config in (
        CreditConfig(),
        CreditConfig(baseline="centred", normalisation="token", kl_target="uniform"),
    ):
        expected = assign_credit([group(rewards, lengths)], config, 64)
        records = assign_batch_credit(
            [make_batch_group(rewards, lengths=[[n] for n in lengths])], config, 64
        )
        for one, other in zip(records, expected, strict=True):
            assert one.rewards == other.rewards and one.rollout_id == other.rollout_id
            for name, stream in other.streams().items():
                np.testing.assert_array_equal(getattr(one, name), stream)


def test_copy_counts_as_rollout_but_not_in_baseline():
    records = assign_batch_credit(
        [make_batch_group([1, 0, 0], copies=[0, 1])], CreditConfig(baseline="centred"), 64
    )
    assert [r.rollout_id for r in records] == ["0", "1", "2", "0+1", "1+1"]
    np.testing.assert_allclose([r.advantage[-1] for r in records], np.array([2, -1, -1, 2, -1]) / 3)
    np.testing.assert_allclose([r.rl_weight.sum() for r in records], 1)


def test_branches_share_weight_and_advantage_of_rollout():
    one = make_batch_group([1, 0, 0], copies=[0], lengths=[[2, 4], [3], [3]])
    records = assign_batch_credit([one], CreditConfig(baseline="centred"), 64)
    first, copied = records[:2], records[4:]
    for branches in (first, copied):
        np.testing.assert_allclose(np.concatenate([r.rl_weight[2:] for r in branches]), 1 / 6)
        np.testing.assert_allclose([r.advantage[-1] for r in branches], 2 / 3)


def test_drops_zero_variance_group_of_buffer():
    groups = [make_batch_group([1, 1], copies=[0])]
    assert not assign_batch_credit(groups, CreditConfig(drop_zero_variance_groups=True), 64)
    assert len(assign_batch_credit(groups, CreditConfig(), 64)) == 3


def test_token_normalisation_weights_tokens_equally():
    records = assign_credit([group([1, 0], [2, 4])], CreditConfig(normalisation="token"), 64)
    assert [r.rl_weight.tolist() for r in records] == [[0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]


def test_rollout_with_several_records_counts_once():
    split = group([1, 0], [2, 4])
    split.records[1] = dataclasses.replace(split.records[1], rollout_id="0")
    records = assign_credit([split], CreditConfig(), 64)
    np.testing.assert_allclose(records[0].rl_weight[2:], 1 / 6)
    np.testing.assert_allclose(records[1].rl_weight[2:], 1 / 6)


def test_excludes_failures_of_environment():
    records = assign_credit(
        [group([1, None, 0]), group([None, None])], CreditConfig(baseline="centred"), 64
    )
    assert [r.rollout_id for r in records] == ["0", "2"]
    assert [r.advantage[-1] for r in records] == [0.5, -0.5]


def test_zero_variance_groups_are_zero_or_dropped():
    groups = [group([1, 1]), group([0, 1]), group([1, None, 1])]
    records = assign_credit(groups, CreditConfig(), 64)
    assert len(records) == 6 and not records[0].advantage.any() and records[0].rl_weight.any()
    assert len(assign_credit(groups, CreditConfig(drop_zero_variance_groups=True), 64)) == 2


def test_kl_to_reference_has_separate_weights():
    [reference_record, _] = assign_credit(
        [group([1, 0], [2, 4])], CreditConfig(kl_target="reference"), 64
    )
    assert (
        reference_record.ref_kl_weight.tolist()
        == reference_record.rl_weight.tolist()
        == [0, 0, 0.5, 0.5]
    )
    assert reference_record.ref_logp is None  # the teacher adds them later


def test_kl_to_uniform_has_equal_log_probs():
    """Holds in one process and from the buffer, and only for sampled tokens."""
    config = CreditConfig(kl_target="uniform")
    local = assign_credit([group([1, 0], [2, 4])], config, 64)
    buffered = assign_batch_credit([make_batch_group([1, 0], lengths=[[2], [4]])], config, 64)
    for records in (local, buffered):
        np.testing.assert_allclose(records[0].ref_logp, [np.nan, np.nan, *[-6 * np.log(2)] * 2])
        assert (
            records[0].ref_kl_weight.tolist() == records[0].rl_weight.tolist() == [0, 0, 0.5, 0.5]
        )


def test_distillation_records_have_no_reward():
    records = make_distillation_records([group([1, None], [2, 4])], CreditConfig())
    assert [r.rollout_id for r in records] == ["0"]
    assert records[0].ref_kl_weight.tolist() == [0, 0, 0.5, 0.5] and records[0].rl_weight is None


def test_batch_metrics_of_judged_groups():
    """Zero-variance groups are counted, because the rewards of a run without any gradient look like those of any
    other."""
    other = group([0, None, 0.5], [4, 1, 5])
    other.task = dataclasses.replace(TASK, kind="code")
    call, answer, reply = ({"role": role} for role in ("assistant", "tool", "assistant"))
    other.attempts = [
        Attempt(messages=(call, answer, reply)),
        Attempt(messages=(call, answer)),
        Attempt(messages=(reply,), finish_reason="length"),
    ]
    metrics = batch_metrics([group([1, 1]), other])
    assert metrics["reward"] == {"mean": 0.625, "math": 1, "code": 0.25}
    assert metrics["reward_part"] == {"right": 0.625}
    assert metrics["rollout"] == pytest.approx(
        {
            "tokens": (3 + 3 + 4 + 1 + 5) / 5,
            "truncated": 1 / 5,
            "environment_errors": 1 / 5,
            "used_tools": 1 / 5,
            "zero_variance_groups": 1 / 2,
        }
    )


def test_rejects_unknown_names():
    with pytest.raises(ValueError, match="baseline is 'best'"):
        CreditConfig(baseline="best")
    with pytest.raises(
        ValueError, match="kl_target is 'down'; use one of none, reference, uniform"
    ):
        CreditConfig(kl_target="down")
    with pytest.raises(ValueError, match="normalisation is 'group'; use sequence or token"):
        CreditConfig(normalisation="group")


STREAMS = ("token_ids", "loss_mask", "rollout_logp", "rl_weight", "ce_weight")


def test_packs_each_record_into_one_row():
    rng = np.random.default_rng(0)
    records = [record(int(n), rollout=str(i)) for i, n in enumerate(rng.integers(1, 15, 40))]
    records = [dataclasses.replace(r, rl_weight=r.loss_mask / 2) for r in records]
    batch, records_by_row = pack_records(records, 20, 3, STREAMS)
    rows, length = batch["token_ids"].shape
    assert length == 20 and rows in (24, 48)
    assert sorted(r.rollout_id for row_records in records_by_row for r in row_records) == sorted(
        map(str, range(40))
    )
    for row, row_records in zip(batch["token_ids"], records_by_row):
        ids = np.concatenate([r.token_ids for r in row_records])
        assert row[: len(ids)].tolist() == ids.tolist()
    segments = []
    for i in range(rows):
        for segment in range(1, batch["segment_ids"][i].max() + 1):
            in_segment = batch["segment_ids"][i] == segment
            assert batch["positions"][i, in_segment].tolist() == list(range(in_segment.sum()))
            segments.append({name: batch[name][i, in_segment].tolist() for name in STREAMS})
    expected = [
        {
            "token_ids": r.token_ids.tolist(),
            "loss_mask": r.loss_mask.tolist(),
            "rollout_logp": np.nan_to_num(r.rollout_logp).tolist(),
            "rl_weight": r.rl_weight.tolist(),
            "ce_weight": [0.0] * len(r),
        }
        for r in records
    ]
    assert sorted(map(str, segments)) == sorted(map(str, expected))
    padding = batch["segment_ids"] == 0
    assert not any(batch[name][padding].any() for name in STREAMS)
    # Rows hold several records.
    assert (batch["segment_ids"] != 0).mean() > 0.4


def test_number_of_rows_is_rounded_up():
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
