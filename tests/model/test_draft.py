"""Drafting is training's chain over one cache, and speculative text is the model's own."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import draft, glm5
from glm5_jax.model.draft import speculate, verify
from glm5_jax.model.generate import generate
from tests.model import golden as goldens
from tests.model.small import one_layer
from tests.oracles import glm5 as oracle

DRAFTS, NEW = 3, 14
HOT = 6.0  # drafts are often kept: every distribution is flat
MASK = np.ones((3, 9), np.int32)
MASK[1, :4] = 0
MTP = "model.layers.1."
END = (237,)  # greedy text has it as the second of three tokens that are kept at once
APART = 0.05  # logits of two chains that differ, for these weights


@functools.cache
def fixture():
    """(cfg, params, prompts int[3 9], oracle's config and weights): transformers' golden, its first
    layer and its MTP layer alone, which compile fast."""
    golden = goldens.load("hf_tiny_a")
    one = dict(num_hidden_layers=1, indexer_types=None, eos_token_id=END, pad_token_id=0)
    cfg = dataclasses.replace(golden.cfg, **one)
    params = {k: v for k, v in golden.params.items() if k != "moe_layers"}
    config, weights = oracle.load(goldens.FOLDER / golden.name)
    weights |= {k.replace("layers.4.", "layers.1."): v for k, v in weights.items() if ".4." in k}
    prompts = np.random.default_rng(0).integers(3, cfg.vocab_size, MASK.shape)
    return cfg, params, np.where(MASK, prompts, 0), config | {"num_hidden_layers": 1}, weights


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture
def states(monkeypatch):
    """What was drafted before every verification: (position, drafts, logits up to a constant)."""
    seen = []

    def spied(plain):
        def run(*args, **kwargs):
            out = plain(*args, **kwargs)
            state = out if isinstance(out, draft.DraftState) else out[0]
            logits = HOT * np.log(np.asarray(state.draft_probs))
            seen.append((np.asarray(state.position), np.asarray(state.drafts), logits))
            return out

        return run

    monkeypatch.setattr(draft, "prefill", spied(draft.prefill))
    monkeypatch.setattr(draft, "verify_round", spied(draft.verify_round))
    return seen


def drafted(states, params):
    """Of every unfinished row before a verification: (its text, drafts [1 k], logits [1 k v])."""
    cfg, _, prompts, *_ = fixture()
    out = speculate(
        params,
        prompts,
        cfg,
        NEW,
        num_speculative_tokens=DRAFTS,
        mask=MASK,
        temperature=HOT,
        key=jax.random.key(3),
    )
    progress = out.accepted[:, :-1].cumsum(1)
    assert (progress[0] != progress[2]).any() and len(set(out.accepted[0])) > 2
    # Of every other verification: the oracle reads the whole text for each.
    for (position, drafts, logits), alive in [*zip(states, (out.accepted > 0).T)][::2]:
        for row in np.flatnonzero(alive):
            padding = (MASK[row] == 0).sum()
            yield (
                out.tokens[row, None, padding : position[row] + 1],
                drafts[row, None],
                logits[row, None],
            )


def near(got, expected):
    expected = HOT * log_softmax(expected / HOT)
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_drafts_are_the_oracle_s(states):
    """Rows of different lengths and progress, at every verification: nothing of refused drafts, of
    padding or of a neighbour is left in either cache."""
    _, params, _, config, weights = fixture()
    unlike = []
    for text, drafts, logits in drafted(states, params):
        hidden = oracle.forward(weights, config, text)["final_hidden"][:, :-1]
        expected = oracle.draft(weights, config, text, hidden, drafts)
        near(logits, expected)
        # A chain of un-normed states (hnorm takes out their length) would be seen.
        first = oracle.mtp(weights, config, text, hidden)[0]["hidden"][:, -1:]
        both = np.concatenate([hidden, first / weights[MTP + "shared_head.norm.weight"]], 1)
        known = np.concatenate([text, drafts[:, :1]], 1)
        other = oracle.mtp(weights, config, known, both)[0]["logits"][:, -1]
        unlike.append(np.abs(log_softmax(other) - log_softmax(expected[:, 1])).max())
    assert min(unlike) > APART


def test_step_one_is_training_s(states):
    """Later steps see the trunk's entries where training's saw their own."""
    _, params, _, config, weights = fixture()
    unlike = []
    for text, drafts, logits in drafted(states, params):
        known = np.concatenate([text, drafts], 1)
        hidden = oracle.forward(weights, config, known)["final_hidden"]
        steps = oracle.mtp(weights, config, known, hidden, steps=DRAFTS)
        place = text.shape[1] - 2
        near(logits[:, 0], steps[0]["logits"][:, place])
        second = log_softmax(steps[1]["logits"][:, place] / HOT) * HOT
        unlike.append(np.abs(logits[:, 1] - second).max())
    assert max(unlike) > APART


def test_every_step_is_training_s_where_attention_plays_no_part(states):
    _, params, _, config, weights = fixture()
    silent = MTP + "self_attn.o_proj.weight"
    weights = weights | {silent: 0 * weights[silent]}
    params = jax.tree.map(lambda x: x, params)
    params["mtp"]["block"]["attn"]["o"] = 0 * params["mtp"]["block"]["attn"]["o"]
    for text, drafts, logits in drafted(states, params):
        known = np.concatenate([text, drafts], 1)
        hidden = oracle.forward(weights, config, known)["final_hidden"]
        for k, step in enumerate(oracle.mtp(weights, config, known, hidden, steps=DRAFTS)):
            near(logits[:, k], step["logits"][:, text.shape[1] - 2])


def foresighted(params):
    """The weights bent so that the next token depends mostly on the last, and drafts are often right."""
    params = jax.tree.map(np.array, params)
    mtp, d = params["mtp"], params["final_norm"].shape[0]
    params["embed"]["weight"] *= 30
    mtp["eh_proj"] *= 0.1
    mtp["eh_proj"][:d] += 8 * np.eye(d)
    mtp["enorm"][:] = 1
    mtp["norm"] = params["final_norm"]
    for part in (params["dense_layers"]["mlp"], mtp["block"]["experts"], mtp["block"]["shared"]):
        part["down"] *= 0.1
    return params


def test_greedy_text_is_generate_s():
    """One row ends inside of what a verification kept, and the others go on."""
    cfg, params, prompts, *_ = fixture()
    params = foresighted(params)
    expected = generate(params, prompts, cfg, NEW, mask=MASK)
    got = speculate(params, prompts, cfg, NEW, num_speculative_tokens=DRAFTS, mask=MASK)
    np.testing.assert_array_equal(got.tokens, expected)
    assert (got.accepted.sum(1) == (NEW - 1, NEW - 1, 2)).all()
    # The same weights without an end: the second verification keeps three at once.
    assert got.accepted[2, :2].tolist() == [1, 1] and expected[2, 11] == END[0]
    assert {0, 1, 2} <= set(got.accepted.ravel())


def chi_square(counts, probs, total):
    """Of counts against probabilities; outcomes expected less than five times are taken as one."""
    rare = probs * total < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(probs[~rare], probs[rare].sum()) * total
    expected = np.maximum(expected, 1e-9)
    return ((counts - expected) ** 2 / expected).sum(), len(expected) - 1


def likely(counts, probs, total):
    """Whether the statistic is within five deviations of what chance alone gives."""
    statistic, freedom = chi_square(counts, probs, total)
    return statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_rejection_sampling_is_exact():
    """Texts of three tokens from two Markov chains, the model's and the drafts', against the
    model's exact distribution; what a verification does not give is drawn from the model."""
    total, v = 100_000, 3
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.full(v, 0.6), size=v).astype(np.float32) for _ in range(2))
    p[0, 1], p[1, 2] = 0, 0  # drafts that the model never takes
    p /= p.sum(1, keepdims=True)

    def text(key):
        keys = jax.random.split(key, 6)

        def draw(key, probs):
            return jax.random.categorical(key, jnp.log(probs))

        first = draw(keys[0], q[0])
        drafts = jnp.stack([first, draw(keys[1], q[first])])
        probs = jnp.stack([p[0], jnp.asarray(p)[drafts[0]], jnp.asarray(p)[drafts[1]]])
        draft_probs = jnp.stack([q[0], jnp.asarray(q)[drafts[0]]])
        tokens, count = verify(keys[2], drafts[None], draft_probs[None], probs[None])
        out, last = [], 0
        for i in range(3):
            last = jnp.where(i < count[0], tokens[0, i], draw(keys[3 + i], jnp.asarray(p)[last]))
            out.append(last)
        return jnp.stack(out), count[0]

    p, q = jnp.asarray(p), jnp.asarray(q)
    texts, count = jax.jit(jax.vmap(text))(jax.random.split(jax.random.key(1), total))
    assert set(np.unique(count)) == {1, 2, 3}
    code = np.asarray(texts) @ v ** np.arange(3)[::-1]
    exact = np.array(
        [p[0, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(v), repeat=3)]
    )
    counts = np.bincount(code, minlength=v**3)
    assert likely(counts, exact, total)
    assert not likely(counts, 0.97 * exact + 0.03 / v**3, total)  # as fine as this


