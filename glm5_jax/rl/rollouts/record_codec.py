"""Encodes the token records of a rollout for the way from the gateway to the trainer.

The form is msgpack: for each record its status and its streams as bytes. Numbers as text would take three times the bytes.
Equal records have equal bytes, so that a digest of the bytes identifies them.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from glm5_jax.data.record import STREAMS, TokenRecord

_DIGEST_BYTES = 16


class _EncodedRecord(msgspec.Struct, array_like=True):
    """Record as it is sent.

    Attributes:
      status: status of the record.
      streams: bytes of each filled stream by name, little-endian, in the dtype of `STREAMS`.
    """

    status: str
    streams: dict[str, bytes]


def encode_records(records: Sequence[TokenRecord]) -> bytes:
    """Returns the bytes of sampled records; `decode_records` is the inverse."""
    return msgspec.msgpack.encode(
        [
            _EncodedRecord(
                record.status,
                {
                    name: stream.astype(_wire_dtype(name), copy=False).tobytes()
                    for name, stream in record.streams().items()
                },
            )
            for record in records
        ]
    )


def decode_records(content: bytes, **fields: Any) -> tuple[TokenRecord, ...]:
    """Returns the records that `encode_records` encoded, with further fields. Raises ValueError for other bytes."""
    try:
        return tuple(
            TokenRecord(
                status=encoded.status,
                **{
                    name: np.frombuffer(stream, _wire_dtype(name))
                    for name, stream in encoded.streams.items()
                },
                **fields,
            )
            for encoded in msgspec.msgpack.decode(content, type=list[_EncodedRecord])
        )
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ValueError(
            f"the bytes are no token records ({error}); send what the gateway sent"
        ) from None


def digest_of(content: bytes) -> str:
    """Returns the digest of encoded records."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _wire_dtype(name: str) -> np.dtype:
    return np.dtype(STREAMS[name]).newbyteorder("<")
