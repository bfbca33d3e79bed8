"""Tests thinking modes: the reasoning that each keeps from turn to turn, and the samples of a conversation."""

import pytest

from glm5_jax.text.chat import ChatError, render_chat
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.thinking import MODES, request_options, split_samples
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.default()


def user(text):
    return {"role": "user", "content": text}


def reply(text, reasoning=None, call=None):
    calls = [{"name": call, "arguments": {}}] if call else None
    return {
        "role": "assistant",
        "content": text,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }


RESULT = {"role": "tool", "content": "7"}
CHAT = [
    user("One?"),
    reply("", "r1", "look"),
    RESULT,
    reply("a1", "r2"),
    user("Two?"),
    reply("a2"),
    user("Three?"),
    reply("a3", "r3"),
]


def trained_text(rendered) -> str:
    return TOKENIZER.decode([i for i, m in zip(rendered.ids, rendered.loss_mask) if m])


def test_interleaved_mode_makes_one_sample_per_turn():
    first, second, third = (s.render(TOKENIZER) for s in split_samples(CHAT, "interleaved"))
    assert (
        trained_text(first)
        == "r1</think><tool_call>look</tool_call><|observation|>r2</think>a1<|user|>"
    )
    assert trained_text(second) == "a2<|user|>"
    assert trained_text(third) == "r3</think>a3<|user|>"
    assert "r1" not in third.text and "r2" not in third.text
    # The three samples together train each token that the model wrote exactly once.
    preserved = trained_text(split_samples(CHAT, "preserved")[0].render(TOKENIZER))
    assert "".join(map(trained_text, (first, second, third))) == preserved


def test_preserved_mode_makes_one_sample_with_all_reasoning():
    [sample] = split_samples([*CHAT, user("Four?")], "preserved")
    rendered = sample.render(TOKENIZER)
    assert rendered.text.endswith("<think>r3</think>a3<|user|>")
    assert all(f"<think>{r}</think>" in rendered.text for r in ("r1", "r2", "r3"))


def test_turn_level_mode_follows_reasoning_of_turns():
    thinking = [s.enable_thinking for s in split_samples(CHAT, "turn_level")]
    assert thinking == [True, False, True]
    quiet = split_samples(CHAT, "turn_level")[1].render(TOKENIZER, variant="glm5.2")
    assert (
        quiet.text.endswith("<|assistant|><think></think>a2<|user|>")
        and trained_text(quiet) == "a2<|user|>"
    )


def test_sample_that_ends_with_call_stops_for_result():
    [sample] = split_samples(CHAT[:2], "interleaved")
    assert trained_text(sample.render(TOKENIZER)).endswith("</tool_call><|observation|>")


@pytest.mark.parametrize(
    ("mode", "variant"),
    [(m, v) for m in MODES for v in VARIANTS if m != "preserved" or VARIANTS[v].keeps_reasoning],
)
def test_sample_begins_with_prompt_of_last_reply(mode, variant):
    """Checks also that every token after the prompt has a loss."""
    silent = [user("One?"), reply("a1"), user("Two?"), reply("", None, "look"), RESULT, reply("a2")]
    empty = [user("One?"), reply("a1", "")]
    inline = [user("One?"), reply("<think>r1</think>a1")]
    for chat in (CHAT, silent, empty, inline, [user("One?"), reply("a1", " \n")]):
        for sample in split_samples(chat, mode):
            options = {
                "enable_thinking": sample.enable_thinking,
                "clear_thinking": sample.clear_thinking,
                "variant": variant,
            }
            prompt = render_chat(sample.messages[:-1], TOKENIZER, **options)
            rendered = sample.render(TOKENIZER, variant=variant)
            assert rendered.ids[: len(prompt.ids)] == prompt.ids
            assert all(rendered.loss_mask[len(prompt.ids) :])


