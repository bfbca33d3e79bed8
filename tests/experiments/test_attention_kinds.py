"""Kinds of attention: conversion and training of each arm, scores, and verdicts that follow the rows."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from experiments.ablations import attention_kinds, retriever
from experiments.ablations.arms import AblationRuns, Arm
from experiments.ablations.attention_kinds import (
    ARMS,
    DENSE,
    DSA,
    FULL,
    GDN,
    INTERLEAVED,
    SEARCHED,
    SEEDS,
    SIMPLE,
    AttentionKindsStudy,
)
from glm5_jax.checkpoint import store
from glm5_jax.checkpoint.models import check_arithmetic
from glm5_jax.data.synthetic import LongContextTasks
from glm5_jax.evals.ruler import STREAM, RulerConfig, Score
from glm5_jax.model import glm5
from glm5_jax.model.ablations.convert import convert
from glm5_jax.parallel.tree import flatten, matches_any
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.optimizer import groups_of

pytestmark = pytest.mark.usefixtures("without_pictures")

VARIANTS = ("tiny", "small")
CHOSEN = {"tiny": "FSSF", "small": "SFSFFSSFFSSF"}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A folder with a trained tokenizer, because training one takes seconds."""
    folder = tmp_path_factory.mktemp("kinds")
    Tokenizer.default().save(folder / "tokenizer")
    return folder


def arms(variant, workdir):
    study = attention_kinds.get_config(variant)
    chosen = attention_kinds.kinds_of(CHOSEN[variant])
    return study, attention_kinds.arms(study, workdir, chosen)


