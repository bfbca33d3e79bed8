"""Grades code by its functions, with the policy's code and the tests in two separate sandboxes that run this file.

`answer` holds the policy's code: it makes the requested calls and returns their results. `judge` runs the
tests on those results. No code of the policy runs where tests are decided, and what the tests expect never
reaches a place where the policy's code could read it.

The judge finds the calls by running the tests. A call whose result is not known yet is recorded and stands
for itself, asserts are then ignored, and the tests run again once the results are there. So the calls of
all asserts are made at once, and each may depend on earlier ones.

Each run must make the same calls, so the hashes of texts, and with them the order of sets, must not differ
between runs (`PYTHONHASHSEED`), and neither do random numbers.

Uses only the standard library, for the Python of the sandbox (3.9 or later). An argument that the code
changes in place stays unchanged for the tests.
"""

import ast
import builtins
import json
import os
import random
import sys
import types

MAX_VALUES = 200_000  # in one result
MAX_DEPTH = 60


class Unserializable(Exception):
    """A value that is not one of Python's plain types, or is too large."""


def encode(value, left=None, depth=0):
    """Returns a plain value as JSON that keeps types apart: ints, floats, strings and lists unchanged, others tagged.

    A value of a subclass becomes one of its plain class. Raises Unserializable for other values and large
    ones.

    Args:
      left: list with the number of values that may still follow; None allows `MAX_VALUES`.
      depth: depth of nesting.
    """
    left = [MAX_VALUES] if left is None else left
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise Unserializable("a value that is too large")

    def each(values):
        return [encode(item, left, depth + 1) for item in values]

    if value is None or value is True or value is False:
        return value
    if isinstance(value, Reference):
        return value.form
    if isinstance(value, int):
        return int(value) if -(2**60) < value < 2**60 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return each(value)
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: each(value)}
    if isinstance(value, dict):
        return {"dict": each(value.items())}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: value.hex()}
    raise Unserializable(f"an object of class {type(value).__name__}")


PLAIN = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
}
# Functions that are called in the sandbox of the policy's code, for operations of the tests on its objects.
BUILTINS = {"getattr": getattr, "len": len, "list": list, "next": next}
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}


def decode(form, references=None):
    """Returns the value that `encode` was called with.

    Args:
      form: JSON from `encode`.
      references: function by kind of reference ("name" of an object of the code, "result" of a call,
          "builtin" of `BUILTINS`) that returns its value; None rejects references.
    """
    if not isinstance(form, (dict, list)):
        return form
    [(kind, inside)] = form.items() if isinstance(form, dict) else [("list", form)]
    if kind in CONTAINERS:
        return CONTAINERS[kind]([decode(item, references) for item in inside])
    if kind in PLAIN:
        return PLAIN[kind](inside)
    if references is None:
        raise TypeError(f"a value of kind {kind!r} is not accepted here")
    return references[kind](inside)


# ---------------------------------------------------------------- sandbox of the policy's code


def answer(code, setup, calls):
    """Runs `code`, then `setup`, and makes the calls in order.

    Returns a list with {"value": ...}, {"object": name of its class} or {"raised": [class, text]} for each
    call, or {"broken": reason} if the code itself fails.
    """
    # Dataclasses and other libraries look up the module of a class.
    module = sys.modules["solution"] = types.ModuleType("solution")
    random.seed(0)
    try:
        exec(compile(code, "solution.py", "exec"), module.__dict__)
        exec(compile(setup, "setup.py", "exec"), module.__dict__)
    except BaseException as error:
        return {"broken": " ".join(_describe(error))}
    results, outcomes = [], []
    references = {
        "name": module.__dict__.__getitem__,
        "result": results.__getitem__,
        "builtin": BUILTINS.__getitem__,
    }
    for call in calls:
        result = None
        try:
            function, args, kwargs = (
                decode(call[part], references) for part in ("function", "args", "kwargs")
            )
            result = function(*args, **kwargs)
            outcomes.append({"value": encode(result)})
        except Unserializable:
            outcomes.append({"object": type(result).__name__})
        except BaseException as error:
            outcomes.append({"raised": _describe(error)})
        results.append(result)
    return outcomes


def _describe(error):
    try:
        return [type(error).__name__, str(error)[:300]]
    except BaseException:
        return [type(error).__name__, ""]


# ---------------------------------------------------------------- sandbox of the tests


class Unknown(Exception):
    """Raised where a test needs a result that is not known yet."""


