"""Wide and narrow heads: equal training cost and a third less decoding cost, counted from shapes."""

import dataclasses

import pytest

from experiments.ablations import mla_heads
from experiments.ablations.mla_heads import NARROW, WIDE, decode_flops, narrower
from glm5_jax import presets
from glm5_jax.training.flops import train_flops

pytestmark = pytest.mark.usefixtures("without_pictures")


def test_narrow_variant_of_glm5_matches_paper():
    """GLM-5 2.1: head width 192 and a third more heads; with 64 rotated dimensions."""
    wide, narrow = presets.glm5(), narrower(presets.glm5())
    assert (narrow.num_attention_heads, wide.num_attention_heads) == (96, 64)
    assert narrow.qk_nope_head_dim + narrow.qk_rope_head_dim == 192
    assert wide.qk_nope_head_dim + wide.qk_rope_head_dim == 256
    # All heads have the same total width, except for the rotated part of each.
    assert 96 * narrow.qk_nope_head_dim == 64 * wide.qk_nope_head_dim
    assert 96 * narrow.v_head_dim == pytest.approx(64 * wide.v_head_dim, rel=2e-3)
    assert narrow.num_parameters == pytest.approx(wide.num_parameters, rel=1e-3)
    dense = dataclasses.replace(wide, attention="dense")
    ratio = train_flops(dense, 4096) / train_flops(narrower(dense), 4096)
    assert ratio == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["glm5", "small"])
def test_narrow_heads_decode_a_third_cheaper(name):
    wide = presets.get(name)
    n, c, r = wide.num_attention_heads, wide.kv_lora_rank, wide.qk_rope_head_dim
    each = decode_flops(wide, 3000) - decode_flops(wide, 1000)
    # Scores over c + r numbers and a sum of values of the same width, in every head.
    assert each == 2000 * 2 * n * 2 * (c + r)
    narrow = decode_flops(narrower(wide), 3000) - decode_flops(narrower(wide), 1000)
    assert each / narrow == pytest.approx(2 / 3)


def test_decoding_cost_has_constant_rest():
    cfg = presets.glm5()
    n, c, d = cfg.num_attention_heads, cfg.kv_lora_rank, cfg.hidden_size
    h, u = cfg.qk_nope_head_dim, cfg.v_head_dim
    each = 2 * n * 2 * (c + cfg.qk_rope_head_dim)
    rest = 2 * n * (c * (h + u) + u * d)
    assert decode_flops(cfg, 1000) == 1001 * each + rest


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_both_arms_train_for_same_flops(variant):
    config = mla_heads.get_config(variant)
    totals = {}
    for name, arm in mla_heads.arms(config).items():
        (stage,) = arm.stages
        mtp = config.step.mtp_steps if stage.model.num_nextn_predict_layers else 0
        each = train_flops(stage.model, config.data.sequence_length, mtp)
        totals[name] = stage.schedule.total_steps * each
        assert dataclasses.replace(
            stage, name="", model=config.model, schedule=config.schedule
        ) == (dataclasses.replace(config, name=""))
    assert totals[WIDE] == pytest.approx(totals[NARROW], rel=0.5 / config.schedule.total_steps)
    assert totals[WIDE] != 0


@pytest.mark.parametrize("fields", [{"num_attention_heads": 3}, {"qk_nope_head_dim": 19}])
def test_names_heads_without_narrower_variant(fields):
    model = dataclasses.replace(presets.tiny(), **fields)
    with pytest.raises(ValueError, match="have no narrower variant"):
        narrower(model)


def test_names_heads_that_are_mostly_rotated():
    model = dataclasses.replace(presets.tiny(), qk_nope_head_dim=4, qk_rope_head_dim=12)
    with pytest.raises(ValueError, match="qk head width 4 [+] 12"):
        narrower(model)


def test_finding_compares_by_seed():
    rates = []

    def runs(trials):
        rates.extend(t.rate for t in trials)
        return [
            {
                "arm": t.arm,
                "rate": t.rate,
                "seed": t.seed,
                "steps": t.stages[0].steps,
                "loss": 3.0 + t.seed + (t.arm == WIDE) / 4 + abs(t.rate - 0.01),
                "curve": [[t.stages[0].steps], [3.0]],
            }
            for t in trials
        ]

    result = mla_heads.compare(runs, mla_heads.get_config(), "command")
    assert "minus MLA-192's is +0.2500 ± 0.0000" in result.verdicts[0]
    assert result.verdicts[1].startswith("this model: ") and result.verdicts[1].endswith("-33.3%")
    assert result.verdicts[2].startswith("GLM-5: ") and "147,456" in result.verdicts[2]
    assert len(set(rates)) == 5
    steps = [row[3].split()[0] for row in result.tables[0].rows]
    assert int(steps[0]) > int(steps[1])  # narrow heads cost a little more