@pytest.mark.parametrize("mode", MODES)
def test_disables_thinking_without_reasoning(mode):
    """Otherwise a model would learn to close its thinking at once when thinking is requested."""
    [sample] = split_samples([user("One?"), reply("a1", "")], mode)
    assert not sample.enable_thinking
    for variant in ("glm5", "glm5.1", "glm5.2"):
        assert trained_text(sample.render(TOKENIZER, variant=variant)) == "a1<|user|>"
    thinking = [s.enable_thinking for s in split_samples(CHAT, mode)]
    assert thinking == ([True] if mode == "preserved" else [True, False, True])


def test_only_preserved_thinking_keeps_earlier_tokens():
    """In preserved mode each prompt continues all text before it."""

    def shared(mode):
        options, prefixes = request_options(mode), []
        for end in (4, 6):
            so_far = render_chat(CHAT[:end], TOKENIZER, add_generation_prompt=False, **options).ids
            prompt = render_chat(CHAT[: end + 1], TOKENIZER, **options).ids
            equal = next((i for i, (a, b) in enumerate(zip(so_far, prompt)) if a != b), len(so_far))
            prefixes.append((equal, len(so_far)))
        return prefixes

    (one, length), (two, longer_length) = shared("preserved")
    assert (one, two) == (length, longer_length) and two > one
    (one, length), _ = shared("interleaved")
    assert one < length


LONG_CHAT = [
    user("One?"),
    reply("a1"),
    user("Two?"),
    reply(" a2 ", " \n"),
    user("Three?"),
    reply("", " r3 ", "look"),
    RESULT,
    reply("a3", ""),
    user("Four?"),
    reply("a4", "r4"),
]


@pytest.mark.parametrize(
    ("variant", "rewritten", "closed_at_once"),
    [("glm5", [], [1, 7]), ("glm5.1", [2, 8], []), ("glm5.2", [], [])],
)
def test_preserved_tokens_change_at_listed_messages(variant, rewritten, closed_at_once):
    """`rewritten`: messages that change the text before them. `closed_at_once`: replies whose prompt does not begin
    them.
    """

    def ids(end, prompt=False):
        options = {"clear_thinking": False, "add_generation_prompt": prompt, "variant": variant}
        return render_chat(LONG_CHAT[:end], TOKENIZER, **options).ids

    def begins(a, b):
        return b[: len(a)] == a

    later = range(1, len(LONG_CHAT))
    assert [i for i in later if not begins(ids(i), ids(i + 1))] == rewritten
    replies = [i for i in later if LONG_CHAT[i]["role"] == "assistant"]
    assert [i for i in replies if not begins(ids(i, True), ids(i + 1))] == closed_at_once
    # Only glm5.2 keeps blanks of the reasoning. No variant keeps blanks around the content.
    text = TOKENIZER.decode(ids(len(LONG_CHAT)))
    keeps_blanks = variant == "glm5.2"
    assert ("<think> \n</think>a2<|user|>" in text, "<think> r3 </think>" in text) == (
        keeps_blanks,
        keeps_blanks,
    )


def test_mixes_modes_in_one_conversation():
    """A session may think, then not think, then preserve its thinking."""
    prompts = [
        render_chat(CHAT[:1], **request_options("interleaved")).text,
        render_chat(CHAT[:5], **request_options("turn_level", think=False)).text,
        render_chat(CHAT[:7], **request_options("preserved")).text,
    ]
    assert prompts[0].endswith("One?<|assistant|><think>")
    assert prompts[1].endswith("Two?<|assistant|></think>") and "r1" not in prompts[1]
    assert prompts[2].endswith("Three?<|assistant|><think>") and "<think>r1</think>" in prompts[2]


def test_rejects_invalid_modes_and_chats():
    with pytest.raises(ValueError, match="unknown mode 'deep'; use one of interleaved"):
        split_samples(CHAT, "deep")
    with pytest.raises(ValueError, match="think is false; preserved always thinks"):
        request_options("preserved", think=False)
    with pytest.raises(ChatError, match="no message is an assistant's; add a reply"):
        split_samples([user("One?")], "preserved")
    with pytest.raises(ChatError, match="message 0 has role 'user'; only a chat that ends"):
        render_chat([user("One?")], close=True)
