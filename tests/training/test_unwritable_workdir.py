"""Tests runs whose workdir cannot be written, and the order of a checkpoint and the files that belong to it."""

import errno

import jax
import numpy as np
import pytest

from glm5_jax.checkpoint.store import Store
from glm5_jax.metrics.metrics_log import MetricsLog
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training import loop, stages
from glm5_jax.training.metrics import Recorder, TrainingStopped
from glm5_jax.training.pretraining import Pretraining
from glm5_jax.training.step import Step
from tests.experiments.test_arms import config
from tests.runtime.test_replaced_files import file_size_limit
from tests.training import bigram

STATE = {
    "params": {"w": np.zeros(4, np.float32)},
    "optimizer": {"m": np.zeros(4, np.float32)},
    "step": np.int32(0),
    "key": np.zeros(2, np.uint32),
}


def untrained(*_, **__):
    """Returns functions of a step that only knows its first state, in place of `make_step`."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), STATE)
    return Step(lambda key, params=None: STATE, abstract, None, None, None, None, True)


def test_names_full_disk_when_run_starts(tmp_path):
    stage = Pretraining(config(), tmp_path, step_maker=untrained)
    with (
        file_size_limit(50),
        pytest.raises(
            TrainingStopped, match="cannot be written .*no checkpoint is complete.*free some space"
        ),
    ):
        stage.run()
    assert not (tmp_path / "config.json").exists() and not list(tmp_path.glob(".config*"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_names_folder_without_permission(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, "not permitted", "config.json")

    monkeypatch.setattr(stages, "write_config", fail)
    with pytest.raises(TrainingStopped, match="config.json cannot be written .not permitted"):
        Pretraining(config(), tmp_path, step_maker=untrained).run()


def test_run_goes_on_without_report_that_fails(tmp_path, monkeypatch, caplog):
    def fail(_):
        raise ZeroDivisionError("in a plot")

    stage = Pretraining(config(), tmp_path, step_maker=untrained)
    monkeypatch.setattr(stages.report, "write_page", fail)
    monkeypatch.setattr(stage, "_train", lambda stop: None)
    assert stage.run().step == 0
    assert "the report of" in caplog.text and "in a plot" in caplog.text


def test_resumed_run_keeps_tokenizer_on_full_disk(tmp_path):
    Tokenizer.load("bytes").save(tmp_path)
    before = (tmp_path / "tokenizer.json").read_bytes()
    with file_size_limit(50), pytest.raises(OSError):
        Tokenizer.default().save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before


def test_exports_state_before_its_checkpoint(tmp_path):
    """A checkpoint of the last step ends a run for good, so that nothing would write a missing file later."""
    exported = []

    def export(state):
        exported.append(int(state["step"]))
        if exported[-1] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    train = loop.TrainConfig(save_interval=2, eval_interval=0, sample_interval=0)
    with (
        Store(tmp_path) as store,
        MetricsLog(tmp_path) as rows,
        ProgressBar(4) as progress,
    ):
        state, counters = loop.resume(
            store, jax.eval_shape(bigram.initialise), bigram.initialise, None
        )
        with pytest.raises(TrainingStopped, match="the disk is full; .*checkpoints/2"):
            loop.train(
                train,
                4,
                step=jax.jit(bigram.step, donate_argnums=0),
                state=state,
                loader=bigram.Loader(),
                place=lambda batch: batch,
                batch_size=lambda seen: 4,
                store=store,
                recorder=Recorder(rows, progress, counters),
                export=export,
            )
        store.wait()
        assert exported == [2, 4] and store.steps == [2]


def test_refuses_checkpoints_without_their_config(tmp_path):
    with Store(tmp_path) as store:
        store.save(STATE, {}, {"counters": {}})
    with pytest.raises(ValueError, match="has checkpoints and no config.json, .* copy it too"):
        Pretraining(config(), tmp_path, step_maker=untrained)


@pytest.mark.parametrize("meta", [{}, {"counters": {"tokens": "x"}}, {"counters": {"other": 1}}])
def test_names_checkpoint_without_counters(tmp_path, meta):
    with Store(tmp_path) as store:
        store.save(STATE, {}, meta)
        store.wait()
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), STATE)
        with pytest.raises(
            TrainingStopped, match="damaged .its meta is .*move it to another folder"
        ):
            loop.resume(store, abstract, lambda: STATE, None)
