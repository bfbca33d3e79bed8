"""Arms over rates and seeds: one compilation, no repeated training, and the numbers of separate runs."""

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments.ablations.arms import (
    RATIO,
    AblationRuns,
    Arm,
    SharedSteps,
    Tuned,
    grid,
    losses_by_rate,
    outcome,
    steps_to,
    tune,
    tune_without_divergence,
)
from glm5_jax import presets
from glm5_jax.data.mixture import DataConfig
from glm5_jax.data.sources import SourceConfig
from glm5_jax.metrics.metrics_log import MetricsLog, column, read
from glm5_jax.rl.algorithm.losses import PolicyConfig, PolicyLoss
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.training import report
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.metrics import TrainingStopped
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.pretraining import ExperimentConfig, Pretraining
from glm5_jax.training.schedule import BatchRampConfig, ScheduleConfig
from glm5_jax.training.step_config import StepConfig

STEPS = 4


class Bias:
    """Evaluator that scores parameters by one of their numbers."""

    def __init__(self, setting):
        self.setting = setting

    def __call__(self, params):
        return {"held_out/loss": float(np.asarray(params["final_norm"]).mean())}

    def baselines(self):
        return {"unigram": 1.0}


def config(**changes) -> ExperimentConfig:
    model = dataclasses.replace(
        presets.tiny(),
        attention="dense",
        index_topk=None,
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=8,
        num_attention_heads=2,
        num_nextn_predict_layers=0,
    )
    base = ExperimentConfig(
        name="toy",
        model=model,
        data=DataConfig(
            sources=(SourceConfig(kind="shakespeare"),),
            sequence_length=16,
            shuffle_window=64,
            num_threads=0,
        ),
        batch=BatchRampConfig(start=128, end=128, ramp_tokens=0, multiple=128),
        optimizer=OptimizerConfig(ns_dtype="float32", matrices="adamw"),
        schedule=ScheduleConfig(
            kind="linear", peak=1e-2, end=1e-3, warmup_steps=2, total_steps=STEPS
        ),
        step=StepConfig(remat="none"),
        train=TrainConfig(
            eval_interval=2, sample_interval=0, save_interval=2, max_consecutive_skipped=2
        ),
    )
    return dataclasses.replace(base, **changes)


ARM = Arm("toy", (config(),))
TRIALS = [
    ARM.trial(rate=1e-2, seed=0),
    ARM.trial(rate=1e-3, seed=0),
    ARM.trial(rate=1e-2, seed=1),
]


@pytest.fixture(scope="module", autouse=True)
def without_pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_page", lambda workdir: None)  # seconds each
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    runs = AblationRuns(tmp_path_factory.mktemp("arms"), Bias)
    return runs, runs(TRIALS)


@pytest.fixture
def fake_training(monkeypatch):
    """Replaces trainings by the last lines of their logs; returns the seeds of the replaced ones."""
    ran = []

    def run(training):
        ran.append(training.config.seed)
        with MetricsLog(training.workdir) as log:
            log.write({"step": STEPS, "loss/ce": 2.0 + len(ran)})

    monkeypatch.setattr(Pretraining, "run", run)
    monkeypatch.setattr(Pretraining, "is_finished", property(lambda training: True))
    return ran


def curve(rows):
    return column(rows, "loss/total")


@pytest.mark.slow
def test_rates_and_seeds_share_one_compilation(done):
    runs, rows = done
    assert runs.compiled == 1
    assert [(r["arm"], r["rate"], r["seed"]) for r in rows] == [
        ("toy", 1e-2, 0),
        ("toy", 1e-3, 0),
        ("toy", 1e-2, 1),
    ]
    assert len({r["loss"] for r in rows}) == 3
    assert {r["steps"] for r in rows} == {STEPS}
    for trial in TRIALS:
        (folder,) = runs.folders(trial)
        assert column(read(folder), "learning_rate")[1][2] == pytest.approx(trial.rate)
        assert not (folder / "checkpoints").exists()  # only requested checkpoints stay


def test_only_equal_token_losses_share_compilation():
    base, steps = config(), SharedSteps()

    def make_step(beta):
        loss = PolicyLoss(PolicyConfig(beta=beta))
        return steps(base.model, base.step, base.optimizer, float, token_loss=loss)

    assert make_step(2.0).update is make_step(2.0).update is not make_step(3.0).update


@pytest.mark.slow
def test_trial_equals_separate_run(done, tmp_path):
    runs, _ = done
    trial = TRIALS[2]
    Pretraining(trial.stages[0], tmp_path, Bias).run()
    steps, expected = curve(read(tmp_path))
    assert steps == list(range(1, STEPS + 1))
    np.testing.assert_allclose(curve(read(runs.folders(trial)[0]))[1], expected, rtol=1e-6)


