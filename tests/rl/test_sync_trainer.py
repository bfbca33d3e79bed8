"""RL stages in one process: the result of a step, and the resumption of stopped runs."""

import dataclasses
import json
import signal

import jax
import numpy as np
import pytest
from flax import nnx

from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.store import latest_step
from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model import glm5
from glm5_jax.rl.algorithm.credit import CreditConfig
from glm5_jax.rl.algorithm.losses import PolicyConfig
from glm5_jax.rl.config import EvaluationConfig, RlConfig, Teacher
from glm5_jax.rl.trainers.mismatch_monitor import MismatchConfig
from glm5_jax.rl.trainers.sync_trainer import (
    MAX_EMPTY_BATCHES,
    SyncRlTrainer,
    TaskSuite,
    compute_staleness,
)
from glm5_jax.rl.types import Reward, Task
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.metrics import TrainingStopped
from tests.rl.small_stage import (
    COMMON,
    TOKENIZER,
    SequentialTasks,
    all_equal,
    final_weights,
    reward_low_bytes,
    shared_train_step,
    train_on_one_device,
)

TASKS = [
    Task(id=f"t{i}", kind=kind, messages=({"role": "user", "content": f"{i}?"},), origin=kind)
    for i, kind in enumerate(["math", "code"] * 4)
]


def suite(verify=reward_low_bytes, **options):
    """Returns a task suite with a verifier."""
    return TaskSuite(
        tasks=SequentialTasks(TASKS), held_out={"math": TASKS[:2]}, verify=verify, **options
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Returns the folder of the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)
    return str(folder)


@pytest.fixture
def config(tokenizer):
    return config_of(tokenizer)


def config_of(tokenizer):
    """Returns a config of four steps that evaluates and saves every second step."""
    return RlConfig(
        name="rl",
        tokenizer=tokenizer,
        train=TrainConfig(eval_interval=2, save_interval=2),
        evaluation=EvaluationConfig(tasks=2, group=2),
        **COMMON,
    )


@pytest.fixture
def quick_config(config, one_device):
    """Returns a config for one device, without the comparison of engine and trainer."""
    return dataclasses.replace(config, mismatch=MismatchConfig(attempts=0))


def short(config, steps=2):
    """Returns a config of a few steps, without checkpoints and evaluations in between."""
    train = dataclasses.replace(config.train, steps=steps, eval_interval=0, save_interval=0)
    return dataclasses.replace(config, train=train)


def stage_of(config, workdir, task_suite=None, known=(), step_maker=shared_train_step):
    """Returns the trainer of a config."""
    return SyncRlTrainer(config, workdir, task_suite or suite(), known, step_maker)


def check_metrics(workdir):
    """Checks the metrics of a run of four steps."""
    rows = read(workdir)
    steps, mismatch = column(rows, "policy/abs_logratio")
    assert steps == [1, 2, 3, 4] and max(mismatch) < 1e-5
    names = """reward/mean reward/math reward/code reward_part/low rollout/tokens rollout/truncated
        rollout/environment_errors rollout/zero_variance_groups rollout/used_tools loss/rl policy/mismatch_kl policy/ratio
        policy/clip_frac_low policy/clip_frac_high policy/entropy mismatch/logp_max seconds/rollout seconds/judging"""
    for name in names.split():
        assert len(column(rows, name)[0]) == 4, name
    assert column(rows, "policy/staleness")[1] == [0] * 4
    assert max(column(rows, "mismatch/logp_max")[1]) < 1e-5
    assert min(column(rows, "speed/tokens_per_second")[1]) > 0
    assert column(rows, "held_out/math")[0] == [2, 4]


