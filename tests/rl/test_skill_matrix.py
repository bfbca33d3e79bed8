"""Every skill of every checkpoint: each measured as its own stage would."""

import dataclasses

import pytest

from glm5_jax.metrics.metrics_log import column, read
from glm5_jax.rl.trainers.skill_matrix import evaluate_skills, in_both_modes, judge_form
from glm5_jax.rl.trainers.sync_trainer import TaskSuite
from glm5_jax.rl.types import Attempt
from glm5_jax.training.loop import TrainConfig
from tests.rl.small_stage import InTurn, likes_low_bytes
from tests.rl.test_sync_trainer import TASKS, config, quick, saved, stage_of, tokenizer  # noqa: F401


@pytest.mark.slow
def test_each_skill_after_each_stage(quick, tmp_path):  # noqa: F811
    config = dataclasses.replace(quick, train=TrainConfig(steps=2, eval_interval=2))  # noqa: F811
    kinds = {"math": TASKS[::2], "code": TASKS[1::2]}
    suite = TaskSuite(tasks=InTurn(TASKS), held_out=kinds, verify=likes_low_bytes)
    start = saved(config, tmp_path / "start", 1)
    learning = dataclasses.replace(config, checkpoint=start)
    stage_of(learning, tmp_path / "rl", suite).run()
    found = evaluate_skills(config, suite, {"sft": start, "rl": str(tmp_path / "rl")})
    rows = read(tmp_path / "rl")
    for kind in kinds:
        first, last = (column(rows, f"held_out/{kind}")[1][i] for i in (0, -1))
        assert found.rewards[kind] == {"sft": pytest.approx(first), "rl": pytest.approx(last)}
    assert found.rewards["math"]["sft"] != found.rewards["math"]["rl"]
    assert list(found.rewards) == [*kinds, "form with thinking", "form without"]
    for kind, own in found.samples.items():
        asked = (TASKS[1] if kind == "code" else TASKS[0]).messages[-1]["content"]
        assert own["prompt"] == asked and list(own) == ["prompt", "sft", "rl"]
    with pytest.raises(ValueError, match="nowhere"):
        evaluate_skills(config, suite, {"rl": str(tmp_path / "nowhere")})


def test_a_reply_is_well_formed_if_it_ends_and_thinks_where_it_is_asked_to():
    modes = in_both_modes(TASKS[:1])
    [thinking], [plain] = modes["form with thinking"], modes["form without"]

    def formed(task, content="4", reasoning="two and two", finish_reason="stop"):
        said = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        return judge_form(task, Attempt(messages=(said,), finish_reason=finish_reason)).value

    assert (formed(thinking), formed(plain)) == (1, 0)
    assert (formed(thinking, reasoning=None), formed(plain, reasoning=None)) == (0, 1)
    for wrong in ({"content": " "}, {"content": "4</think>"}, {"finish_reason": "length"}):
        assert formed(thinking, **wrong) == 0
        assert formed(plain, **{"reasoning": None} | wrong) == 0
    assert judge_form(plain, Attempt(messages=(), finish_reason="length")).value == 0
