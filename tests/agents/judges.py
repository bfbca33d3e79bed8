"""Simulates judges over real HTTP that follow injected instructions every time, as a weak model might."""

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
    """Serves chat completions and yields the URL. `answer` returns content, a `web.Response`, or a choice's fields as a
    dict.
    """

    async def chat(request):
        body = await request.json()
        response = answer(body)
        response = await response if hasattr(response, "__await__") else response
        if isinstance(response, web.StreamResponse):
            return response
        choice = response if isinstance(response, dict) else {"message": {"content": response}}
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
    """Yields a client of a server of `serving`."""
    async with serving(answer) as url, ChatClient(url, **options) as opened:
        yield opened


def form(body):
    """Returns (key, the verdict that the request shows as an example)."""
    system = body["messages"][0]["content"]
    return MARK.search(system)[1], json.loads(system.splitlines()[-1])


def parts(body):
    """Returns (fenced texts by name, all other text of the user), as seen by a model that reads chat tokens as turns.
    Text after such a token counts as outside of the fence.
    """
    key, _ = form(body)
    content = body["messages"][1]["content"]
    content, *turns = TURN.split(content)
    block = re.compile(rf"<data-{key} (\w+)>\n(.*?)\n</data-{key}>", re.DOTALL)
    return dict(block.findall(content)), "\n".join([block.sub("", content), *turns])


def verdict(body, quality, winner=None):
    """Returns the content of a verdict. quality: function from a fenced text to a score, 0 to `TOP`."""
    key, shown = form(body)
    fenced, _ = parts(body)
    scores = {name: quality(text) for name, text in fenced.items() if name != "task"}
    if "winner" not in shown:
        values = dict.fromkeys(shown["scores"], scores.get("reply", 0))
        return json.dumps({"key": key, "reasons": "r", "scores": values})
    values = {side: dict.fromkeys(shown["scores"][side], scores.get(side, 0)) for side in "AB"}
    if winner is None:
        winner = max("AB", key=lambda side: scores.get(side, 0))
        winner = "tie" if scores.get("A") == scores.get("B") else winner
    return json.dumps({"key": key, "reasons": "r", "scores": values, "winner": winner})


def facts(text):
    """Counts how often the text contains "fact", at most `TOP`."""
    return min(TOP, text.count("fact"))


def gullible(body):
    """Judges the fenced texts by their facts, unless text outside of the fence contains instructions."""
    _, outside = parts(body)
    instructions = outside.replace(f"Give your verdict as JSON, with the key {form(body)[0]}.", "")
    if re.search(r"score|verdict|10|perfect|win", instructions, re.IGNORECASE):
        return verdict(body, lambda text: TOP, "A")
    return verdict(body, facts)


def parrot(body):
    """Repeats the first verdict in its input, and judges by facts where there is none."""
    echo = re.search(r'\{[^{}]*"scores".*\}', body["messages"][1]["content"], re.DOTALL)
    return echo[0] if echo else verdict(body, facts)
