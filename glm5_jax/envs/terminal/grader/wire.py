"""Connects two processes, one of which runs an attempt's code: values as JSON, objects as numbers.

Plain values are copied. The other side gets a `Proxy` for everything else, whose attributes, calls and
operators are requests. Lists, dictionaries and sets that a call changes are changed on the caller's side
too.
"""

import builtins
import collections
import datetime
import inspect
import json
import re
import sys
import threading
import types

from .plain import (
    ARITHMETIC,
    COMPARISONS,
    OPERANDS,
    PLAIN_MODULES,
    TEXTS,
    is_method_of_mock,
    value_inside,
)

_MAX_DEPTH = 100
_MAX_MESSAGE_BYTES = 1 << 28
_ITEMS = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}
_TABLES = {
    "d": dict,
    "o": collections.OrderedDict,
    "n": collections.Counter,
    "v": lambda pairs: collections.defaultdict(None, pairs),
}
_TABLE_OF = {dict: "d", collections.OrderedDict: "o", collections.Counter: "n"}
_TABLE_OF[collections.defaultdict] = "v"
_ITEM_OF = {kind: letter for letter, kind in _ITEMS.items()}
_BY_NAME = {kind.__qualname__: make for kind, (_, make) in TEXTS.items()}
_BUILTIN_TYPES = {k: v for k, v in vars(builtins).items() if isinstance(v, type)}
# Kinds of objects that tests check for.
_KINDS = {"class": type, "function": types.FunctionType, "generator": types.GeneratorType}
_OPERATORS = """lt le eq ne gt ge hash bool len length_hint getitem setitem delitem contains iter next reversed call add
sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or radd rsub rmul rmatmul rtruediv rfloordiv rmod
rdivmod rpow rlshift rrshift rand rxor ror iadd isub imul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior neg
pos abs invert int float complex index round trunc floor ceil enter exit str repr format bytes missing""".split()
SPECIAL = frozenset(f"__{name}__" for name in _OPERATORS)
_HIDDEN = (
    "gi_",
    "cr_",
    "ag_",
    "f_",
    "tb_",
    "co_",
    "_",
)  # beginnings of attributes of frames and code, which give access to everything


class RemoteError(RuntimeError):
    """Raised if the process with the attempt's code has ended, or sent something that cannot be read."""


class RemoteExit(SystemExit):
    """Raised if the attempt's code ended itself, which is not the end of its tests."""


class Proxy:
    """Object of the other process; it reports the `__class__` of a class, function or generator."""

    @property
    def __class__(self):
        return vars(self)["_kind"] or type(self)

    @property
    def __doc__(self):
        return self._peer.request("get", self, "__doc__")

    def __getattr__(self, name):
        return self._peer.request("get", self, name)

    def __setattr__(self, name, value):
        self._peer.request("set", self, name, value)

    def __delattr__(self, name):
        self._peer.request("del", self, name)

    def __dir__(self):
        return self._peer.request("dir", self)

    def __instancecheck__(self, value):
        return _is_proxy(value) and self._peer.request("isinstance", value, self)

    def __subclasscheck__(self, value):
        return _is_proxy(value) and self._peer.request("issubclass", value, self)


def _special(name):
    def method(self, *args, **keywords):
        if self._peer.decides and name in COMPARISONS and not _is_proxy(args[0]):
            return _compare(self, name, args[0])
        is_sum = self._peer.decides and name in ARITHMETIC and _is_operand(args[0])
        if is_sum and isinstance(value := self._peer.value_of(self), OPERANDS):
            return ARITHMETIC[name](value, args[0])
        answer = self._peer.request("special", self, name, list(args), keywords)
        if is_sum and not _is_proxy(answer) and answer is not NotImplemented:
            raise RemoteError(
                f"{_class_of(self)} computes a plain value from the tests' {type(args[0]).__name__}, which may be the "
                "one that they expect; return plain values, or give the class __float__ or __int__"
            )
        if name == "__exit__" and self._peer.decides:
            # The attempt's code must not swallow a test's assertion.
            is_test = isinstance(args[1], AssertionError) or not isinstance(args[1], Exception)
            return answer and not is_test
        return answer

    return method


def _is_proxy(value):
    return issubclass(type(value), Proxy)


def _is_operand(value):
    """Returns whether the sum or difference with a value of the tests can say what they expect."""
    is_array = type(value).__module__ == "numpy" and hasattr(value, "dtype")
    return is_array or (isinstance(value, OPERANDS) and not _is_proxy(value))


