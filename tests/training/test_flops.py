"""Tests of the model FLOPs of matmuls, attention, indexers and MTP."""

import dataclasses

import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.config import LoraConfig
from glm5_jax.training import flops


def dense(cfg):
    return dataclasses.replace(cfg, index_topk=None, attention="dense")


def vectors(cfg):
    """Returns the number of parameters of norms, which multiply elementwise."""
    d = cfg.hidden_size
    per_layer = 2 * d + cfg.q_lora_rank + cfg.kv_lora_rank
    return cfg.num_hidden_layers * per_layer + d


@pytest.mark.parametrize("name", ["tiny", "glm5", "glm4_7_flash"])
def test_matmul_flops_are_twice_active_parameters(name):
    cfg = dense(presets.get(name))
    n, hru = cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
    one_token = flops.forward_flops(cfg, 1) - 2 * cfg.num_hidden_layers * n * hru
    assert one_token == 2 * (cfg.num_active_parameters - vectors(cfg))


def test_counts_visible_keys_of_attention():
    cfg, t = presets.tiny(), 100
    n, hru = cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim + cfg.v_head_dim
    i, j, k = cfg.index_n_heads, cfg.index_head_dim, cfg.index_topk
    attended = sum(min(q + 1, k) for q in range(t))
    scored = sum(q + 1 for q in range(t))
    layers = cfg.num_hidden_layers
    per_key = 2 * layers * (n * hru * attended + i * j * scored) / t
    at_one = 2 * layers * (n * hru + i * j)
    got = flops.forward_flops(cfg, t) - flops.forward_flops(cfg, 1)
    assert got == pytest.approx(per_key - at_one, rel=1e-12)


def test_counts_weights_of_ablations_once():
    """With one token a window is full attention, and a recurrence takes three products with its state."""
    for projections in ("mla", "gqa"):
        cfg = presets.ablation(projections)
        n, x, u = (
            cfg.num_attention_heads,
            cfg.qk_nope_head_dim + cfg.qk_rope_head_dim,
            cfg.v_head_dim,
        )
        norms = 0 if projections == "gqa" else cfg.q_lora_rank + cfg.kv_lora_rank
        for kind, state, more in (
            ("window", n * (x + u), 0),
            ("simple_gdn", 3 * n * x * u, 0),
            ("gdn", 3 * n * x * u, 2 * n + u),
        ):
            model = dataclasses.replace(cfg, layer_attention=(kind,) * 4)
            vectors = 4 * (2 * cfg.hidden_size + norms + more) + cfg.hidden_size
            want = 2 * (model.num_active_parameters - vectors + 4 * state)
            assert flops.forward_flops(model, 1) == want, (projections, kind)


def test_counts_window_keys_and_no_keys_of_states():
    cfg, t = presets.ablation("window"), 100
    per_key = cfg.num_attention_heads * (20 + 12 + 24)
    seen = sum(min(q + 1, cfg.sliding_window) for q in range(t)) + sum(q + 1 for q in range(t))
    growth = flops.forward_flops(cfg, t) - flops.forward_flops(cfg, 1)
    assert growth == pytest.approx(2 * 2 * per_key * (seen / t - 2), rel=1e-12)
    linear = dataclasses.replace(cfg, layer_attention=("gdn", "simple_gdn") * 2)
    assert flops.forward_flops(linear, 9) == flops.forward_flops(linear, 900)


def test_sparse_attention_grows_by_index_scores_only():
    cfg = presets.glm5()
    score = cfg.index_n_heads * cfg.index_head_dim * cfg.num_hidden_layers
    growth = flops.forward_flops(cfg, 131072) - flops.forward_flops(cfg, 65536)
    assert growth == pytest.approx(score * 65536, rel=0.1)
    assert flops.forward_flops(dense(cfg), 131072) > 1.5 * flops.forward_flops(cfg, 131072)


def test_counts_shared_indexers_once():
    shared = presets.glm5_2()
    model = dataclasses.replace(shared, indexer_types=None)
    q, d = shared.q_lora_rank, shared.hidden_size
    i, j = shared.index_n_heads, shared.index_head_dim
    saved = 2 * 57 * (q * i * j + d * j + d * i + i * j * (1 + 1) / 2)
    assert flops.forward_flops(model, 1) - flops.forward_flops(shared, 1) == saved


