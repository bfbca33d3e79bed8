"""Tests of cached decoding against the goldens of transformers, and of its options."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from glm5_jax.model import generate as decoding, glm5
from glm5_jax.model.generate import generate
from tests.kernels.implementations import in_tiers
from tests.model import golden as goldens
from tests.model.small import one_layer
from tests.oracles import glm5 as oracle


@pytest.fixture
def logits_of_steps(monkeypatch):
    """Records the logits [b v] of every call that advances the cache."""
    seen, plain = [], decoding.advance

    def recording(*args):
        logits, cache = plain(*args)
        seen.append(np.asarray(logits))
        return logits, cache

    monkeypatch.setattr(decoding, "advance", recording)
    return seen


HALVES = ("hf_tiny_a", "hf_tiny_b")  # two goldens only, because each compiles another program


@pytest.mark.parametrize("kind", ["long", "short", "pad"])
@pytest.mark.parametrize("name", in_tiers(["hf_tiny_c"], sorted({*goldens.NAMES} - {"hf_tiny_c"})))
def test_generation_equals_transformers(name, kind, logits_of_steps):
    """Prefill runs in two halves or token by token; short prompts cross index_topk; "pad" is left padding.

    The script of the goldens checked transformers' cached logits against its full forward.
    """
    golden = goldens.load(name)
    ids = "pad_gen_ids" if kind == "pad" else f"gen_{kind}_ids"
    if ids not in golden.arrays:
        pytest.skip("this golden has no padded batch")
    expected, length = golden.arrays[ids], golden.tokens.shape[1]
    new = golden.arrays["gen_long_logits"].shape[1]
    got = generate(
        golden.params,
        expected[:, :-new].astype(np.int32),
        dataclasses.replace(
            golden.cfg, pad_token_id=None
        ),  # transformers continued after end tokens
        new,
        mask=golden.arrays["pad_attention_mask"] if kind == "pad" else None,
        prefill_chunk=length // 2 if name in HALVES and kind != "short" else 1,
        capacity=length + new,
    )
    np.testing.assert_array_equal(got, expected)
    if kind != "pad":
        logits = np.stack(logits_of_steps[-new:], axis=1)
        np.testing.assert_allclose(logits, golden.arrays[f"gen_{kind}_logits"], atol=2e-4)


@pytest.mark.slow
def test_dense_decoding_equals_oracle(logits_of_steps):
    """The golden's model runs without its indexer, as in pre-training."""
    golden = goldens.load("hf_tiny_a")
    cfg = dataclasses.replace(golden.cfg, attention="dense", pad_token_id=None)
    got = generate(golden.params, golden.tokens, cfg, 4, prefill_chunk=20)
    config, weights = oracle.load(goldens.FOLDER / golden.name)
    full = oracle.forward(weights, config, got[:, :-1], attention_kind="dense")["logits"]
    np.testing.assert_allclose(np.stack(logits_of_steps[-4:], axis=1), full[:, -4:], atol=2e-4)
    np.testing.assert_array_equal(got[:, -4:], full[:, -4:].argmax(-1))


CFG = one_layer(vocab_size=32, num_nextn_predict_layers=0, max_position_embeddings=20)
PROMPTS = np.array([[3, 1, 4, 1], [5, 9, 2, 6]])


@functools.cache
def params():
    return jax.tree.map(lambda x: 9 * x, glm5.init_params(CFG, jax.random.key(1)))


# Token by token, so that these tests share one compiled program.
generate_in_steps = functools.partial(generate, capacity=12, prefill_chunk=1)


@functools.cache
def greedy():
    return generate_in_steps(params(), PROMPTS, CFG, 8)


def test_pads_rows_after_end_token():
    """An end token in the prompt, as after an earlier turn, has no effect."""
    ends = {int(greedy()[0, 6]), int(PROMPTS[1, -1])}
    cfg = dataclasses.replace(CFG, eos_token_id=tuple(ends), pad_token_id=31)
    got = generate_in_steps(params(), PROMPTS, cfg, 8)
    for row, plain in zip(got, greedy()):
        new = plain[4:].tolist()
        first = next((i for i, token in enumerate(new) if token in ends), len(new))
        assert row[4:].tolist() == new[: first + 1] + [31] * (7 - first)
    assert (got[0, 7:] == 31).all() and got[1, 4] != 31


def test_sampling_is_deterministic_per_key():
    draw = functools.partial(generate_in_steps, params(), PROMPTS, CFG, 8, temperature=3.0)
    one, again, other = (draw(key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert one.shape == (2, 12) and (one[:, :4] == PROMPTS).all()
    hot = generate_in_steps(params(), PROMPTS, CFG, 8, temperature=1e9, key=jax.random.key(0))
    assert len(set(hot[0, 4:])) > 3  # every step draws a new sample
    cold = generate_in_steps(params(), PROMPTS, CFG, 8, temperature=1e-6, key=jax.random.key(2))
    np.testing.assert_array_equal(cold, greedy())


def test_ignores_capacity_and_chunk_size():
    got = generate(params(), PROMPTS, CFG, 8, capacity=20, prefill_chunk=3)
    np.testing.assert_array_equal(got, greedy())


def test_left_padding_does_not_change_row():
    padded = np.array([[0, 0, 3, 1], [5, 9, 2, 6]])
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]])
    got = generate_in_steps(params(), padded, CFG, 5, mask=mask)
    unpadded = generate_in_steps(params(), padded[:, 2:], CFG, 5)
    np.testing.assert_array_equal(got[0, 4:], unpadded[0, 2:])
    np.testing.assert_array_equal(got[1], greedy()[1, :9])


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(temperature=1.0), "temperature 1.0 needs a key"),
        (dict(capacity=11), "capacity 11 is below prompt 4 . 8 new tokens"),
        (dict(num_new=17), "sequence length 21 exceeds max_position_embeddings 20"),
    ],
)
def test_generate_rejects_invalid_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        generate(params(), PROMPTS, CFG, **({"num_new": 8} | changes))
