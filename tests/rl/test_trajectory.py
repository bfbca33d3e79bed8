import json

import numpy as np
import pytest

from glm5_jax.data.record import TokenRecord
from glm5_jax.rl.trajectory import Trajectory, trajectory
from glm5_jax.rl.types import Reward

NAN = float("nan")


def record(versions, **more):
    sampled = np.array(versions) >= 0
    logp = np.where(sampled, -0.125, NAN)
    ids = np.arange(len(versions))
    return TokenRecord(
        token_ids=ids, loss_mask=sampled, rollout_logp=logp, weight_version=versions, **more
    )


def made(reward=1.0, records=(), **more):
    said = {"role": "user", "content": "2*3?"}, {"role": "assistant", "content": "6"}
    return Trajectory("g-0", "g", "sums", 7, said, Reward(reward), tuple(records), **more)


def test_what_is_told_as_json_is_heard_again():
    ids = {"group_id": "g", "rollout_id": "g-0"}
    one = made(0.5, [record([-1, 3, 3, -1, 4], **ids)], metrics={"calls": 2.0}, seconds=1.5)
    found = trajectory(json.loads(json.dumps(one.told())))
    [was], [own] = one.records, found.records
    for name, stream in was.streams().items():
        np.testing.assert_array_equal(getattr(own, name), stream)
    assert (own.group_id, own.rollout_id, own.status) == ("g", "g-0", "completed")
    for name in ("rollout_id", "group_id", "task", "number", "messages", "reward", "metrics"):
        assert getattr(found, name) == getattr(one, name)
    assert found.seconds == 1.5


def test_versions_are_those_of_all_branches():
    assert made(1.0, [record([-1, 4, 5]), record([-1, -1, 2])]).versions == (2, 5)
    assert made(1.0, [record([-1, -1])]).versions is None


@pytest.mark.parametrize(
    ("reward", "versions", "failed"),
    [(0.0, [-1, 1], False), (None, [-1, 1], True), (0.0, [-1, -1], True)],
)
def test_failed_is_what_says_nothing_of_the_policy(reward, versions, failed):
    assert made(reward, [record(versions)]).failed == failed
