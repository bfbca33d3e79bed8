"""One command trains a policy by reasoning RL, general RL and distillation; after a restart the result is the same."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from experiments import distill, rl_general, rl_reasoning
from glm5_jax.checkpoint import models
from glm5_jax.envs.instructions.generated_tasks import ConstraintTaskConfig
from glm5_jax.envs.reasoning.task_sources import TaskConfig
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.metrics.metrics_log import read
from glm5_jax.rl.config import EvaluationConfig, Teacher
from glm5_jax.runtime.preemption import PreemptionGuard
from glm5_jax.training import report
from glm5_jax.training.loop import TrainConfig
from glm5_jax.training.schedule import ScheduleConfig
from launch import stage_runner
from launch.stage_plan import plan_stages
from tests.model.small import one_layer

STAGES = ("rl_reasoning", "rl_general", "distill")
STEPS = 2


def lifecycle_config():
    base = dataclasses.replace(
        rl_reasoning.addition(),
        model=one_layer(vocab_size=292, max_position_embeddings=512),
        schedule=ScheduleConfig(
            kind="constant", peak=1e-2, end=0.0, warmup_steps=0, total_steps=STEPS
        ),
        train=TrainConfig(eval_interval=1, sample_interval=0, save_interval=1),
        rollout=dataclasses.replace(rl_reasoning.addition().rollout, prompts=4, group=4),
        engine=EngineConfig(page_size=32, max_num_seqs=16, prefill_chunk=256, max_length=256),
        evaluation=EvaluationConfig(tasks=2),
        length=256,
        rows=8,
        tasks=(rl_reasoning.TaskWeight(TaskConfig(kind="addition", size=200, fewer=1)),),
    )
    general = rl_general.GeneralRlConfig(
        **rl_general.shared_fields(base, name="general", requires_checkpoint=True),
        tasks=(
            rl_general.GeneralTaskWeight(demands=ConstraintTaskConfig(size=200, max_characters=60)),
        ),
        rules="share",
    )
    last = distill.DistillConfig(
        **rl_general.shared_fields(
            general,
            name="distill",
            objective="teachers",
            teachers=(
                Teacher(checkpoint="rl_reasoning", origin="reasoning"),
                Teacher(checkpoint="rl_general", origin="general"),
            ),
            rollout=dataclasses.replace(base.rollout, prompts=8, group=1),
        ),
        reasoning=base.tasks,
        general=general.tasks,
    )
    return dataclasses.make_dataclass("Life", STAGES)(base, general, last)


def timeless_rows(folder):
    """Returns the metrics of a run, without speeds and durations."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("speed/", "seconds/", "system/"))
        }
        for row in read(folder)
    ]


def test_rejects_teacher_without_checkpoint(tmp_path):
    (tmp_path / "rl_general/checkpoints").mkdir(parents=True)
    before = None
    for stage in plan_stages(lifecycle_config(), tmp_path):
        before = stage.config.make_stage(stage.folder, None, before)
    before.close()
    with pytest.raises(ValueError, match="rl_general holds no checkpoint"):
        stage.config.make_stage(stage.folder, None)


@pytest.mark.slow
def test_resumed_stages_equal_uninterrupted_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "write_page", lambda workdir: None)  # takes seconds per stage
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    assert (
        stage_runner.run_stages(
            types.SimpleNamespace(), lifecycle_config(), uninterrupted, PreemptionGuard()
        )
        == 0
    )
    update, count = Engine.update_weights, 0

    def fail_twice(self, *args, **options):
        nonlocal count
        count += 1
        # At the start of the second stage, before any checkpoint, and again before its last step.
        if count in (STEPS + 2, 2 * STEPS + 3):
            raise RuntimeError("the machine is gone")
        update(self, *args, **options)

    monkeypatch.setattr(Engine, "update_weights", fail_twice)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the machine is gone"):
            stage_runner.run_stages(
                types.SimpleNamespace(), lifecycle_config(), resumed, PreemptionGuard()
            )
    assert (
        stage_runner.run_stages(
            types.SimpleNamespace(), lifecycle_config(), resumed, PreemptionGuard()
        )
        == 0
    )
    assert "resuming at step 1" in "".join(capsys.readouterr())
    before = None
    for name in STAGES:
        rows = timeless_rows(uninterrupted / name)
        assert rows == timeless_rows(resumed / name) and rows[-1]["step"] == STEPS
        assert all(row["policy/staleness"] == 0 for row in rows if "policy/staleness" in row)
        config = getattr(lifecycle_config(), name)
        after, after_resume = (
            jax.tree.leaves(jax.device_get(models.open_weights(folder / name, config.model)()))
            for folder in (uninterrupted, resumed)
        )
        assert all(map(np.array_equal, after, after_resume))
        # Each stage starts from the weights of the one before, and changes them.
        assert before is None or not all(map(np.array_equal, before, after))
        before = after
