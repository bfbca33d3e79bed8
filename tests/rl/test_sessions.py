"""A session's requests read exactly what was read and sampled before, and nothing sampled is trained on twice."""

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
    said = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    calls = [{"name": "calculate", "arguments": {"expression": own}} for own in calls]
    return said | ({"tool_calls": calls} if calls else {})


def written(message, thinking=True):
    """The ids with which a model says a message, its stop included."""
    asked = [user("?")]
    options = dict(clear_thinking=False, enable_thinking=thinking)
    prompt = render_chat(asked, TOKENIZER, **options).ids
    whole = render_chat([*asked, message], TOKENIZER, close=True, **options).ids
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def whole(messages, tools=None, thinking=True):
    options = dict(tools=tools, clear_thinking=False, enable_thinking=thinking)
    return tuple(render_chat(messages, TOKENIZER, **options).ids)


def answer(session, plan, message, output=None, version=0, finish_reason="stop"):
    output = written(message) if output is None else output
    logprobs = [-float(i % 7) for i in range(len(output))]
    turn = session.make_turn(
        plan, output, logprobs, [version] * len(output), finish_reason, message
    )
    session.add(turn)
    return turn


def ask(session, messages, message, **more):
    plan = session.plan(messages, TOOLS)
    answer(session, plan, message, **more)
    return plan


def test_what_follows_is_read_behind_what_was_sampled():
    session, first = Session(TOKENIZER), [user("2*3?")]
    said = reply("", "I use it.", ["2*3"])
    plan = session.plan(first, TOOLS)
    assert plan.ids == plan.context == whole(first, TOOLS) and plan.kind == CLEAN
    # Not what the message is written as: bytes of no text, and a blank that no message keeps.
    output = [200, 201, *written(said)]
    answer(session, plan, said, output)
    again = session.plan([*first, said, tool("6")], TOOLS)
    new = whole([*first, said, tool("6")], TOOLS)[len(whole(first, TOOLS)) + len(output) - 2 :]
    assert output[-1] == SPECIAL["<|observation|>"] and again.num_dropped == 0
    assert again.ids == (*plan.ids, *output, *new) and again.context == new
    assert again.kind == CLEAN and again.parent == 0


def test_a_stop_that_expected_another_message_gives_way_to_what_opens_it():
    session, first, said = Session(TOKENIZER), [user("2*3?")], reply("", "So.", ["2*3"])
    ask(session, first, said)
    plan = session.plan([*first, said, user("Leave it.")], TOOLS)
    assert plan.num_dropped == 1 and plan.ids == whole([*first, said, user("Leave it.")], TOOLS)
    answer(session, plan, reply("Good."))
    [record] = session.records()
    # The stop that was sampled is not in the sample; all else is.
    assert record.loss_mask.sum() == len(written(said)) - 1 + len(written(reply("Good.")))


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
def test_a_reply_may_come_back_in_another_spelling(change):
    session, first, said = Session(TOKENIZER), [user("2*3?")], reply("Wait.", "So.", ["2*3"])
    ask(session, first, said)
    plan = session.plan([*first, change(said), tool("6")], TOOLS)
    assert plan.kind == CLEAN and plan.ids == whole([*first, said, tool("6")], TOOLS)


@pytest.mark.parametrize("content", ["a</think>b", "a</think>b</think>c", "<think>a</think>"])
@pytest.mark.parametrize("reasoning", ["", "So."])
def test_content_in_which_reasoning_seems_to_stand_may_come_back_without_the_other(
    content, reasoning
):
    session, first, said = Session(TOKENIZER), [user("2*3?")], reply(content, reasoning, ["2*3"])
    # The mark is text where the thinking has ended; a model writes the one token for it.
    output = written(reply("", "So.", ["2*3"]))
    plan = session.plan(first, TOOLS)
    answer(session, plan, said, output)
    for told in (said, {k: v for k, v in said.items() if k != "reasoning_content"}):
        again = session.plan([*first, told, tool("6")], TOOLS)
        assert again.kind == CLEAN and again.ids[: len(plan.ids) + len(output)] == (
            *plan.ids,
            *output,
        )
    for other in ({"content": "b"}, {"content": "x</think>b"}, {"tool_calls": []}):
        told = {k: v for k, v in said.items() if k != "reasoning_content"} | other
        more = tool("6") if told["tool_calls"] else user("Go on.")
        assert session.plan([*first, told, more], TOOLS).kind == REALIGN


