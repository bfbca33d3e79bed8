"""Engine and trainer are compared in every step: they are equal, or the run ends with the reason."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from glm5_jax.data.record import TokenRecord
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model import glm5
from glm5_jax.rl.config import RlConfig, policy_step_config
from glm5_jax.rl.rollouts.rollout import RolloutConfig
from glm5_jax.rl.trainers.mismatch_monitor import (
    MismatchConfig,
    check_mismatch,
    exceeded_limits,
    precision_of,
    select_records,
)
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Task
from glm5_jax.training.experiment import check_resume, write_config
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.metrics import TrainingStopped
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig
from tests.rl.small_stage import SequentialTasks, reward_low_bytes, shared_train_step
from tests.rl.test_train_inference_mismatch import CFG

# One dense layer and one MoE layer, each with an indexer that selects fewer tokens than a task and its reply have.
SPARSE = dataclasses.replace(CFG, vocab_size=292, num_hidden_layers=2, num_nextn_predict_layers=0)
TASKS = [
    Task(id=f"t{i}", kind="any", messages=({"role": "user", "content": "abc" * i},))
    for i in range(1, 5)
]


CONFIG = RlConfig(
    name="monitored",
    model=SPARSE,
    tokenizer="bytes",
    requires_checkpoint=False,
    optimizer=OptimizerConfig(weight_decay=0.0, frozen=("indexer/",)),
    schedule=ScheduleConfig(kind="constant", peak=1e-2, end=0.0, warmup_steps=0, total_steps=3),
    step=dataclasses.replace(policy_step_config(), remat="none"),
    train=TrainConfig(eval_interval=0, save_interval=0),
    rollout=RolloutConfig(prompts=4, group=2, max_tokens=12, thinking=False),
    engine=EngineConfig(page_size=8, max_num_seqs=8, prefill_chunk=64, max_length=64),
    length=64,
    rows=8,
)


@functools.cache
def params():
    return glm5.params_of(glm5.Glm5(SPARSE, rngs=nnx.Rngs(0)))


def stage(workdir):
    suite = TaskSuite(tasks=SequentialTasks(TASKS), held_out={}, verify=reward_low_bytes)
    return SyncRlTrainer(CONFIG, workdir, suite, step_maker=shared_train_step)


@pytest.mark.slow
def test_logs_equality_of_engine_and_trainer_each_step(tmp_path):
    trainer = stage(tmp_path)
    trainer.run()
    rows = read(tmp_path)
    for name, value in {"key_match_rate": 1, "expert_match_rate": 1, "layer": -1, "gap": 0}.items():
        assert column(rows, f"mismatch/{name}") == ([1, 2, 3], [value] * 3), name
    for name in ("logp_max", "logp_mean", "recorded_max", "recorded_mean"):
        steps, values = column(rows, f"mismatch/{name}")
        assert steps == [1, 2, 3] and max(values) < 1e-5, name
    assert min(column(rows, "seconds/mismatch")[1]) > 0
    assert "Equal choices, share" in (tmp_path / "report/index.html").read_text()


@pytest.mark.slow
def test_stops_if_engine_keeps_old_weights(tmp_path, monkeypatch):
    """The run ends before it trains on samples of the old weights."""

    def ignore_weights(self, params, version, policy="finish"):
        self.version = version

    monkeypatch.setattr(Engine, "update_weights", ignore_weights)
    with pytest.raises(TrainingStopped, match="mismatch/gap is .*, more than 3.81e-06.*no check"):
        stage(tmp_path).run()
    assert column(read(tmp_path), "mismatch/key_match_rate") == ([1], [1.0])


def test_resumes_with_other_limits(tmp_path):
    write_config(tmp_path, CONFIG)
    check_resume(
        tmp_path,
        dataclasses.replace(
            CONFIG,
            mismatch=MismatchConfig(
                attempts=1, tokens=1, max_gap_eps=1, min_match_rate=0, max_logp_diff=1
            ),
        ),
    )
    with pytest.raises(ValueError, match="length was 64, is 65"):
        check_resume(tmp_path, dataclasses.replace(CONFIG, length=65))


def record(num_prompt_tokens, *sampled):
    """Returns a record of a prompt and of replies with these lengths, with one token between two replies."""
    logp = [np.nan] * num_prompt_tokens
    for count in sampled:
        logp += [*-np.arange(1.0, count + 1), np.nan]
    logp = np.asarray(logp[:-1] if sampled else logp)
    return TokenRecord(token_ids=np.arange(len(logp)), loss_mask=~np.isnan(logp), rollout_logp=logp)


@pytest.mark.parametrize(
    "attempts, lengths", [(0, []), (1, [9]), (2, [9, 3]), (3, [9, 5, 3]), (9, [9, 8, 6, 5, 4, 3])]
)
def test_selects_attempts_of_all_lengths_longest_first(attempts, lengths):
    records = [record(1, n - 1) for n in (4, 9, 3, 5, 8, 6)] + [record(20)]
    config = MismatchConfig(attempts=attempts)
    assert [len(selected) for selected in select_records(records, config)] == lengths
    assert [len(selected) for selected in select_records(records[::-1], config)] == lengths


def test_limits_compared_tokens_to_last_ones():
    attempt = record(3, 4, 2)
    nan = np.nan
    for tokens, expected in {
        1: [nan] * 9 + [-2],
        3: [nan] * 6 + [-4, nan, -1, -2],
        6: attempt.rollout_logp,
        99: attempt.rollout_logp,
    }.items():
        [selected] = select_records([attempt], MismatchConfig(tokens=tokens))
        np.testing.assert_array_equal(selected.rollout_logp, expected)
        np.testing.assert_array_equal(selected.token_ids, attempt.token_ids)


EQUAL = {
    "gap": 0.0,
    "logp_mean": 0.0,
    "recorded_mean": 0.0,
    "key_match_rate": 1.0,
    "expert_match_rate": 1.0,
}


@pytest.mark.parametrize(
    "name, allowed, beyond, message",
    [
        ("gap", 0.5, 0.51, "gap is 0.51, more than 0.5"),
        ("logp_mean", 0.2, 0.21, "logp_mean is 0.21, more than 0.2"),
        ("recorded_mean", 0.2, math.nan, "recorded_mean is nan, more than 0.2"),
        ("key_match_rate", 0.75, 0.74, "key_match_rate is 0.74, less than 0.75"),
        ("expert_match_rate", 0.75, math.nan, "expert_match_rate is nan, less than 0.75"),
    ],
)
def test_reports_each_exceeded_limit(name, allowed, beyond, message):
    def messages_of(value):
        metrics = {f"mismatch/{key}": x for key, x in (EQUAL | {name: value}).items()}
        return exceeded_limits(metrics, MismatchConfig(max_gap_eps=4.0), 0.125)

    assert messages_of(allowed) == []
    assert messages_of(beyond) == [f"mismatch/{message}"]


def test_model_without_choices_is_checked_by_log_probs():
    metrics = {"mismatch/gap": 0.0, "mismatch/logp_mean": 0.3, "mismatch/recorded_mean": 0.0}
    assert exceeded_limits(metrics, MismatchConfig(), 1.0) == [
        "mismatch/logp_mean is 0.3, more than 0.2"
    ]


@pytest.mark.parametrize(
    "dtype, options, precision",
    [
        ("float32", {}, 2**-23),
        ("bfloat16", {}, 2**-7),
        ("float32", {"index_cache": "int8"}, 1 / 127),
        ("bfloat16", {"latent_cache": "fp8"}, 1 / 8),
    ],
)
def test_precision_is_that_of_coarsest_dtype(dtype, options, precision):
    cfg = dataclasses.replace(SPARSE, dtype=dtype)
    engine = Engine(
        glm5.Glm5(cfg, params=params()), config=EngineConfig(page_size=8, max_num_seqs=1, **options)
    )
    assert precision_of(engine.computation) == precision


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attempts": -1}, "attempts is -1; it must be at least 0"),
        ({"tokens": 0}, "tokens is 0; it must be at least 1"),
        ({"max_gap_eps": -1.0}, "max_gap_eps is -1.0; it must be at least 0"),
        ({"max_logp_diff": math.nan}, "max_logp_diff is nan; it must be at least 0"),
        ({"min_match_rate": 1.5}, "min_match_rate is 1.5; it must be between 0 and 1"),
    ],
)
def test_rejects_invalid_limits(changes, message):
    with pytest.raises(ValueError, match=message):
        MismatchConfig(**changes)


@pytest.mark.slow
def test_other_lengths_compile_no_new_programs():
    engine = Engine(
        glm5.Glm5(SPARSE, params=params()),
        config=EngineConfig(page_size=8, max_num_seqs=1, prefill_chunk=64),
    )
    rng = np.random.default_rng(0)

    def compare(*sizes):
        def random_record(num_prompt_tokens, count):
            logp = np.where(np.arange(num_prompt_tokens + count) < num_prompt_tokens, np.nan, 0.0)
            ids = rng.integers(0, 292, num_prompt_tokens + count)
            return TokenRecord(token_ids=ids, loss_mask=~np.isnan(logp), rollout_logp=logp)

        records = [random_record(*size) for size in sizes]
        return check_mismatch(params(), records, engine, SPARSE, config)

    config = MismatchConfig(attempts=0)
    assert compare((4, 3)) == {}
    config = MismatchConfig(max_logp_diff=math.inf)
    assert compare((90, 20), (20, 12), (3, 2))["mismatch/key_match_rate"] == 1.0
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_options: "backend_compile" in name and compiled.append(name)
    )
    assert compare((95, 31), (9, 3), (2, 1))["mismatch/key_match_rate"] == 1.0
    assert compiled == []
    jax.jit(lambda x: x * 2 + 3)(np.arange(3))
    assert compiled  # the listener works
