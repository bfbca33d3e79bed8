"""The tool `python` in tasks of search and of tool-integrated reasoning: offered, answered, and checked before a run."""

import asyncio
import dataclasses

import pytest

from experiments import rl_agentic, rl_reasoning
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.envs.reasoning.verifiers import TirVerifier
from glm5_jax.rl.types import Attempt
from glm5_jax.text.tool_calls import ToolCall


def names_of(task):
    return [tool["function"]["name"] for tool in task.tools]


@pytest.mark.parametrize(
    ("kind", "others"),
    [("products", ["calculate"]), ("musique", ["search", "open", "find"]), ("worlds", ["search", "open", "find"])],
)  # fmt: skip
def test_offers_python_by_config(kind, others):
    config = TaskConfig(kind=kind, size=3)
    assert names_of(next(tasks(config))) == others
    assert names_of(next(tasks(dataclasses.replace(config, python=True)))) == [*others, "python"]


@pytest.mark.parametrize("kind", ["addition", "gsm8k", "choices", "mbpp"])
def test_refuses_python_for_kind_without_tools(kind):
    with pytest.raises(ValueError, match=f"python is true, and {kind} has no tools; only .* tir and search"):  # fmt: skip
        TaskConfig(kind=kind, python=True)


@pytest.mark.parametrize("shares", [rl_reasoning.ALL, rl_agentic.ALL])
def test_full_size_tool_tasks_offer_python(shares):
    for share in shares:
        has_tools = share.tasks.domain in ("tir", "search")
        assert share.tasks.python == has_tools


def test_answers_program_of_task(isolation):
    [task] = tasks(
        TaskConfig(kind="products", size=1, digits=6, held_out_fraction=0.0, python=True)
    )
    product = task.messages[0]["content"].removesuffix("?")
    box = rl_reasoning.make_toolbox([task])
    call = ToolCall("python", {"code": f"print({product})"}, None, "")
    answer = asyncio.run(box(task, call))
    assert answer == task.data["answer"]
    request = {"id": "a", "function": {"name": "python", "arguments": call.arguments}}
    messages = (
        {"role": "assistant", "content": "", "tool_calls": [request]},
        {"role": "tool", "content": answer, "tool_call_id": "a"},
        {"role": "assistant", "content": answer},
    )
    with TirVerifier() as verifier:
        assert asyncio.run(verifier(task, Attempt(messages=messages))).value == 1


def test_refuses_tasks_with_python_without_sandbox(tmp_path, monkeypatch):
    box = pytest.importorskip("glm5_jax.envs.sandbox.bubblewrap")
    monkeypatch.setattr(box, "PATH", str(tmp_path))
    config = TaskConfig(kind="products", size=3)
    assert rl_reasoning.make_toolbox(tasks(config))
    with pytest.raises(ValueError, match=r"tool python, which does not run: .*\(bwrap\).*python=False"):  # fmt: skip
        rl_reasoning.make_toolbox(tasks(dataclasses.replace(config, python=True)))
