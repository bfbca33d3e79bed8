"""Tests of the model against the goldens of transformers, and of packed batches against the oracle."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten
from glm5_jax.training.gradients import Rates, gradient_function
from glm5_jax.training.step_config import StepConfig
from pallas_kernels.cross_entropy import linear_cross_entropy
from tests.kernels.implementations import in_tiers
from tests.model import golden as goldens
from tests.oracles import experts, glm5 as oracle

LOGITS = 2e-4  # absolute, with logits up to 10
ROUNDING = 10  # times the difference of float32 and float64 in transformers


# The default tier runs the golden with shared indices and groups of experts.
@pytest.fixture(
    scope="module",
    params=in_tiers(["hf_tiny_b"], sorted({*goldens.NAMES} - {"hf_tiny_b"})),
)
def golden(request):
    return goldens.load(request.param)


def trace(golden, tokens, segments):
    positions = oracle.positions_of(segments).astype(np.int32)
    run = goldens.traced_forward(golden.cfg)
    return run(golden.params, tokens.astype(np.int32), segments.astype(np.int32), positions)


@pytest.fixture(scope="module")
def traced(golden):
    """Returns (Output, intermediate results) of the prompt."""
    return trace(golden, golden.tokens, np.ones_like(golden.tokens))


def assert_near(golden, name, actual, expected):
    rounding = golden.meta["float32_vs_float64"]
    atol = ROUNDING * rounding.get(name, rounding["hidden_states"])["max_abs"]
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=0)


def test_all_goldens_exist():
    assert {"hf_tiny_a", "hf_tiny_b", "hf_tiny_c", "hf_tiny_d"} <= set(goldens.NAMES)


def test_logits_equal_golden(golden, traced):
    out = traced[0]
    assert out.logits.dtype == np.float32
    np.testing.assert_allclose(out.logits, golden.arrays["logits"], atol=LOGITS, rtol=0)
    assert_near(golden, "final_hidden", out.hidden, golden.arrays["final_hidden"])


@pytest.mark.parametrize("name", ["hidden_states", "attn_out", "mlp_out"])
def test_layer_outputs_equal_golden(golden, traced, name):
    assert_near(golden, name, np.stack(traced[1][name]), golden.arrays[name])


def to_mask(topk, length):
    return (topk[..., None] == np.arange(length)).any(-2)


def test_selected_keys_equal_golden(golden, traced):
    chosen = traced[1]["topk"]
    if "selected" not in golden.arrays:
        assert chosen == [None] * golden.cfg.num_hidden_layers
        return
    length = golden.tokens.shape[1]
    for topk, selected in zip(chosen, golden.arrays["selected"], strict=True):
        np.testing.assert_array_equal(to_mask(topk, length), selected)
        empty_last = np.where(topk < 0, length, topk)
        np.testing.assert_array_equal(np.sort(empty_last), empty_last)


def test_index_scores_equal_golden(golden, traced):
    if "index_scores" not in golden.arrays:
        pytest.skip("glm4_moe_lite has no indexer")
    scores = np.stack(traced[1]["index_scores"])
    seen = np.isfinite(golden.arrays["index_scores"])
    assert_near(golden, "index_scores", scores[seen], golden.arrays["index_scores"][seen])


def dense_weights(routing, shape):
    """Returns combine weights of all experts, 0 if not selected."""
    weights = np.zeros((routing.expert_ids.shape[0], shape[-1]), np.float32)
    np.put_along_axis(weights, routing.expert_ids, routing.combine_weights, axis=-1)
    return weights.reshape(shape)


def test_routing_equals_golden(golden, traced):
    expected = golden.arrays["router_weights"]
    logits = golden.arrays["router_logits"].astype(np.float64)
    for routing, weights, z in zip(traced[1]["routing"], expected, logits, strict=True):
        ours = dense_weights(routing, weights.shape)
        np.testing.assert_array_equal(ours != 0, weights != 0)
        assert_near(golden, "router_weights", ours, weights)
        np.testing.assert_allclose(routing.probs.reshape(z.shape), 1 / (1 + np.exp(-z)), atol=1e-5)
    np.testing.assert_array_equal(traced[0].stats.load, (expected != 0).sum((1, 2)))


def test_left_padding_equals_golden(golden):
    if "pad_logits" not in golden.arrays:
        pytest.skip("this golden has no padded batch")
    mask = golden.arrays["pad_attention_mask"]
    out, _ = trace(golden, golden.arrays["pad_input_ids"], mask)
    logits = out.logits * mask[..., None]
    np.testing.assert_allclose(logits, golden.arrays["pad_logits"], atol=LOGITS, rtol=0)
    assert out.stats.load.sum() == mask.sum() * golden.cfg.num_experts_per_tok * len(out.stats.load)


def test_packed_documents_equal_oracle(golden):
    """Attention never crosses documents, and a document does not depend on the others in its row."""
    length = golden.tokens.shape[1]
    segments = np.ones_like(golden.tokens)
    segments[0, 5:] = 2
    segments[0, -9:] = 0
    segments[1, 15:] = 7
    segments[1, 18:] = 2
    config, weights = oracle.load(goldens.FOLDER / golden.name)
    expected = oracle.forward(weights, config, golden.tokens, segment_ids=segments)
    out, inside = trace(golden, golden.tokens, segments)
    real = segments != 0
    np.testing.assert_allclose(out.logits[real], expected["logits"][real], atol=LOGITS, rtol=0)
    for topk, selected in zip(inside["topk"], expected["selected"], strict=True):
        if topk is not None:
            np.testing.assert_array_equal(to_mask(topk, length), selected)
    document = segments[1] == 2
    other = golden.tokens.copy()
    other[1, ~document] = 3 + other[1, ~document] % 5
    other[0] = 4
    np.testing.assert_array_equal(
        trace(golden, other, segments)[0].logits[1, document], out.logits[1, document]
    )


one_golden_by_default = pytest.mark.parametrize(
    "golden",
    in_tiers(["hf_tiny_d"], sorted({*goldens.NAMES} - {"hf_tiny_d"})),
    indirect=True,
)
PLAIN = StepConfig(mtp_steps=0, balance_weight=0.0, remat="none", loss_chunk=24, gather_block=16)
RATES = Rates(jnp.float32(0), jnp.float32(0))


def batch_of(tokens):
    """Returns a batch of one document per row, with every token but the first as a target."""
    ones = np.ones(tokens.shape, np.float32)
    return {
        "token_ids": tokens,
        "segment_ids": ones.astype(np.int32),
        "positions": np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape),
        "loss_mask": ones * (np.arange(tokens.shape[1]) > 0),
        "ce_weight": ones,
    }


def balance_of(golden):
    """Returns the balance loss of transformers' routing, summed over layers."""
    total, everyone = 0.0, np.ones(golden.tokens.shape, bool)
    for logits, weights in zip(golden.arrays["router_logits"], golden.arrays["router_weights"]):
        chosen = np.argsort(weights == 0, axis=-1, kind="stable")
        chosen = chosen[..., : golden.cfg.num_experts_per_tok]
        total += experts.balance_loss(logits.astype(np.float64), chosen, everyone)
    return total


