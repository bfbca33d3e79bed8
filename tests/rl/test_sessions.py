"""Prompts of a session contain exactly the tokens that were read and sampled before, and each sampled token is
trained on once."""

import dataclasses
import json
import random

import numpy as np
import pytest

from glm5_jax.rl.rollouts.sessions import (
    CLEAN,
    FORK,
    REALIGN,
    Session,
    SessionConfig,
    SessionError,
    Turn,
)
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load("bytes")
SPECIAL = TOKENIZER.special_ids
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def reply(content="", reasoning="So.", calls=()):
    """Returns an assistant message; calls: expressions of calls of the tool `calculate`."""
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    calls = [{"name": "calculate", "arguments": {"expression": expression}} for expression in calls]
    return message | ({"tool_calls": calls} if calls else {})


def output_of(message, thinking=True):
    """Returns the ids that a model samples for a message, its stop token included."""
    questions = [user("?")]
    options = dict(clear_thinking=False, enable_thinking=thinking)
    prompt = render_chat(questions, TOKENIZER, **options).ids
    complete = render_chat([*questions, message], TOKENIZER, close=True, **options).ids
    assert complete[: len(prompt)] == prompt
    return complete[len(prompt) :]


def prompt_of(messages, tools=None, thinking=True):
    """Returns the ids of a prompt."""
    options = dict(tools=tools, clear_thinking=False, enable_thinking=thinking)
    return tuple(render_chat(messages, TOKENIZER, **options).ids)


def add_reply(session, plan, message, output=None, version=0, finish_reason="stop"):
    """Adds a reply to a plan, and returns its turn."""
    output = output_of(message) if output is None else output
    logprobs = [-float(i % 7) for i in range(len(output))]
    turn = session.make_turn(
        plan, output, logprobs, [version] * len(output), finish_reason, message
    )
    session.add(turn)
    return turn


def plan_and_reply(session, messages, message, **options):
    """Plans a request, adds its reply, and returns the plan."""
    plan = session.plan(messages, TOOLS)
    add_reply(session, plan, message, **options)
    return plan


def test_next_prompt_extends_sampled_tokens():
    session, first = Session(TOKENIZER), [user("2*3?")]
    message = reply("", "I use it.", ["2*3"])
    plan = session.plan(first, TOOLS)
    assert plan.ids == plan.context == prompt_of(first, TOOLS) and plan.kind == CLEAN
    # The output differs from the rendered message: its first bytes are invalid text.
    output = [200, 201, *output_of(message)]
    add_reply(session, plan, message, output)
    next_plan = session.plan([*first, message, tool("6")], TOOLS)
    new = prompt_of([*first, message, tool("6")], TOOLS)[
        len(prompt_of(first, TOOLS)) + len(output) - 2 :
    ]
    assert output[-1] == SPECIAL["<|observation|>"] and next_plan.num_dropped == 0
    assert next_plan.ids == (*plan.ids, *output, *new) and next_plan.context == new
    assert next_plan.kind == CLEAN and next_plan.parent == 0


def test_replaces_stop_token_of_other_role():
    session, first, message = Session(TOKENIZER), [user("2*3?")], reply("", "So.", ["2*3"])
    plan_and_reply(session, first, message)
    plan = session.plan([*first, message, user("Leave it.")], TOOLS)
    assert plan.num_dropped == 1 and plan.ids == prompt_of(
        [*first, message, user("Leave it.")], TOOLS
    )
    add_reply(session, plan, reply("Good."))
    [record] = session.records()
    # The record lacks only the sampled stop token.
    assert record.loss_mask.sum() == len(output_of(message)) - 1 + len(output_of(reply("Good.")))


@pytest.mark.parametrize(
    "change",
    [
        lambda message: {k: v for k, v in message.items() if k != "reasoning_content"},
        lambda message: (
            message
            | {
                "content": [{"type": "text", "text": message["content"]}],
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {
                            "name": c["name"],
                            "arguments": json.dumps(c["arguments"], indent=1),
                        },
                    }
                    for c in message["tool_calls"]
                ],
            }
        ),
    ],
)
def test_recognises_reply_in_other_format(change):
    session, first, message = Session(TOKENIZER), [user("2*3?")], reply("Wait.", "So.", ["2*3"])
    plan_and_reply(session, first, message)
    plan = session.plan([*first, change(message), tool("6")], TOOLS)
    assert plan.kind == CLEAN and plan.ids == prompt_of([*first, message, tool("6")], TOOLS)


