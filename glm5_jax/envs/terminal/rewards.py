"""Reads the reward that a test script wrote, by Harbor's rules."""

import json
import math
from collections.abc import Mapping

MAX_BYTES = 1 << 16  # size of a reward file


class RewardError(ValueError):
    """Raised if no reward can be read: missing, empty, no number, not finite, or no regular file."""


def read_json(data: bytes) -> tuple[float, Mapping[str, float]]:
    """Returns the reward and its parts from a `reward.json`: a number, or an object of numbers.

    The reward of an object is the value of "reward", or its only value. Raises RewardError.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"reward.json is no JSON: {error}") from None
    if not isinstance(content, dict):
        return _finite(content, "reward.json"), {}
    if not content:
        raise RewardError("reward.json is an empty object")
    parts = {name: _finite(value, f"{name!r} in reward.json") for name, value in content.items()}
    if "reward" not in parts and len(parts) > 1:
        raise RewardError(f"reward.json has no 'reward' among {', '.join(sorted(parts))[:200]}")
    return parts.get("reward", next(iter(parts.values()))), parts


def read_text(data: bytes) -> float:
    """Returns the number in a `reward.txt`. Raises RewardError."""
    text = data.decode("utf-8", errors="replace").strip()
    if not text:
        raise RewardError("reward.txt is empty")
    try:
        value = float(text.replace("_", "?"))
    except ValueError:
        raise RewardError(f"reward.txt holds {text[:60]!r}, no number") from None
    return _finite(value, "reward.txt")


def _finite(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RewardError(f"{where} is {str(value)[:60]!r}, no number")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise RewardError(f"{where} is {value}, no finite number")
    return value