def test_trains_only_trial_without_complete_row(fake_training, tmp_path):
    rows = AblationRuns(tmp_path)(TRIALS)
    assert fake_training == [0, 0, 1] and [row["loss"] for row in rows] == [3.0, 4.0, 5.0]
    again = AblationRuns(tmp_path)
    assert again(TRIALS) == again.rows() == rows and len(fake_training) == 3
    renamed = dataclasses.replace(TRIALS[0], arm="another name")
    assert again([renamed]) == [rows[0] | {"arm": "another name"}]
    results = tmp_path / "results.jsonl"
    results.write_text(results.read_text()[:-10])
    assert AblationRuns(tmp_path).rows() == rows[:2]
    assert [row["loss"] for row in AblationRuns(tmp_path)(TRIALS)] == [3.0, 4.0, 6.0]
    assert fake_training == [0, 0, 1, 1]


@pytest.mark.slow
def test_killed_trial_resumes_bitwise(done, tmp_path, monkeypatch):
    complete, _ = done
    runs = AblationRuns(tmp_path, Bias)
    plain = ProgressBar.update

    def kill(bar, done, text):
        plain(bar, done, text)
        if done == 3:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(ProgressBar, "update", kill)
        runs(TRIALS[:1])
    assert runs.rows() == []
    fresh = AblationRuns(tmp_path, Bias)
    [row] = fresh(TRIALS[:1])
    assert fresh.done == STEPS - 2  # the checkpoint was at step 2
    assert curve(read(fresh.folders(TRIALS[0])[0])) == curve(read(complete.folders(TRIALS[0])[0]))
    assert row["loss"] == complete.rows()[0]["loss"]


@pytest.mark.slow
def test_trains_shared_stages_once(tmp_path):
    first = config(train=dataclasses.replace(config().train, save_interval=0))
    second = dataclasses.replace(first, name="second")
    runs = AblationRuns(
        tmp_path, Bias, keep=True, measure=lambda trial, folder: {"folder": folder.name}
    )
    [short] = runs([Arm("short", (first,)).trial()])
    trial = Arm("long", (first, second)).trial()
    [row] = runs([trial])
    assert runs.done == STEPS  # steps of the second stage only
    before, after = runs.folders(trial)
    assert before.name == short["folder"] and after.name == row["folder"] != before.name
    config_json = json.loads((after / "config.json").read_text())
    assert config_json["checkpoint"] == str(before)
    start, end = curve(read(before))[1], curve(read(after))[1]
    assert end[0] < start[0] - 0.01  # it starts from the first stage's weights


@pytest.mark.slow
def test_diverged_training_is_result(tmp_path):
    runs = AblationRuns(tmp_path)
    rows = runs([ARM.trial(rate=1e30, seed=0), ARM.trial(rate=1e-2, seed=0)])
    assert rows[0]["loss"] is None
    assert rows[1]["loss"] == pytest.approx(rows[1]["train_loss"])
    assert losses_by_rate(rows) == {1e-2: rows[1]["loss"], 1e30: math.inf}


def test_stopped_training_is_no_result(tmp_path, monkeypatch):
    """Also after skipped steps, as many as make a divergence if consecutive."""

    def stopped(training):
        with MetricsLog(training.workdir) as log:
            log.write({"step": 9, "skipped": 3})
        raise TrainingStopped("the disk is full")

    monkeypatch.setattr(Pretraining, "run", stopped)
    runs = AblationRuns(tmp_path)
    with pytest.raises(TrainingStopped, match="the disk is full"):
        runs(TRIALS[:1])
    assert runs.rows() == []


def test_shorter_schedule_keeps_shape():
    schedule = config().schedule
    trial = Arm("a", (config(), config())).trial(rate=2e-2, seed=3, share=0.5)
    first, last = trial.stages
    assert first.schedule == schedule
    assert last.schedule == dataclasses.replace(
        schedule, peak=2e-2, end=2e-3, total_steps=2, warmup_steps=1
    )
    assert {(s.seed, s.data.seed) for s in trial.stages} == {(3, 3)}


