"""Arms of reinforcement learning after SFT: their common stages, their differences, and the verdicts."""

import dataclasses
import itertools

import pytest

from experiments import rl_reasoning
from experiments.ablations import reinforcement
from experiments.ablations.reinforcement import DENSE, DISTILLED, KL_COEFFICIENTS, NEW, OLD, SPARSE

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module", params=["tiny", "small"])
def arms(request):
    return reinforcement.get_config(request.param)


def test_arms_share_sft_and_seeds_share_base_model(arms):
    shared = {name: arm.trial(seed=1).digests for name, arm in arms.items()}
    for name in (*KL_COEFFICIENTS, DISTILLED):
        assert shared[name][:7] == shared[SPARSE][:7]
    assert shared[DISTILLED][:8] == shared[SPARSE]
    for one, other in itertools.combinations(shared.values(), 2):
        assert one[:4] == other[:4] and one[-1] != other[-1]
    for name, arm in arms.items():
        other = arm.trial(seed=2).digests
        same = [a == b for a, b in zip(shared[name], other)]
        assert same.index(False) == (5 if name == DENSE else 6)  # SFT
        assert not any(same[same.index(False) :])


@pytest.mark.parametrize("name", KL_COEFFICIENTS)
def test_kl_arms_differ_only_in_kl_target(arms, name):
    sparse, pulled = (arms[arm].stages[-1] for arm in (SPARSE, name))
    assert pulled.credit.kl_target == "reference" and pulled.policy.ref_kl == KL_COEFFICIENTS[name]
    assert [t.checkpoint for t in pulled.teachers] == [arms[name].stages[-2].name]
    free = {"name": sparse.name, "credit": sparse.credit, "policy": sparse.policy, "teachers": ()}
    assert dataclasses.replace(pulled, **free) == sparse


def test_dense_arm_differs_only_in_attention(arms):
    sparse, dense = (arms[name].stages[-1] for name in (SPARSE, DENSE))
    assert (sparse.model.attention, dense.model.attention) == ("sparse", "dense")
    assert dense.optimizer == sparse.optimizer and dense.rollout == sparse.rollout


def test_distillation_has_previous_stages_as_teachers(arms):
    before, rl, distilled = arms[DISTILLED].stages[-3:]
    after = distilled.continue_from({before.name: "SFT", rl.name: "RL"})
    assert {(t.origin, t.checkpoint) for t in after.teachers} == {
        ("sft", "SFT"),
        ("reasoning", "RL"),
    }
    assert after.checkpoint == "RL"
    assert [share.tasks.steps for share in (*distilled.sft, *distilled.reasoning)] == [5, 3]
    assert [share.tasks.steps for share in rl.tasks] == [3]
    assert {OLD, NEW} == {
        f"sft.{distilled.sft[0].name}",
        f"reasoning.{distilled.reasoning[0].name}",
    }
    assert rl.credit == rl_reasoning.get_config("tiny").credit and rl.credit.kl_target == "none"


def row(new, old):
    """Returns skills by stages, equal in both forms."""
    stages = ("sft", "rl", "distill")
    skills = {OLD: old, NEW: new, "form with thinking": new, "form without": new}
    return {"skills": {name: dict(zip(stages, values)) for name, values in skills.items()}}


def make_finding(distilled_old=(0.9, 0.4, 0.85), pulled=0.7, dense=0.8):
    rows = {SPARSE: [row((0.1, 0.8), (0.9, 0.4))] * 3}
    rows |= {name: [row((0.1, pulled), (0.9, 0.6))] * 3 for name in KL_COEFFICIENTS}
    rows |= {DENSE: [row((0.2, dense), (0.9, 0.5))] * 3}
    rows |= {DISTILLED: [row((0.1, 0.8, 0.82), distilled_old)] * 3}
    curve = [((0, 10), (0.1, 0.8))] * 3
    curves = {name: curve for name in rows if name != DISTILLED}
    return reinforcement.finding(rows, curves, "COMMAND")


def test_verdicts_follow_rows():
    restored, *pulled, attention = make_finding().verdicts
    assert "falls by 56" in restored and "gives 90" in restored
    assert "in 3 of 3 seeds, of which 3 got at least 80%" in restored
    assert "+2.0" in restored
    for line, (name, coefficient) in zip(pulled, KL_COEFFICIENTS.items(), strict=True):
        assert line.startswith(f"{name} ({coefficient}) minus not")
        assert "the new skill -10.0" in line and "the old one +20.0" in line
    assert "sparse model gains 70.0" in attention and "dense one 60.0" in attention
    assert "at the end: +0.0 ± 0.0 (+0.0 .. +0.0), within the spread" in attention
    assert "in 0 of 3 seeds, of which 0 got" in make_finding((0.9, 0.5, 0.9)).verdicts[0]
    assert "in 3 of 3 seeds, of which 0 got" in make_finding((0.9, 0.4, 0.79)).verdicts[0]


def test_table_has_line_for_every_arm_and_skill():
    [table] = make_finding().tables
    assert [line[:2] for line in table.rows[:2]] == [(SPARSE, "old"), (SPARSE, "new")]
    assert table.rows[0][2:] == ("90.0 ± 0.0 (90.0 .. 90.0)", "40.0 ± 0.0 (40.0 .. 40.0)", "-")
    assert table.rows[-4][0] == DISTILLED and table.rows[-4][4].startswith("85.0")
