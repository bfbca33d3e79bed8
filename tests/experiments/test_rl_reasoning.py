"""Reasoning RL as an experiment: its tasks, their rewards, and refused configs."""

import asyncio
import dataclasses
import json
import math

import pytest

from experiments import rl_reasoning
from experiments.rl_reasoning import TaskWeight, partial_digit_reward
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.rl.types import Attempt, Task
from glm5_jax.text.tool_calls import ToolCall
from tests.envs.search_solvers import attempt, follow

SUM = Task(
    id="t", kind="math", messages=({"role": "user", "content": "40+60?"},), data={"answer": "100"}
)


def worth(reply, finish_reason="stop", sampled=0):
    message = {"role": "assistant", "content": reply}
    return partial_digit_reward(
        SUM, Attempt(messages=(message,), finish_reason=finish_reason, num_sampled_tokens=sampled)
    )


@pytest.mark.parametrize(
    ("reply", "reason", "value"),
    [
        ("100", "stop", 1.0),
        ("100", "length", 0.1 + 0.4 + 0.2),
        ("101", "stop", 0.1 + 0.1 + 0.4 * 2 / 3 + 0.2 * math.exp(-1 / 5)),
        ("10", "stop", 0.1 + 0.1 + 0.4 * 2 / 3 + 0.2 * math.exp(-90 / 5)),
        ("1000", "stop", 0.1 + 0.1 + 0.4 * 3 / 4),
        ("1x", "stop", 0.05 + 0.1 + 0.4 / 3),
        ("ab", "length", 0.0),
        ("", "stop", 0.1),
    ],
)
def test_rewards_parts_of_sum(reply, reason, value):
    reward = worth(reply, reason)
    assert reward.value == pytest.approx(value)
    assert reward.parts["exact"] == (reply == "100" and reason == "stop")


def test_hidden_tokens_reduce_reward():
    assert worth("100", sampled=4).value == pytest.approx(1.0)
    hidden = worth("100", sampled=5)
    assert hidden.value == pytest.approx(1 - (0.1 + 0.4) / 4) and hidden.parts["exact"] == 1


def small(**changes):
    return dataclasses.replace(rl_reasoning.addition(), **changes)


LONGER = {
    "length": 2048,
    "engine": rl_reasoning.EngineConfig(),
    "model": dataclasses.replace(rl_reasoning.addition().model, max_position_embeddings=2048),
}


def test_policy_is_small_and_held_out_tasks_differ(tmp_path):
    config = rl_reasoning.get_config("addition")
    assert config.model.num_stored_parameters < 200_000
    [share] = config.tasks
    few = dataclasses.replace(share, tasks=dataclasses.replace(share.tasks, size=1000))
    stage = dataclasses.replace(config, tasks=(few,)).make_stage(tmp_path)
    suite = stage.suite
    training = {task.messages[0]["content"] for task in suite.tasks.draw(2000)}
    held_out = {
        task.messages[0]["content"]
        for held_out_tasks in suite.held_out.values()
        for task in held_out_tasks
    }
    assert training and held_out and not training & held_out
    stage.close()


def test_each_kind_has_its_verifier(tmp_path):
    shares = (
        TaskWeight(TaskConfig(kind="gsm8k", size=20)),
        TaskWeight(TaskConfig(kind="choices", size=20), 2.0),
    )
    stage = small(tasks=shares, partial_credit=False, **LONGER).make_stage(tmp_path)
    verify = stage.suite.verify
    for share in shares:
        task = next(tasks(share.tasks))
        right = Attempt(
            messages=({"role": "assistant", "content": f"answer: {task.data['answer']}"},)
        )
        wrong = Attempt(messages=({"role": "assistant", "content": "answer: Q"},))
        assert asyncio.run(verify(task, right)).value == 1
        assert asyncio.run(verify(task, wrong)).value == 0
    drawn = [task.kind for task in stage.suite.tasks.draw(30)]
    assert drawn.count("science") == 2 * drawn.count("math")
    stage.close()


def test_run_searches_passages(tmp_path):
    share = TaskWeight(TaskConfig(kind="worlds", size=20, hops=3))
    more = {
        "length": 4096,
        "model": dataclasses.replace(LONGER["model"], max_position_embeddings=4096),
    }
    stage = small(tasks=(share,), partial_credit=False, **{**LONGER, **more}).make_stage(tmp_path)
    suite = stage.suite
    [task] = suite.tasks.draw(1)
    answer = asyncio.run(attempt(task, follow))
    for message, result in zip(answer.messages, answer.messages[1:]):
        for call in message.get("tool_calls", ()):
            tool_call = ToolCall(**call["function"], problem=None, text="")
            assert asyncio.run(suite.tools(task, tool_call)) == result["content"]
    assert len(answer.messages) > 12 and asyncio.run(suite.verify(task, answer)).value == 1
    stage.close()


def test_refuses_programs_without_sandbox(tmp_path, monkeypatch):
    """Refused before training; a run of both kinds would otherwise train only on the other kind."""
    box = pytest.importorskip("glm5_jax.envs.sandbox.bubblewrap")
    monkeypatch.setattr(box, "PATH", str(tmp_path))
    shares = tuple(TaskWeight(TaskConfig(kind=kind, size=20)) for kind in ("addition", "mbpp"))
    with pytest.raises(
        ValueError, match=r"'mbpp-\d+' of kind 'code' cannot be judged: .*\(bwrap\)"
    ):
        small(tasks=shares, partial_credit=False, **LONGER).make_stage(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_leaves_out_tasks_that_all_attempts_solve(tmp_path, capsys):
    share = TaskWeight(TaskConfig(kind="addition", size=40, digits=1, held_out_fraction=0.2))
    student_file, teacher_file = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    known = [task.id for task in tasks(share.tasks)]

    def write(path, passes):
        lines = (
            json.dumps({"task": t, "passes": passes(i), "tries": 8}) for i, t in enumerate(known)
        )
        path.write_text("\n".join(lines))

    write(student_file, lambda i: 8 * (i % 2))
    write(teacher_file, lambda i: 4)
    config = small(tasks=(share,), verdicts=str(student_file), stronger_verdicts=str(teacher_file))
    stage = config.make_stage(tmp_path / "run")
    assert {task.id for task in stage.suite.tasks.draw(200)} == set(known[::2])
    assert "too_easy" in capsys.readouterr().out
    stage.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": ()}, "tasks is empty"),
        ({"tasks": (TaskWeight(), TaskWeight())}, "two of the tasks have one name"),
        ({"verdicts": "x"}, "belong together; give both or none"),
    ],
)
def test_rejects_contradictory_config(changes, words):
    with pytest.raises(ValueError, match=words):
        small(**changes)
    with pytest.raises(
        ValueError,
        match="unknown variant 'huge'; use one of addition, tiny, tools, small, flash, glm5",
    ):
        rl_reasoning.get_config("huge")
