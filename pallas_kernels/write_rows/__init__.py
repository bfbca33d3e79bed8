"""New rows of a cache put in their places, with nothing else of it touched."""

from typing import NamedTuple

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice


def write_rows(rows, new, places, *, implementation="auto"):
    """rows [s ...] with new [m ...] of the same dtype at places int32[m]; those outside of 0 to s - 1 are nowhere,
    all others are different. It happens in place where rows is donated. Nothing carries a gradient.

    A TPU's own scatter has rows of another layout than kernels that copy single ones (`WordRows`): with it all of
    them are copied twice at every call. implementation: see `dispatch.choose`.
    """
    choice = dispatch.choose("write_rows", implementation, rows)
    return choice.function("write")(Static(choice), rows, new, places)
