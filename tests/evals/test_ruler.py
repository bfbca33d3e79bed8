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
def decoded():
    """Prompts int[6 20] and what the model writes after them, int[6 6]."""
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


def test_what_greedy_decoding_writes_is_solved():
    prompts, answers = decoded()
    found = score(params(), CFG, tasks_of(prompts, answers), 4)
    assert found.exact.all() and (found.share == 1).all()
    np.testing.assert_allclose(found.depth, 0.3)


def test_a_sample_is_solved_if_and_only_if_greedy_decoding_writes_it():
    """One token of every sample is another: the first, a middle one or the last of the answers."""
    prompts, answers = decoded()
    for place, hit in ((0, 0), (2, 1), (5, 2)):
        wrong = answers.copy()
        wrong[::2, place] = (wrong[::2, place] + 1) % CFG.vocab_size
        found = score(params(), CFG, tasks_of(prompts, wrong), 3)
        np.testing.assert_array_equal(found.exact, (wrong == answers).all(1))
        assert found.exact.tolist() == [False, True] * 3
        # What follows a wrong token is judged after it, and is another text's continuation.
        assert (found.share[::2] < 1).all() and (found.share[1::2] == 1).all()
        if hit == 2:
            np.testing.assert_allclose(found.share[::2], 2 / 3)


def test_answers_of_unequal_number_and_length_share_a_batch():
    prompts, answers = decoded()
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
    found = score(params(), CFG, two + one, 6, tail=8)
    assert found.exact.all() and np.isnan(found.depth[3:]).all()
    apart = [score(params(), CFG, part, 6) for part in (two, one)]
    assert [s.exact.all() for s in apart] == [True, True]


def test_logits_of_the_prompt_are_never_made():
    """Of the compiled program: nothing in it has t x v elements; the answers' logits are there."""
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


def test_every_kind_and_length_is_scored_the_same_each_time():
    found = scores()
    assert list(found) == ["needle/40", "multi_value/40", "needle/64", "multi_value/64"]
    again = ruler(params(), CFG, TOKENIZER, dataclasses.replace(CONFIG, batch_size=5))
    for name, one in found.items():
        assert len(one.exact) == 5 and one.samples == again[name].samples
        np.testing.assert_array_equal(one.share, again[name].share)
    assert len({one.samples for one in found.values()}) == 4


def test_runs_one_program_for_all_kinds_of_a_length(monkeypatch):
    plain, asked = module.correct_tokens, []

    def record(params, tokens, *static):
        asked.append((tokens.shape, tokens.dtype, *static))
        return plain(params, tokens, *static)

    monkeypatch.setattr(module, "correct_tokens", record)
    ruler(params(), CFG, TOKENIZER, CONFIG)
    assert len(asked) == 8 and len(set(asked)) == 2


def made(exact, share=None, samples="x"):
    exact = np.array(exact, bool)
    share = np.array(exact if share is None else share, np.float64)
    return Score(exact=exact, share=share, depth=np.zeros(len(exact)), samples=samples)


def test_two_models_are_compared_on_their_common_samples():
    a = {"needle/8": made([1, 1, 1, 0] * 50), "needle/9": made([1] * 200, samples="y")}
    b = {"needle/8": made([1, 1, 0, 0] * 50), "needle/9": made([1] * 200, samples="y")}
    found = compare(a, b)
    assert found["needle/8"][0] == pytest.approx(0.25) and found["needle/8"][1] > 0.15
    assert found["needle/9"][0] == 0 and found["needle/9"][1] < 0 < found["needle/9"][2]
    assert found["all"][0] == pytest.approx(0.125)
    assert np.diff(found["all"][1:]) < np.diff(found["needle/8"][1:])  # more samples
    with pytest.raises(ValueError, match="not scored on the same samples"):
        compare(a, {"needle/8": b["needle/8"]})
    with pytest.raises(ValueError, match="not scored on the same samples"):
        compare(a, b | {"needle/9": made([1] * 200, samples="z")})


def test_the_table_and_the_metrics_say_what_was_found():
    found = {
        "needle/8": made([1, 1, 1, 0]),
        "multi_value/8": made([0, 1, 0, 0], [0.5, 1, 0.5, 0]),
        "needle/16": made([1, 1, 1, 1]),
        "multi_value/16": made([0, 0, 0, 0], [0.5, 0.5, 0.5, 0]),
    }
    lines = [line.split() for line in table(found).splitlines()]
    assert lines[0] == ["solved,", "%", "8", "tokens", "16", "tokens"]
    assert lines[1] == ["needle", "75.0", "[30.1,", "95.4]", "100.0", "[51.0,", "100.0]"]
    assert [lines[2][0], lines[2][1], lines[3][0], lines[3][1]] == [
        "multi_value", "25.0", "share", "50.0",
    ]  # fmt: skip
    assert lines[4] == ["mean", "50.0", "50.0"]
    numbers = metrics(found)
    assert numbers["ruler/needle/8/exact"] == 0.75
    assert numbers["ruler/multi_value/16/share"] == 0.375


def setting():
    """Of a run on eight devices, over which a batch of four is split, and each sequence once more."""
    config = ExperimentConfig(model=CFG, mesh=MeshConfig(data=2, fsdp=2, context=2))
    return Setting(
        config=config, tokenizer=TOKENIZER, batch_rows=4, place=lambda batch: batch, evaluate=None
    )


class Other:
    def __init__(self, given):
        self.given = given

    def __call__(self, params):
        return {"held_out/loss": 1.5}

    def baselines(self):
        return {"unigram": 3.0}


def test_it_is_an_evaluator_beside_another_and_a_mesh_changes_nothing():
    both, alone = Ruler(CONFIG, setting(), other=Other), Ruler(CONFIG, setting())
    mesh = make_mesh(data=2, fsdp=2, context=2)
    placed = jax.device_put(params(), glm5.param_shardings(CFG, mesh))
    assert both(placed) == {"held_out/loss": 1.5} | metrics(scores())
    assert both.baselines() == {"unigram": 3.0}
    assert alone(placed) == metrics(scores()) and alone.baselines() == {}


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
def test_bad_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_lengths_beyond_the_model_are_refused_before_any_work():
    config = dataclasses.replace(CONFIG, lengths=(40, 129))
    message = "sequence length 129 exceeds max_position_embeddings 128"
    with pytest.raises(ValueError, match=message):
        ruler(params(), CFG, TOKENIZER, config)
    with pytest.raises(ValueError, match=message):
        Ruler(config, setting())


def test_long_evaluations_show_how_far_they_are(monkeypatch, capsys):
    monkeypatch.setattr(module, "QUIET_S", 0.0)
    ruler(params(), CFG, TOKENIZER, CONFIG)
    assert "sample 20/20  multi_value at 64" in capsys.readouterr().err
    ruler(params(), CFG, TOKENIZER, CONFIG, progress=False)
    assert not any(capsys.readouterr())
