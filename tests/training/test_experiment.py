"""Tests of config.json, and of its comparison when a run resumes."""

import dataclasses
import json

import pytest

from glm5_jax import presets
from glm5_jax.training.experiment import check_resume, choose, write_config
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.pretraining import ExperimentConfig
from glm5_jax.training.schedule import ScheduleConfig

CONFIG = ExperimentConfig(model=presets.tiny())


def with_changes(**parts) -> ExperimentConfig:
    """Returns CONFIG with changed fields, such as optimizer={"split": "whole"}."""
    new = {
        name: dataclasses.replace(getattr(CONFIG, name), **value)
        if isinstance(value, dict)
        else value
        for name, value in parts.items()
    }
    return dataclasses.replace(CONFIG, **new)


def test_writes_config_as_json(tmp_path):
    write_config(tmp_path / "new", CONFIG)
    [file] = (tmp_path / "new").iterdir()
    assert json.loads(file.read_text())["optimizer"]["muon_momentum"] == 0.95
    check_resume(tmp_path / "new", CONFIG)
    check_resume(tmp_path / "nowhere", CONFIG)


@pytest.mark.parametrize(
    "parts,message",
    [
        ({"model": {"hidden_size": 64}}, "model.hidden_size was 128, is 64"),
        ({"data": {"seed": 3}}, "data.seed was 0, is 3"),
        ({"data": {"sources": CONFIG.data.sources[:1]}}, "data.sources was "),
        ({"optimizer": {"split": "whole"}}, 'optimizer.split was "head", is "whole"'),
        ({"schedule": {"peak": 1.0}}, "schedule.peak was 0.0002, is 1.0"),
        ({"batch": {"end": 32 << 20}}, "batch.end was 67108864, is 33554432"),
        ({"step": {"z_weight": 0.1}}, "step.z_weight was 0.0, is 0.1"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"checkpoint": "x"}, 'checkpoint was null, is "x"'),
        ({"seed": 1, "data": {"seed": 3}}, "seed was 0, is 1; data.seed was 0, is 3"),
    ],
)
def test_rejects_changed_config_on_resume(tmp_path, parts, message):
    write_config(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="holds a run of another configuration") as error:
        check_resume(tmp_path, with_changes(**parts))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_names_config_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not the configuration of a run"):
        check_resume(tmp_path, CONFIG)


def test_accepts_changed_performance_options_on_resume(tmp_path):
    write_config(tmp_path, CONFIG)
    parts = {
        "train": {"steps": 7, "save_interval": 1, "keep": 9},
        "mesh": {"fsdp": 2, "expert": 4},
        "sample": {"tokens": 3},
        "name": "other",
        "data": {"num_threads": 0, "prefetch_documents": 1},
        "step": {"rows_per_device": 2, "remat": "none", "reduce_dtype": "float32"},
    }
    check_resume(tmp_path, with_changes(**parts))


def test_changeable_fields_exist():
    def paths(config, at=""):
        for name, value in config.items():
            yield from paths(value, f"{at}{name}.") if isinstance(value, dict) else [f"{at}{name}"]

    existing = [*paths(dataclasses.asdict(CONFIG))]
    for free in CONFIG.changeable_on_resume:
        assert any(path.startswith(free) for path in existing), free


def test_steps_default_to_schedule():
    schedule = ScheduleConfig(total_steps=30, warmup_steps=1)
    assert dataclasses.replace(CONFIG, schedule=schedule).steps == 30
    assert dataclasses.replace(CONFIG, schedule=schedule, train=TrainConfig(steps=4)).steps == 4


def test_rejects_unknown_variant():
    with pytest.raises(ValueError, match="unknown variant 'x'; use one of a, b"):
        choose("x", {"a": lambda: CONFIG, "b": lambda: CONFIG})
