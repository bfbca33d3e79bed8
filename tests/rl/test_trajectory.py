"""Trajectories and the summaries of their records."""

import json

import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.trajectory import (
    Trajectory,
    summarize_records,
    summary_from_json,
    trajectory_from_json,
)
from glm5_jax.rl.types import Reward

NAN = float("nan")


def record(versions, **options):
    sampled = np.array(versions) >= 0
    logp = np.where(sampled, -0.125, NAN)
    ids = np.arange(len(versions))
    return TokenRecord(
        token_ids=ids, loss_mask=sampled, rollout_logp=logp, weight_version=versions, **options
    )


def make_trajectory(reward=1.0, records=(), **options):
    return Trajectory(
        rollout_id="g-0",
        group_id="g",
        task="sums",
        number=7,
        reward=Reward(reward),
        summary=summarize_records(records),
        records=tuple(records),
        **options,
    )


def test_encodes_trajectory_without_its_records():
    trajectory = make_trajectory(
        0.5,
        [record([-1, 3, 3, -1, 4])],
        metrics={"calls": 2.0},
        duration_s=1.5,
        has_used_tools=True,
    )
    body = trajectory.to_json()
    assert "records" not in body
    decoded = trajectory_from_json(json.loads(json.dumps(body)))
    assert decoded.records == () and decoded.summary == trajectory.summary
    names = ("rollout_id", "group_id", "task", "number", "reward", "metrics")
    for name in (*names, "duration_s", "has_used_tools"):
        assert getattr(decoded, name) == getattr(trajectory, name)


def test_encodes_trajectory_that_failed():
    failed = Trajectory(
        rollout_id="g-0", group_id="g", task="sums", number=7, reward=Reward(None, error="gone")
    )
    assert trajectory_from_json(json.loads(json.dumps(failed.to_json()))) == failed
    assert failed.has_failed and failed.versions == ()


def test_summarizes_all_branches():
    branches = [record([-1, 4, 5, 4]), record([-1, -1, 2], status="truncated")]
    summary = summarize_records(branches, "d")
    assert (summary.lengths, summary.num_trained_tokens) == ((4, 3), 4)
    assert (summary.versions, summary.is_truncated, summary.digest) == ((2, 4, 5), True, "d")
    assert not summarize_records(branches[::-1]).is_truncated
    empty = summarize_records([])
    assert empty.versions == empty.lengths == () and not empty.is_truncated


def test_rejects_tokens_to_train_on_without_version():
    unknown = TokenRecord(token_ids=[1, 2], loss_mask=[0, 1], rollout_id="g-0")
    with pytest.raises(ValueError, match="'g-0' has tokens to train on without a weight_version"):
        summarize_records([unknown])


@pytest.mark.parametrize(
    "changes", [{"versions": ["3"]}, {"lengths": None}, {"is_truncated": 2}, {"digest": 5}]
)
def test_rejects_json_that_is_no_summary(changes):
    body = {"lengths": [3], "num_trained_tokens": 2, "versions": [1], "is_truncated": False}
    assert summary_from_json(body).versions == (1,)
    with pytest.raises(ValueError):
        summary_from_json(body | changes)


@pytest.mark.parametrize(
    ("reward", "versions", "has_failed"),
    [(0.0, [-1, 1], False), (None, [-1, 1], True), (0.0, [-1, -1], True)],
)
def test_trajectory_without_reward_or_trained_tokens_has_failed(reward, versions, has_failed):
    assert make_trajectory(reward, [record(versions)]).has_failed == has_failed
