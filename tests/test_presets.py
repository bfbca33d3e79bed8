"""Tests of the presets' sizes against the published models."""

import pytest

from glm5_jax import presets
from glm5_jax.parallel import axes


def test_glm5_has_744_billion_parameters():
    cfg = presets.glm5()
    assert cfg.num_parameters == 743_911_199_232
    assert cfg.num_stored_parameters == 753_864_139_008
    assert 40.8e9 < cfg.num_active_parameters < 40.9e9


def test_glm5_2_has_753_billion_weights():
    """The released headers sum to this number without the 76 biases of 256 experts."""
    assert presets.glm5_2().num_stored_parameters == 753_329_921_024 + 76 * 256
    full = presets.glm5_2().full_layers
    assert full == (0, 1, *range(2, 78, 4)) and len(full) == 21


def test_glm4_7_flash_has_30_billion_parameters():
    cfg = presets.glm4_7_flash()
    assert 29e9 < cfg.num_parameters < 31e9
    assert cfg.full_layers == () and cfg.attention == "dense"


def test_small_fits_one_accelerator():
    cfg = presets.small()
    assert 1.2e9 < cfg.num_parameters < 1.3e9 < cfg.num_stored_parameters < 1.4e9
    assert 0.25e9 < cfg.num_active_parameters < 0.3e9


def test_axes_of_tiny_have_distinct_sizes():
    cfg = presets.tiny()
    sizes = axes.sizes(cfg)
    del sizes["y"], sizes["w"]  # key heads and convolution taps of the ablations
    sizes |= {"f dense": cfg.intermediate_size, "f moe": cfg.moe_intermediate_size}
    sizes |= {"k": cfg.index_topk, "a": cfg.num_experts_per_tok}
    assert len(set(sizes.values())) == len(sizes), sizes
    for letter in ("n", "e", "d", "v", "f dense", "f moe"):
        assert sizes[letter] % 8 == 0, letter


@pytest.mark.parametrize("kind", ["window", "gdn", "simple_gdn"])
def test_ablations_replace_every_second_layer(kind):
    cfg = presets.ablation(kind)
    assert cfg.layer_attention == ("full", kind, "full", kind) and cfg.sliding_window == 1024 // 32
    assert cfg.index_topk is None and cfg.attention == "dense"
    large = presets.ablation(kind, presets.glm5())
    assert large.layer_attention.count(kind) == 39 and large.sliding_window == 4096


def test_ablates_projections():
    cfg = presets.ablation("gqa", presets.small())
    heads, width = cfg.num_key_value_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim
    assert heads * (width + cfg.v_head_dim) == 2048  # of GQA-8, table 1
    assert presets.ablation("gqa").num_key_value_heads == 4
    plain = presets.ablation("mla")
    assert plain.layer_attention is None and plain.projections == "mla"
    assert plain.full_layers == () and plain.hidden_size == presets.tiny().hidden_size
    with pytest.raises(ValueError, match="unknown ablation 'swa'; use one of mla, gqa, window"):
        presets.ablation("swa")


def test_rejects_unknown_preset():
    with pytest.raises(ValueError, match="unknown preset 'glm6'; use one of glm5, glm5_2"):
        presets.get("glm6")
