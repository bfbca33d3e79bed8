"""A stage of reinforcement learning: what a step does, and that a stopped run goes on as if it never had."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import save_hf
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
    InTurn,
    likes_low_bytes,
    same,
    shared,
    weights,
)

TASKS = [
    Task(id=f"t{i}", kind=kind, messages=({"role": "user", "content": f"{i}?"},), origin=kind)
    for i, kind in enumerate(["math", "code"] * 4)
]


def suite(verify=likes_low_bytes, **more):
    return TaskSuite(tasks=InTurn(TASKS), held_out={"math": TASKS[:2]}, verify=verify, **more)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)
    return str(folder)


@pytest.fixture
def config(tokenizer):
    return RlConfig(
        name="rl",
        tokenizer=tokenizer,
        train=TrainConfig(eval_interval=2, save_interval=2),
        evaluation=EvaluationConfig(tasks=2, group=2),
        **COMMON,
    )


@pytest.fixture
def quick(config, one_device):
    """On one device, without the comparison of engine and learner."""
    return dataclasses.replace(config, mismatch=MismatchConfig(attempts=0))


def short(config, steps=2):
    """So few steps, of which nothing is saved or evaluated between."""
    train = dataclasses.replace(config.train, steps=steps, eval_interval=0, save_interval=0)
    return dataclasses.replace(config, train=train)


def stage_of(config, workdir, made=None, known=(), step_maker=shared):
    return SyncRlTrainer(config, workdir, made or suite(), known, step_maker)


def check_run_and_one_that_was_stopped(config, tmp_path):
    """That a run does what it says, and one that was stopped in the middle the same, bit by bit."""
    made = suite()
    stage = stage_of(config, tmp_path / "whole", made, TASKS)
    summary = stage.run()
    assert stage.is_finished and summary.reward is not None and summary.held_out_reward is not None
    assert "reward" in str(summary) and "training loss" not in str(summary)
    rows = read(tmp_path / "whole")
    steps, mismatch = column(rows, "policy/abs_logratio")
    assert steps == [1, 2, 3, 4] and max(mismatch) < 1e-5
    told = """reward/mean reward/math reward/code reward_part/low rollout/tokens rollout/truncated
        rollout/environment_errors rollout/zero_variance_groups rollout/used_tools loss/rl policy/mismatch_kl policy/ratio
        policy/clip_frac_low policy/clip_frac_high policy/entropy mismatch/logp_max seconds/rollout seconds/judging"""
    for name in told.split():
        assert len(column(rows, name)[0]) == 4, name
    assert column(rows, "policy/staleness")[1] == [0] * 4
    assert max(column(rows, "mismatch/logp_max")[1]) < 1e-5
    assert min(column(rows, "speed/tokens_per_second")[1]) > 0
    assert column(rows, "held_out/math")[0] == [2, 4]
    assert made.tasks.drawn == 16 and len(made.tasks.accepted) == 16 and not made.tasks.dropped
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2))
    stage_of(half, tmp_path / "parted").run()
    before = weights(tmp_path / "parted")
    stage_of(config, tmp_path / "parted").run()
    after = weights(tmp_path / "parted")
    assert not same(before, after)
    assert same(after, weights(tmp_path / "whole"))
    told = [
        {k: v for k, v in row.items() if not k.startswith(("speed/", "seconds/"))}
        for workdir in ("whole", "parted")
        for row in read(tmp_path / workdir)
    ]
    assert told[: len(told) // 2] == told[len(told) // 2 :]


def test_resumes_run_that_was_stopped(config, one_device, tmp_path):
    check_run_and_one_that_was_stopped(config, tmp_path)


@pytest.mark.slow
def test_resumes_run_that_was_stopped_on_all_devices(config, tmp_path):
    config = dataclasses.replace(config, credit=CreditConfig(kl_target="uniform"))
    check_run_and_one_that_was_stopped(config, tmp_path)
    assert "Reward on held-out tasks" in (tmp_path / "whole/report/index.html").read_text()


def test_stops_before_it_trains_on_samples_of_an_engine_with_old_weights(
    config, one_device, tmp_path, monkeypatch
):
    def forgetful(self, params, version, policy="finish"):
        self.version = version

    monkeypatch.setattr(Engine, "update_weights", forgetful)
    strict = dataclasses.replace(short(config), mismatch=MismatchConfig(max_logp_diff=1e-3))
    with pytest.raises(
        TrainingStopped, match="mismatch/logp_mean is .*, more than 0.001.*no check"
    ):
        stage_of(strict, tmp_path).run()
    assert column(read(tmp_path), "policy/staleness") == ([1], [0])


def test_attempts_of_a_broken_environment_are_never_learnt_from(quick, tmp_path):
    async def broken(task, attempt):
        return Reward(None, error="no sandbox")

    made = suite(broken)
    with pytest.raises(TrainingStopped, match=f"{MAX_EMPTY_BATCHES} batches in a row .*no sandbox"):
        stage_of(quick, tmp_path, made).run()
    assert not made.tasks.accepted and len(made.tasks.dropped) == 4 * MAX_EMPTY_BATCHES

    async def half(task, attempt):
        if task.kind == "code":
            return Reward(None, error="no sandbox")
        return await likes_low_bytes(task, attempt)

    made = suite(half)
    stage_of(short(quick), tmp_path / "half", made).run()
    assert len(made.tasks.accepted) == len(made.tasks.dropped) == 4
    assert column(read(tmp_path / "half"), "rollout/environment_errors")[1] == [0.5] * 2


def test_groups_without_a_difference_are_named_when_nothing_else_comes(quick, tmp_path):
    async def never(task, attempt):
        return Reward(0.0, error="wrong")

    strict = dataclasses.replace(quick, credit=CreditConfig(drop_zero_variance_groups=True))
    why = (
        "0 of the last batch's 16 attempts have no reward; the rewards of the others .* "
        "credit.drop_zero_variance_groups leaves"
    )
    with pytest.raises(TrainingStopped, match=why):
        stage_of(strict, tmp_path, suite(never)).run()


def test_a_kind_that_cannot_be_judged_is_refused_before_it_starts(config, tmp_path):
    """Each kind is asked about once, and by an attempt that says nothing."""
    asked = []

    async def half(task, attempt):
        asked.append((task.id, attempt.reply))
        return Reward(None, error="no sandbox") if task.kind == "code" else Reward(0.0)

    with pytest.raises(ValueError, match="'t1' of kind 'code' cannot be judged: no sandbox"):
        stage_of(config, tmp_path, suite(half), TASKS)
    assert sorted(asked) == [("t0", ""), ("t1", "")] and not list(tmp_path.iterdir())


def test_a_kind_without_held_out_tasks_is_left_out_of_their_mean(quick, tmp_path):
    made = dataclasses.replace(suite(), held_out={"math": TASKS[:2], "code": []})
    once = dataclasses.replace(quick, train=TrainConfig(steps=1, eval_interval=1, save_interval=0))
    stage_of(once, tmp_path, made).run()
    rows = read(tmp_path)
    assert column(rows, "held_out/reward")[0] == [1]
    assert column(rows, "held_out/reward") == column(rows, "held_out/math")
    assert not column(rows, "held_out/code")[0]


def saved(config, path, seed):
    """A folder of new weights of a seed."""
    save_hf(glm5.Glm5(config.model, rngs=nnx.Rngs(seed)), path)
    return str(path)


def test_teachers_are_chosen_by_the_origin_of_a_task(quick, tmp_path):
    """Each is followed on its own tasks alone; who is the student itself changes nothing."""
    one, other = (saved(quick, tmp_path / f"teacher{seed}", seed) for seed in (1, 2))
    # What is learnt from teachers alone is pulled nowhere else.
    pulled = CreditConfig(kl_target="uniform")
    common = dict(objective="teachers", checkpoint=one, credit=pulled)
    alike = dataclasses.replace(short(quick, 1), teachers=(Teacher(checkpoint=one),), **common)
    stage_of(alike, tmp_path / "alike").run()
    assert abs(column(read(tmp_path / "alike"), "loss/ref_kl")[1][0]) < 1e-5
    both = dataclasses.replace(
        short(quick, 1),
        teachers=(Teacher(checkpoint=one, origin="math"), Teacher(checkpoint=other, origin="code")),
        **common,
    )
    batches, scores = [], []

    def watched(*args, **more):
        step = shared(*args, **more)
        scores.append(step.score)

        def train(state, batch):
            batches.append(jax.device_get(batch))
            return step.train(state, batch)

        return step._replace(train=train)

    stage_of(both, tmp_path / "both", step_maker=watched).run()
    # Of the first step: Muon makes a step of rounding as large as any.
    norms = {
        name: column(read(tmp_path / name), "grad_norm/muon")[1][0] for name in ("alike", "both")
    }
    assert norms["alike"] < 1e-3 * norms["both"]
    [score], [batch] = scores, batches
    trained = batch["loss_mask"] == 1
    theirs = {}
    for teacher in both.teachers:
        logp = np.asarray(score(models.open_weights(teacher.checkpoint, quick.model)(), batch))
        theirs[teacher.origin] = np.abs(logp - batch["ref_logp"]) < 1e-6
    assert (theirs["math"] ^ theirs["code"])[trained].all()
    assert 0.2 < theirs["math"][trained].mean() < 0.8
    assert not batch["rl_weight"].any() and batch["ref_kl_weight"][trained].all()


@pytest.mark.slow
def test_a_pull_to_the_uniform_keeps_entropy(config, tmp_path):
    longer = dataclasses.replace(
        config,
        schedule=dataclasses.replace(config.schedule, total_steps=40),
        train=TrainConfig(eval_interval=0, save_interval=0),
        rollout=dataclasses.replace(config.rollout, group=16),
    )
    entropy = {}
    for pull in ("none", "uniform"):
        policy = PolicyConfig(ref_kl=3.0)
        one = dataclasses.replace(longer, credit=CreditConfig(kl_target=pull), policy=policy)
        SyncRlTrainer(one, tmp_path / pull, suite()).run()
        entropy[pull] = column(read(tmp_path / pull), "policy/entropy")[1][-1]
    assert entropy["none"] < 5 < entropy["uniform"] < np.log(292)


@pytest.mark.slow
def test_a_pull_keeps_a_policy_near_its_reference(config, tmp_path):
    start = saved(config, tmp_path / "start", 1)
    near = dataclasses.replace(
        config,
        checkpoint=start,
        teachers=(Teacher(checkpoint=start),),
        credit=CreditConfig(kl_target="reference"),
        policy=PolicyConfig(ref_kl=30.0),
    )
    far = dataclasses.replace(config, checkpoint=start)
    gone = {}
    for name, one in (("near", near), ("far", far)):
        stage_of(one, tmp_path / name).run()
        loads = (models.open_weights(path, config.model) for path in (start, tmp_path / name))
        logits = [glm5.forward(load(), np.arange(20)[None], config.model).logits for load in loads]
        gone[name] = float(np.abs(logits[0] - logits[1]).mean())
    assert gone["near"] < gone["far"]


@pytest.mark.parametrize(
    ("changes", "words"),
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
        ({"rows": 0}, "rows is 0, reward_concurrency 64 and sft_rows 0; use at least 1"),
    ],
)
def test_contradictions_are_refused(config, changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config, **changes)


def test_what_cannot_run_is_refused_before_it_starts(config, tmp_path, monkeypatch):
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
    for changes, more, words in cases:
        with pytest.raises(ValueError, match=words):
            SyncRlTrainer(dataclasses.replace(config, **changes), tmp_path, suite(**more), TASKS)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="runs in one process and this pod has 2"):
        SyncRlTrainer(config, tmp_path, suite())
    assert not list(tmp_path.iterdir())


def test_staleness_is_that_of_the_oldest_token():
    def of(*versions):
        sampled = np.array(versions) >= 0
        logp = np.where(sampled, -1.0, np.nan)
        return TokenRecord(
            token_ids=[1] * len(versions),
            loss_mask=sampled,
            rollout_logp=logp,
            weight_version=versions,
        )

    text = TokenRecord(token_ids=[1, 2], loss_mask=[0, 1], ce_weight=[0, 1])
    assert compute_staleness([of(-1, 7, 5, -1), text, of(-1, 6)], 8) == 3
    assert compute_staleness([of(-1, 8)], 8) == 0 and np.isnan(compute_staleness([text], 8))


def test_a_config_can_be_written_and_read(config):
    assert json.loads(json.dumps(dataclasses.asdict(config)))["policy"]["correction"] == "icepop"
