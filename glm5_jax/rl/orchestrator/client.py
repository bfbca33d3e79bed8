"""Clients of the asynchronous system: of the hub, for a trainer, and of any server of JSON, for what runs in a loop."""

import asyncio
import dataclasses
import http.client
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.trajectory import Taken, trajectory
from glm5_jax.runtime.http_server import ApiError, json_bytes, read_json, truncate_text
from glm5_jax.runtime.json_body import MAX_SINGLE_PASS_BYTES, JsonLimits

_log = logging.getLogger(__name__)
SHOWN = 200  # bytes of an answer that cannot be read
MAX_MESSAGE = 2000  # characters of an error that an answer tells
NOT_BEGUN = 428  # of HTTP: the hub has not been told where the trainer is
UNAVAILABLE = 503  # of HTTP: the hub cannot keep what it is sent, and says why
AGAIN = 0.5  # seconds between two tries to reach a hub
POLL = 30.0  # seconds that a hub is asked to wait at once
MARGIN = 60.0  # seconds that an answer may take beyond those that it was asked to wait


class JsonClient:
    """Asks servers of JSON, as many at once as are asked, within `async with`, which may be entered again.

    api_key: that they want. most_bytes: of an answer.
    """

    def __init__(self, api_key: str | None = None, *, most_bytes: int = 2**28):
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._most, self._session = most_bytes, None

    async def __aenter__(self) -> "JsonClient":
        # `seconds` counts, and the pool's own limit must not make requests wait on that clock.
        connector, forever = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=connector, timeout=forever
        )
        return self

    async def __aexit__(self, *_) -> None:
        await self._session.close()

    async def ask(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        seconds: float,
        most_bytes: int | None = None,
        limits: JsonLimits = JsonLimits(),
        api_key: str | None = None,
    ) -> Any:
        """Returns the value of an answer. Raises ServerError unless it is 200 and JSON, in time and not too long.

        most_bytes: size of the answer; None: that of the client. limits: what the answer may hold. api_key: key of
        this server; None: that of the client.
        """
        if self._session is None:
            raise RuntimeError("the client is not open; use it within `async with`")
        data = None if body is None else json_bytes(body)
        headers = None if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            async with asyncio.timeout(seconds):
                # A server that redirects would choose where the API key and the request go.
                request = self._session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                )
                async with request as response:
                    most = min(most_bytes or self._most, self._most)
                    status, content = response.status, await self._read(url, response, most)
        except TimeoutError:
            raise ServerError(f"{url} has not answered within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"no server answers at {url}: {error}") from None
        if len(content) <= MAX_SINGLE_PASS_BYTES:
            return _value(url, status, content, limits)
        # A large answer is read in pieces in another thread, while the answers of others are read here.
        return await asyncio.to_thread(_value, url, status, content, limits)

    async def _read(self, url: str, response: aiohttp.ClientResponse, most: int) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > most:
                raise ServerError(f"the answer of {url} is longer than {most} bytes")
        return bytes(content)


def _value(url: str, status: int, content: bytes, limits: JsonLimits) -> Any:
    try:
        value = read_json(content, limits)
        if status == 200:
            return value
        message = value["error"]["message"]
    except (ApiError, LookupError, TypeError) as error:
        shown = content[:SHOWN].decode(errors="replace")
        why = f", as {error}" if isinstance(error, ApiError) else ""
        message = f"the answer of {url} is no JSON of an API ({status}{why}): {shown}"
    raise ServerError(truncate_text(str(message), MAX_MESSAGE), status)


class HubClient:
    """Of the hub at `url`, for a trainer and for people: it waits, and without a limit while a hub has no room on its disk. patience: seconds that a hub which is not there, as it is started anew,
    is asked again. Then, and for what the hub refuses, as whatever a trainer says that another has replaced, all methods
    raise ServerError.

    Attributes:
      hindered: what the hub says stands in the way of the batch that was last asked for; empty once it is there.
      counts: of that batch, what the hub has counted since the one before (`Buffer.counted`).
    """

    def __init__(self, url: str, api_key: str | None = None, *, patience: float = 120.0):
        if not patience >= 0:
            raise ValueError(f"patience is {patience}; it must not be negative")
        self._client, self._patience = Client(url, api_key, direct=True), patience
        self._weights: dict[str, Any] | None = None  # that the engines have
        self._lease = 0  # of this trainer, once it has begun
        self.hindered: tuple[str, ...] = ()
        self.counts: dict[str, int] = {}

    def begin(self, step: int, version: int, checksum: str | None = None) -> None:
        """After a start or resume: the trainer has done `step` updates, and the engines have the weights of `version`,
        with the checksum that they tell of them."""
        weights = {"version": version, "checksum": checksum}
        self._lease = self._ask("/trainer/begin", {"step": step, **weights})["lease"]
        self._weights = weights

    def take(self, step: int, seconds: float = 60.0) -> list[Taken] | None:
        """The batch that the trainer of `step` updates learns from, waited for so long; None: it is not there yet. Asked
        again before it is trained on, the same."""
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            body = {"step": step, "seconds": min(left, POLL)}
            said = self._known(step, "/groups/take", body, body["seconds"])
            self.hindered = tuple(said.get("hindered", ()))
            self.counts = said.get("counts", {})
            if said["groups"] is not None:
                return [heard_taken(group) for group in said["groups"]]
            if time.monotonic() >= until:
                return None

    def trained(self, step: int) -> None:
        """The trainer has learnt from the batch of `step`, and has now done one update more."""
        self._known(step + 1, "/groups/trained", {"step": step})

    def push(self, version: int, checksum: str | None = None) -> None:
        """The engines have the weights of `version`; those that have others are asked for nothing."""
        weights = {"version": version, "checksum": checksum}
        self._known(version, "/version", weights)
        self._weights = weights

    def evaluate(self, count: int, seconds: float = 3600.0) -> dict[str, dict[str, Any]]:
        """By task, what became of attempts at so many held-out tasks at most: "reward", the mean, None if there is none;
        "count", of attempts that have one; "failed", of others."""
        return self._ask("/evaluate", {"count": count, "seconds": seconds}, seconds)["tasks"]

    def cancel(self, group_id: str, again: bool = False) -> None:
        """Calls off a group that is under way. again: whether its task number is to be admitted again."""
        self._ask("/groups/cancel", {"group_id": group_id, "again": again})

    def pause(self, paused: bool = True) -> None:
        """No group begins until it is told False; those under way go on."""
        self._ask("/pause" if paused else "/resume", {})

    def status(self) -> dict[str, Any]:
        """How everything is doing."""
        return self._ask("/status")

    def _known(self, step: int, path: str, body: Mapping, seconds: float = 0.0) -> Any:
        """As `_ask`; a hub that knows nothing, as it was started anew without a journal, is first told of this step."""
        try:
            return self._ask(path, body | {"lease": self._lease}, seconds)
        except ServerError as error:
            if error.status != NOT_BEGUN or self._weights is None:
                raise
        self.begin(step, **self._weights)
        if path == "/groups/trained":
            return {}
        return self._ask(path, body | {"lease": self._lease}, seconds)

    def _ask(self, path: str, body: Mapping | None = None, seconds: float = 0.0) -> Any:
        data = None if body is None else json_bytes(body)
        until, pause = time.monotonic() + self._patience, ""
        while True:
            try:
                with self._client.open(path, data, timeout_s=seconds + MARGIN) as response:
                    return json.load(response)
            except ServerError as error:
                if error.status == UNAVAILABLE:
                    # The hub is there and waits for room on its disk, as must the trainer.
                    if str(error) != pause:
                        _log.warning("%s", error)
                    until, pause = time.monotonic() + self._patience, str(error)
                elif error.status is not None or time.monotonic() > until:
                    raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                # It was killed in the middle of its answer.
                if time.monotonic() > until:
                    raise ServerError(f"the hub's answer to {path} has no end: {error}") from None
            time.sleep(AGAIN)


def told_taken(group: Taken) -> dict:
    """A group as JSON, each member once; `heard_taken` is the way back."""
    own = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    members = {member.rollout_id: member for member in group.members}
    return own | {
        "members": [member.told() for member in members.values()],
        "places": [member.rollout_id for member in group.members],
    }


def heard_taken(said: Mapping[str, Any]) -> Taken:
    """The group that `told_taken` spoke of; copies are the same objects."""
    said = dict(said)
    members = {one["rollout_id"]: trajectory(one) for one in said["members"]}
    places = said.pop("places")
    more = {"members": tuple(members[name] for name in places), "baseline": tuple(said["baseline"])}
    return Taken(**{**said, **more})
