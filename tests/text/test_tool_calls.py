"""Tests that replies are parsed into the same parts however the stream is cut, with a problem for each broken call."""

import http.server
import json
import random
import threading
import time

import pytest

import glm5_jax as glm
from glm5_jax.text.chat import ChatError, render_chat
from glm5_jax.text.tokenizer import Detokenizer, Tokenizer
from glm5_jax.text.tool_calls import Reply, ReplyParser, ToolCall, parse_reply

TOKENIZER = Tokenizer.default()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "limit": {"type": "integer"}},
            },
        },
    }
]
CALL = (
    "<tool_call>find<arg_key>text</arg_key><arg_value>12</arg_value>"
    "<arg_key>limit</arg_key><arg_value>5</arg_value></tool_call>"
)


def test_exports_parse_reply():
    assert glm.parse_reply is parse_reply


def test_parses_reasoning_content_and_typed_calls():
    reply = parse_reply(f"Search.</think>\nI look. {CALL}<|observation|>", TOOLS)
    call = ToolCall("find", {"text": "12", "limit": 5}, None, CALL[11:-12])
    assert reply == Reply("Search.", "I look.", (call,), "<|observation|>")
    # Without a schema a value is JSON if it can be.
    [call] = parse_reply(CALL, [{"name": "find"}], thinking=False).tool_calls
    assert call.arguments == {"text": 12, "limit": 5}


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("Hi<|user|>", False, Reply(None, "Hi", (), "<|user|>")),
        ("</think>Hi", True, Reply(None, "Hi", (), None)),
        ("<think>so</think>Hi", False, Reply("so", "Hi", (), None)),
        ("\n<think>so</think>\nHi", False, Reply("so", "Hi", (), None)),
        ("<think>so</think>Hi", True, Reply("so", "Hi", (), None)),
        ("cut off", True, Reply("cut off", "", (), None)),
        ("so</think>a </think> b", True, Reply("so", "a </think> b", (), None)),
        ("a<b <tool", False, Reply(None, "a<b <tool", (), None)),
        ("done<|endoftext|>more", False, Reply(None, "done", (), "<|endoftext|>")),
        ("  \n", True, Reply(None, "", (), None)),
        # Calls inside the reasoning are text.
        (f"so {CALL}<|observation|>", True, Reply(f"so {CALL}", "", (), "<|observation|>")),
        (f"so {CALL}</think>Hi", True, Reply(f"so {CALL}", "Hi", (), None)),
    ],
)
def test_finds_end_of_thinking(text, thinking, expected):
    assert parse_reply(text, thinking=thinking) == expected


def test_parses_call_without_arguments():
    reply = parse_reply("<tool_call>find</tool_call><|observation|>", TOOLS, thinking=False)
    assert reply == Reply(None, "", (ToolCall("find", {}, None, "find"),), "<|observation|>")


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("lose", "no tool is named 'lose'; there are find"),
        ("find<arg_key>text</arg_key>", "the call ends after a key"),
        ("find<arg_key>text", "the call ends inside the key"),
        ("find<arg_value>x</arg_value>", "<arg_value> stands inside the name"),
        ("find<arg_key>a</arg_key>x<arg_value>1</arg_value>", "text stands after a key"),
        (
            "find" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2,
            "the argument 'a' is given twice",
        ),
    ],
)
def test_parses_call_after_broken_call(inside, problem):
    reply = parse_reply(f"<tool_call>{inside}</tool_call>{CALL}", TOOLS, thinking=False)
    broken, intact = reply.tool_calls
    assert problem in broken.problem and broken.text == inside
    assert intact.problem is None and intact.arguments == {"text": "12", "limit": 5}


def test_reports_truncated_call():
    reply = parse_reply(
        "<tool_call>find<arg_key>text</arg_key><arg_value>ab", TOOLS, thinking=False
    )
    [call] = reply.tool_calls
    assert call.problem == "the call has no </tool_call>" and call.arguments == {}


def test_keeps_marker_text_in_value():
    text = (
        "<tool_call>find<arg_key>text</arg_key><arg_value>a<think>b</think></arg_value></tool_call>"
    )
    assert parse_reply(text, TOOLS, thinking=False).tool_calls[0].arguments == {
        "text": "a<think>b</think>"
    }


def argument(text, schema=None, parameters=None):
    """Parses `text` as an argument with this schema and returns its value."""
    base = {"type": "object", "properties": {} if schema is None else {"a": schema}}
    tools = [{"name": "f", "parameters": base | (parameters or {})}]
    written = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    [call] = parse_reply(written, tools, thinking=False).tool_calls
    assert call.problem is None
    return call.arguments["a"]


