"""Tests the messages that agents send against the paper's rules applied to the history, and their invariants."""

import dataclasses

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.agents.context import CONTEXTS, OMITTED, Context, ContextConfig, TokenCounter
from glm5_jax.rl.types import Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.messages import read_messages
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
QUESTION = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was it?"})
TASK = Task(id="t", kind="search", messages=QUESTION, tools=(LOOK,))
COUNTER = TokenCounter(TOKENIZER)
PROMPT_TOKENS = COUNTER.prompt(TASK)


def make_round(number, results, reasoning="so"):
    """Returns a round with one call per result."""
    calls = [
        {"id": f"{number}-{i}", "function": {"name": "look", "arguments": {"at": i}}}
        for i in range(len(results))
    ]
    reply = {
        "role": "assistant",
        "content": None,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }
    return [reply] + [
        {"role": "tool", "tool_call_id": f"{number}-{i}", "content": text}
        for i, text in enumerate(results)
    ]


def tokens(messages, task=TASK):
    """Returns the number of tokens as a server renders the messages."""
    return len(render_chat(messages, TOKENIZER, tools=task.tools or None).ids)


def expected_messages(config, rounds):
    """Applies GLM-5 4.2.4 to all rounds and returns the messages, and the replies before which everything was
    discarded.
    """
    begin, restarts = 0, []
    for n in range(len(rounds) + 1):
        sent = list(QUESTION)
        for i in range(begin, n):
            for message in rounds[i]:
                old = config.keep_rounds is not None and i < n - config.keep_rounds
                sent.append(
                    {**message, "content": OMITTED}
                    if old and message["role"] == "tool"
                    else message
                )
        if config.max_prompt_tokens is not None and tokens(sent) > config.max_prompt_tokens:
            begin, sent = n, list(QUESTION)
            restarts.append(n)
    return sent, restarts


configs = st.builds(
    ContextConfig,
    keep_rounds=st.none() | st.integers(1, 4),
    max_prompt_tokens=st.none() | st.integers(PROMPT_TOKENS, PROMPT_TOKENS + 400),
)
results = st.lists(
    st.sampled_from(["7", "word " * 20, "é" * 9, "<|user|>", "line\n" * 60]), min_size=1, max_size=3
)
histories = st.lists(st.tuples(results, st.sampled_from(["", "I look.", "hm " * 30])), max_size=9)


@settings(max_examples=30)
@given(configs, histories)
def test_sends_messages_by_rules_of_paper(config, history):
    """Compares with the rules applied to the history, and checks invariants of each request."""
    context, before, num = Context(config, TASK, COUNTER), list(QUESTION), 0
    rounds, restarts = [], []
    for number, (round_results, reasoning) in enumerate(history):
        newest = make_round(number, round_results, reasoning)
        rounds.append(newest)
        context.add(newest)
        sent = context.messages()
        assert (sent, context.restarts) == expected_messages(config, rounds)
        assert context.messages() == sent, "reading the messages changes nothing"
        assert sent[: len(QUESTION)] == list(QUESTION)
        read_messages(sent)  # raises if a result has no call
        for i, message in enumerate(sent):
            calls = [call["id"] for call in message.get("tool_calls", ())]
            assert [m["tool_call_id"] for m in sent[i + 1 : i + 1 + len(calls)]] == calls
        assert context.num_tokens == tokens(sent) <= (config.max_prompt_tokens or 10**9)
        if context.restarts != restarts:
            restarts, num = list(context.restarts), 0
            assert sent == list(QUESTION) and context.restarts[-1] == number + 1
        else:
            num += 1
            assert sent[len(sent) - len(newest) :] == newest, "the last round is never omitted"
            # Append-only: messages that do not become OMITTED stay the same.
            same = [a == b or b["content"] == OMITTED for a, b in zip(before, sent)]
            assert all(same) and len(sent) == len(before) + len(newest)
            if config.keep_rounds is None or num <= config.keep_rounds:
                assert sent[: len(before)] == before
        before = sent
    assert context.total == tokens(
        [*QUESTION, *(m for messages_of_round in rounds for m in messages_of_round)]
    )


def test_omits_only_results_of_older_rounds():
    context = Context(ContextConfig(keep_rounds=2, max_prompt_tokens=None), TASK, COUNTER)
    rounds = [make_round(n, ["a" * 50, "b" * 50], f"thought {n}") for n in range(4)]
    for messages_of_round in rounds:
        context.add(messages_of_round)
    sent = context.messages()[len(QUESTION) :]
    assert [m["content"] for m in sent if m["role"] == "tool"] == [OMITTED] * 4 + [
        "a" * 50,
        "b" * 50,
    ] * 2
    assert [m for m in sent if m["role"] != "tool"] == [
        messages_of_round[0] for messages_of_round in rounds
    ]
    assert sent[6:] == rounds[2] + rounds[3]


def test_hierarchical_discards_only_when_needed():
    rounds = [make_round(n, ["word " * 200]) for n in range(6)]
    max_prompt_tokens = PROMPT_TOKENS + sum(
        COUNTER.added(TASK, messages_of_round) for messages_of_round in rounds[:3]
    )
    hierarchical, discard_all = (
        ContextConfig(keep_rounds=2, max_prompt_tokens=max_prompt_tokens),
        ContextConfig(keep_rounds=None, max_prompt_tokens=max_prompt_tokens),
    )
    restarts = {}
    for config in (hierarchical, discard_all):
        context = Context(config, TASK, COUNTER)
        for messages_of_round in rounds:
            context.add(messages_of_round)
            context.messages()
        restarts[config] = context.restarts
    assert restarts == {hierarchical: [], discard_all: [4]}


def test_uses_numbers_of_paper():
    assert OMITTED == "Tool result is omitted to save tokens."
    values = {name: dataclasses.astuple(config) for name, config in CONTEXTS.items()}
    assert values == {
        "everything": (None, None),
        "keep_recent": (5, None),
        "discard_all": (None, 100_000),
        "hierarchical": (5, 32_768),
    }


def test_rejects_task_without_room_and_invalid_numbers():
    Context(ContextConfig(keep_rounds=None, max_prompt_tokens=PROMPT_TOKENS), TASK, COUNTER)
    with pytest.raises(ValueError, match=f"task 't' has {PROMPT_TOKENS} tokens"):
        Context(ContextConfig(keep_rounds=None, max_prompt_tokens=PROMPT_TOKENS - 1), TASK, COUNTER)
    for field in ("keep_rounds", "max_prompt_tokens"):
        with pytest.raises(ValueError, match=f"{field} is 0"):
            ContextConfig(**{field: 0})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("thinking", [True, False])
def test_counts_rounds_additively_in_every_layout(variant, thinking):
    task = dataclasses.replace(TASK, thinking=thinking)
    counter = TokenCounter(TOKENIZER, variant, thinking=not thinking)
    rounds = [
        make_round(0, ["one", "two"]),
        make_round(1, [""], ""),
        make_round(2, ["three"], "hm"),
    ]
    sent = [*QUESTION, *(message for messages_of_round in rounds for message in messages_of_round)]
    rendered = render_chat(
        sent, TOKENIZER, tools=task.tools, enable_thinking=thinking, variant=variant
    )
    parts = [
        counter.prompt(task),
        *(counter.added(task, messages_of_round) for messages_of_round in rounds),
    ]
    assert sum(parts) == len(rendered.ids)
