"""The two ends of judging code by its functions, each in a sandbox of its own, which runs the text of this file.

`answer` holds the policy's code: it makes the calls it is sent and says what they return. `judge` runs the tests
on those values. No line of the policy's runs where tests are decided, and what the tests expect never comes
to where its code could read it.

The judge learns what to call by running the tests: a call whose result it does not know yet is noted down and
stands for itself, asserts then mean nothing, and the tests run again once the values are there. So the calls
of all asserts are made at once, and each of them may depend on earlier ones.

Standard library alone, for the Python of the sandbox (3.9 or later). An argument that the code changes in place
stays as it was for the tests.
"""

import ast
import builtins
import json
import os
import random
import sys
import types

MOST_VALUES = 200_000  # in one result
MOST_DEPTH = 60


class Unplain(Exception):
    """A value that is none of Python's own plain ones; or too large."""


def encode(value, left=None, depth=0):
    """A plain value as JSON that keeps types apart: ints, floats, strings and lists as themselves, the others tagged.
    Of a subclass, the plain one. left: a list with the number of values that may still come."""
    left = [MOST_VALUES] if left is None else left
    left[0] -= 1
    if left[0] < 0 or depth > MOST_DEPTH:
        raise Unplain("a value that is too large")

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
    raise Unplain(f"an object of class {type(value).__name__}")


PLAIN = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
}
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}


def decode(form, references=None):
    """The value of what `encode` made. references: by their kind, what tells the value of one ("name" of something in
    the code, "result" of a call); without them a reference is refused."""
    if not isinstance(form, (dict, list)):
        return form
    [(kind, inside)] = form.items() if isinstance(form, dict) else [("list", form)]
    if kind in CONTAINERS:
        return CONTAINERS[kind]([decode(item, references) for item in inside])
    return (PLAIN if kind in PLAIN else references)[kind](inside)


# ---------------------------------------------------------------- where the policy's code is


def answer(code, setup, calls):
    """Runs `code`, then `setup`, and makes the calls in order: [{"value": ...}, {"object": its class}, or {"raised":
    [class, text]}, ...]. {"broken": why} if the code itself fails."""
    # Dataclasses and others look for the module of a class.
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        exec(compile(code, "solution.py", "exec"), module.__dict__)
        exec(compile(setup, "setup.py", "exec"), module.__dict__)
    except BaseException as error:
        return {"broken": " ".join(_said(error))}
    results, outcomes = [], []
    references = {"name": module.__dict__.__getitem__, "result": results.__getitem__}
    for call in calls:
        result = None
        try:
            function, args, kwargs = (
                decode(call[part], references) for part in ("function", "args", "kwargs")
            )
            result = function(*args, **kwargs)
            outcomes.append({"value": encode(result)})
        except Unplain:
            outcomes.append({"object": type(result).__name__})
        except BaseException as error:
            outcomes.append({"raised": _said(error)})
        results.append(result)
    return outcomes


def _said(error):
    try:
        return [type(error).__name__, str(error)[:300]]
    except BaseException:
        return [type(error).__name__, ""]


# ---------------------------------------------------------------- where the tests are decided


class Unknown(Exception):
    """A result was needed that is not known yet."""


class Reference:
    """Something of the code's: one of its names, the object that a call returned, or a result not known yet. It can
    be called, and be an argument; to compare it, or to do anything else with it, is refused."""

    def __init__(self, calls, form, refusal):
        self.calls, self.form, self.refusal = calls, form, refusal

    def __call__(self, *args, **kwargs):
        return self.calls.make(self, args, kwargs)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def refuse(self, *_):
        raise self.refusal


for _name in (
    "eq ne lt le gt ge hash bool len iter next contains getitem str repr format int float index complex round "
    "abs neg pos invert add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror xor rxor lshift rshift divmod"
).split():
    setattr(Reference, f"__{_name}__", Reference.refuse)


class Calls:
    """The calls that the tests make, in order, and what is known of their results from the run before."""

    def __init__(self, known):
        self.known = known  # pairs of a call, as text, and its outcome
        self.made = []
        self.num_unknown = self.num_asserts = 0

    def make(self, function, args, kwargs):
        """The value of a call, a `Reference` if it is none or not known; what it raised is raised."""
        call = {
            "function": function.form,
            "args": encode(list(args)),
            "kwargs": encode(kwargs),
        }
        form = {"result": len(self.made)}
        self.made.append(call)
        place = form["result"]
        if place >= len(self.known) or self.known[place][0] != json.dumps(call):
            self.num_unknown += 1
            return Reference(self, form, Unknown())
        outcome = self.known[place][1]
        if "value" in outcome:
            return outcome["value"]
        if "object" in outcome:
            why = f"the code returned an object of class {outcome['object']}"
            return Reference(self, form, TypeError(why))
        name, text = outcome["raised"]
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError
        raise kind(f"{name}: {text}")

    def check(self, test):
        """An assert. While a result is unknown, nothing is decided."""
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
    """Runs the tests with what the calls are known to have given: {"calls": those whose results are needed} or
    {"passed": bool, "why": ...}. names: of the code's, that the tests use; all others are their own."""
    try:
        known = [
            (json.dumps(call), {key: decode(value) for key, value in outcome.items()})
            for call, outcome in zip(calls, outcomes)
        ]
    except Exception as error:
        return {"passed": False, "why": f"the code's answer is malformed: {error}"}
    scope = {"__name__": "tests"}
    random.seed(0)
    made = Calls(known)
    exec(compile(prelude, "prelude.py", "exec"), scope)
    for name in names:
        why = TypeError(f"{name} is the code's; tests can only call it")
        scope[name] = Reference(made, {"name": name}, why)
    scope["__check__"] = made.check
    tree = ast.parse(tests)
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("the tests assert nothing")
    tree = ast.fix_missing_locations(_Asserts().visit(tree))
    why = ""
    try:
        exec(compile(tree, "tests.py", "exec"), scope)
    except Unplain as error:
        raise ValueError(f"a test calls the code with {error}") from None
    except Exception as error:
        why = " ".join(_said(error))
    if made.num_unknown:
        return {"calls": made.made}
    if not made.made:
        raise ValueError(f"the tests call nothing of the code {why}")
    if not made.num_asserts:
        why = why or "no assert was reached"
    return {"passed": not why, "why": why}


def main():
    """`answer` or `judge`, by the first argument, with what standard input holds; the last line of standard output is
    what it returns, or {"failed": why}. What the code prints goes nowhere."""
    request = json.loads(sys.stdin.buffer.read())
    reply = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    try:
        result = {"answer": answer, "judge": judge}[sys.argv[1]](**request)
    except Exception as error:
        result = {"failed": " ".join(_said(error))}
    reply.write(json.dumps(result))
    reply.flush()
    # Threads that the code started would be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
