"""Reasoning RL as an experiment: its tasks, what they are worth, and what is refused."""

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
    said = {"role": "assistant", "content": reply}
    return partial_digit_reward(
        SUM, Attempt(messages=(said,), finish_reason=finish_reason, num_sampled_tokens=sampled)
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
def test_parts_of_a_sum_are_worth_a_part(reply, reason, value):
    found = worth(reply, reason)
    assert found.value == pytest.approx(value)
    assert found.parts["exact"] == (reply == "100" and reason == "stop")


def test_tokens_that_nobody_sees_cost_something():
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


def test_the_policy_is_small_and_its_tasks_are_apart(tmp_path):
    config = rl_reasoning.get_config("addition")
    assert config.model.num_stored_parameters < 200_000
    [share] = config.tasks
    few = dataclasses.replace(share, tasks=dataclasses.replace(share.tasks, size=1000))
    stage = dataclasses.replace(config, tasks=(few,)).make_stage(tmp_path)
    suite = stage.suite
    learnt = {task.messages[0]["content"] for task in suite.tasks.draw(2000)}
    held_out = {task.messages[0]["content"] for own in suite.held_out.values() for task in own}
    assert learnt and held_out and not learnt & held_out
    stage.close()


def test_each_kind_has_its_own_verifier(tmp_path):
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


def test_passages_are_searched_in_a_run(tmp_path):
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
            asked = ToolCall(**call["function"], problem=None, text="")
            assert asyncio.run(suite.tools(task, asked)) == result["content"]
    assert len(answer.messages) > 12 and asyncio.run(suite.verify(task, answer)).value == 1
    stage.close()


def test_programs_are_refused_where_no_sandbox_starts(tmp_path, monkeypatch):
    """Before anything is trained, as all else that is wrong; a run of both kinds would learn of the other alone."""
    box = pytest.importorskip("glm5_jax.envs.sandbox.sandbox")
    monkeypatch.setattr(box, "PATH", str(tmp_path))
    shares = tuple(TaskWeight(TaskConfig(kind=kind, size=20)) for kind in ("addition", "mbpp"))
    with pytest.raises(
        ValueError, match=r"'mbpp-\d+' of kind 'code' cannot be judged: .*\(bwrap\)"
    ):
        small(tasks=shares, partial_credit=False, **LONGER).make_stage(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_everybody_solves_is_left_out(tmp_path, capsys):
    share = TaskWeight(TaskConfig(kind="addition", size=40, digits=1, held_out_fraction=0.2))
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    known = [task.id for task in tasks(share.tasks)]

    def write(path, passes):
        lines = (
            json.dumps({"task": t, "passes": passes(i), "tries": 8}) for i, t in enumerate(known)
        )
        path.write_text("\n".join(lines))

    write(own, lambda i: 8 * (i % 2))
    write(other, lambda i: 4)
    config = small(tasks=(share,), verdicts=str(own), stronger_verdicts=str(other))
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
def test_contradictions_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        small(**changes)
    with pytest.raises(
        ValueError,
        match="unknown variant 'huge'; use one of addition, tiny, tools, small, flash, glm5",
    ):
        rl_reasoning.get_config("huge")