@one_golden_by_default
def test_gradients_equal_golden(golden):
    step = jax.jit(gradient_function(golden.cfg, PLAIN))
    loss, parts, grads = step(golden.params, batch_of(golden.tokens), RATES)
    np.testing.assert_allclose(loss, golden.arrays["loss"], rtol=1e-6)
    np.testing.assert_allclose(parts.balance, balance_of(golden), rtol=1e-5)
    ours = goldens.to_hf_names(golden.cfg, flatten(jax.device_get(grads)))
    for name, expected in np.load(goldens.FOLDER / golden.name / "grads.npz").items():
        atol = 5e-5 * np.abs(expected).max()
        np.testing.assert_allclose(ours[name], expected, atol=atol, rtol=0, err_msg=name)
    norms = golden.meta["grad_norms"]  # of all parameters; grads.npz has some layers only
    for name, norm in norms.items():
        np.testing.assert_allclose(np.linalg.norm(ours[name]), norm, rtol=5e-5, err_msg=name)
    for name in set(ours) - set(norms):
        assert not ours[name].any(), name
    mtp = f"model.layers.{golden.cfg.num_hidden_layers}."
    without = [name for name in set(ours) - set(norms) if not name.startswith(mtp)]
    buffers = [name for name in without if name.endswith("e_score_correction_bias")]
    assert set(without) - set(buffers) == set(golden.meta["parameters_without_gradient"])


@one_golden_by_default
def test_float64_equals_golden(golden):
    with jax.enable_x64(True):
        cfg, params = golden.to_float64()
        targets = golden.tokens[:, 1:].reshape(-1)

        @jax.jit
        def run(params):
            out = glm5.forward(params, golden.tokens, cfg)
            rows = out.hidden[:, :-1].reshape(-1, cfg.hidden_size)
            head = params["embed"]["weight"].T
            if not cfg.tie_word_embeddings:
                head = params["lm_head"]["weight"]
            nll, _ = linear_cross_entropy(rows, head, targets, 24)
            return out.logits, out.hidden, nll.mean()

        logits, hidden, loss = run(params)
        assert logits.dtype == hidden.dtype == loss.dtype == np.float64
    np.testing.assert_allclose(logits, golden.arrays["logits_f64"], atol=1e-9, rtol=0)
    np.testing.assert_allclose(hidden, golden.arrays["final_hidden_f64"], atol=1e-9, rtol=0)
    np.testing.assert_allclose(loss, golden.arrays["loss_f64"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("golden", in_tiers(["hf_tiny_d"], ["hf_tiny_a"]), indirect=True)
def test_mtp_chain_equals_golden(golden):
    """The one layer runs three steps, each from the normed hidden state of the previous one."""
    tokens = golden.tokens
    step = jax.jit(glm5.forward_mtp, static_argnums=3)
    hidden = golden.arrays["final_hidden"]
    for k in (1, 2, 3):
        following = np.pad(tokens[:, k:], ((0, 0), (0, k)))
        out = step(golden.params, hidden, following, golden.cfg)
        hidden = out.hidden
        suffix = "" if k == 1 else f"_{k}"
        if f"mtp_logits{suffix}" in golden.arrays:
            logits = golden.arrays[f"mtp_logits{suffix}"]
            np.testing.assert_allclose(out.logits[:, :-k], logits, atol=8e-4, rtol=0)
            assert_near(golden, "mtp_hidden", hidden[:, :-k], golden.arrays[f"mtp_hidden{suffix}"])


FRESH = """
import json, sys
import numpy as np
from glm5_jax.checkpoint import hf_import
model = hf_import.load_hf(sys.argv[1])
arrays = np.load(sys.argv[1] + "/arrays.npz")
logits = model(arrays["input_ids"].astype(np.int32))
print(json.dumps(float(np.abs(logits - arrays["logits"]).max())))
"""


@pytest.mark.slow
def test_logits_in_fresh_process_equal_golden(plain_env):
    folder = str(goldens.FOLDER / "hf_tiny_b")
    child = subprocess.run(
        [sys.executable, "-c", FRESH, folder], env=plain_env, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) < LOGITS
