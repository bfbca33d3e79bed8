"""HTTP clients of the asynchronous RL system.

- `JsonClient`: asynchronous client of any server that speaks JSON; the orchestrator and the task services use it.
- `OrchestratorClient`: blocking client of the orchestrator; the trainer uses it, and people do.
"""

import asyncio
import concurrent.futures
import dataclasses
import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from glm5_jax.inference.client import Client, ServerError
from glm5_jax.rl.request_bodies import (
    BeginTrainer,
    CancelGroup,
    EvaluateTasks,
    MarkLost,
    MarkTrained,
    SetWeights,
    TakeGroups,
)
from glm5_jax.rl.rollouts.client import RecordClient, is_refused
from glm5_jax.rl.rollouts.record_codec import decode_records
from glm5_jax.rl.trajectory import BatchGroup, Trajectory
from glm5_jax.runtime.http_server import ApiError, read_json, truncate_text
from glm5_jax.runtime.json_body import MAX_SINGLE_PASS_BYTES, JsonLimits
from glm5_jax.runtime.json_encoding import json_bytes
from glm5_jax.runtime.json_structs import JsonStruct

_log = logging.getLogger(__name__)
_Leased = TakeGroups | MarkLost | MarkTrained | SetWeights
MAX_SHOWN_BYTES = 200  # of a response that is not JSON, in error messages
MAX_MESSAGE_LENGTH = 2000  # characters of an error message from a server
NO_TRAINER = 428  # HTTP status: the orchestrator does not know the trainer's position
UNAVAILABLE = 503  # HTTP status: the orchestrator cannot store the request now
RETRY_DELAY_S = 0.5  # between two attempts to reach the orchestrator
POLL_TIMEOUT_S = 30.0  # longest wait of one request for a batch
RESPONSE_MARGIN_S = 60.0  # time for a response in addition to the wait that the request asks for


