"""RL stages with adapters: which leaves are trained, sampled with, saved and continued."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.peft_adapters import load_adapter, with_adapter
from glm5_jax.checkpoint.store import Store
from glm5_jax.config import LoraConfig
from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.model import glm5, lora
from glm5_jax.parallel.tree import flatten
from glm5_jax.rl.config import EvaluationConfig, RlConfig
from glm5_jax.rl.trainers.sync_trainer import SyncRlTrainer, TaskSuite
from glm5_jax.rl.types import Task
from glm5_jax.training.loop import TrainConfig
from tests.rl.small_stage import (
    COMMON,
    TOKENIZER,
    SequentialTasks,
    reward_low_bytes,
    shared_train_step,
)

BASE = COMMON["model"]
TASKS = [
    Task(id=f"t{i}", kind="a", messages=({"role": "user", "content": f"{i}?"},)) for i in range(4)
]
ADAPTERS = LoraConfig(rank=2, alpha=8.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Workdir of a run that trained BASE."""
    return save_run(tmp_path_factory.mktemp("base"), BASE)


def save_run(folder, cfg):
    """Saves a checkpoint of random weights in a run folder, and returns the folder."""
    params = glm5.init_params(cfg, jax.random.key(1))
    state = {
        "params": params,
        "optimizer": {"m": np.zeros(2)},
        "step": np.int32(1),
        "key": np.zeros(2),
    }
    with Store(folder) as store:
        store.save(state, {}, {})
    (folder / "config.json").write_text(json.dumps({"model": dataclasses.asdict(cfg)}))
    TOKENIZER.save(folder / "tokenizer")
    return folder


def config(checkpoint, **changes):
    """Returns the config of an RL stage with adapters."""
    options = COMMON | dict(
        name="rl",
        model=dataclasses.replace(BASE, lora=ADAPTERS),
        train=TrainConfig(steps=2, eval_interval=0, save_interval=0),
        evaluation=EvaluationConfig(tasks=0),
        checkpoint=str(checkpoint),
        model_of_checkpoint=True,
    )
    return RlConfig(**options | changes)


def stage(config, workdir):
    """Returns the trainer of a config."""
    suite = TaskSuite(tasks=SequentialTasks(TASKS), held_out={}, verify=reward_low_bytes)
    return SyncRlTrainer(config, workdir, suite, step_maker=shared_train_step)


def test_uses_model_and_tokenizer_of_checkpoint(checkpoint, tmp_path, one_device):
    larger = dataclasses.replace(BASE, num_hidden_layers=3, hidden_size=24, lora=ADAPTERS)
    trainer = stage(config(checkpoint, model=larger), tmp_path / "run")
    expected = dataclasses.replace(BASE, lora=ADAPTERS)
    ids = {"eos_token_id": trainer.tokenizer.eos_ids, "pad_token_id": trainer.tokenizer.pad_id}
    assert trainer.config.model == dataclasses.replace(expected, **ids)
    assert trainer.tokenizer.fingerprint == TOKENIZER.fingerprint
    trainer.close()


def test_rejects_missing_checkpoint(tmp_path, one_device):
    with pytest.raises(ValueError, match="give --experiment.checkpoint=PATH"):
        stage(dataclasses.replace(config("x"), checkpoint=None), tmp_path / "run")


def test_rejects_targets_that_peft_cannot_express(checkpoint, tmp_path, one_device):
    half = dataclasses.replace(BASE, lora=LoraConfig(rank=2, targets=("/attn/k_b$",)))
    with pytest.raises(ValueError, match="PEFT's form has all of them or none"):
        stage(config(checkpoint, model=half), tmp_path / "run")


def test_loads_base_of_new_adapters_in_compute_dtype(checkpoint):
    cfg = dataclasses.replace(BASE, dtype="bfloat16", lora=ADAPTERS)
    params = flatten(models.open_weights(checkpoint, cfg)())
    assert {x.dtype.name for p, x in params.items() if "router/" not in p} == {"bfloat16"}
    assert params.keys() == flatten(glm5.abstract_params(BASE)).keys()


def test_merges_adapters_unless_they_are_continued(tmp_path):
    cfg = dataclasses.replace(BASE, lora=ADAPTERS)
    run = save_run(tmp_path / "run", cfg)
    continued = flatten(models.open_weights(run, cfg)())
    saved = flatten(glm5.init_params(cfg, jax.random.key(1)))
    assert all(np.array_equal(x, saved[path]) for path, x in continued.items())
    assert continued.keys() == saved.keys()
    merged = flatten(models.open_weights(run, BASE)())
    assert merged.keys() == flatten(glm5.abstract_params(BASE)).keys()
    assert models.load_model(run).cfg == models.read_config(run)[0] == BASE


@pytest.mark.slow
def test_trains_and_samples_with_adapters(checkpoint, tmp_path, one_device):
    run = stage(config(checkpoint), tmp_path / "run")
    run.run()
    # The engine sampled with the learner's weights, adapters included.
    assert max(column(read(tmp_path / "run"), "policy/abs_logratio")[1]) < 1e-5
    cfg = run.config.model
    trained = flatten(models.open_weights(tmp_path / "run", cfg)())
    base = flatten(models.open_weights(checkpoint, lora.without_adapters(cfg))())
    assert all(np.array_equal(trained[path], x) for path, x in base.items())
    _, leaves = load_adapter(tmp_path / "run" / "adapter", cfg)
    assert all(np.array_equal(x, trained[path]) for path, x in leaves.items())
    assert all(np.any(x) for x in leaves.values())
    # The run's model is the base with its adapter.
    expected = flatten(glm5.params_of(models.load_model(tmp_path / "run")))
    merged = with_adapter(models.load_model(checkpoint), tmp_path / "run" / "adapter")
    for path, x in flatten(glm5.params_of(merged)).items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)
    # It resumes, and writes its adapter again.
    longer = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, steps=3))
    stage(longer, tmp_path / "run").run()
    _, resumed = load_adapter(tmp_path / "run" / "adapter", cfg)
    assert not all(np.array_equal(x, leaves[path]) for path, x in resumed.items())
