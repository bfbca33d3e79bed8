"""Tests the agent loop: its requests, its responses to a model's mistakes, how attempts end, and what raises."""

import asyncio
import dataclasses
import re

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.agents.context import OMITTED, ContextConfig, TokenCounter
from glm5_jax.agents.loop import ChatAgent, LoopConfig
from glm5_jax.agents.tools import Toolbox, calculate
from glm5_jax.data import chat_tasks
from glm5_jax.envs.reasoning.python_tool import PYTHON, Python
from glm5_jax.envs.sandbox import ExecResult
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task, reward_without_verifier
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from tests.agents.scripted import Scripted, calling

SLOW = {
    "type": "function",
    "function": {"name": "slow", "parameters": {"properties": {"seconds": {}}}},
}
QUESTION = ({"role": "user", "content": "6*7?"},)
TASK = Task(id="t", kind="tir", messages=QUESTION, tools=(*chat_tasks.shop_tools(), SLOW))
COUNTER = TokenCounter(Tokenizer.default())
CONFIG = LoopConfig(max_turns=8, context=ContextConfig(keep_rounds=None, max_prompt_tokens=None))
PRODUCT = ("calculate", {"expression": "6*7"})


async def slow(task, arguments):
    await asyncio.sleep(arguments["seconds"])
    return f"after {arguments['seconds']}"


BOX = Toolbox({"calculate": calculate, "slow": slow})


def attempt(replies, tools=BOX, task=TASK, fields=None, **limits):
    """Runs the agent on scripted replies and returns (client, trace)."""
    client = Scripted(replies)
    agent = ChatAgent(
        client=client,
        tools=tools,
        counter=COUNTER,
        config=dataclasses.replace(CONFIG, **limits),
        fields=fields or {},
    )
    return client, asyncio.run(agent(task))


def answers(trace):
    return [m["content"] for m in trace.messages if m["role"] == "tool"]


def test_executes_calls_until_final_answer():
    client, trace = attempt([[PRODUCT], "42"], fields={"temperature": 0.5})
    assert trace.ended == "answer" and trace.attempt.reply == "42"
    assert reward_without_verifier(trace.attempt) is None
    [first, second] = client.requests
    assert first[0] == list(QUESTION) and second[0] == [*QUESTION, *trace.messages[:-1]]
    reply, result = trace.messages[:-1]
    assert reply["reasoning_content"] == "I look." and reply["tool_calls"][0]["id"] == "c1-0"
    assert result == {"role": "tool", "tool_call_id": "c1-0", "content": "42"}
    for messages, fields in client.requests:
        left = CONFIG.max_tokens - COUNTER.prompt(TASK)
        left -= COUNTER.added(TASK, messages[1:]) if messages[1:] else 0
        assert fields == {"temperature": 0.5, "tools": list(TASK.tools), "max_tokens": left}


def test_runs_calls_in_parallel_and_orders_results():
    running = max_running = 0

    async def tools(task, call):
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(0.01)
        answer = await BOX(task, call)
        running -= 1
        return answer

    calls = [("slow", {"seconds": 0.03}), PRODUCT, ("slow", {"seconds": 0.01})]
    client, trace = attempt([calls, "done"], tools)
    assert answers(trace) == ["after 0.03", "42", "after 0.01"] and max_running == 3
    assert [m.get("tool_call_id") for m in trace.messages] == [None, "c1-0", "c1-1", "c1-2", None]
    assert client.requests[1][0] == [*QUESTION, *trace.messages[:-1]]


