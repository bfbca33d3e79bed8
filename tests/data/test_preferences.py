"""Tests that preference files are read as written, and that errors name the line."""

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


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def write_lines(tmp_path, *lines):
    path = tmp_path / "lines.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("\n".join(texts).encode("utf-8", "surrogateescape"))
    return path


def test_reads_pairs(tmp_path):
    reasoned = assistant("Hello!", reasoning_content="polite")
    path = write_lines(tmp_path, PAIR, "", {**PAIR, "chosen": reasoned, "source": "ours"})
    assert read_preferences(path) == [
        Preference(messages=(HI,), chosen=assistant("Hello!"), rejected=assistant("What?")),
        Preference(messages=(HI,), chosen=reasoned, rejected=assistant("What?")),
    ]


def test_reads_pair_with_tool_calls(tmp_path):
    call = {"id": "1", "function": {"name": "now", "arguments": "{}"}}
    turns = [HI, assistant(None, tool_calls=[call]), {"role": "tool", "content": "9"}]
    [pair] = read_preferences(
        write_lines(
            tmp_path,
            {
                **PAIR,
                "messages": turns,
                "rejected": assistant("", tool_calls=[call]),
                "tools": [TOOL],
            },
        )
    )
    assert pair.tools == (TOOL,) and pair.messages[1]["tool_calls"][0]["name"] == "now"
    assert pair.rejected["tool_calls"] == [{"name": "now", "arguments": {}}]


def test_reads_anchors_and_prompts(tmp_path):
    [anchor] = read_anchors(write_lines(tmp_path, {"messages": [HI], "anchor": "Good day."}))
    assert anchor == Anchor((HI,), assistant("Good day."))
    line = {"id": "a", "messages": [HI], "rubric": "general"}
    assert read_prompts(
        write_lines(tmp_path, line, {**line, "id": "b", "guidance": "Be brief."})
    ) == [
        Prompt(id="a", messages=(HI,), rubric="general"),
        Prompt(id="b", messages=(HI,), rubric="general", guidance="Be brief."),
    ]
    with pytest.raises(ValueError, match="two prompts have the id 'a'; rename one"):
        read_prompts(write_lines(tmp_path, line, line))


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
            {**PAIR, "messages": [HI, assistant("Yes")]},
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
def test_rejects_invalid_pair_by_line(tmp_path, line, message):
    path = write_lines(tmp_path, PAIR, line)
    with pytest.raises(ValueError, match=f"lines.jsonl, line 2: .*{message}"):
        read_preferences(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 3}, "id is 3; give a text"),
        ({"rubric": None}, "rubric is None"),
        ({"guidance": ["x"]}, r"guidance is \['x'\]"),
        ({"messages": [HI, assistant("x")]}, "the last message is of role 'assistant'"),
    ],
)
def test_rejects_invalid_prompt(tmp_path, change, message):
    line = {"id": "a", "messages": [HI], "rubric": "general"} | change
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        read_prompts(write_lines(tmp_path, line))


def test_rejects_file_without_lines(tmp_path):
    with pytest.raises(ValueError, match="lines.jsonl has no lines"):
        read_anchors(write_lines(tmp_path, ""))


@pytest.mark.parametrize("name", PROMPTS)
def test_reads_shipped_prompts(name):
    prompts = read_prompts(PROMPTS[name])
    assert 20 <= len(prompts) <= 40 and {prompt.rubric for prompt in prompts} == {name}
    assert len({prompt.messages[-1]["content"] for prompt in prompts}) == len(prompts)


def test_safety_prompts_include_harmless_traps():
    kinds = [prompt.id.split("-")[1] for prompt in read_prompts(PROMPTS["safety"])]
    assert min(kinds.count("decline"), kinds.count("trap")) >= 10
    assert kinds.count("care") and kinds.count("mixed")
    assert all(prompt.guidance for prompt in read_prompts(PROMPTS["safety"]))