def test_digest_covers_stages_and_not_arm():
    trial = Arm("a", (config(),)).trial(seed=1)
    assert trial.digests == Arm("b", (config(),)).trial(seed=1).digests
    assert trial.digests == Arm("a", (config(), config())).trial(seed=1).digests[:1]
    others = [
        Arm("a", (config(name="b"),)).trial(seed=1),
        Arm("a", (config(),)).trial(seed=2),
        Arm("a", (config(optimizer=OptimizerConfig(split="whole")),)).trial(seed=1),
        Arm("a", (config(), config())).trial(seed=1),
    ]
    assert len({t.digests[-1] for t in [trial, *others]}) == 5


def test_digest_depends_on_content_of_tokenizer(tmp_path):
    def digest(name, text):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)
        return Arm("a", (config(tokenizer=str(folder)),)).trial().digests[-1]

    reference = digest("here", "{}")
    assert digest("moved", "{}") == reference != digest("other", "[]")
    assert Arm("a", (config(tokenizer="bytes"),)).trial().digests[-1] != reference


def test_outcome_reads_log(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 41):
            log.write(
                {"step": step, "loss/ce": 5 - step / 40, "max_logit": [1.0, float(step % 38)]}
            )
        log.write({"step": 41, "max_logit": [math.nan, math.nan]})
        log.write({"step": 20, "held_out/loss": 4.5})
        log.write({"step": 40, "held_out/loss": 4.25})
    row = outcome(tmp_path)
    assert row["reward"] is None
    assert row["loss"] == 4.25
    assert row["curve"] == [[20, 40], [4.5, 4.25]]
    assert row["train_loss"] == pytest.approx(5 - 39.5 / 40)
    assert row["max_logit"] == pytest.approx(1.5)  # of steps 39 and 40: 1 and 2
    with MetricsLog(tmp_path) as log:
        for step, reward in ((0, 0.25), (40, 0.75)):
            log.write({"step": step, report.HELD_OUT_REWARD: reward})
    assert outcome(tmp_path)["reward"] == 0.75


def test_grid_grows_until_best_rate_is_inside():
    tried = []

    def runs(trials):
        tried.extend(trials)
        return [{"rate": t.rate, "loss": abs(math.log(t.rate / 0.31))} for t in trials]

    rates = grid(0.01)
    assert rates == [0.0025, 0.005, 0.01, 0.02, 0.04]
    tuned = tune(runs, ARM, rates)
    best = tuned.rate
    assert sorted(tuned.losses) == [*rates, 0.08, 0.16, 0.32]
    assert tuned.loss == tuned.losses[best] == min(tuned.losses.values())
    assert best == 0.04 * RATIO**3  # 0.32, and three is the maximum to add ...
    assert max(t.rate for t in tried) == best
    assert tune(runs, ARM, rates, extend=4).rate == best
    assert max(t.rate for t in tried) == best * RATIO  # ... the fourth shows that it is inside
    assert tune(runs, ARM, grid(0.31)).rate == 0.31


def test_diverged_seed_excludes_rate():
    def runs(trials):
        return [
            {"rate": t.rate, "loss": None if t.rate > 0.01 and t.seed else -t.rate} for t in trials
        ]

    assert tune(runs, ARM, grid(0.01), seeds=(0, 1)).rate == 0.01
    with pytest.raises(ValueError, match="diverged at every rate"):
        tune(lambda trials: [{"rate": t.rate, "loss": None} for t in trials], ARM, grid(1.0))


def test_takes_next_best_rate_if_seed_diverges():
    def runs(trials):
        return [
            {"rate": t.rate, "loss": None if t.seed and t.rate > limit else 1.0} for t in trials
        ]

    tuned, limit = Tuned(ARM, 0.04, {0.01: 3.0, 0.02: 2.5, 0.04: 2.0}), 0.01
    result, rows = tune_without_divergence(runs, tuned, (0, 1))
    assert (result.rate, [row["rate"] for row in rows]) == (0.01, [0.01, 0.01])
    assert result.losses == {0.01: 3.0, 0.02: math.inf, 0.04: math.inf}
    limit = 0.04
    assert tune_without_divergence(runs, tuned, (0, 1))[0] == tuned
    limit = 0.0
    with pytest.raises(
        ValueError, match="no rate of .* at which none of the seeds .0, 1. diverged"
    ):
        tune_without_divergence(runs, tuned, (0, 1))


def test_counts_steps_to_level():
    series = [10, 20, 30], [5.0, 4.0, 3.0]
    assert steps_to(series, 3.5) == 25.0
    assert steps_to(series, 6.0) == 10.0
    assert steps_to(series, 2.9) is None


def test_rejects_invalid_arm_and_folder(tmp_path):
    with pytest.raises(ValueError, match="arm 'empty' has no stage"):
        Arm("empty", ())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        AblationRuns(tmp_path / "file")
