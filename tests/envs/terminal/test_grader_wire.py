"""Tests handle an attempt's objects in another process like local ones. The attempt reaches no object of the tests."""

import collections
import datetime
import decimal
import enum
import inspect
import math
import os
import threading
import types
from unittest import mock

import pytest

from glm5_jax.envs.terminal.grader.wire import Peer, Proxy, RemoteError, RemoteExit


class Stack:
    """Class of an attempt."""

    limit = 3

    def __init__(self, *items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __eq__(self, other):
        return isinstance(other, Stack) and other.items == self.items

    def map(self, function):
        return [function(item) for item in self.items]


class Anything:
    """Object that is equal to everything and computes any expected result."""

    def __eq__(self, other):
        return True

    def __lt__(self, other):
        return True

    __gt__ = __le__ = __ge__ = __lt__
    __hash__ = object.__hash__

    def __sub__(self, other):
        return 0

    __rsub__ = __sub__

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return True


class Degrees(float):
    """Plain value of a subclass."""


class Level(enum.IntEnum):
    HIGH = 3


class Half:
    def __float__(self):
        return 0.5

    def __eq__(self, other):
        return True

    def __rsub__(self, other):
        return 99


class StackError(KeyError):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


def attempts_module():
    def fail():
        raise StackError("empty", 7)

    def leave():
        raise SystemExit(0)

    def interrupt():
        raise KeyboardInterrupt

    def read(value, name):
        return getattr(value, name)

    async def later(x):
        return x + 1

    names = {
        "Stack": Stack,
        "StackError": StackError,
        "Anything": Anything,
        "Half": Half,
        "degrees": lambda: Degrees(36.6),
        "level": lambda: Level.HIGH,
        "point": lambda: collections.namedtuple("Point", "x y")(1, 2),
        "fail": fail,
        "leave": leave,
        "interrupt": interrupt,
    }
    return types.SimpleNamespace(
        **names,
        read=read,
        later=later,
        sort=lambda items: items.sort(),
        echo=lambda x: x,
        gen=lambda: (x for x in "ab"),
    )


class Nothing:
    def before(self, extra=None):
        return None

    def after(self, extra=None):
        return None


def pipe():
    """Returns files for reading and for writing."""
    reading, writing = os.pipe()
    return open(reading, "rb"), open(writing, "wb")


@pytest.fixture
def module():
    """Returns a module of an attempt as its tests see it."""
    (answers, answering), (requests, requesting) = pipe(), pipe()
    client = Peer(answers, requesting, is_open=False, around=Nothing())
    server = Peer(requests, answering, is_open=True)
    source = attempts_module()

    async def finished(number):
        return await server.object_of(number)

    def wait(number):
        import asyncio

        return asyncio.run(finished(number))

    operations = {"load": lambda: source, "await": wait}
    thread = threading.Thread(target=server.serve, args=(operations, Nothing()), daemon=True)
    thread.start()
    yield client.request("load")
    requesting.close()
    thread.join(10)
    assert not thread.is_alive()
    for file in (answers, answering, requests):
        file.close()


@pytest.mark.parametrize(
    "value",
    [None, True, 10**40, -1.5, float("inf"), "a\u00e4\ud800", b"\0x", [1, (2, {3: {4}})], {"a": frozenset({1})}, 2 + 3j,
     decimal.Decimal("1.10"), datetime.date(2026, 1, 2), datetime.timedelta(1, 2, 3), range(1, 9, 2), slice(1, None),
     collections.Counter("aab"), collections.deque([1, 2]), collections.OrderedDict(b=1, a=2), int, Ellipsis],
)  # fmt: skip
def test_copies_plain_values(module, value):
    copied = module.echo(value)
    assert copied == value and type(copied) is type(value) and not isinstance(copied, Proxy)


def test_shows_objects_like_local_ones(module):
    stack = module.Stack(1, 2)
    assert (len(stack), stack.items, stack.limit, module.Stack.limit) == (2, [1, 2], 3, 3)
    assert stack == module.Stack(1, 2) != module.Stack(1)
    assert (
        isinstance(stack, module.Stack)
        and not isinstance(3, module.Stack)
        and isinstance(module.Stack, type)
    )
    assert stack.map(lambda x: x * 10) == [10, 20]
    stack.items = [5]
    assert stack.map(str) == ["5"] and type(stack).__name__ == "Stack"
    assert (
        str(inspect.signature(module.read)) == "(value, name)"
        and module.Stack.__doc__ == "Class of an attempt."
    )
    assert inspect.isgenerator(module.gen()) and list(module.gen()) == ["a", "b"]
    assert not hasattr(stack, "nothing") and callable(module.echo) and not callable(stack)


def test_compares_objects_by_their_plain_value(module):
    assert module.degrees() == 36.6 == pytest.approx(module.degrees()) and module.degrees() > 36
    assert module.level() == 3 and module.level() + 1 == 4 and module.level() in (2, 3)
    assert module.point() == (1, 2) != module.point()[:1]
    assert module.Half() == 0.5 and not module.Half() == 0.6 and 1 - module.Half() == 0.5


def test_objects_of_attempt_cannot_equal_everything(module):
    thing = module.Anything()
    for value in (8, "x", [1], pytest.approx(8.0), decimal.Decimal(8), mock.sentinel.x):
        assert not thing == value and thing != value
    assert not [thing] == [8] and 8 not in [thing]
    with pytest.raises(TypeError):
        assert 7 < thing
    with pytest.raises(RemoteError, match="computes a plain value from the tests' int"):
        abs(thing - 8)
    assert thing == module.Anything()  # two objects of the attempt compare by the attempt's rules


def test_objects_of_attempt_cannot_suppress_assertions(module):
    with pytest.raises(AssertionError), module.Anything():
        raise AssertionError
    with module.Anything():
        raise KeyError


def test_changes_lists_of_caller(module):
    items = [3, 1, 2]
    module.sort(items)
    assert items == [1, 2, 3]


def test_waits_for_coroutines(module):
    import asyncio

    assert asyncio.run(module.later(3)) == 4


def test_raises_errors_of_attempt(module):
    with pytest.raises(module.StackError) as error:
        module.fail()
    assert isinstance(error.value, KeyError) and (error.value.args, error.value.code) == (
        ("empty",),
        7,
    )


def test_distinguishes_exits_of_attempt_and_tests(module):
    with pytest.raises(SystemExit) as error:
        module.leave()
    assert type(error.value) is RemoteExit
    with pytest.raises(RuntimeError):
        module.interrupt()


@pytest.mark.parametrize(
    "name", ["__globals__", "__self__", "_x", "gi_frame", "f_globals", "tb_frame"]
)
def test_hides_internals_of_tests_from_attempt(module, name):
    def function():
        return 1

    with pytest.raises(RuntimeError, match="may not read"):
        module.read(function, name)
    assert module.read(types.SimpleNamespace(x=3), "x") == 3


def test_hides_modules_of_tests_from_attempt(module):
    assert module.read(math, "pi") == math.pi
    with pytest.raises(RuntimeError, match="may not reach the module sys"):
        module.read(datetime, "sys")


@pytest.mark.parametrize("kind", [mock.Mock, mock.MagicMock, mock.AsyncMock])
@pytest.mark.parametrize(
    "name", ["configure_mock", "attach_mock", "reset_mock", "call_args_list", "assert_called_once"]
)
def test_hides_parts_of_mocks_from_attempt(module, kind, name):
    """With these an attempt could make each assertion of a mock pass."""
    with pytest.raises(RuntimeError, match=f"may not use '{name}' of a mock"):
        module.read(kind(), name)


def test_attempt_calls_mocks_and_their_children(module):
    callback = mock.Mock(return_value=3)
    callback.child.return_value = 4

    assert module.read(callback, "child")() == 4
    assert module.Stack(5).map(callback) == [3]
    callback.assert_called_once_with(5)


@pytest.mark.parametrize(
    "answer", [b"", b"\x02\0\0\0[]", b"\xff\xff\xff\xffxx", b"\x02\0\0\0x", b"\x02\0\0\0{]"]
)
def test_reports_that_attempt_has_ended(answer):
    (answers, answering), (requests, requesting) = pipe(), pipe()
    with answers, requests, requesting:
        with answering:
            answering.write(answer)
        with pytest.raises(RemoteError, match="has ended"):
            Peer(answers, requesting, is_open=False).request("load")