OR_NULL = {"type": ["string", "null"]}
ANY_OF = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFINED = {"$defs": {"Choice": {"enum": ["1", "2"]}, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '"x"', '"x"'),
        ({"type": "string", "enum": ["1"]}, "3", "3"),
        (OR_NULL, "123", "123"),
        (OR_NULL, '"x"', '"x"'),
        (OR_NULL, "null", None),
        (OR_NULL | {"minLength": 5}, "123", "123"),
        (ANY_OF, "123", "123"),
        (ANY_OF, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", "2"]}, '"1"', "1"),
        ({"enum": ["1", None]}, "null", None),
        ({"enum": ["1", 1]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, '["b"]', ["b"]),
        ({"anyOf": [{"$ref": "#/$defs/Choice"}, {"type": "null"}]}, "2", "2"),
        ({"anyOf": [{"$ref": "#/$defs/Choice"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"]}, "123", 123),
        ({"type": "integer"}, "abc", "abc"),
        ({"type": "integer"}, "1.5", 1.5),
        (True, "5", 5),
        ({"description": "anything"}, "[1]", [1]),
        (None, "5", 5),
        (None, '"x"', "x"),
        (None, "NaN", "NaN"),
        (None, "[-Infinity]", "[-Infinity]"),
        (None, "1e400", "1e400"),
        (None, "[" * 100_000, "[" * 100_000),
        (None, "[" * 100 + "]" * 100, json.loads("[" * 100 + "]" * 100)),
        (None, "[" * 101 + "]" * 101, "[" * 101 + "]" * 101),
        (None, '{"a":' * 101 + "1" + "}" * 101, '{"a":' * 101 + "1" + "}" * 101),
        (None, "9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_reads_value_by_schema(schema, text, value):
    read = argument(text, schema, DEFINED)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "dict"},
        {"type": 5},
        {"anyOf": 7},
        {"$ref": "#/$defs/Missing"},
        {"$ref": "#/$defs/Loop"},
        {"$ref": "other.json"},
        {"type": ["integer", "null"], "minimum": "x"},
        5,
        ["string"],
    ],
)
def test_ignores_invalid_schema(schema):
    assert argument("5", schema, DEFINED) == 5
    assert argument("five", schema, DEFINED | {"$id": "http://["}) == "five"
    assert argument("5", schema, {"$id": "http://["}) == 5


def test_does_not_fetch_remote_schema():
    """The referenced server counts the requests that reach it."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_error(404)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        schema = {"$ref": f"http://127.0.0.1:{server.server_port}/schema.json"}
        assert argument("5", schema) == 5
        server.shutdown()
    assert not requests


def test_ignores_pattern_with_exponential_time():
    began = time.perf_counter()
    assert argument("1" * 40, {"type": ["string", "null"], "pattern": "^(1+)+$"}) == "1" * 40
    argument("a" * 40 + "b", {"anyOf": [{"type": "string", "pattern": "^(a+)+$"}]})
    argument('"' + "a" * 40 + 'b"', {"anyOf": [{"type": "string", "pattern": "^(a+)+$"}]})
    assert time.perf_counter() - began < 5


def test_rejects_invalid_tool_before_parsing():
    with pytest.raises(ChatError, match="tool 1, 'f', has parameters True"):
        ReplyParser([*TOOLS, {"name": "f", "parameters": True}])


def test_reads_id_without_token_as_replacement_character():
    """A model's embedding has more rows than its tokenizer has tokens."""
    a, beyond = TOKENIZER.encode("a"), TOKENIZER.vocab_size + 3
    parser = ReplyParser(tokenizer=TOKENIZER, thinking=False)
    cut = TOKENIZER.encode("🙂")[:1]
    streamed = "".join(d.text for d in parser.feed([*a, beyond, *a, *cut, -1, *a]))
    assert streamed == parser.close().content == "a\ufffda\ufffd\ufffda"


REPLIES = [
    f"Ä naïve 日本 🙂 thought.\n</think>\n\nSome content 🙂 <b>x</b> {CALL} {CALL}\n<|observation|>",
    "so <x </think> a </tool_call> < <arg_key>x</arg_key> <|use",
    "<tool_call>find</tool_call>  text between  <tool_call>find<arg_key>k</arg_key>",
    "</think>" + CALL,
    "think only, cut <|endofte",
]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("text", REPLIES)
def test_parses_stream_in_pieces_of_any_size(text, thinking, as_ids):
    source = TOKENIZER.encode(text, parse_special=True) if as_ids else text
    expected = parse_reply(
        source, TOOLS, tokenizer=TOKENIZER if as_ids else None, thinking=thinking
    )
    r = random.Random(0)
    for trial in range(40):
        size = 1 if trial == 0 else r.randrange(2, 9)
        parser = ReplyParser(TOOLS, tokenizer=TOKENIZER if as_ids else None, thinking=thinking)
        deltas, at = [], 0
        while at < len(source):
            step = size if trial == 0 else r.randrange(1, size + 1)
            deltas += parser.feed(source[at : at + step])
            at += step
        reply = parser.close()
        assert reply == expected
        # Text that was streamed is never retracted.
        for part, final in (
            ("reasoning", reply.reasoning_content or ""),
            ("content", reply.content),
        ):
            assert final.startswith("".join(d.text for d in deltas if d.part == part))
        assert [d.call for d in deltas if d.part == "call"] == [
            c for c in reply.tool_calls if c.problem != "the call has no </tool_call>"
        ]


@pytest.mark.parametrize(
    "text",
    [
        "<" * 2_000_000,
        "<think" * 400_000,
        "word " * 400_000,
        "a" + " " * 2_000_000 + "b",
        "\n" * 2_000_000 + "b",
    ],
)
def test_parses_two_megabytes_quickly(text):
    began = time.perf_counter()
    assert parse_reply(text).reasoning_content == text.strip()
    parser = ReplyParser()
    for at in range(0, len(text), 20):
        parser.feed(text[at : at + 20])
    assert parser.close().reasoning_content == text.strip()
    assert time.perf_counter() - began < 30


def test_parses_long_argument_quickly():
    began = time.perf_counter()
    parser = ReplyParser([{"name": "f"}], thinking=False)
    parser.feed("<tool_call>f<arg_key>a</arg_key><arg_value>")
    for _ in range(400_000):
        parser.feed("word ")
    parser.feed("</arg_value></tool_call>")
    assert parser.close().tool_calls[0].arguments == {"a": "word " * 400_000}
    assert time.perf_counter() - began < 20


def test_reads_spelled_out_marker_ids_as_text():
    ids = TOKENIZER.encode("a</think>b")
    assert parse_reply(ids, tokenizer=TOKENIZER).reasoning_content == "a</think>b"
    with pytest.raises(ValueError, match="a reply of ids needs the tokenizer"):
        parse_reply(ids)


def test_parses_rendered_reply():
    message = {
        "role": "assistant",
        "reasoning_content": "Search.",
        "content": "I look.",
        "tool_calls": [{"name": "find", "arguments": {"text": "a <b>", "limit": 3}}] * 2,
    }
    question = {"role": "user", "content": "Where?"}
    prompt = render_chat([question], TOKENIZER)
    rendered_chat = render_chat([question, message], TOKENIZER, add_generation_prompt=False)
    assert rendered_chat.ids[: len(prompt.ids)] == prompt.ids
    for reply in (rendered_chat.ids[len(prompt.ids) :], rendered_chat.text[len(prompt.text) :]):
        parsed = parse_reply(reply, TOOLS, tokenizer=TOKENIZER)
        assert (parsed.reasoning_content, parsed.content) == ("Search.", "I look.")
        assert [c[:3] for c in parsed.tool_calls] == [
            ("find", {"text": "a <b>", "limit": 3}, None)
        ] * 2


def render_at_depth(messages, frames):
    """Returns the text of the messages, rendered `frames` stack frames deeper."""
    return render_at_depth(messages, frames - 1) if frames else render_chat(messages).text


def test_renders_parsed_calls_of_any_depth():
    """Otherwise a policy could end a run with a call that can be parsed, but not rendered a few stack frames deeper."""
    question = {"role": "user", "content": "Where?"}
    for depth in (10, 100, *range(800, 1000, 7)):
        value = "[" * depth + "]" * depth
        call = f"<tool_call>find<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>"
        message = parse_reply(call, TOOLS, thinking=False).message
        assert value in render_at_depth([question, message], 40)


def test_holds_back_partial_character():
    text = "🙂 日本 é"
    ids = TOKENIZER.encode(text)
    one = Detokenizer(TOKENIZER)
    pieces = [one.feed([i]) for i in ids]
    assert "".join(pieces) + one.close() == text
    assert "\ufffd" not in "".join(pieces) and len(ids) > len(text)
    cut = Detokenizer(TOKENIZER)
    assert cut.feed(ids[:1]) == "" and cut.close() == "\ufffd"
    assert cut.feed(ids) + cut.close() == text
