"""Sends replies as server-sent events, and encodes long pieces outside the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from glm5_jax.inference.pending_requests import PendingRequests
from glm5_jax.inference.replies import ReplyForm
from glm5_jax.runtime.http_server import ApiError
from glm5_jax.runtime.json_encoding import encode_in_pieces, json_bytes

# Larger pieces of a stream are encoded in a thread, because with log-probs they take milliseconds.
_MAX_INLINE_TOKENS = 32


async def send_events(
    write: Callable[[bytes], Awaitable[Any]],
    reply: ReplyForm,
    pending: PendingRequests,
    check_failed: Callable[[], None],
) -> None:
    """Sends one event for each chunk of a reply, then [DONE] unless the events have names.

    Args:
      write: sends bytes to the client. Its ConnectionResetError is raised if the client has disconnected.
      check_failed: raises ApiError if the engine or a request has failed.
    """

    async def send(objects):
        for one in objects:
            await write(_event(one, json_bytes(one), reply.has_named_events))

    loop, num_sent = asyncio.get_running_loop(), [0] * len(pending.handles)
    await send(reply.first())
    async for indices in pending.updates():
        for index in indices:
            # For a slow client tokens accumulate, and their log-probs take long to encode.
            num_tokens = pending.handles[index].num_tokens
            is_large = reply.is_cumulative or num_tokens - num_sent[index] > _MAX_INLINE_TOKENS
            num_sent[index] = num_tokens
            if is_large:
                for event in await loop.run_in_executor(None, _large_events, reply, index):
                    await write(event)
            else:
                await send(reply.piece(index))
    try:
        check_failed()
        await send(reply.last())
    except ApiError as error:
        await send(reply.failed(error))
    if not reply.has_named_events:
        await write(b"data: [DONE]\n\n")


def _event(value: Mapping, data: bytes, is_named: bool) -> bytes:
    """Returns a server-sent event of a value with this JSON."""
    name = b"event: " + value["type"].encode() + b"\n" if is_named else b""
    return name + b"data: " + data + b"\n\n"


def _large_events(reply: ReplyForm, index: int) -> list[bytes]:
    """Returns the events of a piece of many tokens. It is slow, so call it outside the event loop."""
    is_named = reply.has_named_events
    return [_event(one, encode_in_pieces(one), is_named) for one in reply.piece(index)]
