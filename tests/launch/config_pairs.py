"""Sets two fields of an experiment at once to absurd or contradictory values, and checks what its checks say.

A config is accepted, or refused by one ValueError that names one of the two fields. No model is built and nothing is compiled.
"""

import dataclasses
import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from glm5_jax.runtime.config_flags import to_frozen, to_mutable
from launch import command_line

RECIPES = (
    "pretrain:tiny",
    "sft:tiny,mixed",
    "rl_agentic:tiny",
    "serve:tiny",
    "evaluate:questions",
)
MAX_CPU_S = 3.0
_MAX_MESSAGE = 3000
_INTEGERS = (0, 1, -1, 3, 7, 2**31 - 1, 2**31, 2**63, 10**18, -(2**63), 10**400)
_FLOATS = (0.0, -1.0, 1.0, 1e-30, 1e300, math.inf, -math.inf, math.nan)
_TEXTS = ("", "x", "None", "é日 本", "/nowhere", "a\0b", "../..", "x" * 5000, "\ud800")
_OTHERS = (None, True, (), "x", 1.5, [], {}, (1, 2), 10**400, math.nan)


class Field(NamedTuple):
    """Field of a config: its path, its value, and its type."""

    path: tuple[str, ...]
    value: Any
    kind: Any


def fields_of(config: Any) -> list[Field]:
    """Returns the fields that flags set, of all dataclasses in a config."""
    return list(_walk(to_mutable(config), ()))


def _walk(mutable: Any, path: tuple[str, ...]) -> Iterator[Field]:
    for field in dataclasses.fields(mutable):
        value = getattr(mutable, field.name)
        if hasattr(value, "frozen_class"):
            yield from _walk(value, (*path, field.name))
        else:
            yield Field((*path, field.name), value, field.type)


def draw_value(field: Field, draw: random.Random) -> Any:
    """Returns an absurd value of the field's type, and at times of another type."""
    value, kind = field.value, field.kind
    if draw.random() < 0.1:
        return draw.choice(_OTHERS)
    if isinstance(value, bool) or kind is bool:
        return not value
    if isinstance(value, int) or kind is int:
        near = [value + 1, value - 1, 3 * value] if isinstance(value, int) else []
        return draw.choice([*_INTEGERS, *near])
    if isinstance(value, float) or kind is float:
        return draw.choice([*_FLOATS, *([2 * value] if isinstance(value, float) else [])])
    if isinstance(value, str) or kind is str:
        return draw.choice(_TEXTS)
    if isinstance(value, tuple) and value:
        return draw.choice([(), value[:-1], (*value, *value)])
    return draw.choice([*_INTEGERS, *_FLOATS, *_TEXTS, *_OTHERS])


class PairResult(NamedTuple):
    """Answer of the checks of a config to two values.

    Attributes:
      values: values by path.
      error: error; None: the values are accepted.
      cpu_s: processor time, in seconds.
    """

    values: dict[str, Any]
    error: BaseException | None
    cpu_s: float

    @property
    def problem(self) -> str | None:
        """Returns what is wrong with the answer of the checks; None if nothing is."""
        if self.cpu_s > MAX_CPU_S:
            return f"it took {self.cpu_s:.1f} s"
        if self.error is None:
            return None
        text = str(self.error)
        if not isinstance(self.error, ValueError):
            return f"{type(self.error).__name__}: {text[:200]!a}"
        if len(text) > _MAX_MESSAGE + max(len(repr(value)) for value in self.values.values()):
            return f"an error of {len(text)} characters"
        names = {name for path in self.values for name in path.split(".")[-1:]}
        if not any(name in text for name in names):
            return f"the error names no field: {text[:200]!a}"
        return None


def try_pair(config: Any, fields: Sequence[Field], draw: random.Random) -> PairResult:
    """Returns what the checks of a config say about drawn values of two of its fields."""
    mutable, values = to_mutable(config), {}
    for field in fields:
        node = mutable
        for name in field.path[:-1]:
            node = getattr(node, name)
        values[".".join(field.path)] = value = draw_value(field, draw)
        setattr(node, field.path[-1], value)
    start, error = time.process_time(), None
    try:
        to_frozen(mutable)
    except Exception as caught:
        error = caught
    return PairResult(values, error, time.process_time() - start)


def load_config(recipe: str) -> Any:
    """Returns the config of an experiment."""
    return command_line.load(recipe)[1]