LETTERS = one_layer(vocab_size=4, num_attention_heads=2)
ROWS, LENGTH = 4096, 6


@functools.cache
def letters():
    return jax.tree.map(lambda x: 12 * x, glm5.init_params(LETTERS, jax.random.key(1)))


# Of one shape, so that these tests share a program.
spelled = functools.partial(speculate, cfg=LETTERS, num_new=LENGTH, num_speculative_tokens=2)


@pytest.mark.slow
def test_sampled_text_is_distributed_as_the_model_s():
    """4,096 texts from one prompt, against the exact probabilities of their last four tokens."""
    v, prompt = LETTERS.vocab_size, np.array([[2, 0, 3]])
    draw = functools.partial(
        spelled, letters(), np.repeat(prompt, ROWS, 0), temperature=1.3, key=jax.random.key(0)
    )
    got = draw()
    np.testing.assert_array_equal(got.tokens, draw().tokens)
    assert {0, 1, 2, 3} == set(got.accepted.ravel())
    every = np.array(list(itertools.product(range(v), repeat=LENGTH)))
    whole = np.concatenate([np.repeat(prompt, len(every), 0), every], 1)
    logits = jax.jit(glm5.forward, static_argnums=2)(letters(), whole, LETTERS).logits / 1.3
    chances = np.asarray(jax.nn.softmax(logits, -1), np.float64)[:, 2:-1]
    exact = np.take_along_axis(chances, every[..., None], -1)[..., 0].prod(1)
    exact = exact.reshape(-1, v**4).sum(0)
    code = got.tokens[:, -4:] @ v ** np.arange(4)[::-1]
    counts = np.bincount(code, minlength=v**4)
    assert likely(counts, exact / exact.sum(), ROWS)
    assert not likely(counts, 0.8 * exact / exact.sum() + 0.2 / v**4, ROWS)


