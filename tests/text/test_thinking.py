"""Modes of thinking: what is kept from turn to turn, and what a conversation trains in each."""

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


def learnt(rendered) -> str:
    return TOKENIZER.decode([i for i, m in zip(rendered.ids, rendered.loss_mask) if m])


def test_interleaved_is_a_sample_for_every_turn_with_its_own_reasoning():
    first, second, third = (s.render(TOKENIZER) for s in split_samples(CHAT, "interleaved"))
    assert (
        learnt(first) == "r1</think><tool_call>look</tool_call><|observation|>r2</think>a1<|user|>"
    )
    assert learnt(second) == "a2<|user|>"
    assert learnt(third) == "r3</think>a3<|user|>"
    assert "r1" not in third.text and "r2" not in third.text
    # Every token that the model wrote is learnt once: those of three turns are all there are.
    whole = learnt(split_samples(CHAT, "preserved")[0].render(TOKENIZER))
    assert "".join(map(learnt, (first, second, third))) == whole


def test_preserved_is_one_sample_that_holds_all_reasoning():
    [sample] = split_samples([*CHAT, user("Four?")], "preserved")
    rendered = sample.render(TOKENIZER)
    assert rendered.text.endswith("<think>r3</think>a3<|user|>")
    assert all(f"<think>{r}</think>" in rendered.text for r in ("r1", "r2", "r3"))


def test_turn_level_follows_what_each_turn_did():
    asked = [s.enable_thinking for s in split_samples(CHAT, "turn_level")]
    assert asked == [True, False, True]
    quiet = split_samples(CHAT, "turn_level")[1].render(TOKENIZER, variant="glm5.2")
    assert (
        quiet.text.endswith("<|assistant|><think></think>a2<|user|>")
        and learnt(quiet) == "a2<|user|>"
    )


def test_a_sample_that_ends_with_a_call_stops_for_its_result():
    [sample] = split_samples(CHAT[:2], "interleaved")
    assert learnt(sample.render(TOKENIZER)).endswith("</tool_call><|observation|>")


@pytest.mark.parametrize(
    ("mode", "variant"),
    [(m, v) for m in MODES for v in VARIANTS if m != "preserved" or VARIANTS[v].keeps_reasoning],
)
def test_a_sample_begins_with_the_prompt_that_the_model_saw(mode, variant):
    """Up to its last reply; what it then wrote is all that is learnt behind it."""
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
            whole = sample.render(TOKENIZER, variant=variant)
            assert whole.ids[: len(prompt.ids)] == prompt.ids
            assert all(whole.loss_mask[len(prompt.ids) :])


@pytest.mark.parametrize("mode", MODES)
def test_without_reasoning_a_sample_is_one_without_thinking(mode):
    """So no model learns to close thinking that it was asked for."""
    [sample] = split_samples([user("One?"), reply("a1", "")], mode)
    assert not sample.enable_thinking
    for variant in ("glm5", "glm5.1", "glm5.2"):
        assert learnt(sample.render(TOKENIZER, variant=variant)) == "a1<|user|>"
    asked = [s.enable_thinking for s in split_samples(CHAT, mode)]
    assert asked == ([True] if mode == "preserved" else [True, False, True])


def test_only_preserved_thinking_leaves_earlier_tokens_as_they_are():
    """Turn by turn the prompt of the next turn goes on from all that was written."""

    def shared(mode):
        options, found = request_options(mode), []
        for end in (4, 6):
            so_far = render_chat(CHAT[:end], TOKENIZER, add_generation_prompt=False, **options).ids
            prompt = render_chat(CHAT[: end + 1], TOKENIZER, **options).ids
            equal = next((i for i, (a, b) in enumerate(zip(so_far, prompt)) if a != b), len(so_far))
            found.append((equal, len(so_far)))
        return found

    (one, whole), (two, longer) = shared("preserved")
    assert (one, two) == (whole, longer) and two > one
    (one, whole), _ = shared("interleaved")
    assert one < whole


SAID = [
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
def test_where_preserved_tokens_do_not_only_grow(variant, rewritten, closed_at_once):
    """By message: those that change what stood before them, and replies that their prompt does not begin."""

    def ids(end, prompt=False):
        options = {"clear_thinking": False, "add_generation_prompt": prompt, "variant": variant}
        return render_chat(SAID[:end], TOKENIZER, **options).ids

    def begins(a, b):
        return b[: len(a)] == a

    later = range(1, len(SAID))
    assert [i for i in later if not begins(ids(i), ids(i + 1))] == rewritten
    replies = [i for i in later if SAID[i]["role"] == "assistant"]
    assert [i for i in replies if not begins(ids(i, True), ids(i + 1))] == closed_at_once
    # Blanks of a message's reasoning stay in glm5.2 alone; those around content in none.
    text = TOKENIZER.decode(ids(len(SAID)))
    kept = variant == "glm5.2"
    assert ("<think> \n</think>a2<|user|>" in text, "<think> r3 </think>" in text) == (kept, kept)


def test_modes_mix_in_one_conversation():
    """A session may think, then not, then keep what it thought."""
    prompts = [
        render_chat(CHAT[:1], **request_options("interleaved")).text,
        render_chat(CHAT[:5], **request_options("turn_level", think=False)).text,
        render_chat(CHAT[:7], **request_options("preserved")).text,
    ]
    assert prompts[0].endswith("One?<|assistant|><think>")
    assert prompts[1].endswith("Two?<|assistant|></think>") and "r1" not in prompts[1]
    assert prompts[2].endswith("Three?<|assistant|><think>") and "<think>r1</think>" in prompts[2]


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="unknown mode 'deep'; use one of interleaved"):
        split_samples(CHAT, "deep")
    with pytest.raises(ValueError, match="think is false; preserved always thinks"):
        request_options("preserved", think=False)
    with pytest.raises(ChatError, match="no message is an assistant's; add a reply"):
        split_samples([user("One?")], "preserved")
    with pytest.raises(ChatError, match="message 0 has role 'user'; only a chat that ends"):
        render_chat([user("One?")], close=True)
