"""What an agent's requests send: against the paper's rules written out over the whole history, and what they promise."""

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
ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was it?"})
TASK = Task(id="t", kind="search", messages=ASKED, tools=(LOOK,))
COUNTER = TokenCounter(TOKENIZER)
OWN = COUNTER.prompt(TASK)


def made(number, results, thought="so"):
    """A round of as many calls as results."""
    calls = [
        {"id": f"{number}-{i}", "function": {"name": "look", "arguments": {"at": i}}}
        for i in range(len(results))
    ]
    reply = {
        "role": "assistant",
        "content": None,
        "reasoning_content": thought,
        "tool_calls": calls,
    }
    return [reply] + [
        {"role": "tool", "tool_call_id": f"{number}-{i}", "content": text}
        for i, text in enumerate(results)
    ]


def tokens(messages, task=TASK):
    """As a server lays them out."""
    return len(render_chat(messages, TOKENIZER, tools=task.tools or None).ids)


def sent_by_the_paper(config, rounds):
    """GLM-5 4.2.4 over all rounds so far: what is sent, and before which replies everything was discarded."""
    begin, restarts = 0, []
    for n in range(len(rounds) + 1):
        sent = list(ASKED)
        for i in range(begin, n):
            for message in rounds[i]:
                old = config.keep_rounds is not None and i < n - config.keep_rounds
                sent.append(
                    {**message, "content": OMITTED}
                    if old and message["role"] == "tool"
                    else message
                )
        if config.max_prompt_tokens is not None and tokens(sent) > config.max_prompt_tokens:
            begin, sent = n, list(ASKED)
            restarts.append(n)
    return sent, restarts


configs = st.builds(
    ContextConfig,
    st.none() | st.integers(1, 4),
    st.none() | st.integers(OWN, OWN + 400),
)
results = st.lists(
    st.sampled_from(["7", "word " * 20, "é" * 9, "<|user|>", "line\n" * 60]), min_size=1, max_size=3
)
histories = st.lists(st.tuples(results, st.sampled_from(["", "I look.", "hm " * 30])), max_size=9)


@settings(max_examples=60)
@given(configs, histories)
def test_sends_what_the_paper_says_and_keeps_promises(config, history):
    """Against the rules written out, and of each request without them."""
    context, before, num = Context(config, TASK, COUNTER), list(ASKED), 0
    rounds, restarts = [], []
    for number, (own, thought) in enumerate(history):
        newest = made(number, own, thought)
        rounds.append(newest)
        context.add(newest)
        sent = context.messages()
        assert (sent, context.restarts) == sent_by_the_paper(config, rounds)
        assert context.messages() == sent, "asking changes nothing"
        assert sent[: len(ASKED)] == list(ASKED)
        read_messages(sent)  # no result without its call
        for i, message in enumerate(sent):
            calls = [call["id"] for call in message.get("tool_calls", ())]
            assert [m["tool_call_id"] for m in sent[i + 1 : i + 1 + len(calls)]] == calls
        assert context.num_tokens == tokens(sent) <= (config.max_prompt_tokens or 10**9)
        if context.restarts != restarts:
            restarts, num = list(context.restarts), 0
            assert sent == list(ASKED) and context.restarts[-1] == number + 1
        else:
            num += 1
            assert sent[len(sent) - len(newest) :] == newest, "the last round is never omitted"
            # Append-only: whatever does not become OMITTED is as it was.
            same = [a == b or b["content"] == OMITTED for a, b in zip(before, sent)]
            assert all(same) and len(sent) == len(before) + len(newest)
            if config.keep_rounds is None or num <= config.keep_rounds:
                assert sent[: len(before)] == before
        before = sent
    assert context.total == tokens([*ASKED, *(m for own in rounds for m in own)])


def test_of_the_older_rounds_the_results_alone_are_omitted():
    context = Context(ContextConfig(keep_rounds=2, max_prompt_tokens=None), TASK, COUNTER)
    rounds = [made(n, ["a" * 50, "b" * 50], f"thought {n}") for n in range(4)]
    for own in rounds:
        context.add(own)
    sent = context.messages()[len(ASKED) :]
    assert [m["content"] for m in sent if m["role"] == "tool"] == [OMITTED] * 4 + [
        "a" * 50,
        "b" * 50,
    ] * 2
    assert [m for m in sent if m["role"] != "tool"] == [own[0] for own in rounds]
    assert sent[6:] == rounds[2] + rounds[3]


def test_hierarchical_discards_only_what_keep_recent_cannot_shorten():
    rounds = [made(n, ["word " * 200]) for n in range(6)]
    most = OWN + sum(COUNTER.added(TASK, own) for own in rounds[:3])
    both, alone = ContextConfig(2, most), ContextConfig(None, most)
    restarts = {}
    for config in (both, alone):
        context = Context(config, TASK, COUNTER)
        for own in rounds:
            context.add(own)
            context.messages()
        restarts[config] = context.restarts
    assert restarts == {both: [], alone: [4]}


def test_the_numbers_are_the_paper_s():
    assert OMITTED == "Tool result is omitted to save tokens."
    values = {name: dataclasses.astuple(config) for name, config in CONTEXTS.items()}
    assert values == {
        "everything": (None, None),
        "keep_recent": (5, None),
        "discard_all": (None, 100_000),
        "hierarchical": (5, 32_768),
    }


def test_a_task_without_room_and_numbers_that_are_none_are_refused():
    Context(ContextConfig(None, OWN), TASK, COUNTER)
    with pytest.raises(ValueError, match=f"task 't' has {OWN} tokens"):
        Context(ContextConfig(None, OWN - 1), TASK, COUNTER)
    for field in ("keep_rounds", "max_prompt_tokens"):
        with pytest.raises(ValueError, match=f"{field} is 0"):
            ContextConfig(**{field: 0})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("thinking", [True, False])
def test_rounds_add_up_in_every_layout(variant, thinking):
    task = dataclasses.replace(TASK, thinking=thinking)
    counter = TokenCounter(TOKENIZER, variant, thinking=not thinking)
    rounds = [made(0, ["one", "two"]), made(1, [""], ""), made(2, ["three"], "hm")]
    sent = [*ASKED, *(message for own in rounds for message in own)]
    whole = render_chat(
        sent, TOKENIZER, tools=task.tools, enable_thinking=thinking, variant=variant
    )
    parts = [counter.prompt(task), *(counter.added(task, own) for own in rounds)]
    assert sum(parts) == len(whole.ids)