@pytest.mark.slow
def test_dense_attention_drafts_as_well(monkeypatch):
    """And other prompts and temperatures are no other programs."""
    prompts = np.random.default_rng(0).integers(0, LETTERS.vocab_size, (ROWS, 3))
    got = spelled(letters(), prompts)

    def forward(*args, **named):
        raise AssertionError("another program is traced")

    monkeypatch.setattr(draft, "forward", forward)
    np.testing.assert_array_equal(got.tokens, generate(letters(), prompts, LETTERS, LENGTH))
    assert set(got.accepted.ravel()) == {0, 1, 2, 3}
    spelled(letters(), prompts[::-1], temperature=0.5, key=jax.random.key(1))


@pytest.mark.slow
def test_windows_and_grouped_queries_draft_as_well():
    """A window counts from the newest token, wherever in the cache its row has come to stand."""
    cfg = dataclasses.replace(
        LETTERS,
        projections="gqa",
        num_key_value_heads=1,
        layer_attention=("window",),
        sliding_window=3,
    )
    params = jax.tree.map(lambda x: 12 * x, glm5.init_params(cfg, jax.random.key(1)))
    prompts = np.random.default_rng(0).integers(0, cfg.vocab_size, (64, 3))
    got = speculate(params, prompts, cfg, LENGTH, num_speculative_tokens=2)
    np.testing.assert_array_equal(got.tokens, generate(params, prompts, cfg, LENGTH))
    assert len({tuple(row) for row in got.accepted}) > 3


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(temperature=1.0), "temperature 1.0 needs a key"),
        (dict(temperature=-1.0), "temperature is -1.0; it must be 0"),
        (dict(num_speculative_tokens=0), "num_speculative_tokens is 0; it must be positive"),
        (dict(num_new=0), "num_new is 0; it must be positive"),
        (dict(num_new=501), "sequence length 513 exceeds max_position_embeddings 512"),
        (
            dict(cfg=dataclasses.replace(LETTERS, num_nextn_predict_layers=0)),
            "the model has no MTP layer to draft with; use generate",
        ),
        (
            dict(cfg=dataclasses.replace(LETTERS, layer_attention=("simple_gdn",))),
            "has simple_gdn layers, whose state cannot be rolled back when .* use generate",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    cfg, params, prompts, *_ = fixture()
    with pytest.raises(ValueError, match=message):
        speculate(
            params, prompts, **(dict(cfg=cfg, num_new=NEW, num_speculative_tokens=DRAFTS) | changes)
        )
