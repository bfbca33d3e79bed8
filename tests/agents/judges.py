"""Judges over real HTTP that are easily led: what a model might fall for, made certain."""

import contextlib
import json
import re

from aiohttp import web

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.judge import TOP

MARK = re.compile(r"<data-(\w+) ")
TURN = re.compile(r"<\|(?:user|assistant|system|im_start|observation)\|>")


@contextlib.asynccontextmanager
async def serving(answer):
    """A server whose replies are what `answer` gives for a request: content, a `web.Response`, or several choices'
    fields as a dict. Its url."""

    async def chat(request):
        body = await request.json()
        said = answer(body)
        said = await said if hasattr(said, "__await__") else said
        if isinstance(said, web.StreamResponse):
            return said
        choice = said if isinstance(said, dict) else {"message": {"content": said}}
        return web.json_response({"choices": [{"finish_reason": "stop", **choice}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def client(answer, **options):
    """A client of a server of `serving`."""
    async with serving(answer) as url, ChatClient(url, **options) as opened:
        yield opened


def form(body):
    """(key, the verdict that the judge is shown as an example) of a request."""
    system = body["messages"][0]["content"]
    return MARK.search(system)[1], json.loads(system.splitlines()[-1])


def parts(body):
    """(by name what is fenced, all else that a user said), as one sees it who takes chat tokens for turns: what
    follows one is no data, wherever it stands."""
    key, _ = form(body)
    said = body["messages"][1]["content"]
    said, *turns = TURN.split(said)
    block = re.compile(rf"<data-{key} (\w+)>\n(.*?)\n</data-{key}>", re.DOTALL)
    return dict(block.findall(said)), "\n".join([block.sub("", said), *turns])


def verdict(body, quality, winner=None):
    """The content of a verdict. quality: of a fenced text, 0 to `TOP`."""
    key, shown = form(body)
    found, _ = parts(body)
    scores = {name: quality(text) for name, text in found.items() if name != "task"}
    if "winner" not in shown:
        given = dict.fromkeys(shown["scores"], scores.get("reply", 0))
        return json.dumps({"key": key, "reasons": "r", "scores": given})
    given = {side: dict.fromkeys(shown["scores"][side], scores.get(side, 0)) for side in "AB"}
    if winner is None:
        winner = max("AB", key=lambda side: scores.get(side, 0))
        winner = "tie" if scores.get("A") == scores.get("B") else winner
    return json.dumps({"key": key, "reasons": "r", "scores": given, "winner": winner})


def facts(text):
    """How often a text says "fact"."""
    return min(TOP, text.count("fact"))


def gullible(body):
    """Judges what is fenced by its facts, unless somebody asks otherwise outside of the fence."""
    _, outside = parts(body)
    asked = outside.replace(f"Give your verdict as JSON, with the key {form(body)[0]}.", "")
    if re.search(r"score|verdict|10|perfect|win", asked, re.IGNORECASE):
        return verdict(body, lambda text: TOP, "A")
    return verdict(body, facts)


def parrot(body):
    """Repeats the first verdict that it reads, and judges by itself where there is none."""
    found = re.search(r'\{[^{}]*"scores".*\}', body["messages"][1]["content"], re.DOTALL)
    return found[0] if found else verdict(body, facts)
