"""Converts Python's plain values to text and back, and extracts the plain value of an object of another class.

Results of an attempt's code are compared by these values, so that no method of its classes sees, or decides
on, what tests expect.
"""

import collections
import datetime
import decimal
import fractions
import operator
import pathlib
import sys
import uuid

# Type -> functions that write it as text, and read it.
TEXTS = {
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    pathlib.PosixPath: (str, pathlib.PosixPath),
    pathlib.PurePosixPath: (str, pathlib.PurePosixPath),
    uuid.UUID: (str, uuid.UUID),
    int: (hex, lambda text: int(text, 16)),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (str, complex),
}
PLAIN_MODULES = {"builtins", "collections"} | {kind.__module__ for kind in TEXTS}
# Types whose difference tests compare with nothing, such as `want - result`: numbers, times and sets.
OPERANDS = (int, float, complex, decimal.Decimal, fractions.Fraction)
OPERANDS += (datetime.date, datetime.time, datetime.timedelta)
OPERANDS += (set, frozenset, collections.Counter)
COMPARISONS = {
    f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_OPERATIONS = {
    name.strip("_"): getattr(operator, name)
    for name in "add sub mul truediv floordiv mod pow lshift rshift and_ xor or_".split()
} | {"divmod": divmod}
# Special method -> its result for the plain value in an object, and the other value.
ARITHMETIC: dict = {
    f"__{kind}{name}__": (lambda value, other, do=do: do(other, value)) if kind == "r" else do
    for name, do in _OPERATIONS.items()
    for kind in ("", "r", "i")
}
# Type -> function that returns the value of exactly that type in an object of a subclass.
_EXACT = {
    **{
        kind: (lambda value, write=write, make=make: make(write(value)))
        for kind, (write, make) in TEXTS.items()
    },
    **{kind: (lambda value, kind=kind: kind.__pos__(value)) for kind in (int, float, complex)},
    **{
        kind: (lambda value, kind=kind: kind.__getitem__(value, slice(None)))
        for kind in (str, bytes, list, tuple)
    },
    **{
        kind: (lambda value, kind=kind: kind(kind.__iter__(value)))
        for kind in (set, frozenset, collections.deque)
    },
    dict: dict.copy,
}


def is_method_of_mock(value, name):
    """Returns whether a name is a part of a mock itself, with which it can be made to pass each assertion of tests."""
    if type(value).__module__ != "unittest.mock":
        return False
    return name in dir(sys.modules["unittest.mock"].Mock())


def value_inside(value):
    """Returns the plain value that an object's class extends, or the number it converts to; None if there is
    neither.
    """
    for kind, exact in _EXACT.items():
        if isinstance(value, kind):
            return exact(value)
    try:
        return _number(value)
    except Exception:  # for example an expression with unknowns
        return None


def _number(value):
    kind = type(value)
    if hasattr(kind, "__index__"):
        return operator.index(value)
    if hasattr(kind, "__float__"):
        number = float(value)
        is_long = abs(number) >= 2**53 and hasattr(kind, "__int__")
        return int(value) if is_long else number
    return complex(value) if hasattr(kind, "__complex__") else None
