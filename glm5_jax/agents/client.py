"""Asynchronous client of chat servers with OpenAI's API."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from glm5_jax.inference.client import ServerError
from glm5_jax.rl.orchestrator.client import JsonClient
from glm5_jax.rl.types import Message

# Of a reply. A policy must not reach it, because a reply that cannot be read leaves an attempt without a reward: 131,072
# tokens of 128 blanks are 16 MB.
MAX_BYTES = 2**26
REFUSED = (
    400,
    413,
    422,
)  # HTTP statuses that mean that the request is at fault, for example too long


class ChatBackend(Protocol):
    """Chat API of a model; see `ChatClient`."""

    async def chat(self, messages: Sequence[Message], **fields) -> dict: ...


class ChatClient:
    """Client of a server at `url`, such as "http://127.0.0.1:8000"; open it by `async with`, repeatedly if needed.

    - model: model name in requests; None: the server's default.
    - api_key: API key; None: none is sent.
    - timeout_s: time limit of one request, in seconds, without its wait for one of the concurrent slots.
    - concurrency: maximum number of concurrent requests.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        concurrency: int = 16,
    ):
        if not timeout_s > 0 or concurrency < 1:
            raise ValueError(
                f"timeout_s is {timeout_s} and concurrency {concurrency}; make both positive"
            )
        self._url, self._model, self._timeout_s = url.rstrip("/"), model, timeout_s
        self._client = JsonClient(api_key, max_response_bytes=MAX_BYTES)
        self._concurrency, self._slots = concurrency, None

    async def __aenter__(self) -> "ChatClient":
        # A semaphore belongs to one event loop, and each opening may have its own.
        self._slots = asyncio.Semaphore(self._concurrency)
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.__aexit__()

    async def chat(self, messages: Sequence[Mapping], **fields) -> dict:
        """Sends a chat request, and returns the first choice of the reply in the API's form.

        fields: other fields of the request. Raises ServerError for any other reply, and if none arrives in time.
        """
        if self._slots is None:
            raise RuntimeError("the client is not open; use it within `async with`")
        body = {"messages": list(messages), **fields}
        if self._model is not None:
            body["model"] = self._model
        url = f"{self._url}/v1/chat/completions"
        async with self._slots:
            return _choice(await self._client.request("POST", url, body, timeout_s=self._timeout_s))

    async def context_length(self) -> int | None:
        """Returns the context length in tokens that the server reports as `max_model_len`; None if it reports none.

        Raises ServerError.
        """
        url = f"{self._url}/v1/models"
        listing = await self._client.request("GET", url, timeout_s=self._timeout_s)
        models = listing.get("data") if isinstance(listing, dict) else None
        for model in models if isinstance(models, list) else ():
            if isinstance(model, dict) and self._model in (None, model.get("id")):
                length = model.get("max_model_len")
                return length if isinstance(length, int) and length > 0 else None
        return None


def _choice(value: Any) -> dict:
    try:
        choice = value["choices"][0]
        if not isinstance(choice["message"], dict):
            raise TypeError("the message is not an object")
        return choice
    except (LookupError, TypeError):
        raise ServerError(f"the reply is not a chat completion: {value!r:.200}") from None