@pytest.mark.parametrize("content", ["a</think>b", "a</think>b</think>c", "<think>a</think>"])
@pytest.mark.parametrize("reasoning", ["", "So."])
def test_recognises_content_with_think_marks_without_reasoning(content, reasoning):
    session, first, message = Session(TOKENIZER), [user("2*3?")], reply(content, reasoning, ["2*3"])
    # After the end of thinking the mark is text; a model samples a single token for it.
    output = output_of(reply("", "So.", ["2*3"]))
    plan = session.plan(first, TOOLS)
    add_reply(session, plan, message, output)
    for returned in (message, {k: v for k, v in message.items() if k != "reasoning_content"}):
        next_plan = session.plan([*first, returned, tool("6")], TOOLS)
        assert next_plan.kind == CLEAN and next_plan.ids[: len(plan.ids) + len(output)] == (
            *plan.ids,
            *output,
        )
    for change in ({"content": "b"}, {"content": "x</think>b"}, {"tool_calls": []}):
        returned = {k: v for k, v in message.items() if k != "reasoning_content"} | change
        next_message = tool("6") if returned["tool_calls"] else user("Go on.")
        assert session.plan([*first, returned, next_message], TOOLS).kind == REALIGN


@pytest.mark.parametrize(
    "altered",
    [
        reply("Six.", "So.", ["2*3"]),
        reply("Wait.", "Other.", ["2*3"]),
        reply("Wait.", "So.", ["2*4"]),
        reply("Wait.", "So."),
    ],
)
def test_replaces_altered_reply(altered):
    session, first = Session(TOKENIZER), [user("2*3?")]
    plan_and_reply(session, first, reply("Wait.", "So.", ["2*3"]))
    messages = [*first, altered, tool("6") if altered.get("tool_calls") else user("Go on.")]
    plan = session.plan(messages, TOOLS)
    assert plan.kind == REALIGN and plan.ids == prompt_of(messages, TOOLS)
    add_reply(session, plan, reply("6"))
    further = [*messages, reply("6"), user("And 7?")]
    plan = plan_and_reply(session, further, reply("7"))
    assert plan.kind == CLEAN and plan.ids == prompt_of(further, TOOLS)
    [record] = session.records()
    assert record.loss_mask.sum() == len(output_of(reply("6"))) + len(output_of(reply("7")))


def test_forks_at_altered_long_reply():
    session, first = Session(TOKENIZER, SessionConfig(max_realigned_tokens=20)), [user("2*3?")]
    long = reply("a" * 40)
    plan_and_reply(session, first, long)
    messages = [*first, reply("b"), user("Go on.")]
    plan = plan_and_reply(session, messages, reply("6"))
    assert plan.ids == prompt_of(messages, TOOLS) and session.turns[1].kind == FORK
    one, two = session.records()
    assert one.loss_mask.sum() == len(output_of(long))
    assert two.loss_mask.sum() == len(output_of(reply("6")))


def test_branches_train_each_reply_once():
    """A sub-agent, a second attempt at a turn, and a context that restarts from a summary."""
    session, first = Session(TOKENIZER), [user("Plan.")]
    message = reply("First this.")
    plan_and_reply(session, first, message)
    left, right, summary = ([*first, message, user(text)] for text in ("Left?", "Right?", ""))
    summary = [user("A summary.")]
    plan_and_reply(session, left, reply("L"))
    plan_and_reply(session, right, reply("RR"))
    plan_and_reply(session, summary, reply("SSS"))
    assert [turn.kind for turn in session.turns] == [CLEAN, CLEAN, FORK, FORK]
    records = session.records(group_id="g")
    assert [tuple(record.token_ids) for record in records] == [
        prompt_of([*messages, reply(text)], TOOLS)[:-2] + (SPECIAL["<|user|>"],)
        for messages, text in ((left, "L"), (right, "RR"), (summary, "SSS"))
    ]
    counts = [len(output_of(reply(text))) for text in ("First this.", "L", "RR", "SSS")]
    assert [record.loss_mask.sum() for record in records] == [
        counts[0] + counts[1],
        counts[2],
        counts[3],
    ]
    assert {record.group_id for record in records} == {"g"}


def test_other_tools_start_new_branch():
    session, first, message = Session(TOKENIZER), [user("2*3?")], reply("6")
    plan_and_reply(session, first, message)
    messages = [*first, message, user("Why?")]
    assert session.plan(messages, TOOLS).parent == 0
    plan = session.plan(messages)
    assert plan.parent == -1 and plan.ids == prompt_of(messages)


def test_thinking_mode_may_change_between_turns():
    session, first = Session(TOKENIZER), [user("2*3?")]
    plan = session.plan(first, enable_thinking=False)
    assert plan.ids == prompt_of(first, thinking=False)
    message = reply("6", "")
    add_reply(session, plan, message, output_of(message, thinking=False))
    messages = [*first, message, user("Why?")]
    plan = session.plan(messages, enable_thinking=True)
    assert plan.ids[-2:] == (SPECIAL["<|assistant|>"], SPECIAL["<think>"])
    assert plan.kind == CLEAN and plan.ids[: len(prompt_of(first, thinking=False))] == prompt_of(
        first, thinking=False
    )


