"""Messages between a server that decodes and one that prefills.

The first posts a `PrefillRequest` to `/prefill`. The second answers with parts as they are computed, each a message of
array_messages.py with a `PartHead` and the arrays of `PrefixPages`. The last part has no pages.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from glm5_jax.inference.array_messages import LENGTHS_SIZE, ArrayMessages, encode, lengths
from glm5_jax.inference.kv_transfer.pages import PrefixPages
from glm5_jax.inference.request_bodies import Version
from glm5_jax.runtime.json_body import MAX_VALUES
from glm5_jax.runtime.json_structs import Count, JsonStruct

MAX_PART_BYTES = 2**33  # GLM-5 in bf16: 0.1 MB a token, 0.5 GB for a chunk of 4,096
_MAX_HEAD_BYTES = 2**20


class PrefillRequest(JsonStruct, kw_only=True, frozen=True):
    """Body of `/prefill`.

    Attributes:
      ids: token ids of the prompt.
      start: number of pages of the prompt that the receiver has.
      model: name of the served model.
      version: version of the weights.
      layout: `Engine.page_layout` of the receiver.
    """

    ids: Annotated[list[Count], Meta(min_length=1, max_length=MAX_VALUES)]
    start: Count = 0
    model: str
    version: Version
    layout: Annotated[str, Meta(max_length=64)]


class PartHead(msgspec.Struct, kw_only=True, frozen=True):
    """Head of a part: its first page in the prompt, and its number of pages."""

    start: int
    count: int


_PARTS = ArrayMessages[PartHead](PartHead)
END = encode(PartHead(start=0, count=0))


def encode_part(part: PrefixPages) -> bytes:
    """Returns the message of a part, without its padding. Waits for the arrays."""
    arrays = [np.asarray(array)[: part.count] for array in part.arrays]
    return encode(PartHead(start=part.start, count=part.count), arrays)


async def read_part(
    read: Callable[[int], Coroutine[None, None, bytes]], layout: str
) -> PrefixPages | None:
    """Reads a part; None: it was the last one. Raises ValueError for other data.

    read: returns the next bytes of the stream, exactly as many as it is asked for.
    """
    head_bytes, body_bytes = lengths(await read(LENGTHS_SIZE))
    if head_bytes > _MAX_HEAD_BYTES or body_bytes > MAX_PART_BYTES:
        raise ValueError(f"a part has a head of {head_bytes} bytes and {body_bytes} bytes of pages")
    head, arrays = _PARTS.decode(await read(head_bytes), await read(body_bytes))
    if head.count == 0:
        return None
    if head.start < 0 or not arrays or any(len(array) != head.count for array in arrays):
        raise ValueError(f"a part of {head.count} pages has arrays of other sizes")
    return PrefixPages(head.start, head.count, layout, arrays)
