"""Simulates models with scripted replies, as a chat client and as a server."""

import asyncio
import json
from collections.abc import Callable, Sequence

from glm5_jax.runtime.http_server import HttpServer, ListenConfig, json_response, read_json


class Scripted:
    """Chat client with scripted replies, from a list or from a function of the messages.

    A text is an answer, a list of (tool, arguments) makes calls, an exception is raised, and a dict is the complete
    choice. requests: (messages, fields) of each request.
    """

    def __init__(self, replies: Sequence | Callable):
        self._next = replies if callable(replies) else lambda _, script=iter(replies): next(script)
        self.requests = []

    async def chat(self, messages, **fields):
        self.requests.append((list(messages), fields))
        reply = self._next(messages)
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, dict):
            return reply
        if isinstance(reply, str):
            return {"message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
        return calling(*reply, number=len(self.requests))


def calling(*calls, number=0, reasoning="I look."):
    """Returns a choice that makes calls. Arguments that are text are used as they are."""
    tool_calls = [
        {
            "id": f"c{number}-{i}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            },
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "reasoning_content": reasoning}
    return {"message": message | {"tool_calls": tool_calls}, "finish_reason": "tool_calls"}


class ScriptedServer(HttpServer):
    """OpenAI's API of a scripted model, also at the paths of gateway sessions.

    A choice with "sleep" is delayed by that many seconds. paths: paths of all requests.
    """

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
