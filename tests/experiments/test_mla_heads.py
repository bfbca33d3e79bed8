"""Wide and narrow heads: the same cost in training, a third less in decoding, counted from shapes."""

import dataclasses

import pytest

from experiments.ablations import mla_heads
from experiments.ablations.mla_heads import NARROW, WIDE, decode_flops, narrower
from glm5_jax import presets
from glm5_jax.training.flops import train_flops

pytestmark = pytest.mark.usefixtures("without_pictures")


def test_the_narrow_variant_of_glm5_is_the_papers():
    """GLM-5 2.1: head width 192 and a third more heads; with 64 rotated dimensions."""
    wide, narrow = presets.glm5(), narrower(presets.glm5())
    assert (narrow.num_attention_heads, wide.num_attention_heads) == (96, 64)
    assert narrow.qk_nope_head_dim + narrow.qk_rope_head_dim == 192
    assert wide.qk_nope_head_dim + wide.qk_rope_head_dim == 256
    # Heads together are as wide, but for the rotated part that each of them has.
    assert 96 * narrow.qk_nope_head_dim == 64 * wide.qk_nope_head_dim
    assert 96 * narrow.v_head_dim == pytest.approx(64 * wide.v_head_dim, rel=2e-3)
    assert narrow.num_parameters == pytest.approx(wide.num_parameters, rel=1e-3)
    dense = dataclasses.replace(wide, attention="dense")
    ratio = train_flops(dense, 4096) / train_flops(narrower(dense), 4096)
    assert ratio == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["glm5", "small"])
def test_decoding_costs_a_third_less_for_every_cached_token(name):
    wide = presets.get(name)
    n, c, r = wide.num_attention_heads, wide.kv_lora_rank, wide.qk_rope_head_dim
    each = decode_flops(wide, 3000) - decode_flops(wide, 1000)
    # Scores over c + r numbers and a sum of values as wide, in every head.
    assert each == 2000 * 2 * n * 2 * (c + r)
    narrow = decode_flops(narrower(wide), 3000) - decode_flops(narrower(wide), 1000)
    assert each / narrow == pytest.approx(2 / 3)


def test_the_rest_of_a_decoded_tokens_attention_does_not_grow():
    cfg = presets.glm5()
    n, c, d = cfg.num_attention_heads, cfg.kv_lora_rank, cfg.hidden_size
    h, u = cfg.qk_nope_head_dim, cfg.v_head_dim
    each = 2 * n * 2 * (c + cfg.qk_rope_head_dim)
    rest = 2 * n * (c * (h + u) + u * d)
    assert decode_flops(cfg, 1000) == 1001 * each + rest


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_both_arms_train_for_the_same_flops(variant):
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
def test_heads_that_cannot_be_cut_are_named(fields):
    model = dataclasses.replace(presets.tiny(), **fields)
    with pytest.raises(ValueError, match="have no narrower variant"):
        narrower(model)


def test_heads_that_are_mostly_rotated_are_named():
    model = dataclasses.replace(presets.tiny(), qk_nope_head_dim=4, qk_rope_head_dim=12)
    with pytest.raises(ValueError, match="qk head width 4 [+] 12"):
        narrower(model)


def test_the_finding_compares_by_seed():
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

    found = mla_heads.compare(runs, mla_heads.get_config(), "command")
    assert "minus MLA-192's is +0.2500 ± 0.0000" in found.verdicts[0]
    assert found.verdicts[1].startswith("this model: ") and found.verdicts[1].endswith("-33.3%")
    assert found.verdicts[2].startswith("GLM-5: ") and "147,456" in found.verdicts[2]
    assert len(set(rates)) == 5
    steps = [row[3].split()[0] for row in found.tables[0].rows]
    assert int(steps[0]) > int(steps[1])  # narrow heads cost a little more
