"""Converts frozen config dataclasses to mutable ones for command-line flags, and back.

`to_mutable(config)` copies a tree of dataclasses into mutable copies, whose fields flags may set. `to_frozen` builds the
original classes from them, so that every check of their constructors runs on the final values. A field with metadata
{"flag": False}, such as a secret, has no flag and keeps its value.
"""

import dataclasses
import re
import types
import typing
from typing import Any


def to_mutable(config: Any) -> Any:
    """Returns a mutable copy of a dataclass and of every dataclass in its fields."""
    hints = typing.get_type_hints(type(config))
    fields, values, fixed = [], {}, {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _is_flag(field):
            fixed[field.name] = value
            continue
        if dataclasses.is_dataclass(value):
            value = to_mutable(value)
            kind = type(value)
        else:
            kind = _flag_type(hints[field.name])
        fields.append((field.name, kind))
        values[field.name] = value
    mutable_class = dataclasses.make_dataclass(
        type(config).__name__,
        fields,
        namespace={"frozen_class": type(config), "fixed": fixed, "initial": dict(values)},
    )
    return mutable_class(**values)


def to_frozen(mutable: Any, path: str = "") -> Any:
    """Returns the frozen dataclass of a mutable copy, with its current values.

    Raises ValueError if a value has the wrong type or a constructor rejects it. The message begins with the path of
    the field or the group.
    """
    cls, hints = mutable.frozen_class, typing.get_type_hints(mutable.frozen_class)
    values = dict(mutable.fixed)
    for field in dataclasses.fields(mutable):
        value, where = getattr(mutable, field.name), f"{path}{field.name}"
        if hasattr(value, "frozen_class"):
            values[field.name] = to_frozen(value, f"{where}.")
        else:
            initial = mutable.initial[field.name]
            values[field.name] = _typed(value, hints[field.name], where, initial)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path.rstrip('.')}: {error}" if path else str(error)) from None


def flags_between(before: Any, after: Any, path: str = "") -> list[tuple[str, str]]:
    """Returns (path, text) of the flags that turn one dataclass into the other.

    Raises ValueError if flags cannot do it: a part has another class, or a field without a flag differs.
    """
    if type(before) is not type(after):
        raise ValueError(
            f"{path.rstrip('.') or 'the experiment'} is a {type(after).__name__}, and no flag turns a "
            f"{type(before).__name__} into it; use an experiment that has one"
        )
    flags = []
    for field in dataclasses.fields(after):
        where, old, new = (
            f"{path}{field.name}",
            getattr(before, field.name),
            getattr(after, field.name),
        )
        if dataclasses.is_dataclass(old) or dataclasses.is_dataclass(new):
            flags += flags_between(old, new, f"{where}.")
        elif new != old and not _is_flag(field):
            raise ValueError(
                f"{where} has no flag, so it cannot be passed to another program; use a file"
            )
        elif new != old:
            flags.append((where, new if isinstance(new, str) else repr(_plain(new))))
    return flags


def _plain(value):
    """Returns a value as a Python literal, with its dataclasses as dicts."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value


def _is_flag(field: dataclasses.Field) -> bool:
    return field.metadata.get("flag", True)


def _flag_type(hint):
    """Returns the type by which a flag parses its text; `object` parses any Python literal (None, tuples)."""
    if hint in (int, float, bool, str):
        return hint
    return str if hint == str | None else object


def _typed(value, hint, path, initial):
    """Returns a value converted to the type of its field. Raises ValueError if it does not fit.

    initial: the config's value, which the error gives as an example.
    """
    if hint == str | None and value in ("None", "none", ""):
        return None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{path} is too large for a floating-point number") from None
    if typing.get_origin(hint) is tuple and isinstance(value, (tuple, list)):
        try:
            value = _built(value, hint)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if problem := _misfit(path, value, hint):
        example = (
            f"; an example is {literal_of(initial)}" if initial and not _is_plain(hint) else ""
        )
        raise ValueError(f"{problem}{example}")
    return value


def _misfit(name: str, value, hint) -> str | None:
    """Returns an error message if a value does not fit its field, else None."""
    if _fits(value, hint):
        return None
    return f"{name} is {value!r}; it must be of type {type_text(hint)}"


def type_text(hint) -> str:
    """Returns a type as its annotation is written, without the modules of its classes."""
    if typing.get_origin(hint) is None and isinstance(hint, type):
        return hint.__name__
    return re.sub(r"(?:[\w<>]+\.)+(?=\w)", "", str(hint))


def _is_plain(hint) -> bool:
    """Returns whether a type needs no example: a number, a bool, a text, or one of these or None."""
    kinds = typing.get_args(hint) if _is_union(hint) else (hint,)
    return all(kind in (int, float, bool, str, type(None)) for kind in kinds)


def literal_of(value: Any) -> str:
    """Returns the text that gives a flag this value; dataclasses are dicts of the fields that differ from their default."""
    return value if isinstance(value, str) else repr(_shortest(value))


def _shortest(value):
    """Returns a value with its dataclasses as dicts, without the fields that have their default."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_shortest, value))
    if not dataclasses.is_dataclass(value):
        return value
    fields = {}
    for field in dataclasses.fields(value):
        item, default = getattr(value, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if item != default:
            fields[field.name] = _shortest(item)
    return fields


def _built(item, hint):
    """Builds the dataclass that a dict on the command line describes, and those of its values.

    Of a union of dataclasses it is the first one that accepts the fields. Any other value is returned unchanged. Raises
    ValueError if no dataclass accepts the dict.
    """
    if typing.get_origin(hint) is tuple and isinstance(item, (tuple, list)):
        return tuple(_built(part, typing.get_args(hint)[0]) for part in item)
    union = typing.get_args(hint) if _is_union(hint) else (hint,)
    kinds = [kind for kind in union if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    if not (kinds and isinstance(item, dict)):
        return item
    problems = []
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        if item.keys() <= hints.keys():
            values = {name: _built(value, hints[name]) for name, value in item.items()}
            misfits = [_misfit(name, value, hints[name]) for name, value in values.items()]
            problems += filter(None, misfits)
            if any(misfits):
                continue
            try:
                return kind(**values)
            except TypeError:  # a field without default is missing; the next kind may not need it
                continue
    if problems:
        raise ValueError(problems[0])
    fields = {kind.__name__: [f.name for f in dataclasses.fields(kind)] for kind in kinds}
    offers = (f"no {name}; its fields are {', '.join(names)}" for name, names in fields.items())
    raise ValueError(f"{item} is {'; and '.join(offers)}")


def _is_union(hint) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _fits(value, hint) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        return any(_fits(value, a) for a in args)
    if origin is typing.Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if origin is not None:
        return isinstance(value, origin)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return (
        hint is typing.Any or isinstance(value, hint) or (hint is float and isinstance(value, int))
    )