def test_random_chats_train_each_token_once():
    """Every prompt is the tokens read and sampled before, then new ones. Each sampled token that is still in a prompt
    is trained on once, with its log-prob and version."""
    for seed in range(200):
        rng = random.Random(seed)
        session = Session(TOKENIZER, SessionConfig(max_realigned_tokens=rng.choice([1, 1000])))
        chats, sampled = [[user(f"Question {seed}")]], 0
        for version in range(rng.randint(2, 7)):
            messages = rng.choice(chats)
            message = reply(
                rng.choice(["", "x", "Ünï <tool_call> \n"]).strip(),
                rng.choice(["Hm.", "Think."]),
                [str(rng.random())] * rng.randint(0, 2),
            )
            plan = session.plan(messages, TOOLS)
            noise = [rng.randrange(256) for _ in range(rng.randint(0, 3))]
            turn = add_reply(session, plan, message, [*noise, *output_of(message)], version)
            sampled += len(turn.output)
            calls = len(message.get("tool_calls", ()))
            results = [tool("6")] * calls if rng.random() < 0.9 else []
            chats.append([*messages, message, *(results or [user("And?")])])
            ids = (*plan.ids, *turn.output)
            next_plan = session.plan(chats[-1], TOOLS)
            assert next_plan.ids[: len(ids) - 1] == ids[:-1]
        records = session.records()
        trained = sum(int(record.loss_mask.sum()) for record in records)
        dropped = sum(turn.num_dropped for turn in session.turns)
        assert sampled - dropped <= trained <= sampled
        for record in records:
            is_trained = record.loss_mask == 1
            assert (record.weight_version[is_trained] >= 0).all() and np.isnan(
                record.rollout_logp[~is_trained]
            ).all()


def test_restores_session_from_its_turns():
    session, first = Session(TOKENIZER), [user("2*3?")]
    plan_and_reply(session, first, reply("", "So.", ["2*3"]))
    messages = [*first, reply("Other.", "So.", ["2*3"]), tool("6")]
    plan_and_reply(session, messages, reply("6"))
    restored = Session(TOKENIZER)
    for turn in session.turns:
        fields = json.loads(json.dumps(dataclasses.asdict(turn)))
        restored.add(
            Turn(
                **{
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in fields.items()
                }
            )
        )
    further = [*messages, reply("6"), user("And?")]
    assert restored.plan(further, TOOLS) == session.plan(further, TOOLS)
    for record, restored_record in zip(session.records(), restored.records(), strict=True):
        np.testing.assert_array_equal(record.token_ids, restored_record.token_ids)
        np.testing.assert_array_equal(record.rollout_logp, restored_record.rollout_logp)


@pytest.mark.parametrize(
    "messages, status, error",
    [
        ([], 400, "at least one message"),
        ([{"role": "nobody", "content": "?"}], 400, "nobody"),
        ([user("2*3?"), reply("6")], 400, "add one after it"),
        ([user("2*3?"), reply("cut"), user("Why?")], 409, "raise max_tokens"),
        ([tool("6")], 400, "no assistant's call"),
    ],
)
def test_rejects_invalid_messages_without_changes(messages, status, error):
    session = Session(TOKENIZER)
    plan_and_reply(session, [user("2*3?")], reply("cut"), finish_reason="length")
    with pytest.raises(SessionError, match=error) as raised:
        session.plan(messages, TOOLS)
    assert raised.value.status == status and len(session.turns) == 1


def test_rejects_turn_without_parent_and_changes_nothing():
    session, other = Session(TOKENIZER), Session(TOKENIZER)
    first, message = [user("2*3?")], reply("6")
    plan_and_reply(session, first, message)
    plan = session.plan([*first, message, user("Why?")], TOOLS)
    with pytest.raises(SessionError, match="turn 0 follows turn 0, which does not exist") as raised:
        other.make_turn(plan, [1], [0.0], [0], "stop", reply("So."))
    assert raised.value.status == 500
    turn = session.make_turn(plan, [1], [0.0], [0], "stop", reply("So."))
    with pytest.raises(SessionError, match="turn 0 follows turn 0") as raised:
        other.add(turn)
    assert raised.value.status == 500 and other.turns == []
    # The rejection left no trace: the next turn is the first one.
    assert plan_and_reply(other, first, message).parent == -1
    other.add(turn)
    assert [t.parent for t in other.turns] == [-1, 0]


def test_limits_number_of_turns():
    session = Session(TOKENIZER, SessionConfig(max_turns=1))
    plan_and_reply(session, [user("2*3?")], reply("6"))
    with pytest.raises(SessionError, match="raise max_turns") as raised:
        session.plan([user("2*3?"), reply("6"), user("Why?")], TOOLS)
    assert raised.value.status == 429
    with pytest.raises(ValueError, match="max_turns is 0"):
        SessionConfig(max_turns=0)
    with pytest.raises(ValueError, match=r"\(2, 1, 1\) ids"):
        Turn(
            parent=-1,
            kind=CLEAN,
            tools="[]",
            messages=(),
            num_dropped=0,
            context=(1,),
            output=(1, 2),
            logprobs=(0.0,),
            versions=(0,),
            finish_reason="stop",
            reply={},
        )
