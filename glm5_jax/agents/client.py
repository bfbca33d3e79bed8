"""An asynchronous client of servers that speak OpenAI's API."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.client import JsonClient
from glm5_jax.rl.types import Message

MAX_BYTES = 2**22  # of an answer
REFUSED = (400, 413, 422)  # of HTTP: what was asked is at fault, too long for instance


class Chats(Protocol):
    """Where a model is asked, as `ChatClient` describes it."""

    async def chat(self, messages: Sequence[Message], **fields) -> dict: ...


class ChatClient:
    """Of a server at `url`, such as "http://127.0.0.1:8000", within `async with`, which may be entered again.

    model: what to ask, None for whatever the server has. seconds: that one request may take, its wait for a place
    among `concurrency` others left out.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        seconds: float = 120.0,
        concurrency: int = 16,
    ):
        if not seconds > 0 or concurrency < 1:
            raise ValueError(
                f"seconds is {seconds} and concurrency {concurrency}; make both positive"
            )
        self._url, self._model, self._seconds = url.rstrip("/"), model, seconds
        self._client = JsonClient(api_key, most_bytes=MAX_BYTES)
        self._concurrency, self._places = concurrency, None

    async def __aenter__(self) -> "ChatClient":
        # A semaphore belongs to one event loop, and each opening may have its own.
        self._places = asyncio.Semaphore(self._concurrency)
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.__aexit__()

    async def chat(self, messages: Sequence[Mapping], **fields) -> dict:
        """The first choice of a reply, as the API describes it; fields: others of the request.

        ServerError for whatever else comes, or nothing in time.
        """
        if self._places is None:
            raise RuntimeError("the client is not open; use it within `async with`")
        body = {"messages": list(messages), **fields}
        if self._model is not None:
            body["model"] = self._model
        url = f"{self._url}/v1/chat/completions"
        async with self._places:
            return _choice(await self._client.ask("POST", url, body, seconds=self._seconds))


def _choice(value: Any) -> dict:
    try:
        choice = value["choices"][0]
        if not isinstance(choice["message"], dict):
            raise TypeError("the message is no object")
        return choice
    except (LookupError, TypeError):
        raise ServerError(f"the answer is no chat completion: {value!r:.200}") from None