@pytest.mark.parametrize(
    ("call", "expected_error"),
    [
        (("calculate", "{6*7"), "the line is not JSON"),
        (("calculate", "[6]"), "the arguments are not an object: [6]"),
        (("calculate", '{"expression": "1", "expression": "2"}'), "'expression' twice"),
        (("calculate", {}), "calculate needs expression"),
        (("calculate", ""), "calculate needs expression"),
        (("calculate", {"expression": "six"}), "'s' is no number"),
        (("lookup", {"x": 1}), "no tool lookup"),
        (("slow", {"seconds": "x"}), "slow failed: TypeError"),
        (("slow", {"seconds": 60}), "slow gave no result within 0.05 s"),
    ],
)
def test_reports_mistake_to_model_and_continues(call, expected_error):
    limits = {"tool_timeout_s": 0.05, "ends_on_broken_call": False}
    client, trace = attempt([[PRODUCT, call], "42"], **limits)
    right, wrong = answers(trace)
    assert right == "42" and wrong.startswith("Error: ") and expected_error in wrong
    assert trace.ended == "answer" and trace.messages[-1]["content"] == "42"
    assert bool(trace.failures) == (call[0] == "slow")
    # Only arguments that any server can read are sent back.
    sent = client.requests[1][0][1]["tool_calls"][1]["function"]["arguments"]
    assert sent == (
        "{}"
        if "line" in expected_error or "object" in expected_error or "twice" in expected_error
        else trace.messages[0]["tool_calls"][1]["function"]["arguments"]
    )


def test_keeps_markers_in_content():
    choice = calling(PRODUCT, reasoning="")
    choice["message"]["content"] = "a</think>b"
    client, _ = attempt([choice, "42"])
    sent = client.requests[1][0][1]
    assert sent["content"] == "a</think>b" and sent["reasoning_content"] == ""


def test_raises_on_environment_failure():
    async def down(task, call):
        raise ToolError("it is down")

    with pytest.raises(ToolError, match="it is down"):
        attempt([[PRODUCT], "42"], down)
    for error in (ServerError("no answer"), ServerError("busy", 503), TimeoutError("mine")):
        with pytest.raises(type(error), match=str(error)):
            attempt([[PRODUCT], error])
    aborted = {"message": {"role": "assistant", "content": "4"}, "finish_reason": "abort"}
    with pytest.raises(ServerError, match="ended by 'abort'"):
        attempt([aborted])
    broken = calling(PRODUCT)
    del broken["message"]["tool_calls"][0]["function"]["name"]
    for nameless in (broken, calling(("", {}))):
        with pytest.raises(ServerError, match="has invalid calls"):
            attempt([nameless])


def test_waits_for_other_tools_after_failure():
    ended = []

    async def tools(task, call):
        if call.name == "calculate":
            raise ToolError("it is down")
        await asyncio.sleep(0.02)
        ended.append(call.name)
        return ""

    with pytest.raises(ToolError):
        attempt([[PRODUCT, ("slow", {"seconds": 0})]], tools)
    assert ended == ["slow"]


def cut_off(choice):
    return {**choice, "finish_reason": "length"}


HUGE = ServerError("the prompt has 99 tokens", 400)


@pytest.mark.parametrize(
    ("replies", "limits", "ended", "num_messages"),
    [
        ([[PRODUCT]] * 9, {"max_turns": 3}, "max_turns", 5),
        ([[PRODUCT]] * 9, {"max_tokens": COUNTER.prompt(TASK) + 60}, "max_tokens", 6),
        ([[PRODUCT], [("slow", {"seconds": 9})]], {"timeout_s": 0.1}, "timeout", 3),
        ([[PRODUCT], cut_off(calling(PRODUCT))], {}, "length", 3),
        ([[PRODUCT], HUGE], {}, "refused", 2),
    ],
)
def test_gives_no_reward_without_final_answer(replies, limits, ended, num_messages):
    client, trace = attempt(replies, **limits)
    assert trace.ended == ended and len(trace.messages) == num_messages
    assert (
        trace.attempt.finish_reason == "length"
        and reward_without_verifier(trace.attempt).value == 0
    )
    assert len(client.requests) <= limits.get("max_turns", 8)


def test_raises_if_server_never_replies():
    class Silent:
        async def chat(self, messages, **fields):
            await asyncio.sleep(60)

    agent = ChatAgent(
        client=Silent(),
        tools=BOX,
        counter=COUNTER,
        config=dataclasses.replace(CONFIG, timeout_s=0.05),
    )
    with pytest.raises(ServerError, match="no reply has arrived"):
        asyncio.run(agent(TASK))


def test_raises_if_server_rejects_task():
    with pytest.raises(ServerError, match="99 tokens"):
        attempt([HUGE])
    with pytest.raises(ValueError, match="max_tokens is 5; raise it"):
        attempt(["42"], max_tokens=5)


