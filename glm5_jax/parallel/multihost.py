"""Collectives over the processes of a pod, for values that JSON holds and for arrays.

All processes must call each of these functions. With one process they need no network.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def all_gather_objects(value: Any) -> list:
    """Returns the values of all processes, in the order of processes; a value is anything that JSON holds."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(multihost_utils.process_allgather(np.asarray(len(text))).max())
    padded = np.pad(text, (0, longest - len(text)), constant_values=ord(" "))
    return [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded)]


def fetch_array(array: jax.Array) -> np.ndarray:
    """Returns all of an array in every process. The devices of other processes may hold parts of it."""
    if jax.process_count() == 1:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def any_process(flag: Any) -> bool:
    """Returns True if at least one process passed a true flag."""
    if jax.process_count() == 1:
        return bool(flag)
    return bool(multihost_utils.process_allgather(bool(flag)).any())


def raise_on_all(error: Exception | None) -> None:
    """Raises in every process if one of them passed an error.

    A process that passed an error raises it; the others raise a ValueError with the message of the first one.
    Otherwise they would wait for a process that has stopped.
    """
    if any_process(error is not None):
        if error is not None:
            all_gather_objects(str(error))
            raise error
        raise ValueError(next(text for text in all_gather_objects(None) if text is not None))


def run_on_first(action: Callable[[], Any]) -> None:
    """Runs action in the first process only, and raises its error in every process.

    In the other processes OSError and ValueError keep their kind; any other error is a RuntimeError.
    """
    run_on_all(action if jax.process_index() == 0 else lambda: None)


def run_on_all(action: Callable[[], Any]) -> None:
    """Runs action in every process, and raises an error of one of them in every process; see `run_on_first`."""
    error = None
    try:
        action()
    except Exception as raised:
        error = raised
    kinds = {"OSError": OSError, "ValueError": ValueError}
    kind = next((k for k, c in kinds.items() if isinstance(error, c)), "")
    failures = all_gather_objects(None if error is None else [kind, str(error)])
    if error is not None:
        raise error
    failure = next((failure for failure in failures if failure is not None), None)
    if failure is not None:
        raise kinds.get(failure[0], RuntimeError)(failure[1])


def broadcast_from_first(action: Callable[[], Any]) -> Any:
    """Runs action in the first process only, and returns its result, anything that JSON holds, in every process.

    Raises the errors of `run_on_first`.
    """
    if jax.process_count() == 1:
        return action()
    return json.loads(broadcast_bytes_from_first(lambda: json.dumps(action()).encode()))


def broadcast_bytes_from_first(action: Callable[[], bytes]) -> bytes:
    """Runs action in the first process only, and returns its result in every process.

    Raises the errors of `run_on_first`.
    """
    results: list[bytes] = []
    run_on_first(lambda: results.append(action()))
    if jax.process_count() == 1:
        return results[0]
    # Not `all_gather_objects`, with which every process would hold a buffer of this size for each process.
    content = np.frombuffer(results[0] if results else b"", np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.asarray(len(content))))
    content = content if results else np.zeros(length, np.uint8)
    return multihost_utils.broadcast_one_to_all(content).tobytes()