def check_resumed_run(config, uninterrupted, resumed):
    """Checks that a run that stops after two steps and is resumed equals an uninterrupted one bit by bit."""
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2))
    stage_of(half, resumed).run()
    before = final_weights(resumed)
    stage_of(config, resumed).run()
    after = final_weights(resumed)
    assert not all_equal(before, after)
    assert all_equal(after, final_weights(uninterrupted))
    metrics = [
        {k: v for k, v in row.items() if not k.startswith(("speed/", "seconds/", "system/"))}
        for workdir in (uninterrupted, resumed)
        for row in read(workdir)
    ]
    assert metrics[: len(metrics) // 2] == metrics[len(metrics) // 2 :]


@pytest.fixture(scope="module")
def finished(tokenizer, tmp_path_factory):
    """Returns (config, trainer, summary, task suite, folder) of a finished run on one device."""
    config, task_suite = config_of(tokenizer), suite()
    workdir = tmp_path_factory.mktemp("run") / "uninterrupted"
    with pytest.MonkeyPatch.context() as monkeypatch:
        train_on_one_device(monkeypatch)
        stage = stage_of(config, workdir, task_suite, TASKS)
        return config, stage, stage.run(), task_suite, workdir


def test_run_ends_with_summary_and_metrics(finished):
    _, stage, summary, task_suite, workdir = finished
    assert stage.is_finished and summary.reward is not None and summary.held_out_reward is not None
    assert "reward" in str(summary) and "training loss" not in str(summary)
    check_metrics(workdir)
    tasks = task_suite.tasks
    assert tasks.num_drawn == len(tasks.accepted) == 16 and not tasks.dropped


def test_resumes_stopped_run(finished, one_device, tmp_path):
    config, *_, workdir = finished
    check_resumed_run(config, workdir, tmp_path)


@pytest.mark.slow
def test_resumes_stopped_run_on_all_devices(config, tmp_path):
    config = dataclasses.replace(config, credit=CreditConfig(kl_target="uniform"))
    stage_of(config, tmp_path / "uninterrupted", known=TASKS).run()
    check_metrics(tmp_path / "uninterrupted")
    check_resumed_run(config, tmp_path / "uninterrupted", tmp_path / "resumed")
    assert "Reward on held-out tasks" in (tmp_path / "uninterrupted/report/index.html").read_text()


def test_stop_ends_sampling_and_resumed_run_samples_again(quick_config, tmp_path):
    class StoppedTasks(SequentialTasks):
        num_draws = 0

        def draw(self, count):
            self.num_draws += 1
            if self.num_draws == 2:
                signal.raise_signal(signal.SIGTERM)
            return super().draw(count)

    config = short(quick_config)
    stopped_suite = dataclasses.replace(suite(), tasks=StoppedTasks(TASKS))
    stage_of(config, tmp_path / "stopped", stopped_suite).run()
    assert latest_step(tmp_path / "stopped") == 1
    stage_of(config, tmp_path / "stopped").run()
    stage_of(config, tmp_path / "whole").run()
    assert all_equal(final_weights(tmp_path / "stopped"), final_weights(tmp_path / "whole"))


def test_stops_before_training_on_samples_of_old_weights(config, one_device, tmp_path, monkeypatch):
    def ignore_weights(self, params, version, policy="finish"):
        self.version = version

    monkeypatch.setattr(Engine, "update_weights", ignore_weights)
    strict = dataclasses.replace(short(config), mismatch=MismatchConfig(max_logp_diff=1e-3))
    with pytest.raises(
        TrainingStopped, match="mismatch/logp_mean is .*, more than 0.001.*no check"
    ):
        stage_of(strict, tmp_path).run()
    assert column(read(tmp_path), "policy/staleness") == ([1], [0])


def test_never_trains_on_attempts_of_failed_environment(quick_config, tmp_path):
    async def fail(task, attempt):
        return Reward(None, error="no sandbox")

    task_suite = suite(fail)
    with pytest.raises(TrainingStopped, match=f"{MAX_EMPTY_BATCHES} batches in a row .*no sandbox"):
        stage_of(quick_config, tmp_path, task_suite).run()
    assert not task_suite.tasks.accepted and len(task_suite.tasks.dropped) == 4 * MAX_EMPTY_BATCHES

    async def fail_code_tasks(task, attempt):
        if task.kind == "code":
            return Reward(None, error="no sandbox")
        return await reward_low_bytes(task, attempt)

    task_suite = suite(fail_code_tasks)
    stage_of(short(quick_config), tmp_path / "half", task_suite).run()
    assert len(task_suite.tasks.accepted) == len(task_suite.tasks.dropped) == 4
    assert column(read(tmp_path / "half"), "rollout/environment_errors")[1] == [0.5] * 2


def test_stops_if_all_groups_have_zero_variance(quick_config, tmp_path):
    async def reward_zero(task, attempt):
        return Reward(0.0, error="wrong")

    strict = dataclasses.replace(quick_config, credit=CreditConfig(drop_zero_variance_groups=True))
    message = (
        "0 of the last batch's 16 attempts have no reward; the rewards of the others .* "
        "credit.drop_zero_variance_groups leaves"
    )
    with pytest.raises(TrainingStopped, match=message):
        stage_of(strict, tmp_path, suite(reward_zero)).run()


def test_rejects_kind_whose_verifier_fails(config, tmp_path):
    """One attempt with an empty reply is judged for each kind."""
    judged = []

    async def fail_code_tasks(task, attempt):
        judged.append((task.id, attempt.reply))
        return Reward(None, error="no sandbox") if task.kind == "code" else Reward(0.0)

    with pytest.raises(ValueError, match="'t1' of kind 'code' cannot be judged: no sandbox"):
        stage_of(config, tmp_path, suite(fail_code_tasks), TASKS)
    assert sorted(judged) == [("t0", ""), ("t1", "")] and not list(tmp_path.iterdir())


def test_mean_excludes_kinds_without_held_out_tasks(quick_config, tmp_path):
    task_suite = dataclasses.replace(suite(), held_out={"math": TASKS[:2], "code": []})
    one_step = dataclasses.replace(
        quick_config, train=TrainConfig(steps=1, eval_interval=1, save_interval=0)
    )
    stage_of(one_step, tmp_path, task_suite).run()
    rows = read(tmp_path)
    assert column(rows, "held_out/reward")[0] == [1]
    assert column(rows, "held_out/reward") == column(rows, "held_out/math")
    assert not column(rows, "held_out/code")[0]


def save_weights(config, path, seed):
    """Saves random weights of a seed, and returns the folder."""
    save_hf(glm5.Glm5(config.model, rngs=nnx.Rngs(seed)), path)
    return str(path)


def test_chooses_teacher_by_origin_of_task(quick_config, tmp_path):
    """Each teacher applies only to its tasks. A teacher that equals the student changes nothing."""
    student_path, other_path = (
        save_weights(quick_config, tmp_path / f"teacher{seed}", seed) for seed in (1, 2)
    )
    # With this objective the credit's target is ignored.
    credit = CreditConfig(kl_target="uniform")
    common = dict(objective="teachers", checkpoint=student_path, credit=credit)
    equal_teacher = dataclasses.replace(
        short(quick_config, 1), teachers=(Teacher(checkpoint=student_path),), **common
    )
    stage_of(equal_teacher, tmp_path / "equal").run()
    assert abs(column(read(tmp_path / "equal"), "loss/ref_kl")[1][0]) < 1e-5
    both = dataclasses.replace(
        short(quick_config, 1),
        teachers=(
            Teacher(checkpoint=student_path, origin="math"),
            Teacher(checkpoint=other_path, origin="code"),
        ),
        **common,
    )
    batches, scores = [], []

    def record_steps(*args, **options):
        step = shared_train_step(*args, **options)
        scores.append(step.score)

        def train(state, batch):
            batches.append(jax.device_get(batch))
            return step.train(state, batch)

        return step._replace(train=train)

    stage_of(both, tmp_path / "both", step_maker=record_steps).run()
    # Only the first step: Muon scales a gradient of rounding errors like any other.
    norms = {
        name: column(read(tmp_path / name), "grad_norm/muon")[1][0] for name in ("equal", "both")
    }
    assert norms["equal"] < 1e-3 * norms["both"]
    [score], [batch] = scores, batches
    trained = batch["loss_mask"] == 1
    matches = {}
    for teacher in both.teachers:
        logp = np.asarray(
            score(models.open_weights(teacher.checkpoint, quick_config.model)(), batch)
        )
        matches[teacher.origin] = np.abs(logp - batch["ref_logp"]) < 1e-6
    assert (matches["math"] ^ matches["code"])[trained].all()
    assert 0.2 < matches["math"][trained].mean() < 0.8
    assert not batch["rl_weight"].any() and batch["ref_kl_weight"][trained].all()


@pytest.mark.slow
def test_uniform_kl_target_preserves_entropy(config, tmp_path):
    longer = dataclasses.replace(
        config,
        schedule=dataclasses.replace(config.schedule, total_steps=40),
        train=TrainConfig(eval_interval=0, save_interval=0),
        rollout=dataclasses.replace(config.rollout, group=16),
    )
    entropy = {}
    for target in ("none", "uniform"):
        policy = PolicyConfig(ref_kl=3.0)
        variant = dataclasses.replace(longer, credit=CreditConfig(kl_target=target), policy=policy)
        SyncRlTrainer(variant, tmp_path / target, suite()).run()
        entropy[target] = column(read(tmp_path / target), "policy/entropy")[1][-1]
    assert entropy["none"] < 5 < entropy["uniform"] < np.log(292)


@pytest.mark.slow
def test_reference_kl_target_limits_change_of_policy(config, tmp_path):
    start = save_weights(config, tmp_path / "start", 1)
    with_kl = dataclasses.replace(
        config,
        checkpoint=start,
        teachers=(Teacher(checkpoint=start),),
        credit=CreditConfig(kl_target="reference"),
        policy=PolicyConfig(ref_kl=30.0),
    )
    without_kl = dataclasses.replace(config, checkpoint=start)
    change = {}
    for name, variant in (("with_kl", with_kl), ("without_kl", without_kl)):
        stage_of(variant, tmp_path / name).run()
        loads = (models.open_weights(path, config.model) for path in (start, tmp_path / name))
        logits = [glm5.forward(load(), np.arange(20)[None], config.model).logits for load in loads]
        change[name] = float(np.abs(logits[0] - logits[1]).mean())
    assert change["with_kl"] < change["without_kl"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "fear"}, "objective is 'fear'; use one of rewards, teachers"),
        ({"objective": "teachers"}, "give teachers for the objective"),
        ({"teachers": (Teacher(checkpoint="x"),)}, "give teachers for the objective"),
        (
            {
                "objective": "teachers",
                "teachers": (
                    Teacher(checkpoint="x", origin="a"),
                    Teacher(checkpoint="y", origin="a"),
                ),
            },
            "two teachers have one origin",
        ),
        (
            {
                "credit": CreditConfig(kl_target="reference"),
                "teachers": (Teacher(checkpoint="x", origin="a"),),
            },
            'has the origin ""',
        ),
        ({"rows": 0}, "rows is 0; use at least 1"),
    ],
)
def test_rejects_contradicting_options(config, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


def test_rejects_invalid_run_before_start(config, tmp_path, monkeypatch):
    cases = [
        ({"rows": 3}, {}, "rows is 3; it must be a multiple of 8"),
        ({"engine": EngineConfig(max_length=65)}, {}, "engine.max_length is 65 and length 64"),
        ({"engine": EngineConfig(max_length=7)}, {}, "'t0' has a prompt of .* tokens; at most 6"),
        (
            {"objective": "teachers", "teachers": (Teacher(checkpoint="/nowhere"),)},
            {},
            "/nowhere does not exist",
        ),
        (
            {"objective": "teachers", "teachers": (Teacher(checkpoint="x", origin="math"),)},
            {},
            r"'t1' is of origin 'code', and there are teachers of \['math'\]",
        ),
        ({"requires_checkpoint": True}, {}, "starts from trained weights"),
    ]
    for changes, options, message in cases:
        with pytest.raises(ValueError, match=message):
            SyncRlTrainer(dataclasses.replace(config, **changes), tmp_path, suite(**options), TASKS)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="runs in one process and this pod has 2"):
        SyncRlTrainer(config, tmp_path, suite())
    assert not list(tmp_path.iterdir())


def test_staleness_is_age_of_oldest_token():
    def record_of(*versions):
        sampled = np.array(versions) >= 0
        logp = np.where(sampled, -1.0, np.nan)
        return TokenRecord(
            token_ids=[1] * len(versions),
            loss_mask=sampled,
            rollout_logp=logp,
            weight_version=versions,
        )

    text = TokenRecord(token_ids=[1, 2], loss_mask=[0, 1], ce_weight=[0, 1])
    assert compute_staleness([record_of(-1, 7, 5, -1), text, record_of(-1, 6)], 8) == 3
    assert compute_staleness([record_of(-1, 8)], 8) == 0 and np.isnan(compute_staleness([text], 8))


def test_config_can_be_encoded_as_json(config):
    assert json.loads(json.dumps(dataclasses.asdict(config)))["policy"]["correction"] == "icepop"
