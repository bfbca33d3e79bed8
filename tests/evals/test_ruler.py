"""The verdict of one forward is that of greedy decoding; scores, comparisons and tables are right."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest

from glm5_jax.data.synthetic import LongContextTask, LongContextTaskConfig
from glm5_jax.evals import ruler as module
from glm5_jax.evals.ruler import Ruler, RulerConfig, Score, compare, metrics, ruler, score, table
from glm5_jax.model import glm5
from glm5_jax.model.generate import generate
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import MeshConfig
from glm5_jax.training.pretraining import ExperimentConfig, Setting
from tests.model.small import one_layer

TOKENIZER = Tokenizer.default()
CFG = one_layer(num_nextn_predict_layers=0, max_position_embeddings=128)
CONFIG = RulerConfig(
    kinds=("needle", "multi_value"),
    lengths=(40, 64),
    samples=5,
    batch_size=4,
    task=LongContextTaskConfig(surface="tokens"),
)


@functools.cache
def params():
    return jax.tree.map(lambda x: 9 * x, glm5.init_params(CFG, jax.random.key(1)))


@functools.cache
def greedy_samples():
    """Returns prompts int[6 20] and the model's continuations int[6 6]."""
    prompts = np.random.default_rng(0).integers(0, CFG.vocab_size, (6, 20))
    return prompts, generate(params(), prompts, CFG, 6)[:, 20:]


def tasks_of(prompts, answers, cuts=(2, 3)):
    return [
        LongContextTask(
            prompt=p.astype(np.int32),
            answers=tuple(np.split(a.astype(np.int32), cuts)),
            kind="multi_value",
            depths=(0.5, 0.1),
        )
        for p, a in zip(prompts, answers)
    ]


def test_greedy_answers_count_as_solved():
    prompts, answers = greedy_samples()
    results = score(params(), CFG, tasks_of(prompts, answers), 4)
    assert results.exact.all() and (results.share == 1).all()
    np.testing.assert_allclose(results.depth, 0.3)


def test_only_greedy_answers_count_as_solved():
    """One token of every sample is wrong: the first, a middle or the last one of the answers."""
    prompts, answers = greedy_samples()
    for place, hit in ((0, 0), (2, 1), (5, 2)):
        wrong = answers.copy()
        wrong[::2, place] = (wrong[::2, place] + 1) % CFG.vocab_size
        results = score(params(), CFG, tasks_of(prompts, wrong), 3)
        np.testing.assert_array_equal(results.exact, (wrong == answers).all(1))
        assert results.exact.tolist() == [False, True] * 3
        # Tokens after a wrong one continue another text.
        assert (results.share[::2] < 1).all() and (results.share[1::2] == 1).all()
        if hit == 2:
            np.testing.assert_allclose(results.share[::2], 2 / 3)


def test_batches_answers_of_unequal_length():
    prompts, answers = greedy_samples()
    two = tasks_of(prompts[:3], answers[:3])
    one = [
        LongContextTask(
            prompt=np.concatenate([p, a[:5]]).astype(np.int32),
            answers=(a[5:].astype(np.int32),),
            kind="needle",
            depths=(),
        )
        for p, a in zip(prompts[3:], answers[3:])
    ]
    results = score(params(), CFG, two + one, 6, tail=8)
    assert results.exact.all() and np.isnan(results.depth[3:]).all()
    apart = [score(params(), CFG, part, 6) for part in (two, one)]
    assert [s.exact.all() for s in apart] == [True, True]


def test_computes_no_logits_of_prompt():
    """The compiled program has the logits of the answers, and nothing else with t x v elements."""
    tokens = np.zeros((2, 96), np.int32)
    run = module.correct_tokens.lower(
        params(), tokens, CFG, 3, None, module.ExecutionConfig()
    ).compile()
    shapes = re.findall(r"\bf\d+\[([\d,]+)\]", run.as_text())
    sizes = {math.prod(map(int, shape.split(","))) for shape in shapes}
    assert 2 * 3 * CFG.vocab_size in sizes or 6 * CFG.vocab_size in sizes
    assert not [n for n in sizes if n >= 96 * CFG.vocab_size]


@functools.cache
def scores():
    return ruler(params(), CFG, TOKENIZER, CONFIG)


def test_scores_every_kind_and_length_reproducibly():
    results = scores()
    assert list(results) == ["needle/40", "multi_value/40", "needle/64", "multi_value/64"]
    again = ruler(params(), CFG, TOKENIZER, dataclasses.replace(CONFIG, batch_size=5))
    for name, one in results.items():
        assert len(one.exact) == 5 and one.samples == again[name].samples
        np.testing.assert_array_equal(one.share, again[name].share)
    assert len({one.samples for one in results.values()}) == 4


