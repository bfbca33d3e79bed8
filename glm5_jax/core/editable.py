"""Frozen dataclasses, made editable for the command line and frozen again.

`editable(config)` copies a tree of dataclasses into mutable twins, which flags may set field by
field; `freeze` builds the real ones from them, so that every check of their constructors runs on the
final values. A field with metadata {"flag": False}, such as a secret, has no flag and keeps its value.
"""

import dataclasses
import difflib
import types
import typing


def editable(config):
    """A mutable copy of a dataclass and of every dataclass in its fields."""
    hints = typing.get_type_hints(type(config))
    fields, values, fixed = [], {}, {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _is_flag(field):
            fixed[field.name] = value
            continue
        if dataclasses.is_dataclass(value):
            value = editable(value)
            kind = type(value)
        else:
            kind = _flag_type(hints[field.name])
        fields.append((field.name, kind))
        values[field.name] = value
    twin = dataclasses.make_dataclass(
        type(config).__name__, fields, namespace={"twin_of": type(config), "fixed": fixed}
    )
    return twin(**values)


def freeze(twin, path: str = ""):
    """The dataclass that `editable` copied, with the values the copy has now.

    ValueError if a value has the wrong type, or if a constructor refuses it; the message begins with
    the path of the part.
    """
    cls, hints = twin.twin_of, typing.get_type_hints(twin.twin_of)
    values = dict(twin.fixed)
    for field in dataclasses.fields(twin):
        value, where = getattr(twin, field.name), f"{path}{field.name}"
        if hasattr(value, "twin_of"):
            values[field.name] = freeze(value, f"{where}.")
        else:
            values[field.name] = _typed(value, hints[field.name], where)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path.rstrip('.')}: {error}" if path else str(error)) from None


def check_path(twin, path: str) -> None:
    """ValueError unless `path` ("model.hidden_size") names a field; it proposes the nearest ones."""
    node, done = twin, []
    for name in path.split("."):
        known = [f.name for f in dataclasses.fields(node)] if hasattr(node, "twin_of") else []
        if name not in known:
            here = f" in {'.'.join(done)}" if done else ""
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            offer = f"; did you mean {', '.join(close)}?" if close else ", which is a single value"
            raise ValueError(f"no field {name!r}{here}{offer}")
        node = getattr(node, name)
        done.append(name)
    if hasattr(node, "twin_of"):
        known = ", ".join(f.name for f in dataclasses.fields(node))
        raise ValueError(f"{path} is a group of fields; set one of them: {known}")


def flags_between(before, after, path: str = "") -> list[tuple[str, str]]:
    """(path, text) of the flags that make one dataclass of the other. ValueError if none do: a part is of another class."""
    if type(before) is not type(after):
        raise ValueError(
            f"{path.rstrip('.') or 'the experiment'} is of {type(after).__name__}, no flag makes it of {type(before).__name__}"
        )
    found = []
    for field in dataclasses.fields(after):
        where, old, new = (
            f"{path}{field.name}",
            getattr(before, field.name),
            getattr(after, field.name),
        )
        if dataclasses.is_dataclass(old) or dataclasses.is_dataclass(new):
            found += flags_between(old, new, f"{where}.")
        elif new != old and not _is_flag(field):
            raise ValueError(
                f"{where} has no flag, so no other program can be given it; use a file"
            )
        elif new != old:
            found.append((where, new if isinstance(new, str) else repr(_plain(new))))
    return found


def _plain(value):
    """A value as a literal of Python: dataclasses within as dicts."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value


def _is_flag(field: dataclasses.Field) -> bool:
    return field.metadata.get("flag", True)


def _flag_type(hint):
    """The type by which a flag parses its text; `object` reads any Python literal (None, tuples)."""
    if hint in (int, float, bool, str):
        return hint
    return str if hint == str | None else object


def _typed(value, hint, path):
    if hint == str | None and value in ("None", "none", ""):
        return None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(hint) is tuple and isinstance(value, (tuple, list)):
        try:
            value = _built(value, hint)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if problem := _misfit(path, value, hint):
        raise ValueError(problem)
    return value


def _misfit(name: str, value, hint) -> str | None:
    """What is wrong with a field's value; None if nothing is."""
    if _fits(value, hint):
        return None
    return f"{name} is {value!r}; it must be of type {hint.__name__ if isinstance(hint, type) else hint}"


def _built(item, hint):
    """A dataclass written as a dict on the command line, as that dataclass, or as the first of a union
    that takes its fields; what is in it likewise. Anything else as it is."""
    if typing.get_origin(hint) is tuple and isinstance(item, (tuple, list)):
        return tuple(_built(part, typing.get_args(hint)[0]) for part in item)
    union = typing.get_args(hint) if _is_union(hint) else (hint,)
    kinds = [kind for kind in union if dataclasses.is_dataclass(kind)]
    if not (kinds and isinstance(item, dict)):
        return item
    problems = []
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        if item.keys() <= hints.keys():
            values = {name: _built(value, hints[name]) for name, value in item.items()}
            own = [_misfit(name, value, hints[name]) for name, value in values.items()]
            problems += filter(None, own)
            if any(own):
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
