"""Models that say what a test has them say, as a client of chats."""

import json
from collections.abc import Callable, Sequence


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