def test_runs_one_program_per_length(monkeypatch):
    plain, calls = module.correct_tokens, []

    def record(params, tokens, *static):
        calls.append((tokens.shape, tokens.dtype, *static))
        return plain(params, tokens, *static)

    monkeypatch.setattr(module, "correct_tokens", record)
    ruler(params(), CFG, TOKENIZER, CONFIG)
    assert len(calls) == 8 and len(set(calls)) == 2


def make_score(exact, share=None, samples="x"):
    exact = np.array(exact, bool)
    share = np.array(exact if share is None else share, np.float64)
    return Score(exact=exact, share=share, depth=np.zeros(len(exact)), samples=samples)


def test_compares_models_on_common_samples():
    a = {"needle/8": make_score([1, 1, 1, 0] * 50), "needle/9": make_score([1] * 200, samples="y")}
    b = {"needle/8": make_score([1, 1, 0, 0] * 50), "needle/9": make_score([1] * 200, samples="y")}
    results = compare(a, b)
    assert results["needle/8"][0] == pytest.approx(0.25) and results["needle/8"][1] > 0.15
    assert results["needle/9"][0] == 0 and results["needle/9"][1] < 0 < results["needle/9"][2]
    assert results["all"][0] == pytest.approx(0.125)
    assert np.diff(results["all"][1:]) < np.diff(results["needle/8"][1:])  # more samples
    with pytest.raises(ValueError, match="not scored on the same samples"):
        compare(a, {"needle/8": b["needle/8"]})
    with pytest.raises(ValueError, match="not scored on the same samples"):
        compare(a, b | {"needle/9": make_score([1] * 200, samples="z")})


def test_table_and_metrics_report_scores():
    results = {
        "needle/8": make_score([1, 1, 1, 0]),
        "multi_value/8": make_score([0, 1, 0, 0], [0.5, 1, 0.5, 0]),
        "needle/16": make_score([1, 1, 1, 1]),
        "multi_value/16": make_score([0, 0, 0, 0], [0.5, 0.5, 0.5, 0]),
    }
    lines = [line.split() for line in table(results).splitlines()]
    assert lines[0] == ["solved,", "%", "8", "tokens", "16", "tokens"]
    assert lines[1] == ["needle", "75.0", "[30.1,", "95.4]", "100.0", "[51.0,", "100.0]"]
    assert [lines[2][0], lines[2][1], lines[3][0], lines[3][1]] == [
        "multi_value", "25.0", "share", "50.0",
    ]  # fmt: skip
    assert lines[4] == ["mean", "50.0", "50.0"]
    numbers = metrics(results)
    assert numbers["ruler/needle/8/exact"] == 0.75
    assert numbers["ruler/multi_value/16/share"] == 0.375


def setting():
    """Returns the setting of a run on eight devices, with batches of four rows."""
    config = ExperimentConfig(model=CFG, mesh=MeshConfig(data=2, fsdp=2, context=2))
    return Setting(
        config=config, tokenizer=TOKENIZER, batch_rows=4, place=lambda batch: batch, evaluate=None
    )


class Other:
    def __init__(self, run_setting):
        self.run_setting = run_setting

    def __call__(self, params):
        return {"held_out/loss": 1.5}

    def baselines(self):
        return {"unigram": 3.0}


def test_combines_with_other_evaluator_on_mesh():
    both, single = Ruler(CONFIG, setting(), other=Other), Ruler(CONFIG, setting())
    mesh = make_mesh(data=2, fsdp=2, context=2)
    placed = jax.device_put(params(), glm5.param_shardings(CFG, mesh))
    assert both(placed) == {"held_out/loss": 1.5} | metrics(scores())
    assert both.baselines() == {"unigram": 3.0}
    assert single(placed) == metrics(scores()) and single.baselines() == {}


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(kinds=()), r"kinds is \(\); name at least one"),
        (dict(kinds=("needle", "needle")), "each once"),
        (dict(lengths=()), r"lengths is \(\)"),
        (dict(samples=0), "samples is 0; it must be positive"),
        (dict(batch_size=0), "batch_size is 0"),
        (dict(kinds=("pin",)), "kind is 'pin'; use one of needle"),
    ],
)
def test_rejects_invalid_config(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_rejects_lengths_beyond_model():
    config = dataclasses.replace(CONFIG, lengths=(40, 129))
    message = "sequence length 129 exceeds max_position_embeddings 128"
    with pytest.raises(ValueError, match=message):
        ruler(params(), CFG, TOKENIZER, config)
    with pytest.raises(ValueError, match=message):
        Ruler(config, setting())


def test_long_evaluations_show_progress(monkeypatch, capsys):
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    ruler(params(), CFG, TOKENIZER, CONFIG)
    assert "sample 20/20  multi_value at 64" in capsys.readouterr().err
    ruler(params(), CFG, TOKENIZER, CONFIG, progress=False)
    assert not any(capsys.readouterr())
