"""Models that say what a test has them say, as a client of chats and as a server."""

import asyncio
import json
from collections.abc import Callable, Sequence

from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response, read_json


class Scripted:
    """Says one reply after the other: text is an answer, a list of (tool, arguments) are calls, an exception is raised, and
    a dict is the choice itself. Or what a function of the messages gives. asked: (messages, fields) of each request."""

    def __init__(self, replies: Sequence | Callable):
        self._next = replies if callable(replies) else lambda _, given=iter(replies): next(given)
        self.asked = []

    async def chat(self, messages, **fields):
        self.asked.append((list(messages), fields))
        reply = self._next(messages)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, dict):
            return reply
        if isinstance(reply, str):
            return {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        return calling(*reply, number=len(self.asked))


def calling(*calls, number=0, reasoning="I look."):
    """The choice that makes calls; arguments that are text stand in it as they are."""
    made = [
        {
            "id": f"c{number}-{i}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": given if isinstance(given, str) else json.dumps(given),
            },
        }
        for i, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "reasoning_content": reasoning}
    return {"message": message | {"tool_calls": made}, "finish_reason": "tool_calls"}


class ScriptedServer(HttpServer):
    """OpenAI's API, also behind the sessions of a gateway, of a model that is scripted; a choice with "sleep" comes after so
    many seconds. paths: that were asked."""

    def __init__(self, replies: Sequence | Callable, config: ListenConfig = ListenConfig(port=0)):
        super().__init__(config)
        self.scripted, self.paths = Scripted(replies), []

    def routes(self):
        path = "/v1/chat/completions"
        return {"POST": {path: self._chat, "/sessions/{id}" + path: self._chat}}

    async def _chat(self, request):
        self.paths.append(request.path)
        choice = await self.scripted.chat(**read_json(await request.read()))
        if "sleep" in choice:
            await asyncio.sleep(choice["sleep"])
        return json_response({"choices": [choice]})