def test_limits_reply_to_remaining_tokens():
    prompt_tokens, round_tokens = COUNTER.prompt(TASK), None
    client, trace = attempt(
        [[PRODUCT], [PRODUCT], "42"], max_tokens=prompt_tokens + 200, reply_tokens=180
    )
    round_tokens = COUNTER.added(TASK, trace.messages[:2])
    limits = [fields["max_tokens"] for _, fields in client.requests]
    assert limits == [180, 200 - round_tokens, 200 - 2 * round_tokens] and round_tokens > 20


def test_manages_context_and_keeps_full_trace():
    round_tokens = COUNTER.added(TASK, attempt([[PRODUCT], "42"])[1].messages[:2])
    context = ContextConfig(
        keep_rounds=1, max_prompt_tokens=COUNTER.prompt(TASK) + 3 * round_tokens
    )
    client, trace = attempt([[PRODUCT]] * 5 + ["42"], context=context)
    sent = [
        [m["content"] for m in messages if m["role"] == "tool"] for messages, _ in client.requests
    ]
    assert answers(trace) == ["42"] * 5 and len(trace.messages) == 11
    [restart] = trace.restarts
    assert sent[:3] == [[], ["42"], [OMITTED, "42"]] and sent[restart] == []
    assert client.requests[restart][0] == list(QUESTION)
    assert sent[restart + 1 :] == [["42"], [OMITTED, "42"], [OMITTED] * 2 + ["42"]][: 5 - restart]


def test_sends_thinking_mode_of_task():
    task = dataclasses.replace(TASK, thinking=False, tools=())
    fields_before = {"chat_template_kwargs": {"clear_thinking": False}}
    client, _ = attempt(["42"], task=task, fields=fields_before)
    [(_, fields)] = client.requests
    assert fields["chat_template_kwargs"] == {"enable_thinking": False, "clear_thinking": False}
    assert "tools" not in fields and fields_before == {
        "chat_template_kwargs": {"clear_thinking": False}
    }


any_text = st.text(st.characters(exclude_categories=()), max_size=30)
arguments = any_text | st.dictionaries(any_text, any_text | st.integers() | st.none(), max_size=3)
half_surrogates = st.sampled_from(
    ["\ud800", '{"expression": "\ud800"}', '{"expression": "\\ud800"}']
)


@settings(deadline=None)
@given(any_text, any_text, any_text.filter(bool), arguments | half_surrogates)
def test_handles_any_text_of_model(content, reasoning, name, written):
    """No text of a model may count as a failure of the environment."""
    choice = calling((name, written), ("calculate", written), reasoning=reasoning)
    choice["message"]["content"] = content
    client, trace = attempt([choice, "42"], ends_on_broken_call=False)
    assert trace.ended == "answer" and len(answers(trace)) == 2
    assert not any(re.search("[\ud800-\udfff]", text) for text in answers(trace))
    render_chat(client.requests[1][0], tools=TASK.tools).text.encode()


def test_runs_attempts_concurrently():
    """One agent holds separate state for each attempt."""
    client = Scripted(lambda messages: "42" if len(messages) > 3 else [PRODUCT])
    agent = ChatAgent(client=client, tools=BOX, counter=COUNTER, config=CONFIG)

    async def run_attempts():
        return await asyncio.gather(*(agent(TASK) for _ in range(4)))

    traces = asyncio.run(run_attempts())
    assert [trace.ended for trace in traces] == ["answer"] * 4
    assert all(answers(trace) == ["42", "42"] for trace in traces)


@pytest.mark.parametrize(
    "field", ["max_turns", "max_tokens", "reply_tokens", "timeout_s", "tool_timeout_s"]
)
def test_rejects_nonpositive_limits(field):
    with pytest.raises(ValueError, match=f"{field} is 0"):
        LoopConfig(**{field: 0})


def test_runs_python_programs():
    async def run(code, config):
        return ExecResult(code=0, stdout=b"42\n", stderr=b"")

    task = dataclasses.replace(TASK, tools=(PYTHON,))
    _, trace = attempt(
        [[("python", {"code": "print(6*7)"})], "42"], Toolbox({"python": Python(run=run)}), task
    )
    assert answers(trace) == ["42"] and trace.ended == "answer"