@pytest.mark.parametrize(
    "said",
    [
        reply("Six.", "So.", ["2*3"]),
        reply("Wait.", "Other.", ["2*3"]),
        reply("Wait.", "So.", ["2*4"]),
        reply("Wait.", "So."),
    ],
)
def test_a_reply_that_came_back_altered_is_overwritten(said):
    session, first = Session(TOKENIZER), [user("2*3?")]
    ask(session, first, reply("Wait.", "So.", ["2*3"]))
    messages = [*first, said, tool("6") if said.get("tool_calls") else user("Go on.")]
    plan = session.plan(messages, TOOLS)
    assert plan.kind == REALIGN and plan.ids == whole(messages, TOOLS)
    answer(session, plan, reply("6"))
    further = [*messages, reply("6"), user("And 7?")]
    plan = ask(session, further, reply("7"))
    assert plan.kind == CLEAN and plan.ids == whole(further, TOOLS)
    [record] = session.records()
    assert record.loss_mask.sum() == len(written(reply("6"))) + len(written(reply("7")))


def test_a_long_reply_that_came_back_altered_is_kept_beside_what_goes_on():
    session, first = Session(TOKENIZER, SessionConfig(max_realigned_tokens=20)), [user("2*3?")]
    long = reply("a" * 40)
    ask(session, first, long)
    messages = [*first, reply("b"), user("Go on.")]
    plan = ask(session, messages, reply("6"))
    assert plan.ids == whole(messages, TOOLS) and session.turns[1].kind == FORK
    one, two = session.records()
    assert one.loss_mask.sum() == len(written(long))
    assert two.loss_mask.sum() == len(written(reply("6")))


def test_branches_share_their_beginning_and_each_reply_is_trained_once():
    """A sub-agent, a second attempt at a turn, and a context that begins again from a summary."""
    session, first = Session(TOKENIZER), [user("Plan.")]
    said = reply("First this.")
    ask(session, first, said)
    left, right, summary = ([*first, said, user(text)] for text in ("Left?", "Right?", ""))
    summary = [user("A summary.")]
    ask(session, left, reply("L"))
    ask(session, right, reply("RR"))
    ask(session, summary, reply("SSS"))
    assert [turn.kind for turn in session.turns] == [CLEAN, CLEAN, FORK, FORK]
    records = session.records(group_id="g")
    assert [tuple(r.token_ids) for r in records] == [
        whole([*messages, reply(text)], TOOLS)[:-2] + (SPECIAL["<|user|>"],)
        for messages, text in ((left, "L"), (right, "RR"), (summary, "SSS"))
    ]
    counts = [len(written(reply(text))) for text in ("First this.", "L", "RR", "SSS")]
    assert [r.loss_mask.sum() for r in records] == [counts[0] + counts[1], counts[2], counts[3]]
    assert {r.group_id for r in records} == {"g"}


def test_other_tools_are_another_beginning():
    session, first, said = Session(TOKENIZER), [user("2*3?")], reply("6")
    ask(session, first, said)
    messages = [*first, said, user("Why?")]
    assert session.plan(messages, TOOLS).parent == 0
    plan = session.plan(messages)
    assert plan.parent == -1 and plan.ids == whole(messages)


def test_thinking_may_change_from_turn_to_turn():
    session, first = Session(TOKENIZER), [user("2*3?")]
    plan = session.plan(first, enable_thinking=False)
    assert plan.ids == whole(first, thinking=False)
    said = reply("6", "")
    answer(session, plan, said, written(said, thinking=False))
    messages = [*first, said, user("Why?")]
    plan = session.plan(messages, enable_thinking=True)
    assert plan.ids[-2:] == (SPECIAL["<|assistant|>"], SPECIAL["<think>"])
    assert plan.kind == CLEAN and plan.ids[: len(whole(first, thinking=False))] == whole(
        first, thinking=False
    )