class Reference:
    """An object of the policy's code: one of its names, an object that a call returned, or a result not known yet.

    It can be called and passed as an argument, and has attributes. An object that a call returned also has
    a length and items, which must be plain values. Every other operation, comparison included, raises
    `refusal`, because the policy's classes would decide on it.
    """

    def __init__(self, calls, form, refusal):
        self.calls, self.form, self.refusal = calls, form, refusal

    def __call__(self, *args, **kwargs):
        return self.calls.make(self, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if isinstance(self.refusal, Unknown):
            raise self.refusal
        return self._apply("getattr", name)

    def __iter__(self):
        items = self._of_object("list")
        if isinstance(items, Reference):
            raise items.refusal
        return iter(items)

    def __next__(self):
        return self._of_object("next")

    def __len__(self):
        return self._of_object("len")

    def _of_object(self, builtin):
        """Returns the value of a builtin function of this object; raises `refusal` if it is none yet."""
        if "result" not in self.form or isinstance(self.refusal, Unknown):
            raise self.refusal
        return self._apply(builtin)

    def _apply(self, builtin, *args):
        function = Reference(self.calls, {"builtin": builtin}, self.refusal)
        return self.calls.make(function, (self, *args), {})

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def refuse(self, *_):
        """Raises `refusal`; the implementation of all special methods of comparison, conversion and arithmetic."""
        raise self.refusal


for _name in (
    "eq ne lt le gt ge hash bool getitem str repr format int float index complex round "
    "abs neg pos invert add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror xor rxor lshift rshift divmod"
).split():
    setattr(Reference, f"__{_name}__", Reference.refuse)


class Calls:
    """Calls that the tests make, in order, with the results known from the previous run.

    Attributes:
      known: pairs of a call, as JSON text, and its outcome.
      calls: calls of this run.
      num_unknown: number of calls without a known result.
      num_asserts: number of asserts that were reached.
      may_stop: whether a call may raise StopIteration. Elsewhere it would end a `map` of the tests before
        its first comparison, so that `all(map(...))` holds.
    """

    def __init__(self, known, may_stop=False):
        self.known = known
        self.may_stop = may_stop
        self.calls = []
        self.num_unknown = self.num_asserts = 0

    def make(self, function, args, kwargs):
        """Returns the value of a call, or a `Reference` if it is no plain value or not known.

        Raises what the call raised.
        """
        call = {
            "function": function.form,
            "args": encode(list(args)),
            "kwargs": encode(kwargs),
        }
        form = {"result": len(self.calls)}
        self.calls.append(call)
        index = form["result"]
        if index >= len(self.known) or self.known[index][0] != json.dumps(call):
            self.num_unknown += 1
            return Reference(self, form, Unknown())
        outcome = self.known[index][1]
        if "value" in outcome:
            return outcome["value"]
        if "object" in outcome:
            why = f"the code returned an object of class {outcome['object']}"
            return Reference(self, form, TypeError(why))
        name, text = outcome["raised"]
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError
        may_stop = self.may_stop or function.form == {"builtin": "next"}
        if issubclass(kind, (StopIteration, StopAsyncIteration)) and not may_stop:
            kind = RuntimeError
        raise kind(f"{name}: {text}")

    def check(self, test):
        """Evaluates an assert. Decides nothing while a result is unknown."""
        self.num_asserts += 1
        try:
            holds = bool(test())
        except Exception:
            if self.num_unknown:
                return
            raise
        if not holds and not self.num_unknown:
            raise AssertionError(f"assert {self.num_asserts} does not hold")


class _Asserts(ast.NodeTransformer):
    def visit_Assert(self, node):
        nothing = ast.arguments([], [], None, [], [], None, [])
        call = ast.Call(ast.Name("__check__", ast.Load()), [ast.Lambda(nothing, node.test)], [])
        return ast.copy_location(ast.Expr(call), node)


def judge(tests, prelude, names, calls, outcomes):
    """Runs the tests with the known results of calls.

    Args:
      names: names of the policy's code that the tests use; all other names are the tests'.

    Returns {"calls": calls whose results are needed} or {"passed": bool, "why": reason}.
    """
    try:
        known = [
            (json.dumps(call), {key: decode(value) for key, value in outcome.items()})
            for call, outcome in zip(calls, outcomes)
        ]
    except Exception as error:
        return {"passed": False, "why": f"the code's answer is malformed: {error}"}
    # Scope of the tests: the prelude, and references to the policy's code.
    scope: dict[str, object] = {"__name__": "tests"}
    random.seed(0)
    calls_made = Calls(known, may_stop="StopIteration" in tests)
    exec(compile(prelude, "prelude.py", "exec"), scope)
    for name in names:
        why = TypeError(f"{name} is the code's; tests can only call it")
        scope[name] = Reference(calls_made, {"name": name}, why)
    scope["__check__"] = calls_made.check
    # Asserts become calls of `Calls.check`.
    tree = ast.parse(tests)
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("the tests assert nothing")
    tree = ast.fix_missing_locations(_Asserts().visit(tree))
    why = ""
    try:
        exec(compile(tree, "tests.py", "exec"), scope)
    except Unserializable as error:
        raise ValueError(f"a test calls the code with {error}") from None
    except Exception as error:
        why = " ".join(_describe(error))
    # Unknown results are requested before a verdict.
    if calls_made.num_unknown:
        return {"calls": calls_made.calls}
    if not calls_made.calls:
        raise ValueError(f"the tests call nothing of the code {why}")
    if not calls_made.num_asserts:
        why = why or "no assert was reached"
    return {"passed": not why, "why": why}


def main():
    """Runs `answer` or `judge`, by the first argument, with the keywords on standard input.

    The last line of standard output is the result, or {"failed": reason}. What the code prints is
    discarded.
    """
    sys.path[:] = [folder for folder in sys.path if folder]  # not the working folder
    request = json.loads(sys.stdin.buffer.read())
    reply = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        result = {"answer": answer, "judge": judge}[sys.argv[1]](**request)
    except Exception as error:
        result = {"failed": " ".join(_describe(error))}
    reply.write(json.dumps(result))
    reply.flush()
    # A normal exit would wait for threads that the code started.
    os._exit(0)


if __name__ == "__main__":
    main()