def test_counts_block_projection_and_head_per_mtp_step():
    cfg = presets.tiny()
    d, v = cfg.hidden_size, cfg.vocab_size
    one = flops.forward_flops(cfg, 64, 1) - flops.forward_flops(cfg, 64)
    deeper = dataclasses.replace(cfg, num_hidden_layers=cfg.num_hidden_layers + 1)
    block = flops.forward_flops(deeper, 64) - flops.forward_flops(cfg, 64)
    assert one == pytest.approx(block + 2 * (2 * d * d + d * v))


def indexers(cfg, mtp_steps, keys):
    """Returns the forward FLOPs of one token's index vectors and of its scores of `keys` keys."""
    d, q, i, j = cfg.hidden_size, cfg.q_lora_rank, cfg.index_n_heads, cfg.index_head_dim
    layers = len(cfg.full_layers) + mtp_steps
    return 2 * layers * (q * i * j + d * j + d * i + i * j * keys)


def test_step_is_three_forwards_without_selection():
    sparse, t = presets.tiny(), 64
    dense = dataclasses.replace(sparse, attention="dense")
    assert flops.train_flops(dense, t, 3) == 3 * flops.forward_flops(dense, t, 3)
    selection = indexers(sparse, 3, (t + 1) / 2)
    want = 3 * (flops.forward_flops(sparse, t, 3) - selection) + selection
    assert flops.train_flops(sparse, t, 3) == pytest.approx(want, rel=1e-12)


def test_counts_indexer_training_of_both_stages():
    sparse, t, k = presets.tiny(), 64, presets.tiny().index_topk
    dense = dataclasses.replace(sparse, attention="dense")
    warm_up = flops.train_flops(dense, t, 1, trains_trunk=False, trains_indexers=True)
    want = flops.forward_flops(dense, t, 1) + 3 * indexers(sparse, 1, (t + 1) / 2)
    assert warm_up == pytest.approx(want, rel=1e-12)
    learned = flops.train_flops(sparse, t, 1, trains_indexers=True) - flops.train_flops(
        sparse, t, 1
    )
    attended = sum(min(q + 1, k) for q in range(t)) / t
    assert learned == pytest.approx(2 * indexers(sparse, 1, attended), rel=1e-12)


def test_glm5_takes_about_six_flops_per_active_parameter():
    cfg = presets.glm5()
    assert flops.train_flops(cfg, 4096) == pytest.approx(6 * cfg.num_active_parameters, rel=0.25)


def test_knows_peaks_of_device_kinds():
    peaks = {
        "NVIDIA H200": 989e12,
        "TPU v5p": 459e12,
        "TPU v5": 459e12,
        "TPU v5 lite": 197e12,
        "TPU v6 lite": 918e12,
        "TPU7x": 1153.5e12,
        "cpu": None,
    }
    assert {kind: flops.peak_flops(kind) for kind in peaks} == peaks


@pytest.mark.parametrize("indexers", [False, True])
@pytest.mark.parametrize("trunk", [False, True])
@pytest.mark.parametrize("name", ["tiny", "dense", "window", "recurrent"])
def test_flops_of_tokens_sum_to_document(name, trunk, indexers):
    cfg, t = presets.tiny(), 100
    if name == "dense":
        cfg = dataclasses.replace(cfg, attention="dense")
    if name in ("window", "recurrent"):
        cfg = presets.ablation("window")
        kinds = ("gdn", "simple_gdn") if name == "recurrent" else ("window", "full")
        cfg, indexers = dataclasses.replace(cfg, layer_attention=kinds * 2), False
    options = {"trains_trunk": trunk, "trains_indexers": indexers}
    tokens = flops.token_train_flops(cfg, np.arange(t), 2, **options)
    assert tokens.shape == (t,)
    assert float(tokens.mean()) == pytest.approx(flops.train_flops(cfg, t, 2, **options), rel=1e-5)


@pytest.mark.parametrize("t", [1, 7])
def test_counts_no_gradients_of_weights_next_to_adapters(t):
    cfg = dataclasses.replace(presets.tiny(), attention="dense")
    adapted = dataclasses.replace(cfg, lora=LoraConfig(rank=4))
    saved = flops.train_flops(cfg, t) - flops.train_flops(adapted, t)
    # The products of a forward, which is linear in the mean number of keys: 1 and 2 for these lengths.
    products = 2 * flops.forward_flops(cfg, 1) - flops.forward_flops(cfg, 3)
    assert saved == pytest.approx(products)
