"""Commands of an engine of several processes: device programs that all its processes run in the same order.

The first process schedules. For each device program it sends the others a command with the host's arrays, as a message
of array_messages.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from glm5_jax.inference.array_messages import ArrayMessages
from glm5_jax.inference.constraints import TokenRules
from glm5_jax.inference.sampling import SamplingParamsRow
from glm5_jax.inference.step_arrays import DecodeBatch, PrefillBatch, SamplingVariant

ProgramName = Literal["prefill", "decode"]


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


class ReadPages(_Command, frozen=True, tag="read_pages"):
    """Reads pages. Its array has their numbers."""


class WritePages(_Command, frozen=True, tag="write_pages"):
    """Writes pages. Its arrays are their numbers and the leaves of their contents."""


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
    RunStep | ReadPages | WritePages | OpenWeights | LoadWeights | Stop | Listening | StopRequested
)
Send = Callable[[Command, Sequence[np.ndarray]], None]
MESSAGES = ArrayMessages(Command)


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
