"""Tests synthetic conversations: answers follow from the steps, modes reason as they must, and all lines are valid."""

import json
import re

import pytest

from glm5_jax.data.chat_tasks import KINDS, REASONING, ChatTaskConfig, make_lines
from glm5_jax.data.conversation import parse_line

MODES = ("interleaved", "preserved", "turn_level")


def conversations(mode="interleaved", **options):
    return [json.loads(line) for line in make_lines(ChatTaskConfig(**options), mode)]


def replies(chat):
    return [m for m in chat["messages"] if m["role"] == "assistant"]


def solve_turn(question: str, known: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Returns (value of the question, all values) of a chain's turn, by reading its definitions."""
    values = dict(known)
    for name, left, sign, right in re.findall(r"(\w)=(\w)([+*])(\d)", question):
        left = int(left) if left.isdigit() else values[left]
        values[name] = (left * int(right) if sign == "*" else left + int(right)) % 10
    return values[question[-2]], values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_conversations_are_valid_and_depend_only_on_index(kind, mode):
    lines = list(make_lines(ChatTaskConfig(kind=kind, size=30, turns=2), mode))
    assert lines == list(make_lines(ChatTaskConfig(kind=kind, size=40, turns=2), mode))[:30]
    assert len({json.dumps(json.loads(line)["messages"]) for line in lines}) == 30
    for line in lines:
        assert not parse_line(line).mistakes


def test_counts_shipped_conversations():
    counts = {
        kind: len(conversations(kind=kind, size=10**6)) for kind in ("plays", "mbpp", "gsm8k")
    }
    assert counts == {"plays": 6936, "mbpp": 374, "gsm8k": 1500}


def test_splits_rationale_into_reasoning_and_reply():
    [reply] = replies(conversations(kind="gsm8k", size=1)[0])
    assert reply["content"] == "72"
    assert reply["reasoning_content"].endswith("48+24 = 72 clips altogether in April and May.")


@pytest.mark.parametrize("mode", ("interleaved", "preserved"))
def test_reasons_through_chain_step_by_step(mode):
    for chat in conversations(mode, kind="chain", size=50, steps=4, turns=3):
        known, shown = {}, []
        for question, reply in zip(chat["messages"][::2], chat["messages"][1::2]):
            answer, values = solve_turn(question["content"], known)
            known = known or values  # later turns start from the values of the first turn
            assert reply["content"] == str(answer)
            steps = re.findall(r"(\w)=(\d)([+*])(\d)=(\d)", reply["reasoning_content"])
            for name, left, sign, right, result in steps:
                left, right = int(left), int(right)
                assert int(result) == (left * right if sign == "*" else left + right) % 10
                assert int(result) == values[name]
            assert steps[-1][4] == str(answer)
            shown.append([name for name, *_ in steps])
        start = [
            question["content"][2] for question in chat["messages"][2::2]
        ]  # "x=b+5" continues from b
        repeated = ["abcd"[: "abcd".index(name) + 1] for name in start]
        expected = [[*name, "x", "y"] if mode == "interleaved" else ["x", "y"] for name in repeated]
        assert shown == [list("abcd"), *expected]


def test_turn_level_repeats_questions_with_and_without_reasoning():
    for kind in REASONING:
        chats = conversations("turn_level", kind=kind, size=40, turns=3 if kind == "chain" else 1)
        first = [any("reasoning_content" in m for m in turns(c)[0]) for c in chats[::2]]
        assert 5 < sum(first) < 15, "which of the two thinks is random"
        for one, other in zip(chats[::2], chats[1::2]):
            thinks = [
                [any("reasoning_content" in m for m in turn) for turn in turns(chat)]
                for chat in (one, other)
            ]
            assert [a != b for a, b in zip(*thinks)] == [True] * len(thinks[0])
            for message in (*one["messages"], *other["messages"]):
                message.pop("reasoning_content", None)
            assert one == other


def turns(chat) -> list[list[dict]]:
    groups = []
    for message in chat["messages"]:
        if message["role"] == "user":
            groups.append([])
        groups[-1].append(message)
    return groups


def test_calls_tools_and_reports_results():
    names = set()
    for chat in conversations(kind="tools", size=60):
        call, reply = replies(chat)
        [call] = call["tool_calls"]
        result = chat["messages"][2]["content"]
        names.add(call["name"])
        if call["name"] == "calculate":
            left, right = map(int, call["arguments"]["expression"].split("*"))
            assert result == reply["content"] == str(left * right)
        else:
            assert json.loads(result)["order_id"] == call["arguments"]["order_id"]
            assert reply["content"] == f"It is {json.loads(result)['status']}."
    assert names == {tool["function"]["name"] for tool in chat["tools"]}


def test_corrects_share_of_mistaken_first_calls():
    chats = list(make_lines(ChatTaskConfig(kind="tools", size=200, mistakes=0.5), "interleaved"))
    conversations = [parse_line(line) for line in chats]
    assert 70 < sum(bool(c.mistakes) for c in conversations) < 130
    for conversation in conversations:
        if conversation.mistakes:
            assert list(conversation.mistakes) == [1]
            assert conversation.messages[2]["content"].startswith("Error: ")
    reasons = {reason.split("'")[-1] for c in conversations for reason in c.mistakes.values()}
    assert len(reasons) >= 3, (
        "an unknown tool, a wrong argument, and arguments that are not an object"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "poem"), ("size", 0), ("steps", 1), ("steps", 11), ("turns", 0), ("mistakes", 1.5)],
)
def test_rejects_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        ChatTaskConfig(**{field: value})
