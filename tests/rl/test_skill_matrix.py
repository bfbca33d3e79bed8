"""Every skill of every checkpoint is measured as the stage of that skill measures it."""

import dataclasses

import pytest

from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.trainers.skill_matrix import evaluate_skills, in_both_modes, judge_form
from glm5_jax.rl.trainers.sync_trainer import TaskSuite
from glm5_jax.rl.types import Attempt
from glm5_jax.training.loop import TrainConfig
from tests.rl.small_stage import SequentialTasks, reward_low_bytes
from tests.rl.test_sync_trainer import (  # noqa: F401
    TASKS,
    config,
    quick_config,
    save_weights,
    stage_of,
    tokenizer,
)


@pytest.mark.slow
def test_evaluates_each_skill_of_each_checkpoint(quick_config, tmp_path):  # noqa: F811
    config = dataclasses.replace(quick_config, train=TrainConfig(steps=2, eval_interval=2))  # noqa: F811
    kinds = {"math": TASKS[::2], "code": TASKS[1::2]}
    suite = TaskSuite(tasks=SequentialTasks(TASKS), held_out=kinds, verify=reward_low_bytes)
    start = save_weights(config, tmp_path / "start", 1)
    rl_config = dataclasses.replace(config, checkpoint=start)
    stage_of(rl_config, tmp_path / "rl", suite).run()
    matrix = evaluate_skills(config, suite, {"sft": start, "rl": str(tmp_path / "rl")})
    rows = read(tmp_path / "rl")
    for kind in kinds:
        first, last = (column(rows, f"held_out/{kind}")[1][i] for i in (0, -1))
        assert matrix.rewards[kind] == {"sft": pytest.approx(first), "rl": pytest.approx(last)}
    assert matrix.rewards["math"]["sft"] != matrix.rewards["math"]["rl"]
    assert list(matrix.rewards) == [*kinds, "form with thinking", "form without"]
    for kind, samples in matrix.samples.items():
        prompt = (TASKS[1] if kind == "code" else TASKS[0]).messages[-1]["content"]
        assert samples["prompt"] == prompt and list(samples) == ["prompt", "sft", "rl"]
    with pytest.raises(ValueError, match="nowhere"):
        evaluate_skills(config, suite, {"rl": str(tmp_path / "nowhere")})


def test_well_formed_reply_ends_and_follows_thinking_mode():
    modes = in_both_modes(TASKS[:1])
    [thinking], [plain] = modes["form with thinking"], modes["form without"]

    def form_of(task, content="4", reasoning="two and two", finish_reason="stop"):
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        return judge_form(task, Attempt(messages=(message,), finish_reason=finish_reason)).value

    assert (form_of(thinking), form_of(plain)) == (1, 0)
    assert (form_of(thinking, reasoning=None), form_of(plain, reasoning=None)) == (0, 1)
    for change in ({"content": " "}, {"content": "4</think>"}, {"finish_reason": "length"}):
        assert form_of(thinking, **change) == 0
        assert form_of(plain, **{"reasoning": None} | change) == 0
    assert judge_form(plain, Attempt(messages=(), finish_reason="length")).value == 0
