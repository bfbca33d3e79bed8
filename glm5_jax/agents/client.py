"""An asynchronous client of servers that speak OpenAI's API."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import aiohttp

from glm5_jax.inference.client import ServerError
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
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._concurrency, self._places, self._session = concurrency, None, None

    async def __aenter__(self) -> "ChatClient":
        # A semaphore belongs to one event loop, and each opening may have its own.
        self._places = asyncio.Semaphore(self._concurrency)
        # Places are counted here, so the pool's own limit must not make requests wait on the clock.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *_) -> None:
        await self._session.close()

    async def chat(self, messages: Sequence[Mapping], **fields) -> dict:
        """The first choice of a reply, as the API describes it; fields: others of the request.

        ServerError for whatever else comes, or nothing in time.
        """
        if self._session is None:
            raise RuntimeError("the client is not open; use it within `async with`")
        body = {"messages": list(messages), **fields}
        if self._model is not None:
            body["model"] = self._model
        async with self._places:
            try:
                async with asyncio.timeout(self._seconds):
                    status, content = await self._post("/v1/chat/completions", body)
            except TimeoutError:
                raise ServerError(
                    f"{self._url} has not answered within {self._seconds} s"
                ) from None
            except (aiohttp.ClientError, OSError) as error:
                raise ServerError(f"no server answers at {self._url}: {error}") from None
        return _choice(status, content)

    async def _post(self, path: str, body: Mapping) -> tuple[int, bytes]:
        async with self._session.post(self._url + path, json=body) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise ServerError(f"the answer of {self._url} is longer than {MAX_BYTES} bytes")
            return response.status, bytes(content)


def _choice(status: int, content: bytes) -> dict:
    try:
        value = json.loads(content)
        if status != 200:
            raise ServerError(str(value["error"]["message"]), status)
        choice = value["choices"][0]
        if not isinstance(choice["message"], dict):
            raise TypeError("the message is no object")
        return choice
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        shown = content[:200].decode(errors="replace")
        raise ServerError(f"the answer is no chat completion ({status}): {shown}", status) from None
