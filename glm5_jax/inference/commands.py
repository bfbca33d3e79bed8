"""Commands of an engine of several processes: device programs that all its processes run in the same order.

The first process schedules. For each device program it sends the others a command with the host's arrays. A message
is two lengths, the command with the types and shapes of the arrays as MessagePack, and the bytes of the arrays.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from glm5_jax.inference.constraints import TokenRules
from glm5_jax.inference.sampling import SamplingParamsRow
from glm5_jax.inference.step_arrays import DecodeBatch, PrefillBatch, SamplingVariant

ProgramName = Literal["prefill", "decode"]
_LENGTHS = struct.Struct("!IQ")  # bytes of the head, and of the arrays


class _Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the commands."""


class RunStep(_Command, frozen=True, tag="run_step"):
    """Runs a prefill or a decode. Its arrays are changes of the page tables and the leaves of the batch.

    Attributes:
      program: name of the program.
      variant: options of sampling.
      width: columns of the page tables that the program reads.
      has_rules: whether the batch has rules of the drawn tokens.
    """

    program: ProgramName
    variant: SamplingVariant
    width: int
    has_rules: bool


class ReadSlot(_Command, frozen=True, tag="read_slot"):
    """Reads the cache of a sequence. Its array has the sequence's page numbers."""

    dp_rank: int
    slot: int


class WriteSlot(_Command, frozen=True, tag="write_slot"):
    """Writes the cache of a sequence. Its arrays are the page numbers and the leaves of the cache."""

    dp_rank: int
    slot: int


class OpenWeights(_Command, frozen=True, tag="open_weights"):
    """Opens new weights in every process.

    Attributes:
      source: JSON object that says where they are (`runner.WeightSource`).
    """

    source: dict[str, Any]


class LoadWeights(_Command, frozen=True, tag="load_weights"):
    """Loads the weights that were opened last."""


class Stop(_Command, frozen=True, tag="stop"):
    """Ends the process: no further command follows."""


class Listening(_Command, frozen=True, tag="listening"):
    """Sent to the first process: the HTTP server of the sender listens at this port."""

    port: int


class StopRequested(_Command, frozen=True, tag="stop_requested"):
    """Sent to the first process: the sender has received a stop signal."""


Command = (
    RunStep | ReadSlot | WriteSlot | OpenWeights | LoadWeights | Stop | Listening | StopRequested
)
Send = Callable[[Command, Sequence[np.ndarray]], None]
_DECODER = msgspec.msgpack.Decoder(tuple[Command, list[tuple[str, tuple[int, ...]]]])


def encode(command: Command, arrays: Sequence[np.ndarray] = ()) -> bytes:
    """Returns the message of a command and its arrays."""
    head = msgspec.msgpack.encode((command, [(a.dtype.name, a.shape) for a in arrays]))
    lengths = _LENGTHS.pack(len(head), sum(a.nbytes for a in arrays))
    return b"".join([lengths, head, *(a.tobytes() for a in arrays)])


def decode(read: Callable[[int], bytes]) -> tuple[Command, list[np.ndarray]]:
    """Reads one message and returns the command and its arrays.

    read: returns the next bytes of a stream, exactly as many as it is asked for.
    """
    head_bytes, body_bytes = _LENGTHS.unpack(read(_LENGTHS.size))
    command, types = _DECODER.decode(read(head_bytes))
    return command, list(_split(read(body_bytes), types))


def _split(body: bytes, types: Iterable[tuple[str, tuple[int, ...]]]) -> Iterable[np.ndarray]:
    """Yields the arrays in the bytes of a message."""
    start = 0
    for name, shape in types:
        dtype = np.dtype(name)
        count = int(np.prod(shape))
        yield np.frombuffer(body, dtype, count, start).reshape(shape)
        start += count * dtype.itemsize


def _structure(program: type[PrefillBatch] | type[DecodeBatch], has_rules: bool):
    """Returns the structure of a batch as a tree."""
    leaf: Any = 0
    fields: dict[str, Any] = dict.fromkeys(program._fields, leaf)
    if "rows" in fields:
        fields["rows"] = SamplingParamsRow(*[leaf] * len(SamplingParamsRow._fields))
    fields["rules"] = TokenRules(leaf, leaf, leaf) if has_rules else None
    return jax.tree.structure(program(**fields))


# By the program, and whether the batch has rules of the drawn tokens.
BATCH_STRUCTURES = {
    (name, has_rules): _structure(program, has_rules)
    for name, program in (("prefill", PrefillBatch), ("decode", DecodeBatch))
    for has_rules in (False, True)
}
