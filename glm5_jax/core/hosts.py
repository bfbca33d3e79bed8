"""What the processes of a pod tell each other, in numbers and words; one process talks to itself."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def everyones(value) -> list:
    """What each process passed, in the order of processes; anything that JSON holds.

    All processes must call it, as they must the others here.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.asarray(len(text))).max())
    padded = np.pad(text, (0, longest - len(text)), constant_values=ord(" "))
    return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]


def anyone(flag) -> bool:
    """Whether some process passed a true flag."""
    if jax.process_count() == 1:
        return bool(flag)
    return bool(multihost_utils.process_allgather(bool(flag)).any())


def agree(error: Exception | None) -> None:
    """Raises in every process if one has passed an error: its own, or a ValueError that tells the first
    of the others'. Without it the others would wait for one that has stopped."""
    if anyone(error is not None):
        if error is not None:
            everyones(str(error))
            raise error
        raise ValueError(next(told for told in everyones(None) if told is not None))


def first_does(action: Callable[[], Any]) -> None:
    """Runs action in the first process alone. What it raises there, every process raises: of the same
    kind if it is an OSError or a ValueError, otherwise a RuntimeError."""
    error = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as raised:
            error = raised
    kinds = {"OSError": OSError, "ValueError": ValueError}
    kind = next((k for k, c in kinds.items() if isinstance(error, c)), "")
    told = everyones(None if error is None else [kind, str(error)])[0]
    if error is not None:
        raise error
    if told is not None:
        raise kinds.get(told[0], RuntimeError)(told[1])


def of_first(action: Callable[[], Any]) -> Any:
    """What action returns in the first process, where alone it runs: anything that JSON holds. Errors as of `first_does`."""
    found = []
    first_does(lambda: found.append(action()))
    if jax.process_count() == 1:
        return found[0]
    # Not `everyones`, in which each process holds as much from all of them.
    text = np.frombuffer(json.dumps(found[0]).encode() if found else b"", np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.asarray(len(text))))
    text = text if found else np.zeros(length, np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(text).tobytes())