class JsonClient:
    """Asynchronous HTTP client for JSON, with any number of concurrent requests.

    Requests are possible inside `async with`, which may be entered several times.

    - api_key: key that the servers require; None: no key.
    - max_response_bytes: size limit of a response, in bytes.
    """

    def __init__(self, api_key: str | None = None, *, max_response_bytes: int = 2**28):
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._max_response_bytes = max_response_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "JsonClient":
        # `timeout_s` is the only time limit; a connection limit would make requests wait on that clock.
        connector, no_timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=connector, timeout=no_timeout
        )
        return self

    async def __aexit__(self, *_) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        url: str,
        body: Any = None,
        *,
        timeout_s: float,
        max_response_bytes: int | None = None,
        limits: JsonLimits = JsonLimits(),
        api_key: str | None = None,
    ) -> Any:
        """Sends a request and returns the JSON value of the response.

        Raises ServerError unless the status is 200 and the body is JSON within the time and size limits.

        - max_response_bytes: size limit of this response; None: that of the client. The smaller one applies.
        - limits: limits on the values of the response.
        - api_key: key of this server; None: that of the client.
        """
        if self._session is None:
            raise RuntimeError("the client is not open; use it within `async with`")
        data = None if body is None else json_bytes(body)
        headers = None if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            async with asyncio.timeout(timeout_s):
                # Redirects are refused, because the server would choose where the API key and the request go.
                request = self._session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                )
                async with request as response:
                    max_bytes = min(
                        max_response_bytes or self._max_response_bytes, self._max_response_bytes
                    )
                    status, content = response.status, await self._read(url, response, max_bytes)
        except TimeoutError:
            raise ServerError(f"{url} has not answered within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"no server answers at {url}: {error}") from None
        if len(content) <= MAX_SINGLE_PASS_BYTES:
            return _parse_response(url, status, content, limits)
        # A large response is parsed in another thread, so that the event loop can read other responses.
        return await asyncio.to_thread(_parse_response, url, status, content, limits)

    async def _read(self, url: str, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > max_bytes:
                raise ServerError(f"the response of {url} is longer than {max_bytes} bytes")
        return bytes(content)


def _parse_response(url: str, status: int, content: bytes, limits: JsonLimits) -> Any:
    try:
        value = read_json(content, limits)
        if status == 200:
            return value
        message = value["error"]["message"]
    except (ApiError, LookupError, TypeError) as error:
        shown = content[:MAX_SHOWN_BYTES].decode(errors="replace")
        why = f", because {error}" if isinstance(error, ApiError) else ""
        message = f"the response of {url} is not the JSON of an API ({status}{why}): {shown}"
    raise ServerError(truncate_text(str(message), MAX_MESSAGE_LENGTH), status)


class OrchestratorClient:
    """Blocking client of the orchestrator at `url`, for the trainer and for people.

    - An orchestrator that does not answer, because it restarts, gets the same request for up to `patience_s` seconds.
    - An orchestrator without disk space for its journal gets the same request until it has space.
    - The token records of a batch come from the gateway. While it does not answer, the batch is not ready.

    After that, and if the orchestrator refuses a request, all methods raise ServerError. The orchestrator refuses all
    requests of a trainer that another trainer has replaced.

    Attributes:
      blockers: reasons of the orchestrator why the last requested batch is not ready; empty when it is.
      counts: counts of the orchestrator between the previous batch and this one (`GroupBuffer.batch_counts`).
      should_stop: returns whether the program was asked to stop; then a failed request is not repeated.
    """

    def __init__(self, url: str, api_key: str | None = None, *, patience_s: float = 120.0):
        if not patience_s >= 0:
            raise ValueError(f"patience_s is {patience_s}; it must not be negative")
        self._client, self._patience_s = Client(url, api_key, direct=True), patience_s
        self._api_key = api_key
        self._weights: tuple[int, str | None] | None = None  # version and checksum in the engines
        self._lease = 0  # of this trainer; 0: it has not begun
        self._evaluation: concurrent.futures.Future | None = None  # requested, without a result
        self.blockers: tuple[str, ...] = ()
        self.counts: dict[str, int] = {}
        self.should_stop: Callable[[], bool] = lambda: False

    def begin(self, step: int, version: int, checksum: str | None = None) -> None:
        """Registers the trainer after a start or a resume.

        - step: number of updates that the trainer has done.
        - version, checksum: weights in the engines, with the checksum that the engines report.
        """
        body = BeginTrainer(step=step, version=version, checksum=checksum)
        self._lease = self._request("/trainer/begin", body)["lease"]
        self._weights = version, checksum

    def take(self, step: int, timeout_s: float = 60.0) -> list[BatchGroup] | None:
        """Returns the batch that the trainer trains on after `step` updates; None if it is not ready in time.

        Until the batch is trained on, repeated calls return the same batch, unless the gateway has lost token records
        meanwhile. Their rollouts have then failed, and the orchestrator repairs or replaces the groups.
        """
        end = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, end - time.monotonic())
            wait_s = min(remaining_s, POLL_TIMEOUT_S)
            body = TakeGroups(lease=self._lease, step=step, timeout_s=wait_s)
            response = self._request_with_lease(step, "/groups/take", body, wait_s)
            self.blockers = tuple(response.get("blockers", ()))
            self.counts = response.get("counts", {})
            if response["groups"] is not None:
                groups = [batch_group_from_json(group) for group in response["groups"]]
                remaining_s = max(0.0, end - time.monotonic())
                contents = self._fetch_records(response["gateway"], groups, remaining_s)
                if contents is None:
                    return None
                lost = sorted({m.rollout_id for g in groups for m in g.members} - contents.keys())
                if not lost:
                    return with_records(groups, contents)
                _log.warning("the gateway has lost the records of %s", ", ".join(lost))
                body = MarkLost(lease=self._lease, rollout_ids=lost)
                self._request_with_lease(step, "/groups/lost", body)
            elif time.monotonic() >= end:
                return None

    def _fetch_records(
        self, gateway: str, groups: Sequence[BatchGroup], timeout_s: float
    ) -> dict[str, bytes] | None:
        """Returns the encoded records of the members of groups, by rollout, without lost ones.

        Returns None, and sets `blockers`, if the gateway does not answer in time. Raises ServerError if it refuses.
        """
        digests = {
            member.rollout_id: member.summary.digest
            for group in groups
            for member in group.members
            if member.summary is not None
        }
        try:
            return RecordClient(gateway, self._api_key).fetch(digests, timeout_s)
        except ServerError as error:
            if is_refused(error):
                raise
            self.blockers = (f"the gateway at {gateway} fails: {error}",)
            return None

    def mark_trained(self, step: int) -> None:
        """Reports that the trainer has trained on the batch of `step`, and has done one more update."""
        body = MarkTrained(lease=self._lease, step=step)
        self._request_with_lease(step + 1, "/groups/trained", body)

    def push(self, version: int, checksum: str | None = None) -> None:
        """Reports that the engines have these weights. Engines that have others get no requests."""
        body = SetWeights(lease=self._lease, version=version, checksum=checksum)
        self._request_with_lease(version, "/version", body)
        self._weights = version, checksum

    def evaluate(
        self,
        count: int,
        timeout_s: float = 3600.0,
        *,
        group: int = 1,
        temperature: float | None = None,
        top_p: float | None = None,
        wait_s: float | None = None,
    ) -> dict[str, dict[str, Any]] | None:
        """Runs attempts at up to `count` held-out tasks of every task service, and returns results by task.

        A result has "reward", the mean, None without rewards; "count" of attempts with a reward; "failed", the others.

        - timeout_s: time limit of the evaluation, in seconds.
        - group: attempts at each task.
        - temperature, top_p: sampling distribution; None: that of the samples to train on.
        - wait_s: time limit of this call, in seconds; None: that of the evaluation. After it the result is None, and the
          next call waits for the same evaluation.
        """
        if self._evaluation is None:
            body = EvaluateTasks(
                count=count,
                timeout_s=timeout_s,
                group=group,
                temperature=temperature,
                top_p=top_p,
            )
            self._evaluation = _run_in_thread(lambda: self._request("/evaluate", body, timeout_s))
        if not concurrent.futures.wait([self._evaluation], wait_s).done:
            return None
        evaluation, self._evaluation = self._evaluation, None
        return evaluation.result()["tasks"]

    def cancel(self, group_id: str, should_resample: bool = False) -> None:
        """Cancels a running group. should_resample: whether its task number is sampled again."""
        body = CancelGroup(group_id=group_id, should_resample=should_resample)
        self._request("/groups/cancel", body)

    def pause(self, is_paused: bool = True) -> None:
        """Stops new groups from starting, or allows it with False. Running groups continue."""
        self._request("/pause" if is_paused else "/resume", {})

    def status(self) -> dict[str, Any]:
        """Returns the status of the orchestrator, its gateway and its task services."""
        return self._request("/status")

    def _request_with_lease(
        self, step: int, path: str, body: _Leased, wait_s: float = 0.0
    ) -> dict[str, Any]:
        """Sends a request with the trainer's lease.

        An orchestrator that restarted without a journal knows no trainer; then `begin` is repeated with this step.
        """
        try:
            return self._request(path, body, wait_s)
        except ServerError as error:
            if error.status != NO_TRAINER or self._weights is None:
                raise
        self.begin(step, *self._weights)
        if path == "/groups/trained":
            return {}
        return self._request(path, body.replace(lease=self._lease), wait_s)

    def _request(
        self, path: str, body: JsonStruct | Mapping | None = None, wait_s: float = 0.0
    ) -> Any:
        data = None if body is None else json_bytes(body)
        end, last_warning = time.monotonic() + self._patience_s, ""
        while True:
            try:
                timeout_s = wait_s + RESPONSE_MARGIN_S
                with self._client.open(path, data, timeout_s=timeout_s) as response:
                    return json.load(response)
            except ServerError as error:
                if error.status == UNAVAILABLE:
                    # The orchestrator runs and waits for disk space, so the trainer must wait too.
                    if str(error) != last_warning:
                        _log.warning("%s", error)
                    end, last_warning = time.monotonic() + self._patience_s, str(error)
                elif error.status is not None or time.monotonic() > end or self.should_stop():
                    raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                # The orchestrator was killed while it sent the response.
                if time.monotonic() > end or self.should_stop():
                    raise ServerError(
                        f"the orchestrator's response to {path} is incomplete: {error}"
                    ) from None
            time.sleep(RETRY_DELAY_S)


def _run_in_thread(request: Callable[[], Any]) -> concurrent.futures.Future:
    """Runs a request in a thread that does not keep the program from ending."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="evaluation").start()
    return future


def batch_group_to_json(group: BatchGroup) -> dict:
    """Returns a group as JSON without records, with each member once; `batch_group_from_json` is the inverse."""
    fields = msgspec.to_builtins(dataclasses.replace(group, members=()))
    members = {member.rollout_id: member for member in group.members}
    return fields | {
        "members": [member.to_json() for member in members.values()],
        "member_ids": [member.rollout_id for member in group.members],
    }


def batch_group_from_json(body: Mapping[str, Any]) -> BatchGroup:
    """Returns the group that `batch_group_to_json` encoded; repeated members are the same object."""
    group = msgspec.convert(body, BatchGroup)
    members = {member.rollout_id: member for member in group.members}
    return dataclasses.replace(
        group, members=tuple(members[rollout_id] for rollout_id in body["member_ids"])
    )


def with_records(groups: Sequence[BatchGroup], contents: Mapping[str, bytes]) -> list[BatchGroup]:
    """Returns groups whose members have their records; repeated members are the same object.

    contents: encoded records by rollout.
    """

    def load(member: Trajectory) -> Trajectory:
        records = decode_records(
            contents[member.rollout_id], rollout_id=member.rollout_id, group_id=member.group_id
        )
        return dataclasses.replace(member, records=records)

    loaded = []
    for group in groups:
        members = {m.rollout_id: m for m in group.members}
        members = {name: load(member) for name, member in members.items()}
        loaded.append(
            dataclasses.replace(group, members=tuple(members[m.rollout_id] for m in group.members))
        )
    return loaded
