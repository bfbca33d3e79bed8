"""The arms of the DSA adaptation: equal tokens, each without one part of the paper's recipe; and the verdicts."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.ablations import dsa_adaptation, dsa_stages, retriever
from experiments.ablations.arms import AblationRuns
from experiments.ablations.dsa_adaptation import ANNEALED, AT_ONCE, DENSE, FULL, WARM_UP
from experiments.ablations.dsa_stages import (
    SEEDS,
    History,
    finding,
    largest_rise,
    read_history,
    step_of_parity,
)
from experiments.dsa_warmup import TRUNK
from glm5_jax.checkpoint import store
from glm5_jax.data.synthetic import LongContextTasks
from glm5_jax.evals.ruler import RulerConfig, ruler
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("without_pictures")

# As :tiny, with any numbers.
STUDY = dataclasses.replace(
    dsa_stages.get_config("tiny"), rows=16, keys=16, length=128, steps=320, warm_steps=80, every=40
)
ARMS = (DENSE, WARM_UP, FULL, AT_ONCE, ANNEALED)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("dsa_stages")


def tails(study, workdir):
    """Returns the stages of every arm after the dense model, which all arms share."""
    stages_of = dsa_adaptation.arms(study, workdir)
    before = study.dense(workdir)
    assert all(arm.stages[: len(before)] == before for arm in stages_of.values())
    return {name: arm.stages[len(before) :] for name, arm in stages_of.items()}


@pytest.mark.parametrize("variant", ["tiny", "small"])
def test_all_arms_train_on_equal_tokens(variant, workdir):
    study = dsa_stages.get_config(variant)
    stages_by_arm = tails(study, workdir)
    assert tuple(stages_by_arm) == ARMS
    for stages in stages_by_arm.values():
        assert sum(stage.steps for stage in stages) == study.steps
        assert all(stage.steps % study.every == 0 for stage in stages)
        assert {stage.data.sequence_length for stage in stages} == {study.length}
        assert {stage.batch.start for stage in stages} == {study.rows * study.length}
    (dense,), (warm_up,), full, (at_once,), annealed = stages_by_arm.values()
    assert dense.model.attention == "dense" and not dense.step.index_weight
    assert [stage.model.attention for stage in full] == ["dense", "sparse"]
    # Warm-ups are equal while they last, except for the end of the rate.
    assert warm_up.optimizer.frozen == full[0].optimizer.frozen == (TRUNK,)
    assert warm_up.model == full[0].model and warm_up.step == full[0].step
    assert full[0].schedule.peak == 5e-3 and full[0].schedule.end == 2e-4
    assert at_once.model == full[1].model and at_once.model.index_topk == study.keys
    assert "indexer" in at_once.may_differ
    assert [stage.model.index_topk for stage in annealed] == list(study.levels)
    assert study.levels[0] == study.length and study.levels[-1] == study.keys
    assert all(stage.model.attention == "sparse" for stage in annealed)
    assert study.length >= 8 * study.keys
    for stage in (at_once, full[1], *annealed):
        assert stage.optimizer.frozen == () and stage.step.index_weight > 0
        assert stage.schedule.peak == dense.schedule.peak == study.rate


def test_consecutive_stages_read_different_tasks(workdir):
    for stages in tails(dsa_stages.get_config("tiny"), workdir).values():
        seeds = [stage.data.sources[0].tasks.seed for stage in stages]
        assert len(set(seeds)) == len(seeds) and retriever.TASK.seed not in seeds


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"keys": 20}, "length is 128; use keys 20 times a power of two"),
        ({"steps": 200}, "steps is 200; it must be a multiple of 160"),
        ({"warm_steps": 50}, "warm_steps is 50; it must be a multiple of 40"),
        ({"warm_steps": 320}, "warm_steps is 320; it must be 1..319"),
    ],
)
def test_rejects_study_with_incomparable_arms(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(STUDY, **fields)


@pytest.mark.slow
def test_scores_trained_arm_with_final_keys(workdir, monkeypatch):
    """The samples are those of its seed, whatever it trained with; the missed ones are recorded."""
    study = dsa_stages.get_config("tiny")
    task = dataclasses.replace(retriever.TASK, num_keys=24, num_values=4)
    retrieval = RulerConfig(
        kinds=("multi_key",), lengths=(24,), samples=40, seed=5, batch_size=40, task=task
    )
    study = dataclasses.replace(study, keys=3, length=24, retrieval=retrieval)
    small = dict(hidden_size=16, num_hidden_layers=1, first_k_dense_replace=1)
    dense = study.dense(workdir)
    model = dataclasses.replace(dense[-1].model, **small)
    study = dataclasses.replace(
        study, dense=lambda _: (*dense[:-1], dataclasses.replace(dense[-1], model=model))
    )
    arms = dsa_adaptation.arms(study, workdir)
    tokenizer = Tokenizer.load(retriever.tokenizer(workdir))
    tokenizer.save(workdir / "tokenizer")
    # A head that knows one of the four values, and writes it depending on its input.
    task = dataclasses.replace(task, kind="multi_key", length=24)
    value = LongContextTasks(task, tokenizer).task(0).token_ids[-1]
    known = np.arange(retriever.VOCAB) == value
    rows = {}
    for name in (WARM_UP, ANNEALED, DENSE):
        trial = arms[name].trial(seed=2)
        served = study.evaluated_model(trial.stages[-1])
        params = glm5.init_params(served, jax.random.key(0))
        params["lm_head"]["weight"] *= known
        monkeypatch.setattr(store, "load_params", lambda *_, loaded=params: loaded)
        rows[name] = dsa_adaptation.score_arm(study, trial, workdir)
        if name == WARM_UP:
            sparse = dataclasses.replace(model, attention="sparse", index_topk=3)
            config = dataclasses.replace(retrieval, seed=7)
            ids = {"eos_token_id": tokenizer.eos_ids, "pad_token_id": tokenizer.pad_id}
            want = ruler(params, dataclasses.replace(sparse, **ids), tokenizer, config)
    (score,) = want.values()
    assert rows[WARM_UP]["scores"]["multi_key/24"] == {
        "missed": np.flatnonzero(~score.exact).tolist(),
        "of": 40,
        "samples": score.samples,
    }
    assert rows[WARM_UP]["exact"] == score.exact.mean()
    assert 0 < score.exact.sum() < 40
    assert rows[WARM_UP] == rows[ANNEALED]
    assert rows[DENSE]["scores"]["multi_key/24"]["samples"] == score.samples


def log(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_history_counts_steps_of_all_stages(tmp_path):
    exact = "ruler/multi_key/128/exact"
    dense = log(tmp_path / "dense", [{"step": s, "loss/ce": 1.0 / s} for s in (1, 2, 4)])
    warm = [{"step": 0, exact: 0.25, "ruler/multi_key/128/share": 0.75}]
    warm += [{"step": s, "loss/ce": 0.5, "grad_norm/indexer": 2.0 * s} for s in (1, 2)]
    warm += [{"step": 2, exact: 0.5, "ruler/needle/128/exact": 1.0}]
    sparse = [{"step": 0, exact: 0.75}]
    norms = {"grad_norm/indexer": 1.0, "grad_norm/muon": 3.0, "grad_norm/adamw": 4.0}
    sparse += [{"step": 1, "loss/ce": 0.125} | norms, {"step": 1, exact: 1.0}]
    history = read_history(dense, [log(tmp_path / "warm", warm), log(tmp_path / "sparse", sparse)])
    assert history.scores == {0: 0.25, 2: 0.75, 3: 1.0}
    assert history.losses == {0: 0.25, 1: 0.5, 2: 0.5, 3: 0.125}
    assert history.trunk == {3: 5.0}
    assert history.indexer == {1: 2.0, 2: 4.0, 3: 1.0}


def test_spike_is_rise_over_previous_minimum():
    assert largest_rise([3.0, 1.0, 2.0, 0.5, 1.75, 1.0]) == 1.25
    assert largest_rise([0.5, 3.0, 2.0, 1.0]) == 2.5  # from the dense model's loss
    assert largest_rise([3.0, 2.0, 1.0]) == -1.0


def test_parity_is_first_step_near_dense():
    dense = {0: 0.99, 40: 0.992, 80: 0.996}
    assert step_of_parity({0: 0.99, 40: 0.97, 80: 0.991}, dense) == 80
    assert step_of_parity({0: 0.99, 40: 0.987, 80: 0.9}, dense) == 40
    assert step_of_parity({0: 0.99, 40: 0.5, 80: 0.9905}, dense) is None


OF = 2000
TOKENS = 8192


def rows_of(missed, diverged=()):
    """Returns rows of arms that missed this many of the last samples of each seed."""
    return {
        name: [
            {
                "arm": name,
                "seed": seed,
                "loss": None if name in diverged else 0.01,
                "exact": 1 - count / OF,
                "scores": {
                    "multi_key/128": {
                        "missed": list(range(OF - count, OF)),
                        "of": OF,
                        "samples": f"hash {seed}",
                    }
                },
            }
            for seed in SEEDS
        ]
        for name, count in missed.items()
    }


def histories_of(scores):
    """Returns histories that differ in their scores after 0, 40, ... steps."""
    losses, norms = {0: 0.1, 1: 0.5, 2: 0.1}, {1: 2.0, 2: 8.0, 3: 4.0}
    return {
        name: [
            History(
                {40 * i: x for i, x in enumerate(values)},
                losses,
                {} if name == WARM_UP else norms,
                {} if name == DENSE else norms,
            )
            for _ in SEEDS
        ]
        for name, values in scores.items()
    }


SCORES = {
    DENSE: (0.99, 0.99, 0.995, 0.995),
    WARM_UP: (0.2, 0.9, 0.9, 0.9),
    FULL: (0.2, 0.9, 0.98, 0.995),
    AT_ONCE: (0.2, 0.5, 0.9, 0.9),
    ANNEALED: (0.2, 0.99, 0.98, 0.9),
}


def make_finding(missed, **options):
    return finding(STUDY, "command", rows_of(missed, **options), histories_of(SCORES), TOKENS)


@pytest.mark.parametrize(
    "full,verdict",
    [(8, "met"), (4, "met"), (16, "met on average, within the interval"), (30, "not met")],
)
def test_target_is_judged_by_interval_over_seeds(full, verdict):
    result = make_finding({DENSE: 8, WARM_UP: 200, FULL: full, AT_ONCE: 200, ANNEALED: 100})
    sentence = result.verdicts[0]
    assert "on 6,000 pairs" in sentence and sentence.endswith(f"within 0.5: {verdict}")
    assert f"in points: {100 * (8 - full) / OF:+.2f} [" in sentence


@pytest.mark.parametrize("warm_up,shows", [(200, True), (8, False), (4, False)])
def test_need_of_sparse_stage_follows_from_rows(warm_up, shows):
    result = make_finding({DENSE: 8, WARM_UP: warm_up, FULL: 8, AT_ONCE: 200, ANNEALED: 100})
    assert result.verdicts[1].endswith("shows here" if shows else "does not show at this size")


def test_tokens_to_parity_include_sparse_stage():
    result = make_finding({DENSE: 8, WARM_UP: 200, FULL: 8, AT_ONCE: 200, ANNEALED: 100})
    warm_up, full, at_once, annealed = result.verdicts[2:]
    assert warm_up == "warm-up only: within 0.5 points of dense on 0 of 3 seeds"
    assert full.startswith("full: within 0.5 points of dense after 983 ± 0 (983 .. 983) thousand")
    assert "328 ± 0 (328 .. 328) of them sparse" in full  # 120 steps, 80 of them of the warm-up
    assert "0 of 3 seeds" in at_once
    assert "after 328 ± 0" in annealed and "328 ± 0 (328 .. 328) of them sparse" in annealed


def test_tables_show_every_arm():
    result = make_finding({DENSE: 8, WARM_UP: 200, FULL: 8, AT_ONCE: 200, ANNEALED: 100})
    retrieval, unrest = result.tables
    assert [row[0] for row in retrieval.rows] == list(ARMS) == [row[0] for row in unrest.rows]
    cells = dict(zip(ARMS, retrieval.rows))
    assert cells[WARM_UP][1].startswith("90.00 ±") and cells[WARM_UP][2].startswith("-9.60 ±")
    assert cells[WARM_UP][4].startswith("20.0 ±") and cells[WARM_UP][5] == "never, never, never"
    assert cells[FULL][5] == "120, 120, 120"
    norms = dict(zip(ARMS, unrest.rows))
    assert norms[FULL][1].startswith("0.400 ±")
    assert [cell[:5] for cell in norms[FULL][2:]] == ["8.000", "4.000", "8.000"]
    assert norms[WARM_UP][2:4] == ("frozen", "frozen") and norms[DENSE][4] == "frozen"


def test_leaves_out_diverged_arm():
    missed = {DENSE: 8, WARM_UP: 200, FULL: 8, AT_ONCE: 200, ANNEALED: 100}
    result = make_finding(missed, diverged=(AT_ONCE, WARM_UP))
    assert "sparse at once: a training diverged; left out" in result.verdicts
    assert result.verdicts[1] == "warm-up only against full: not compared"
    assert [row[0] for row in result.tables[0].rows] == [DENSE, FULL, ANNEALED]
    with pytest.raises(ValueError, match="full diverged; nothing to compare with"):
        make_finding(missed, diverged=(FULL,))


def test_histories_cover_stages_after_dense_model(workdir, monkeypatch, tmp_path):
    calls = []

    class Fake(AblationRuns):
        def __call__(self, trials):
            return [rows[t.arm][t.seed] for t in trials]

    def record(dense, folders):
        calls.append((dense.name, [folder.name for folder in folders]))
        return histories_of(SCORES)[FULL][0]

    rows = rows_of(dict.fromkeys(ARMS, 8))
    monkeypatch.setattr(dsa_stages, "read_history", record)
    result = dsa_stages.compare_stages(Fake(tmp_path), STUDY, "command")
    assert len(calls) == len(ARMS) * len(SEEDS)
    assert all(dense.startswith("retriever_128_fewer_questions-") for dense, _ in calls)
    names = [name.rsplit("-", 1)[0] for name in calls[2 * len(SEEDS)][1]]
    assert names == ["warm-up_80", "sparse_16_from_80"]
    assert "320 steps of 2,048 tokens" in result.tables[0].title