def _class_of(proxy):
    return f"an object of the attempt's class {type(proxy).__name__}"


def _compare(proxy, name, other):
    """Compares an object of the attempt with a value of the tests, which the attempt's code does not see.

    The object counts as the plain value that its class extends, or as the number that it converts to. If it
    has neither, the other value decides (NotImplemented).
    """
    if type(other).__module__ not in PLAIN_MODULES:
        return NotImplemented
    value = proxy._peer.value_of(proxy)
    if value is not None:
        return COMPARISONS[name](value, other)
    if name != "__ne__" and other is not None:
        text = f"{_class_of(proxy)} is no plain value: it is compared with none, whatever its own methods say"
        print(text, file=sys.stderr)
    return NotImplemented


class Peer:
    """One end of a connection.

    Args:
      reader, writer: files to read from and to write to.
      is_open: whether the other end may do everything. Otherwise it may only call what it was passed, and
          read public attributes.
      around: object whose `before` and `after` run around each request.

    Attributes:
      decides: whether this is the end of the tests, which compare objects of the other end by their plain
          values.
    """

    def __init__(self, reader, writer, is_open, around=None):
        self._reader, self._writer, self._is_open = reader, writer, is_open
        self.decides = not is_open
        self._around = around
        self._objects, self._numbers = {}, {}
        self._classes, self._proxies, self._errors = {}, {}, {}
        self._lock = threading.RLock()
        self._num_requests, self._values = 0, {}

    def value_of(self, proxy):
        """Returns the plain value of an object of the other end (`plain.value_inside`); cached until another
        request.
        """
        number = vars(proxy)["_number"]
        at, value = self._values.get(number, (None, None))
        if at != self._num_requests:
            at, value = self._num_requests, self.request("value", proxy)
            self._values[number], self._num_requests = (at, value), at
        return value

    def request(self, operation, *arguments):
        """Sends a request and returns the answer. Raises what the other end raises, and RemoteError."""
        with self._lock:
            self._num_requests += 1
            mutable = [a for a in _flat(arguments) if type(a) in (list, dict, set, bytearray)]
            sent = {"do": operation, "with": [self._encode(a) for a in arguments]}
            self._send({**sent, "extra": self._around.before() if self._around else None})
            while "do" in (message := self._receive()):
                self._serve(message)
            if self._around:
                self._around.after(message.get("extra"))
            for old, new in zip(mutable, message.get("changed") or ()):
                if new is not None:
                    _change(old, self._decode(new))
            if "raise" in message:
                raise self._decode_error(message["raise"])
            return self._decode(message["value"])

    def serve(self, operations, around):
        """Answers requests until the other end closes."""
        self._operations, self._around_served = operations, around
        while True:
            try:
                message = self._receive()
            except RemoteError:
                return
            self._serve(message)

    def object_of(self, number):
        """Returns the object that the other end knows by a number."""
        return self._objects[number]

    # -- messages ------------------------------------------------------------------------------------

    def _send(self, message):
        data = json.dumps(message).encode()
        try:
            self._writer.write(len(data).to_bytes(4, "little") + data)
            self._writer.flush()
        except OSError:
            raise RemoteError("the process with the attempt's code has ended") from None

    def _receive(self):
        try:
            size = int.from_bytes(self._reader.read(4), "little")
            data = self._reader.read(size) if 0 < size <= _MAX_MESSAGE_BYTES else b""
            message = json.loads(data) if len(data) == size and data else None
        except (OSError, ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise RemoteError("the process with the attempt's code has ended")
        return message

    def _serve(self, message):
        reply, around = {}, getattr(self, "_around_served", None)
        arguments = []
        try:
            if around:
                around.before(message.get("extra"))
            arguments = [self._decode(part) for part in message["with"]]
            mutable = [a for a in _flat(arguments) if type(a) in (list, dict, set, bytearray)]
            before = [json.dumps(self._encode(a)) for a in mutable]
            try:
                reply["value"] = self._encode(self._perform(message["do"], arguments))
            finally:
                after = [self._encode(a) for a in mutable]
                reply["changed"] = [
                    new if json.dumps(new) != old else None for new, old in zip(after, before)
                ]
        except BaseException as error:
            reply["raise"] = self._encode_error(error)
        if around:
            reply["extra"] = around.after()
        self._send(reply)

    def _perform(self, operation, arguments):
        if operation in getattr(self, "_operations", ()):
            return self._operations[operation](*arguments)
        target, *rest = arguments
        if operation == "get":
            self._check_name(rest[0])
            if not self._is_open and is_method_of_mock(target, rest[0]):
                raise RemoteError(f"the attempt's code may not use {rest[0]!r} of a mock")
            if rest[0] == "__signature__" and callable(target):
                return inspect.signature(target)
            return self._checked(getattr(target, rest[0]))
        if operation == "special":
            name, args, keywords = rest
            if name not in SPECIAL:
                raise AttributeError(name)
            return getattr(type(target), name)(target, *args, **keywords)
        if not self._is_open:
            raise RemoteError(f"the attempt's code may not {operation} what its tests gave it")
        return {
            "value": value_inside,
            "set": setattr,
            "del": delattr,
            "dir": dir,
            "isinstance": isinstance,
            "issubclass": issubclass,
        }[operation](target, *rest)

    def _check_name(self, name):
        if not self._is_open and (not isinstance(name, str) or name.startswith(_HIDDEN)):
            raise RemoteError(f"the attempt's code may not read {name!r} of what its tests gave it")

    def _checked(self, value):
        """Returns the value of an attribute, unless it is a module of the tests' process, which would give
        access to everything.
        """
        if not self._is_open and isinstance(value, types.ModuleType):
            raise RemoteError(
                f"the attempt's code may not reach the module {value.__name__} of its tests"
            )
        return value

    # -- values --------------------------------------------------------------------------------------

    def _encode(self, value, depth=0):
        kind = type(value)
        if depth > _MAX_DEPTH:
            raise RecursionError("a value is too deep, or contains itself")
        if value is None or kind in (bool, str, float) or (kind is int and abs(value) < 2**53):
            return value
        if kind in _ITEM_OF:
            return {_ITEM_OF[kind]: [self._encode(item, depth + 1) for item in value]}
        if kind in _TABLE_OF:
            pairs = ([self._encode(x, depth + 1) for x in pair] for pair in value.items())
            return {_TABLE_OF[kind]: list(pairs)}
        if kind in TEXTS:
            return {"k": [kind.__qualname__, TEXTS[kind][0](value)]}
        if kind is datetime.timedelta:
            return {"td": [value.days, value.seconds, value.microseconds]}
        if kind in (range, slice):
            parts = [self._encode(x) for x in (value.start, value.stop, value.step)]
            return {"rg" if kind is range else "sl": parts}
        if kind is re.Pattern and isinstance(value.pattern, str):
            return {"re": [value.pattern, value.flags]}
        if value is Ellipsis or value is NotImplemented:
            return {"el": value is Ellipsis}
        if issubclass(kind, type) and _BUILTIN_TYPES.get(value.__name__) is value:
            return {"bt": value.__name__}
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
            shape = value.shape if kind.__name__ == "ndarray" else None
            return {"np": [value.dtype.str, shape, value.tobytes().hex()]}
        if kind is inspect.Signature:
            parameters = value.parameters.values()
            return {"sg": [[p.name, int(p.kind), *self._default(p)] for p in parameters]}
        return self._encode_object(value)

    def _default(self, parameter):
        is_given = parameter.default is not inspect.Parameter.empty
        return [is_given, self._encode(parameter.default) if is_given else None]

    def _encode_object(self, value):
        if _is_proxy(value) and value._peer is self:
            return {"yours": value._number}
        if issubclass(type(value), type) and value in self._errors.values():
            return {
                "yours": next(n for n, error_class in self._errors.items() if error_class is value)
            }
        if isinstance(value, BaseException):
            return {"er": self._encode_error(value)}
        if inspect.iscoroutine(value):
            return {"co": self._number(value)}
        if issubclass(type(value), type) and issubclass(value, BaseException):
            return {"ec": self._describe_error(value)}
        known = {name for kind in type(value).__mro__ for name in vars(kind)}
        if type(value).__hash__ is None:
            known.discard("__hash__")
        names = sorted(SPECIAL & known)
        label = getattr(value, "__qualname__", None) or type(value).__qualname__
        kind = next((k for k, known in _KINDS.items() if isinstance(value, known)), "")
        described = [str(label), type(value).__name__, kind, names, callable(value)]
        return {"of": [self._number(value), *described]}

    def _number(self, value):
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects[len(self._objects)] = value
        return self._numbers[id(value)]

    def _decode(self, data, depth=0):
        if not isinstance(data, dict):
            return data
        ((letter, content),) = data.items()
        if letter in _ITEMS:
            return _ITEMS[letter](self._decode(item) for item in content)
        if letter in _TABLES:
            return _TABLES[letter]({self._decode(k): self._decode(v) for k, v in content})
        simple = {
            "k": lambda: _BY_NAME[content[0]](content[1]),
            "td": lambda: datetime.timedelta(*content),
            "rg": lambda: range(*map(self._decode, content)),
            "sl": lambda: slice(*map(self._decode, content)),
            "re": lambda: re.compile(*content),
            "sg": lambda: inspect.Signature(list(map(self._parameter, content))),
            "el": lambda: Ellipsis if content else NotImplemented,
            "bt": lambda: _BUILTIN_TYPES[content],
            "np": lambda: _array(*content),
            "yours": lambda: self._objects[content],
            "er": lambda: self._decode_error(content),
            "ec": lambda: self._error_class(content),
            "co": lambda: self._coroutine(content),
            "of": lambda: self._proxy(*content),
        }
        return simple[letter]()

    def _parameter(self, described):
        name, kind, is_given, default = described
        default = self._decode(default) if is_given else inspect.Parameter.empty
        return inspect.Parameter(name, list(inspect._ParameterKind)[kind], default=default)

    def _proxy(self, number, label, type_name, kind, names, is_callable):
        key = (type_name, *names)
        if key not in self._classes:
            methods: dict = {name: _special(name) for name in names if name in SPECIAL}
            methods["__doc__"] = Proxy.__dict__["__doc__"]
            if "__eq__" in methods and "__hash__" not in methods:
                methods["__hash__"] = None
            self._classes[key] = type(str(type_name), (Proxy,), methods)
        if number not in self._proxies:
            proxy = self._classes[key].__new__(self._classes[key])
            fields = {"_peer": self, "_number": number, "_kind": _KINDS.get(kind)}
            fields["__qualname__"] = label
            if is_callable:
                fields["__name__"] = label.rpartition(".")[2]
            vars(proxy).update(fields)
            self._proxies[number] = proxy
        return self._proxies[number]

    def _coroutine(self, number):
        async def wait():
            return self.request("await", number)

        return wait()

    # -- errors --------------------------------------------------------------------------------------

    def _describe_error(self, kind):
        bases = [base.__name__ for base in kind.__mro__ if _is_builtin(base)]
        return [self._number(kind), kind.__name__, kind.__module__, bases[0]]

    def _encode_error(self, error):
        kind = type(error)
        try:
            fields = {k: self._encode(v) for k, v in vars(error).items() if not k.startswith("_")}
            args = self._encode(error.args)
        except Exception:
            fields, args = {}, self._encode((str(error),))
        name = kind.__name__ if _is_builtin(kind) else self._describe_error(kind)
        return {"kind": name, "args": args, "fields": fields}

    def _decode_error(self, data):
        kind = data["kind"]
        kind = _exception(kind) if isinstance(kind, str) else self._error_class(kind)
        try:
            error = kind(*self._decode(data["args"]))
        except TypeError:  # a few builtin classes require certain arguments
            error = RuntimeError(f"{kind.__name__}: {self._decode(data['args'])!r}"[:1000])
        for name, value in data["fields"].items():
            if name.startswith("_"):
                continue
            try:
                setattr(error, name, self._decode(value))
            except AttributeError:
                pass
        return error

    def _error_class(self, described):
        number, name, module, base = described
        if number not in self._errors:
            error_class = type(str(name), (_exception(base),), {"__module__": str(module)})
            self._errors[number] = error_class
        return self._errors[number]


def _is_builtin(kind):
    return _BUILTIN_TYPES.get(kind.__name__) is kind


def _exception(name):
    """Returns the builtin exception class of a name; classes that end programs are replaced by others."""
    kind = _BUILTIN_TYPES.get(name)
    if kind is SystemExit:
        return RemoteExit
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def _flat(arguments):
    """Yields the arguments, and those inside the lists and tables of a call."""
    for argument in arguments:
        yield argument
        if type(argument) is list:
            yield from argument
        elif type(argument) is dict:
            yield from argument.values()


def _change(old, new):
    if type(old) is not type(new):
        raise RemoteError("the attempt's code has answered with a value of another kind")
    if isinstance(old, list | bytearray):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def _array(kind, shape, content):
    import numpy

    array = numpy.frombuffer(bytes.fromhex(content), numpy.dtype(kind)).copy()
    return array[0] if shape is None else array.reshape(shape)
