"""Files of what people prefer are read as written, and what is wrong in them is named by line."""

import json

import pytest

from glm5_jax.data.preferences import (
    PROMPTS,
    Anchor,
    Preference,
    Prompt,
    read_anchors,
    read_preferences,
    read_prompts,
)

HI = {"role": "user", "content": "Hi"}
PAIR = {"messages": [HI], "chosen": "Hello!", "rejected": "What?"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def said(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def written(tmp_path, *lines):
    path = tmp_path / "lines.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("\n".join(texts).encode("utf-8", "surrogateescape"))
    return path


def test_pairs(tmp_path):
    thought = said("Hello!", reasoning_content="polite")
    path = written(tmp_path, PAIR, "", {**PAIR, "chosen": thought, "source": "ours"})
    assert read_preferences(path) == [
        Preference(messages=(HI,), chosen=said("Hello!"), rejected=said("What?")),
        Preference(messages=(HI,), chosen=thought, rejected=said("What?")),
    ]


def test_a_pair_may_call_tools(tmp_path):
    call = {"id": "1", "function": {"name": "now", "arguments": "{}"}}
    turns = [HI, said(None, tool_calls=[call]), {"role": "tool", "content": "9"}]
    [pair] = read_preferences(
        written(
            tmp_path,
            {**PAIR, "messages": turns, "rejected": said("", tool_calls=[call]), "tools": [TOOL]},
        )
    )
    assert pair.tools == (TOOL,) and pair.messages[1]["tool_calls"][0]["name"] == "now"
    assert pair.rejected["tool_calls"] == [{"name": "now", "arguments": {}}]


def test_anchors_and_prompts(tmp_path):
    [anchor] = read_anchors(written(tmp_path, {"messages": [HI], "anchor": "Good day."}))
    assert anchor == Anchor((HI,), said("Good day."))
    line = {"id": "a", "messages": [HI], "rubric": "general"}
    assert read_prompts(written(tmp_path, line, {**line, "id": "b", "guidance": "Be brief."})) == [
        Prompt(id="a", messages=(HI,), rubric="general"),
        Prompt(id="b", messages=(HI,), rubric="general", guidance="Be brief."),
    ]
    with pytest.raises(ValueError, match="two prompts have the id 'a'; rename one"):
        read_prompts(written(tmp_path, line, line))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "the line is a list; give an object"),
        ('{"messages": [], "messages": []}', "field 'messages' twice"),
        ("\udcff", "is not JSON in UTF-8"),
        ({**PAIR, "messages": None}, "messages is None; give a list"),
        ({**PAIR, "messages": []}, r"messages is \[\]; give a list"),
        ({**PAIR, "messages": [1]}, "message 0"),
        ({**PAIR, "messages": [{"role": "user", "content": None}]}, "message 0 .* has no content"),
        (
            {**PAIR, "messages": [HI, said("Yes")]},
            "the last message is of role 'assistant'; end with",
        ),
        ({**PAIR, "chosen": None}, "chosen is None; give a text, or an assistant's message"),
        ({**PAIR, "chosen": HI}, "chosen is .*'role': 'user'"),
        ({**PAIR, "rejected": " "}, "message 1, an assistant's, is empty"),
        ({"messages": [HI], "chosen": "a"}, "rejected is None"),
        ({**PAIR, "rejected": "Hello!"}, "chosen and rejected are the same reply; drop the line"),
        ({**PAIR, "tools": [1]}, "tool"),
        (
            {**PAIR, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 0 has a part of type 'image_url'",
        ),
    ],
)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path, line, message):
    path = written(tmp_path, PAIR, line)
    with pytest.raises(ValueError, match=f"lines.jsonl, line 2: .*{message}"):
        read_preferences(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 3}, "id is 3; give a text"),
        ({"rubric": None}, "rubric is None"),
        ({"guidance": ["x"]}, r"guidance is \['x'\]"),
        ({"messages": [HI, said("x")]}, "the last message is of role 'assistant'"),
    ],
)
def test_prompts_that_are_none(tmp_path, change, message):
    line = {"id": "a", "messages": [HI], "rubric": "general"} | change
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        read_prompts(written(tmp_path, line))


def test_a_file_without_lines_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lines.jsonl has no lines"):
        read_anchors(written(tmp_path, ""))


@pytest.mark.parametrize("name", PROMPTS)
def test_shipped_prompts(name):
    prompts = read_prompts(PROMPTS[name])
    assert 20 <= len(prompts) <= 40 and {prompt.rubric for prompt in prompts} == {name}
    assert len({prompt.messages[-1]["content"] for prompt in prompts}) == len(prompts)


def test_safety_has_what_to_decline_and_what_only_sounds_so():
    kinds = [prompt.id.split("-")[1] for prompt in read_prompts(PROMPTS["safety"])]
    assert min(kinds.count("decline"), kinds.count("trap")) >= 10
    assert kinds.count("care") and kinds.count("mixed")
    assert all(prompt.guidance for prompt in read_prompts(PROMPTS["safety"]))