@pytest.mark.parametrize("variant", VARIANTS)
def test_arms_share_base_and_train_on_equal_tokens(variant, workdir):
    study, arms_by_name = arms(variant, workdir)
    *dense, last = study.stages(workdir)
    assert tuple(arms_by_name) == ARMS
    for name, arm in arms_by_name.items():
        assert arm.stages[: len(dense)] == tuple(dense)
        stages = arm.stages[len(dense) :]
        assert len(stages) == (2 if name == DSA else 1)
        assert sum(stage.steps for stage in stages) == last.schedule.total_steps
        for stage in stages:
            assert (stage.data, stage.batch) == (last.data, last.batch)
        assert stages[-1].schedule.peak == last.schedule.peak
    digests = {arm.trial(seed=1).digests[len(dense) - 1] for arm in arms_by_name.values()}
    assert len(digests) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_converts_half_of_layers_and_all_for_dsa(variant, workdir):
    _, arms_by_name = arms(variant, workdir)
    kinds = {name: arm.stages[-1].model.layer_kinds for name, arm in arms_by_name.items()}
    layers = len(kinds[FULL])
    assert set(kinds[FULL]) == set(kinds[DSA]) == {"full"}
    assert kinds[SEARCHED] == attention_kinds.kinds_of(CHOSEN[variant])
    assert kinds[INTERLEAVED] == ("full", "window") * (layers // 2)
    for name, kind in ((GDN, "gdn"), (SIMPLE, "simple_gdn")):
        instead = {"full": "full", "window": kind}
        assert kinds[name] == tuple(instead[layer] for layer in kinds[SEARCHED])
    sparse = arms_by_name[DSA].stages[-1].model
    assert sparse.attention == "sparse" and sparse.full_layers == tuple(range(layers))
    assert all(
        arm.stages[-1].model.index_topk is None for n, arm in arms_by_name.items() if n != DSA
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_fit_from_stage_to_stage(variant, workdir):
    _, arms_by_name = arms(variant, workdir)
    for arm in arms_by_name.values():
        for first, stage in itertools.pairwise(arm.stages):
            check_arithmetic(first.name, first.model, stage.model, stage.may_differ)
            before, after = (flatten(glm5.abstract_params(part.model)) for part in (first, stage))
            one_sided = before.keys() ^ after.keys()
            assert all(matches_any(stage.may_differ, path) for path in one_sided)
            if first.model.layer_kinds != stage.model.layer_kinds:
                one_sided.add("model.layer_attention")
            patterns = [p for p in stage.may_differ if p != "rope_theta"]  # of mid-training
            assert all(any(matches_any([p], path) for path in one_sided) for p in patterns)
            assert all(before[p].shape == after[p].shape for p in before.keys() & after.keys())


def test_dsa_warms_up_indexers_then_trains_everything(workdir):
    study, arms_by_name = arms("tiny", workdir)
    *_, warmed, sparse = arms_by_name[DSA].stages
    assert warmed.model.attention == "dense" and warmed.steps == study.warmup_steps
    assert warmed.model.index_topk == sparse.model.index_topk == study.index_topk == 16
    groups = {}
    for stage in (warmed, sparse):
        of = flatten(groups_of(stage.optimizer, glm5.axis_letters(stage.model)))
        groups[stage.name] = {path: group for path, group in of.items() if group != "frozen"}
        assert stage.step.index_weight == 1
    warmed, sparse = groups.values()
    assert warmed and all("indexer/" in path for path in warmed)
    assert set(sparse) == set(flatten(glm5.abstract_params(arms_by_name[DSA].stages[-1].model)))


def test_continual_training_has_other_items(workdir):
    *_, before, last = attention_kinds.tiny().stages(workdir)
    [old], [new] = before.data.sources, last.data.sources
    assert dataclasses.replace(old.tasks, seed=new.tasks.seed) == new.tasks
    assert old.tasks.seed != new.tasks.seed


@pytest.mark.parametrize("variant", VARIANTS)
def test_search_and_evaluation_samples_differ(variant):
    study = attention_kinds.get_config(variant)
    [length], samples = study.searched.lengths, []
    for config in (study.judged, study.searched):
        for seed in SEEDS:
            seeded = dataclasses.replace(config, seed=config.seed + seed, samples=2)
            samples.append(seeded.task_of(study.judged.kinds[-1], length))
    assert len({task.seed for task in samples}) == 2 * len(SEEDS)
    if variant == "tiny":
        rows = [LongContextTasks(t, Tokenizer.default(), stream=STREAM).task(0) for t in samples]
        assert len({row.token_ids.tobytes() for row in rows}) == len(rows)


def test_rejects_study_that_evaluates_search_samples():
    study = attention_kinds.tiny()
    same = dataclasses.replace(study.searched, seed=study.judged.seed + 2)
    with pytest.raises(ValueError, match="searched.seed 2: .* put them 3 apart"):
        dataclasses.replace(study, searched=same)
    several = dataclasses.replace(study.searched, lengths=(18, 36))
    with pytest.raises(ValueError, match="scored at one length"):
        dataclasses.replace(study, searched=several)


def test_writes_patterns_in_letters():
    kinds = ("full", "window", "gdn", "simple_gdn")
    assert attention_kinds.letters(kinds) == "FSGD"
    assert attention_kinds.kinds_of("FSGD") == kinds


MODEL = retriever.model(2, hidden_size=16, intermediate_size=16, sliding_window=4)


@pytest.fixture(scope="module")
def toy():
    """Returns a study of two layers."""
    judged = RulerConfig(kinds=("multi_key",), lengths=(12, 18), samples=20, task=retriever.TASK)

    def stages(workdir):
        dense = retriever.stage("toy dense", workdir, 18, 2, MODEL)
        return dense, dataclasses.replace(dense, name="toy")

    searched = dataclasses.replace(judged, lengths=(18,), seed=9)
    return AttentionKindsStudy(
        name="toy", stages=stages, index_topk=4, warmup_steps=1, judged=judged, searched=searched
    )


def measure(study, workdir, monkeypatch, arm, seed, old, new):
    """Returns the row of a trial with dense model `old` and final model `new`."""
    folders = []

    def load(folder, abstract, may_differ=()):
        folders.append(folder)
        held = flatten(new if folder == last else old)
        one_sided = held.keys() ^ flatten(abstract).keys()
        assert all(matches_any(may_differ, path) for path in one_sided)
        return new if folder == last else old

    trial = arm.trial(seed=seed)
    *_, before, last = (
        AblationRuns(workdir).folders(trial) if len(arm.stages) > 1 else (None, workdir)
    )
    last.mkdir(parents=True, exist_ok=True)
    Tokenizer.load(retriever.tokenizer(workdir)).save(last / "tokenizer")
    monkeypatch.setattr(store, "load_params", load)
    row = attention_kinds.measure(study, trial, last)
    assert folders == [last] + ([before] if len(arm.stages) > 1 else [])
    return row


@pytest.mark.slow
def test_measures_converted_and_trained_model(workdir, toy, monkeypatch):
    config = dataclasses.replace(toy.judged, seed=toy.judged.seed + 2)
    tokenizer = Tokenizer.load(retriever.tokenizer(workdir))
    arms_by_name = attention_kinds.arms(toy, workdir, ("window", "full"))
    old = glm5.init_params(MODEL, jax.random.key(0))
    seen = []

    def spy(params, model, *rest):
        seen.append((params, model, *rest))
        return {"12": 0.25, "18": 0.5}

    monkeypatch.setattr(attention_kinds, "solve_rates", spy)
    for name in (SEARCHED, GDN):
        model = arms_by_name[name].stages[-1].model
        new = glm5.init_params(model, jax.random.key(1))
        row = measure(toy, workdir, monkeypatch, arms_by_name[name], 2, old, new)
        assert row == {"before": {"12": 0.25, "18": 0.5}, "after": {"12": 0.25, "18": 0.5}}
        (converted, *rest), (after, *_) = seen[-2:]
        assert rest[0].layer_kinds == model.layer_kinds and rest[2] == config
        assert rest[0].eos_token_id == tuple(tokenizer.eos_ids)
        want, _ = convert(old, MODEL, model.layer_kinds)
        jax.tree.map(np.testing.assert_array_equal, converted, want)
        assert after is new


def test_searches_best_pattern_of_dense_model(workdir, toy, monkeypatch):
    """Scores both patterns of one window, converted, on the samples of this seed's search."""
    dense = Arm(DENSE, toy.stages(workdir)[:1])
    old = glm5.init_params(MODEL, jax.random.key(0))

    def spy(params, model, tokenizer, config):
        assert config == dataclasses.replace(toy.searched, seed=toy.searched.seed + 1)
        jax.tree.map(np.testing.assert_array_equal, params, old)
        return {"18": {"FS": 0.25, "SF": 0.75}[attention_kinds.letters(model.layer_kinds)]}

    monkeypatch.setattr(attention_kinds, "solve_rates", spy)
    row = measure(toy, workdir, monkeypatch, dense, 1, None, old)
    assert row == {"pattern": "SF", "scores": {"FS": 0.25, "SF": 0.75}}


def test_solve_rate_is_mean_over_kinds(monkeypatch):
    config = RulerConfig(kinds=("needle", "multi_key"), lengths=(18, 36), samples=4)
    exact = {"needle/18": 4, "multi_key/18": 1, "needle/36": 2, "multi_key/36": 0}

    def fake(params, model, tokenizer, ruler_config, progress):
        assert (params, model, tokenizer, ruler_config) == (1, 2, 3, config)
        share = np.ones(4)  # some answers are right in every sample
        return {
            k: Score(exact=np.arange(4) < n, share=share, depth=share, samples="")
            for k, n in exact.items()
        }

    monkeypatch.setattr(attention_kinds, "ruler", fake)
    assert attention_kinds.solve_rates(1, 2, 3, config) == {"18": 0.625, "36": 0.25}


def test_every_seed_trains_its_pattern(toy, workdir, monkeypatch):
    trained = []

    class Fake:
        def __init__(self, workdir, measure=None, keep=False):
            assert keep
            self.workdir = workdir

        def __call__(self, trials):
            trained.extend(trials)
            return [row(t) for t in trials]

    def row(trial):
        if trial.arm == DENSE:
            pattern = ("FS", "SF", "SF")[trial.seed]
            return {"seed": trial.seed, "loss": 1.0, "pattern": pattern, "scores": {pattern: 0.5}}
        shares = {"12": 0.5, "18": 0.5}
        return {"seed": trial.seed, "loss": 1.0, "before": shares, "after": shares}

    monkeypatch.setattr(attention_kinds, "AblationRuns", Fake)
    result = attention_kinds.compare(Fake(workdir, keep=True), toy, "command")
    searched = {t.seed: t.stages[-1].model.layer_kinds for t in trained if t.arm == SEARCHED}
    assert searched == {0: ("full", "window"), 1: ("window", "full"), 2: ("window", "full")}
    same = {t.digests[-1] for t in trained if t.seed == 0 and t.arm in (SEARCHED, INTERLEAVED)}
    assert len(same) == 1  # one training for both
    assert len(trained) == len(SEEDS) * (1 + len(ARMS)) and result.command == "command"


def rows(**changes):
    """Returns rows in which every arm solves all, except {arm: (before, after)} at the longest length."""
    names = dict(zip(("full", "apart", "searched", "gdn", "simple", "dsa"), ARMS))
    changes_by_arm = {names[key]: value for key, value in changes.items()}
    out = {}
    for name in ARMS:
        before, after = changes_by_arm.get(name, ((1.0,) * 3, (1.0,) * 3))
        out[name] = [
            {"seed": s, "loss": 0.0, "before": {"12": 1.0, "18": b}, "after": {"12": 1.0, "18": a}}
            for s, (b, a) in enumerate(zip(before, after, strict=True))
        ]
    return out


BASES = [
    {"seed": s, "pattern": best, "scores": {"SF": 0.5, "FS": 0.25, "FF": 1.0}}
    for s, best in enumerate(("SF", "SF", "FS"))
]
ONE = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "index", "verdict"),
    [
        (dict(apart=((0.3, 0.5, 0.4), ONE)), 0, "collapse, to less than 0.5 of it: met (0.40)"),
        (dict(apart=((0.6, 0.4, 0.8), ONE)), 0, "to less than 0.5 of it: not met (0.60)"),
        (dict(apart=((0.5, 0.6, 0.7), ONE)), 1, "windows, searched minus windows, interleaved is +40.00 ± 24.84 (+30.00 .. +50.00) points, by seed; the search loses less: met"),
        (dict(apart=((1.0, 0.5, 0.5), ONE)), 1, "the search loses less: met on average, within the spread"),
        (dict(), 1, "the search loses less: not met"),
        (dict(apart=(ONE, (0.75,) * 3)), 2, "full attention minus windows, interleaved is +25.00 ± 0.00 (+25.00 .. +25.00) points, by seed; a gap remains: met"),
        (dict(searched=(ONE, (1.0, 1.0, 0.9))), 3, "minus windows, searched is +3.33 ± 14.34 (+0.00 .. +10.00) points, by seed; a gap remains: met on average, within the spread"),
        (dict(gdn=(ONE, (0.9,) * 3), full=(ONE, (0.9,) * 3)), 4, "minus Gated DeltaNet is +0.00 ± 0.00 (+0.00 .. +0.00) points, by seed; a gap remains: not met"),
        (dict(simple=(ONE, (0.5,) * 3)), 5, "minus SimpleGDN is +50.00 ± 0.00 (+50.00 .. +50.00) points, by seed; a gap remains: met"),
        (dict(dsa=(ONE, (0.996,) * 3)), 6, "DSA minus full attention is -0.40 ± 0.00 (-0.40 .. -0.40) points, by seed; DSA loses less than 0.5: met"),
        (dict(dsa=(ONE, (0.99, 1.0, 1.0))), 6, "DSA loses less than 0.5: met on average, within the spread"),
        (dict(dsa=(ONE, (0.99,) * 3)), 6, "DSA loses less than 0.5: not met"),
    ],
)  # fmt: skip
def test_verdicts_follow_rows(changes, index, verdict, toy):
    result = attention_kinds.finding(toy, "command", BASES, rows(**changes))
    assert len(result.verdicts) == 7
    when = "before" if index < 2 else "after"
    assert result.verdicts[index].startswith(f"18 tokens, {when} training: ")
    assert result.verdicts[index].endswith(verdict)


