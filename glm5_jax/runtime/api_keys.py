"""Reads API keys, which clients send to servers and servers compare, from files and configs."""

import os
import pathlib
import re
from typing import Any

_KEY = re.compile("[!-~]+")  # characters that a header can hold


def read_key(file: str | os.PathLike, name: str = "api_key_file") -> str:
    """Returns the API key in a file. Raises ValueError, with the option's name, if there is none."""
    try:
        key = pathlib.Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} {file} cannot be read ({error}); name a file") from None
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"{name} {file} must hold the key and nothing else: letters, digits and punctuation of ASCII, no spaces"
        )
    return key


def load_api_key(config: Any) -> str | None:
    """Returns the API key of a config with the fields api_key and api_key_file. Raises ValueError if the file holds none."""
    if config.api_key is None and config.api_key_file is not None:
        return read_key(config.api_key_file)
    return config.api_key
