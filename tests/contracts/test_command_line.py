"""Freezes the command line: these flags, of these types, and no others.

    python -m tests.contracts.test_command_line

writes the golden again after an intended change.
"""

import dataclasses
import typing
from collections.abc import Iterator

from glm5_jax.runtime.config_flags import to_mutable
from launch import command_line as flags
from tests.contracts.source_tree import ROOT

GOLDEN = ROOT / "tests" / "goldens" / "command_line.txt"


def command_line() -> str:
    """Returns one line for each flag of a run of `pretrain.py`: its name and the type of its value."""
    argv = ["run", f"--experiment={ROOT}/experiments/pretrain.py:tiny"]
    mutable = to_mutable(flags.load(argv[1].partition("=")[2])[1])
    lines = [
        f"--{name}\n" for name in flags.define(mutable, argv) if not name.startswith("experiment.")
    ]
    return "".join(lines + list(fields(mutable, "--experiment")))


def fields(mutable, path: str) -> Iterator[str]:
    """Yields the lines of an editable config's fields, in their order."""
    hints = typing.get_type_hints(mutable.frozen_class)
    for field in dataclasses.fields(mutable):
        value, name = getattr(mutable, field.name), f"{path}.{field.name}"
        if hasattr(value, "frozen_class"):
            yield from fields(value, name)
        else:
            hint = hints[field.name]
            yield f"{name}={getattr(hint, '__name__', hint) if isinstance(hint, type) else hint}\n"


def test_command_line_equals_golden():
    assert command_line() == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text(command_line())