def test_tables_show_every_arm(toy):
    changed = rows(apart=((0.25, 0.5, 0.75), ONE), full=(ONE, (0.5, 0.75, 1.0)))
    result = attention_kinds.finding(toy, "command", BASES, changed)
    solved, differences, patterns = result.tables
    assert [row[:2] for row in solved.rows] == [(n, w) for n in ARMS for w in ("before", "after")]
    assert solved.columns[2:] == ("12 tokens", "18 tokens")
    cells = {row[:2]: row[2:] for row in solved.rows}
    assert cells[INTERLEAVED, "before"][1].startswith("50.0 ± ")
    assert cells[INTERLEAVED, "before"][1].endswith("(25.0 .. 75.0)")
    cells = {row[:2]: row[2:] for row in differences.rows}
    assert cells[INTERLEAVED, "before"] == (
        "+0.0 ± 0.0 (+0.0 .. +0.0)",
        "-50.0 ± 62.1 (-75.0 .. -25.0)",
    )
    # After training, the difference is to full attention after training.
    assert cells[SIMPLE, "after"][1] == "+25.0 ± 62.1 (+0.0 .. +50.0)"
    assert (FULL, "before") not in cells
    assert patterns.rows == (
        ("SF", "50.0 (chosen)", "50.0 (chosen)", "50.0"),
        ("FS (interleaved)", "25.0", "25.0", "25.0 (chosen)"),
    )
    assert len(result.plots) == 2


def test_table_omits_patterns_without_score(toy):
    bases = [dict(BASES[0], scores={"SF": 0.5}), dict(BASES[1])]
    result = attention_kinds.finding(toy, "command", bases, {n: r[:2] for n, r in rows().items()})
    assert result.tables[2].rows[1] == ("FS (interleaved)", "-", "25.0")


def test_leaves_out_diverged_arm(toy):
    changed = rows()
    changed[SEARCHED][1] = {"seed": 1, "loss": None}
    result = attention_kinds.finding(toy, "command", BASES, changed)
    assert result.verdicts[-1] == "windows, searched: a training diverged; left out"
    assert len(result.verdicts) == 6 and SEARCHED not in {row[0] for row in result.tables[0].rows}
    changed[FULL][0] = {"seed": 0, "loss": None}
    with pytest.raises(ValueError, match="full attention diverged"):
        attention_kinds.finding(toy, "command", BASES, changed)
