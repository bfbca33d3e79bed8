"""Output of the terminal chat: no control sequence of a model or a server reaches the terminal."""

import json
import re

import pytest
from aiohttp import web

from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response
from glm5_jax.runtime.terminal import make_printable
from launch import chat

CLIPBOARD, TITLE, EIGHT_BIT = "\x1b]52;c;cm0gLXJm\x07", "\x1b]0;root\x1b\\", "\x9d0;x\x9c"
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("text", [CLIPBOARD, TITLE, EIGHT_BIT, "\x1b[2J", "a\x08b", "\x7f", "x\u202ey", "\r"])  # fmt: skip
def test_prints_no_control_character(text):
    assert not ACTS.search(make_printable(f"a{text}b"))


def test_prints_other_text_unchanged():
    text = "Hélène 🧑‍🚀 日本 שלום\n\tdef f(): pass"
    assert make_printable(text) == text and make_printable("a\r\nb") == "a\nb"


class Hostile(HttpServer):
    """Server whose names, replies, calls and errors are full of control sequences."""

    def routes(self):
        chats = {"/v1/chat/completions": self._chat}
        return {"POST": chats, "GET": {"/v1/models": self._models}}

    async def _models(self, request):
        return json_response({"data": [{"id": f"m{TITLE}"}]})

    async def _chat(self, request):
        body = json.loads(await request.read())
        if body["messages"][-1]["content"] == "fail":
            return json_response({"error": {"message": f"no{CLIPBOARD}"}}, 400)
        # A sequence may come in two pieces.
        call = {"index": 0, "function": {"name": f"f{TITLE}", "arguments": EIGHT_BIT}}
        deltas = [
            *({"reasoning": "thinks \x1b"}, {"reasoning_content": "]52;c;x\x07"}),
            *({"content": f"says {CLIPBOARD[:3]}"}, {"content": CLIPBOARD[3:]}),
            {"tool_calls": [call], "content": None},
        ]
        chunks = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")


def test_removes_control_sequences(capsys):
    lines = iter(["hi", "fail", "/quit"])
    with Hostile(ListenConfig(port=0)).running() as url:
        assert chat.main(["chat", f"--url={url}"], lambda prompt: next(lines)) == 0
    shown = capsys.readouterr()
    assert "thinks " in shown.out and "says " in shown.out and "error: no" in shown.out
    assert not ACTS.search(shown.out) and not ACTS.search(shown.err)


class Refusing(Hostile):
    """Server that refuses to list its models."""

    async def _models(self, request):
        return json_response({"error": {"message": f"no{CLIPBOARD}"}}, 400)


def test_removes_control_sequences_of_errors(capsys):
    with Refusing(ListenConfig(port=0)).running() as url:
        assert chat.main(["chat", f"--url={url}"], lambda prompt: "/quit") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: no") and not ACTS.search(shown)
