"""Stores the API key of a run in a file of mode 600, which all programs of the run read.

The first program that starts creates the file in the workdir. Every program sends the key and requires it. The key is
not a flag, because `ps` shows flags to all users, and not an environment variable, because child processes inherit it.
"""

import os
import pathlib
import secrets
import stat

KEY_FILE = "run.key"
_OTHERS = 0o077  # permission bits of group and others


def ensure_key_file(path: str | os.PathLike) -> pathlib.Path:
    """Creates a key file with a random key unless it exists, and returns its path.

    Raises ValueError if it cannot be created, or if other users have permissions on it.
    """
    path = pathlib.Path(path)
    try:
        if not path.exists():
            _create(path)
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(
            f"the key file {path} cannot be created ({error}); write a random key into it, with mode 600"
        ) from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"the key file {path} is no regular file; move it away, or name another")
    if mode & _OTHERS:
        raise ValueError(
            f"the key file {path} has mode {mode & 0o777:03o}, so other users may use it; run chmod 600 on it"
        )
    return path


def _create(path: pathlib.Path) -> None:
    """Creates the file with a new key. If several programs start at once, the file of the first one remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
        # os.replace would overwrite a key that another program has already read.
        os.link(unfinished, path)
    except FileExistsError:
        pass
    finally:
        unfinished.unlink(missing_ok=True)
