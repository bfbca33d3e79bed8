"""Arms that train on old samples: their differences, the verdicts, and one arm for a few steps."""

import dataclasses

import numpy as np
import pytest

from experiments.ablations import stale_policies
from experiments.ablations.arms import Arm, after_sft
from experiments.ablations.stale_policies import AGES, LOSSES, arm_name
from glm5_jax.metrics.metrics_log import column, read

pytestmark = pytest.mark.usefixtures("without_pictures")


def test_arms_differ_only_in_loss_and_age():
    arms = stale_policies.get_config("tiny")
    assert len(arms) == len(LOSSES) * len(AGES)
    base = arms[arm_name("double sided", 0)].stages[-1]
    for loss, correction in LOSSES.items():
        for age in AGES:
            [stage] = arms[arm_name(loss, age)].stages
            assert (stage.policy.correction, stage.max_staleness) == (correction, age)
            assert stage.max_running >= (age + 1) * stage.rollout.prompts
            names = ("name", "policy", "max_staleness", "max_running")
            same = {name: getattr(base, name) for name in names}
            assert dataclasses.replace(stage, **same) == base
    assert len({arm.trial(seed=s).digests[-1] for arm in arms.values() for s in (0, 1)}) == 18


@pytest.mark.slow
def test_samples_reach_maximum_age(tmp_path):
    config = stale_policies.get_config("tiny")[arm_name("ppo", 4)].stages[-1]
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=7, eval_interval=7, save_interval=0),
        rollout=dataclasses.replace(config.rollout, prompts=2, group=4),
        evaluation=dataclasses.replace(config.evaluation, tasks=4),
    )
    config.make_stage(tmp_path).run()
    rows = read(tmp_path)
    assert column(rows, "policy/staleness")[1] == [0, 1, 2, 3, 4, 4, 4]
    orders = np.concatenate(column(rows, "group/order")[1])
    assert orders.tolist() == list(range(14))
    assert len(column(rows, "held_out/reward")[1]) == 1
    trial = Arm("ppo, 4", (config,)).trial()
    row = stale_policies.measure(trial, tmp_path)
    assert row["right"] == column(rows, "reward_part/exact")[1][-1]
    assert row["age"] == 4 and 0 <= row["masked"] <= 1 and row["apart"] > 0


def test_verdicts_compare_by_seed():
    rows, exact = {}, {}
    for place, loss in enumerate(LOSSES):
        for age in AGES:
            name = arm_name(loss, age)
            rows[name] = [
                {
                    "right": 0.5 - 0.1 * place - age / 100 + seed / 1000,
                    "apart": 0.1,
                    "masked": 0.02,
                    "age": age,
                }
                for seed in range(3)
            ]
            exact[name] = [([1, 2], [0.1, 0.2])] * 3
    result = stale_policies.finding(rows, exact, "command")
    assert (
        len(result.verdicts) == 3
        and "+10.0" in result.verdicts[0]
        and "+20.0" in result.verdicts[0]
    )
    assert "-16.0" in result.verdicts[2]
    [table] = result.tables
    assert table.rows[2][:3] == ("double sided", "16", "16.0") and table.rows[2][4:] == (
        "0.100",
        "2.00",
    )


def test_chain_arms_share_loss_and_differ_in_age(tmp_path):
    arms = stale_policies.get_config("chains")
    assert list(arms) == [arm_name("double sided", age) for age in (0, 4)]
    (tmp_path / "sft").mkdir()
    [stage] = after_sft(arms[arm_name("double sided", 4)], tmp_path).stages
    assert stage.checkpoint == str(tmp_path / "sft") and stage.max_staleness == 4
    assert stage.right_metric == "reward/mean" and stage.requires_checkpoint
    with pytest.raises(ValueError, match="has no folder 'sft'; give the workdir of a life"):
        after_sft(arms[arm_name("double sided", 0)], tmp_path / "sft")
    row = {"right": 0.5, "apart": 0.1, "masked": 0.02, "age": 4}
    rows = {name: [row] * 3 for name in arms}
    result = stale_policies.finding(rows, {name: [([1, 2], [0.1, 0.2])] * 3 for name in arms}, "")
    assert len(result.verdicts) == len(result.plots) == len(result.tables[0].rows) == 2
