"""Decodes JSON values to typed messages, for every HTTP server; `json_encoding.json_bytes` encodes messages.

A message is a `JsonStruct`: its fields have types, and ranges as `msgspec.Meta`. `decode` works in two steps.

1. It prepares the value: it leaves out null fields, because they mean the default. It rejects unknown fields and lists
   that are too long before any other code reads them. It converts whole numbers such as 2.0 of integer fields to int.
2. `msgspec.convert` checks types and ranges, and creates the struct. Values of fields of type `Any` are not copied.

A long list of numbers in a large body is a `NumberList`. Handlers get a list instead, except in fields of type `Numbers`.

An invalid value raises an `ApiError` that names the field and the value.
"""

import functools
import logging
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec
from msgspec import Meta, inspect

from glm5_jax.runtime.http_server import ApiError, truncate_text
from glm5_jax.runtime.json_body import NumberList

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
_MAX_NUMBER = 1.7976931348623157e308  # the largest finite float
_MAX_NAME, _MAX_VALUE, _MAX_LISTED = 100, 100, 200  # characters in an error
_MAX_BITS = 192  # of integers that are shown by their digits, which take quadratic time
_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = 60
_log = logging.getLogger(__name__)

# Every integer has a range, so that no handler gets a number that overflows; infinities and NaN are no numbers.
Integer = Annotated[int, Meta(ge=MIN_INTEGER, le=MAX_INTEGER)]
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
PositiveInteger = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Number = Annotated[float, Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
Seconds = Annotated[float, Meta(ge=0, le=_MAX_NUMBER)]
_KEEPS_NUMBER_LISTS = "keeps_number_lists"
# Any value, in which long lists of numbers stay text (`NumberList`) until the handler reads them.
Numbers = Annotated[Any, Meta(extra={_KEEPS_NUMBER_LISTS: True})]


class JsonStruct(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Base of the messages between programs, and of the objects in them.

    Attributes:
      ignored: names of fields that are accepted with any value and not read.
      fixed: the only value of fields that are accepted and not read.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[Mapping[str, Any]] = {}

    def non_default_fields(self) -> dict[str, Any]:
        """Returns the fields whose value is not the default."""
        values = {}
        for field in msgspec.structs.fields(self):
            factory, value = field.default_factory, getattr(self, field.name)
            if value != (field.default if factory is msgspec.NODEFAULT else factory()):
                values[field.name] = value
        return values

    def replace(self, **fields: Any) -> Self:
        """Returns the message with other values of some fields."""
        return msgspec.structs.replace(self, **fields)


# Names of ignored fields that are logged in the life of a process, each once. One body may have 50,000, which would fill
# the disk of the log.
MAX_IGNORED_LOGGED = 100
ignored_paths: set[str] = set()
_Message = TypeVar("_Message", bound=JsonStruct)
_Prepare = Callable[[Any, str, bool], Any]


def decode(value: Any, kind: type[_Message], *, ignore_neutral: bool = False) -> _Message:
    """Returns the message of a JSON value. Raises ApiError if it does not fit the type.

    ignore_neutral: whether unknown fields with a neutral value (false, or an empty text, list or object) are left out
    and logged once; otherwise they are errors.
    """
    prepared = _prepare_fields(kind, value, "", ignore_neutral)
    try:
        return msgspec.convert(prepared, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter for lone surrogates
        explained = next(_explain(prepared, inspect.type_info(kind)), None)
        raise explained or ApiError(str(error)) from None


# -- step 1: preparation -----------------------------------------------------------------------------------


def _preparer(kind: inspect.Type) -> _Prepare | None:
    """Returns the function that prepares values of a type; None: they need no preparation."""
    match kind:
        case inspect.Metadata():
            return None if (kind.extra or {}).get(_KEEPS_NUMBER_LISTS) else _preparer(kind.type)
        case inspect.AnyType():
            return _prepare_any
        case inspect.StructType():
            assert issubclass(kind.cls, JsonStruct), f"{kind.cls} must be a subclass of JsonStruct"
            return functools.partial(_prepare_fields, kind.cls)
        case inspect.ListType() | inspect.VarTupleType():
            return functools.partial(_prepare_items, kind.max_length, _preparer(kind.item_type))
        case inspect.DictType():
            prepare = _preparer(kind.value_type)
            if prepare is None and kind.max_length is None:
                return None
            return functools.partial(_prepare_values, kind.max_length, prepare)
        case inspect.IntType():
            return _prepare_integer
        case inspect.UnionType():
            members = [prepare for one in kind.types if (prepare := _preparer(one)) is not None]
            return functools.partial(_prepare_union, members) if members else None
    return None


@functools.cache
def _field_preparers(cls: type[JsonStruct]) -> dict[str, _Prepare | None]:
    """Returns the preparing function of each field of a message; None: none is needed."""
    hints = inspect.type_info(cls)
    assert isinstance(hints, inspect.StructType)
    return {field.encode_name: _preparer(field.type) for field in hints.fields}


def _prepare_union(members: list[_Prepare], value: Any, path: str, ignore_neutral: bool) -> Any:
    """Prepares a value for all members of a union; each changes values of its own type only."""
    for prepare in members:
        value = prepare(value, path, ignore_neutral)
    return value


def _prepare_fields(cls: type[JsonStruct], value: Any, path: str, ignore_neutral: bool) -> Any:
    """Returns the known fields of an object, prepared and without nulls. Raises ApiError for other fields."""
    if not isinstance(value, dict):
        return value
    preparers, known = _field_preparers(cls), {}
    for name, item in value.items():
        if name not in preparers:
            _check_unread(cls, name, item, _join(path, name), ignore_neutral)
        elif item is not None:
            prepare = preparers[name]
            known[name] = prepare(item, _join(path, name), ignore_neutral) if prepare else item
    return known


def _check_unread(
    cls: type[JsonStruct], name: str, value: Any, path: str, ignore_neutral: bool
) -> None:
    """Raises ApiError for a field that a message lacks, unless it is accepted with this value."""
    if name in cls.ignored:
        return
    if name in cls.fixed:
        fixed = cls.fixed[name]
        is_equal = value == fixed and isinstance(value, bool) == isinstance(fixed, bool)
        if value is not None and not is_equal:
            shown = _shorten(value)
            raise _api_error(
                path, f"{shown} is not supported, {fixed!r} was expected; leave it out"
            )
        return
    is_empty = isinstance(value, str | list | dict) and not value
    if not (ignore_neutral and (value is None or value is False or is_empty)):
        raise _api_error(path, "no such field is known")
    if path not in ignored_paths and len(ignored_paths) < MAX_IGNORED_LOGGED:
        ignored_paths.add(path)
        _log.warning("the field %r is unknown and ignored, because its value is neutral", path)


def _prepare_items(
    max_length: int | None, prepare: _Prepare | None, value: Any, path: str, ignore_neutral: bool
) -> Any:
    """Returns a list with prepared items. Raises ApiError if it is too long, before its items are read."""
    if not isinstance(value, list | NumberList):
        return value
    _check_count(value, max_length, "items", path)
    try:
        if prepare is None:
            return value if isinstance(value, list) else list(value)
        return [prepare(item, f"{path}.{i}", ignore_neutral) for i, item in enumerate(value)]
    except ValueError as error:  # from a NumberList, whose text is parsed only now
        raise _api_error(path, str(error)) from None


def _prepare_values(
    max_length: int | None, prepare: _Prepare | None, value: Any, path: str, ignore_neutral: bool
) -> Any:
    """Returns an object of any names with prepared values. Raises ApiError if it has too many."""
    if not isinstance(value, dict):
        return value
    _check_count(value, max_length, "fields", path)
    if prepare is None:
        return value
    return {name: prepare(item, _join(path, name), ignore_neutral) for name, item in value.items()}


def _prepare_any(value: Any, path: str, ignore_neutral: bool) -> Any:
    """Returns a value with lists in place of each `NumberList`, which no other code could encode or index."""
    holder = [value]
    waiting: list[dict | list] = [holder]  # no recursion, because small bodies may be deeply nested
    try:
        while waiting:
            container = waiting.pop()
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, item in items:
                if isinstance(item, NumberList):
                    container[key] = list(item)
                elif isinstance(item, dict | list):
                    waiting.append(item)
    except ValueError as error:  # from a NumberList, whose text is parsed only now
        raise _api_error(path, str(error)) from None
    return holder[0]


def _prepare_integer(value: Any, path: str, ignore_neutral: bool) -> Any:
    """Returns a whole number as int."""
    return int(value) if type(value) is float and value.is_integer() else value


def _check_count(value: Any, max_length: int | None, noun: str, path: str) -> None:
    if max_length is not None and len(value) > max_length:
        raise _api_error(path, f"{len(value)} {noun} are too many; give at most {max_length}")


# -- step 2: errors of msgspec -----------------------------------------------------------------------------


def _explain(value: Any, kind: inspect.Type, path: str = "") -> Iterator[ApiError]:
    """Yields the errors of a value that does not fit a type, in the order of its fields."""
    if misfit := _misfit(value, kind):
        yield _api_error(path, misfit)
        return
    match member := _member(value, kind):
        case inspect.StructType():
            for field in member.fields:
                if field.encode_name in value:
                    item_path = _join(path, field.encode_name)
                    yield from _explain(value[field.encode_name], field.type, item_path)
                elif field.required:
                    yield _api_error(path, f"{field.encode_name!r} is a required property; add it")
        case inspect.DictType():
            for name, item in value.items():
                yield from _explain(name, member.key_type, path)
                yield from _explain(item, member.value_type, _join(path, name))
        case inspect.ListType() | inspect.VarTupleType():
            for i, item in enumerate(value):
                yield from _explain(item, member.item_type, f"{path}.{i}")
        case inspect.TupleType():
            for i, (item, item_type) in enumerate(zip(value, member.item_types)):
                yield from _explain(item, item_type, f"{path}.{i}")


def _member(value: Any, kind: inspect.Type) -> Any:
    """Returns the type itself, or the member of a union, that values of this JSON type have; None: there is none."""
    if isinstance(kind, inspect.Metadata):
        return _member(value, kind.type)
    if isinstance(kind, inspect.UnionType):
        return next((one for one in kind.types if _member(value, one) is not None), None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case inspect.StructType() | inspect.DictType():
            fits = isinstance(value, dict)
        case inspect.ListType() | inspect.VarTupleType() | inspect.TupleType():
            fits = isinstance(value, list)
        case inspect.StrType() | inspect.LiteralType():  # all literals are texts
            fits = isinstance(value, str)
        case inspect.BoolType():
            fits = isinstance(value, bool)
        case inspect.IntType():
            fits = is_number and isinstance(value, int)
        case inspect.FloatType():
            fits = is_number
        case inspect.NoneType():
            fits = value is None
        case _:
            fits = True
    return kind if fits else None


def _misfit(value: Any, kind: inspect.Type) -> str:
    """Returns why a value does not fit a type, apart from the items of the value; "" if it fits."""
    member, shown = _member(value, kind), _shorten(value)
    if member is None:
        return f"{shown} is not of type {_type_names(kind)}"
    match member:
        case inspect.LiteralType():
            values = truncate_text(str(list(member.values)), _MAX_LISTED)
            return "" if value in member.values else f"{shown} is not one of {values}"
        case inspect.IntType() | inspect.FloatType():
            return _misfit_of_number(value, member, shown)
        case inspect.TupleType() if len(value) != len(member.item_types):
            return f"{shown} has {len(value)} items; give {len(member.item_types)}"
        case inspect.StrType() | inspect.ListType() | inspect.VarTupleType():
            if member.max_length is not None and len(value) > member.max_length:
                return f"{shown} is too long; give at most {member.max_length}"
            if member.min_length is not None and len(value) < member.min_length:
                return f"{shown} is too short; give at least {member.min_length}"
            pattern = getattr(member, "pattern", None)
            if pattern is not None and not re.search(pattern, value):
                return f"{shown} does not match {pattern!r}"
    return ""


def _misfit_of_number(
    value: int | float, kind: inspect.IntType | inspect.FloatType, shown: str
) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return f"{shown} is not a JSON number; give a finite one"
    if kind.ge is not None and value < kind.ge:
        return f"{shown} is less than the minimum of {_format_bound(kind.ge)}"
    if kind.le is not None and value > kind.le:
        return f"{shown} is greater than the maximum of {_format_bound(kind.le)}"
    if kind.gt is not None and value <= kind.gt:
        return f"{shown} is less than or equal to the minimum of {_format_bound(kind.gt)}"
    return ""


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


_TYPE_NAMES = {
    inspect.StructType: "object",
    inspect.DictType: "object",
    inspect.ListType: "array",
    inspect.VarTupleType: "array",
    inspect.TupleType: "array",
    inspect.StrType: "string",
    inspect.LiteralType: "string",
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
}


def _type_names(kind: inspect.Type) -> str:
    """Returns the names of a type in JSON schema, without null."""
    if isinstance(kind, inspect.Metadata):
        return _type_names(kind.type)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return ", ".join(repr(_TYPE_NAMES[type(one)]) for one in members if type(one) in _TYPE_NAMES)


def _api_error(path: str, message: str) -> ApiError:
    return ApiError(f"{path}: {message}" if path else message, param=path or None)


def _join(path: str, name: str) -> str:
    name = truncate_text(name, _MAX_NAME)
    return f"{path}.{name}" if path else name


def _shorten(value: Any) -> str:
    """Returns the repr of a value, shortened; a long integer by its number of bits."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    return truncate_text(_QUOTE.repr(value), _MAX_VALUE)