def test_two_hundred_random_chats():
    """Every prompt is what was read and sampled, then what is new; what was sampled and is still read is trained once,
    with its own log-probs and versions."""
    for seed in range(200):
        draw = random.Random(seed)
        session = Session(TOKENIZER, SessionConfig(max_realigned_tokens=draw.choice([1, 1000])))
        ends, sampled = [[user(f"Question {seed}")]], 0
        for version in range(draw.randint(2, 7)):
            messages = draw.choice(ends)
            said = reply(
                draw.choice(["", "x", "Ünï <tool_call> \n"]).strip(),
                draw.choice(["Hm.", "Think."]),
                [str(draw.random())] * draw.randint(0, 2),
            )
            plan = session.plan(messages, TOOLS)
            junk = [draw.randrange(256) for _ in range(draw.randint(0, 3))]
            turn = answer(session, plan, said, [*junk, *written(said)], version)
            sampled += len(turn.output)
            calls = len(said.get("tool_calls", ()))
            more = [tool("6")] * calls if draw.random() < 0.9 else []
            ends.append([*messages, said, *(more or [user("And?")])])
            ids = (*plan.ids, *turn.output)
            following = session.plan(ends[-1], TOOLS)
            assert following.ids[: len(ids) - 1] == ids[:-1]
        records = session.records()
        trained = sum(int(r.loss_mask.sum()) for r in records)
        dropped = sum(turn.num_dropped for turn in session.turns)
        assert sampled - dropped <= trained <= sampled
        for record in records:
            on = record.loss_mask == 1
            assert (record.weight_version[on] >= 0).all() and np.isnan(
                record.rollout_logp[~on]
            ).all()


def test_a_session_is_the_same_from_what_was_written_of_it():
    session, first = Session(TOKENIZER), [user("2*3?")]
    ask(session, first, reply("", "So.", ["2*3"]))
    messages = [*first, reply("Other.", "So.", ["2*3"]), tool("6")]
    ask(session, messages, reply("6"))
    again = Session(TOKENIZER)
    for turn in session.turns:
        told = json.loads(json.dumps(dataclasses.asdict(turn)))
        again.add(Turn(**{k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}))
    further = [*messages, reply("6"), user("And?")]
    assert again.plan(further, TOOLS) == session.plan(further, TOOLS)
    for one, other in zip(session.records(), again.records(), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.rollout_logp, other.rollout_logp)


@pytest.mark.parametrize(
    "messages, status, words",
    [
        ([], 400, "at least one message"),
        ([{"role": "nobody", "content": "?"}], 400, "nobody"),
        ([user("2*3?"), reply("6")], 400, "add one after it"),
        ([user("2*3?"), reply("cut"), user("Why?")], 409, "raise max_tokens"),
        ([tool("6")], 400, "no assistant's call"),
    ],
)
def test_what_a_session_cannot_take_is_said_and_changes_nothing(messages, status, words):
    session = Session(TOKENIZER)
    ask(session, [user("2*3?")], reply("cut"), finish_reason="length")
    with pytest.raises(SessionError, match=words) as refused:
        session.plan(messages, TOOLS)
    assert refused.value.status == status and len(session.turns) == 1


def test_what_goes_on_from_nothing_is_refused_and_changes_nothing():
    session, other = Session(TOKENIZER), Session(TOKENIZER)
    first, said = [user("2*3?")], reply("6")
    ask(session, first, said)
    plan = session.plan([*first, said, user("Why?")], TOOLS)
    with pytest.raises(
        SessionError, match="turn 0 follows turn 0, which does not exist"
    ) as refused:
        other.make_turn(plan, [1], [0.0], [0], "stop", reply("So."))
    assert refused.value.status == 500
    turn = session.make_turn(plan, [1], [0.0], [0], "stop", reply("So."))
    with pytest.raises(SessionError, match="turn 0 follows turn 0") as refused:
        other.add(turn)
    assert refused.value.status == 500 and other.turns == []
    # Nothing has been refused by halves: the first turn still is the first.
    assert ask(other, first, said).parent == -1
    other.add(turn)
    assert [one.parent for one in other.turns] == [-1, 0]


def test_a_session_has_so_many_replies():
    session = Session(TOKENIZER, SessionConfig(max_turns=1))
    ask(session, [user("2*3?")], reply("6"))
    with pytest.raises(SessionError, match="raise max_turns") as refused:
        session.plan([user("2*3?"), reply("6"), user("Why?")], TOOLS)
    assert refused.value.status == 429
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
