"""Writes and reads the file by which a server reports its port to the process that started it."""

import json
import os


def write_port_file(ready_file: str, port: int) -> None:
    """Writes {"port": port} into a file atomically; `read_port_file` reads it."""
    unfinished = f"{ready_file}.{os.getpid()}"
    with open(unfinished, "w") as file:
        json.dump({"port": port}, file)
    os.replace(unfinished, ready_file)


def read_port_file(ready_file: str | os.PathLike) -> int | None:
    """Returns the port that `write_port_file` wrote; None: no file yet. Raises ValueError for other contents."""
    try:
        with open(ready_file) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        return int(json.loads(text)["port"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f'{ready_file} has {text[:100]!r}; a server writes {{"port": N}}'
        ) from None
