"""Keeps the API key of a run in a file of mode 600, which all its programs read.

The first program that starts creates the file in the workdir, and every program sends the key and requires it. A file is used
because `ps` shows flags to all users, and child processes inherit the environment.
"""

import os
import pathlib
import secrets
import stat

KEY_FILE = "run.key"
_OTHERS = 0o077  # rights of everyone but the owner


def ensure_key_file(path: str | os.PathLike) -> pathlib.Path:
    """Returns the path of a key file, and creates it with a random key if there is none.

    Raises ValueError if it cannot be created, or if other users have rights on it.
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
    """Writes a new key. Of programs that start at once one creates the file, whole, and the others keep that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
        # Not os.replace, which would overwrite a key that another program has already read.
        os.link(unfinished, path)
    except FileExistsError:
        pass
    finally:
        unfinished.unlink(missing_ok=True)
