"""The MTP ablation: arms differ only in runs of the MTP layer, and verdicts follow the rows."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.ablations import mtp
from glm5_jax.checkpoint import store
from glm5_jax.evals.acceptance import AcceptanceConfig
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_arms_differ_only_in_mtp_layer(variant):
    base = mtp.get_config(variant)
    arms = mtp.arms(base)
    for name, arm in arms.items():
        (stage,) = arm.stages
        assert (stage.step.mtp_steps, stage.model.num_nextn_predict_layers) == {
            "shared-3": (3, 1),
            "single": (1, 1),
            "none": (0, 0),
        }[name]
        same = dataclasses.replace(stage, name=base.name, model=base.model, step=base.step)
        assert same == base
    assert all(drafting.num_speculative_tokens == 4 for drafting in mtp.DRAFTING.values())


def rows(shared, single):
    """Returns results of both ways of drafting by arm and seed, from the greedy ones."""

    def row(length, loss):
        accept_rates = [0.75, 0.5, 0.25, 0.125]
        return {
            "loss": loss,
            "greedy": length,
            "sampled": 2.0,
            "greedy_kept": accept_rates if length > 1 else [],
            "sampled_kept": accept_rates if length > 1 else [],
        }

    return {
        "shared-3": [row(x, 3.0 + s) for s, x in enumerate(shared)],
        "single": [row(x, 3.25 + s) for s, x in enumerate(single)],
        "none": [row(1.0, 2.75 + s) for s in range(len(shared))],
    }


@pytest.mark.parametrize(
    "shared,single,verdict",
    [
        ((2.4, 3.6, 2.4), (2.0, 3.0, 2.0), "1.200 ± 0.000 (1.200 .. 1.200); at least 1.08: met"),
        ((2.2, 2.6, 2.2), (2.0, 2.0, 2.0), "at least 1.08: met on average, within the spread"),
        ((2.1, 2.1, 2.2), (2.0, 2.0, 2.0), "at least 1.08: not met"),
    ],
)
def test_verdict_compares_ratios_by_seed(shared, single, verdict):
    result = mtp.finding(rows(shared, single), "command")
    greedy, sampled = result.verdicts
    assert (
        greedy.startswith("greedy: accepted length of shared-3 over single") and verdict in greedy
    )
    assert greedy.endswith(verdict.split("; ")[-1])
    assert "1.000 ± 0.000" in sampled and sampled.endswith("not met")


def test_tables_show_every_arm_and_draft():
    table, by_place = mtp.finding(rows((2.4, 3.6), (2.0, 3.0)), "command").tables
    assert [row[0] for row in table.rows] == ["shared-3", "single", "none"]
    assert "3.000 ± " in table.rows[0][1] and "(2.400 .. 3.600)" in table.rows[0][1]
    assert [row[4][:7] for row in table.rows] == ["+0.2500", "+0.5000", "+0.0000"]
    assert len(by_place.rows) == 4 and by_place.rows[0][1].startswith("0.750")


@pytest.mark.slow
def test_trained_arm_drafts_on_held_out_text(tmp_path, monkeypatch):
    """Loads the weights of the trial's folder, and ends texts as the tokenizer does."""
    config = mtp.get_config()
    small = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=24)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **small))
    trial = mtp.arms(config)["shared-3"].trial(seed=1)
    Tokenizer.default().save(tmp_path / "tokenizer")
    loads = []

    def load(folder, abstract):
        loads.append(folder)
        assert jax.tree.structure(abstract) == jax.tree.structure(params)
        return params

    params = glm5.init_params(trial.stages[-1].model, jax.random.key(0))
    monkeypatch.setattr(store, "load_params", load)
    drafting = AcceptanceConfig(num_prompts=2, prompt_tokens=8, new_tokens=9)
    monkeypatch.setattr(mtp, "DRAFTING", {"greedy": drafting})
    row = mtp.measure_drafts(trial, tmp_path)
    assert loads == [tmp_path]
    assert row["greedy"] == pytest.approx(1 + np.sum(row["greedy_kept"]))
    assert 1 <= row["greedy_interval"][0] <= row["greedy"] <= row["greedy_interval"][1] <= 5
