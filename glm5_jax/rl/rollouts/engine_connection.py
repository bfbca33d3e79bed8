"""Connects the gateway to its engines over HTTP: requests for replies, and probes."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import aiohttp

from glm5_jax.inference.client import INSTANCE

# Errors of an engine that does not respond, or whose response is not JSON or is nested too deeply.
NO_RESPONSE = (TimeoutError, aiohttp.ClientError, OSError, ValueError, RecursionError)
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)  # `reply_timeout_s` is the limit


class EngineResponse(NamedTuple):
    """Response of an engine.

    Attributes:
      status: HTTP status.
      body: JSON value of the body.
      instance: id of the engine's process; None: it sent none.
    """

    status: int
    body: Any
    instance: str | None


class EngineConnections:
    """Asynchronous HTTP client of the engines. Requests are possible inside `async with`.

    - api_key: key that the engines require; None: no key.
    - reply_timeout_s: time limit of a reply, in seconds.
    - probe_timeout_s: time limit of the response to a probe, in seconds.
    """

    def __init__(self, api_key: str | None, *, reply_timeout_s: float, probe_timeout_s: float):
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._reply_timeout_s = reply_timeout_s
        self._probe_timeout = aiohttp.ClientTimeout(total=probe_timeout_s)

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._client = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.close()

    async def generate(self, url: str, body: Mapping, session_id: str) -> EngineResponse:
        """Returns the response to a request of a session for a reply. Raises one of `NO_RESPONSE`."""
        headers = {"X-SMG-Routing-Key": session_id}
        async with (
            asyncio.timeout(self._reply_timeout_s),
            self._client.post(
                f"{url}/generate", json=body, headers=headers, timeout=_NO_TIMEOUT
            ) as response,
        ):
            content = await response.json()
            return EngineResponse(response.status, content, response.headers.get(INSTANCE))

    async def probe(self, url: str) -> Any:
        """Returns the JSON of an engine's response; None without a response in time, and for an error."""
        try:
            async with self._client.get(url, timeout=self._probe_timeout) as response:
                return await response.json() if response.status == 200 else None
        except NO_RESPONSE:
            return None
