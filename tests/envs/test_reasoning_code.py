"""Programs are judged by their results: honest ones pass, and cheats do not."""

import asyncio
import functools
import json
import re

import pytest

from glm5_jax.data import chat_tasks
from glm5_jax.envs.reasoning import code_child, verifiers
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.envs.reasoning.verifiers import CodeVerifier, VerifierConfig, verifier_for
from glm5_jax.rl.types import Attempt, Task
from tests.envs.local_sandbox import LocalSandbox, Ran
from tests.envs.terminal.folders import slow_but

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CONFIG = VerifierConfig(timeout_s=60, code_timeout_s=20)
QUICK = VerifierConfig(timeout_s=60, code_timeout_s=1)  # for programs that use up a resource
ADD = {"tests": "assert add(1, 2) == 3\nassert add(70, 7) == 77", "names": ["add"]}
DOUBLE = {"cases": [{"input": "2\n", "output": "4"}, {"input": "21\n", "output": "42\n"}]}
HONEST = "def add(a, b):\n    return a + b\n"


def reward_of(data, code, config=CONFIG, sandbox=LocalSandbox):
    task = Task(
        id="t", kind="code", messages=({"role": "user", "content": "Write it."},), data=data
    )
    reply = {"role": "assistant", "content": f"Here it is:\n```python\n{code}\n```\nDone."}
    return asyncio.run(CodeVerifier(config, sandbox=sandbox)(task, Attempt(messages=(reply,))))


def is_wrong(reward, why=""):
    assert reward.value == 0.0, reward
    assert why in reward.error
    return True


def shipped(kind, count=None):
    """Yields (task, its reference solution) of the shipped problems."""
    all_tasks = tasks(TaskConfig(kind=kind, held_out_fraction=0))
    for task, problem in list(zip(all_tasks, chat_tasks.load_asset(f"{kind}.jsonl"), strict=True))[
        :count
    ]:
        yield task, problem.get("prompt", "") + problem["code"]


def failures(kind, count=None):
    verifier = verifier_for("code", CONFIG, sandbox=LocalSandbox)
    for task, code in shipped(kind, count):
        reply = {"role": "assistant", "content": f"```python\n{code}\n```"}
        reward = asyncio.run(verifier(task, Attempt(messages=(reply,))))
        if reward.value != 1.0:
            yield task.id, reward


@pytest.mark.parametrize("kind", ("mbpp", "humaneval"))
def test_reference_solutions_pass(kind):
    assert not list(failures(kind, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("mbpp", "humaneval"))
def test_all_reference_solutions_pass(kind):
    assert not list(failures(kind))


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_solution_fails_tests_of_another(count):
    """Nor does the prelude of a HumanEval problem, which is defined before the program."""
    some = list(shipped("humaneval", count))
    for (task, _), (_, other) in zip(some, some[1:]):
        assert is_wrong(reward_of(task.data, other))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        slow(ADD, HONEST),
        (ADD, "print('x' * 5_000_000)\n" + HONEST + "print(add(1, 1))"),
        slow(ADD, HONEST + "if __name__ == '__main__':\n    raise SystemExit(1)"),
        (ADD, "import threading, time\n" + HONEST + "threading.Thread(target=time.sleep, args=[99]).start()"),
        slow(DOUBLE, "print(2 * int(input()))"),
        (DOUBLE, "import sys\nsys.stdout.write(f'{2 * int(sys.stdin.read())}  \\n\\n')"),
        slow(DOUBLE, "if __name__ == '__main__':\n    print(2 * int(input()))  # ünï"),
    ],
)  # fmt: skip
def test_honest_programs_pass(data, code):
    reward = reward_of(data, code)
    assert (reward.value, reward.error, reward.parts) == (1.0, "", {"right": 1.0})


@pytest.mark.parametrize(
    ("tests", "code"),
    [
        # The program's objects are passed back to it, and may be called.
        ("p = Point(1, 2)\nassert norm(p, scale=2) == 10 and norm(Point(0, 1), 1) == 1",
         "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
         "def norm(p, scale): return scale * (p.x ** 2 + p.y ** 2)"),
        slow("c = counter()\nassert c() == 1\nassert c() == 2",
         "def counter():\n    n = 0\n    def c():\n        nonlocal n\n        n += 1\n        return n\n    return c"),
        # The calls depend on the returned values.
        ("n = 6\nwhile n != 1:\n    n = step(n)\nassert n == 1",
         "def step(n): return n // 2 if n % 2 == 0 else 3 * n + 1 if n > 9 else 1"),
        slow("assert all(is_even(n) == (n % 2 == 0) for n in range(20))", "def is_even(n): return n % 2 == 0"),
        ("assert nothing() is None\nassert isinstance(one(), int)\nassert not none()\nassert -one() < 0",
         "def nothing(): pass\ndef one(): return 1\ndef none(): return []"),
        slow("try:\n    half(3)\n    raise RuntimeError\nexcept ValueError as error:\n    assert 'odd' in str(error)\n"
         "assert half(4) == 2", "def half(n):\n    if n % 2: raise ValueError('odd')\n    return n // 2"),
        # They draw the same numbers in every run.
        slow("import random\nn = random.randrange(10**9)\nassert half(2 * n) == n", "def half(n): return n // 2"),
        # Sets of texts have the same order in every run.
        ("words = set('quick brown fox jumps over a lazy dog'.split())\nassert count(words) == 8\nfor word in words:\n"
         "    assert count(word) == len(word)", "def count(s): return len(s)"),
        slow("assert count(words()) == 8", "import random\ndef words(): return random.sample(list(set('abcdefgh')), 8)\n"
             "def count(s): return len(s)"),
        # Objects have attributes, a length and items.
        ("s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4 and s.items == [3] and len(s) == 1",
         "class Stack:\n    def __init__(self): self.items = []\n    def push(self, n): self.items.append(n)\n"
         "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)"),
        ("assert list(up(3)) == [0, 1, 2] and 2 in up(3) and sorted(keys({'b': 1, 'a': 2})) == ['a', 'b']\ng = up(1)\n"
         "assert next(g) == 0\ntry:\n    next(g)\n    raise RuntimeError\nexcept StopIteration:\n    pass",
         "def up(n): yield from range(n)\ndef keys(d): return d.keys()"),
        slow("import math\nassert math.isclose(third(1), 1 / 3)\nassert round(third(1), 2) == 0.33",
         "def third(n): return n / 3"),
        slow("for n in (1, 2):\n    for m in (1, 2):\n        assert sum([n, m]) == n + m", "def sum(n): return n[0] + n[1]"),
    ],
)  # fmt: skip
def test_runs_tests_of_any_python(tests, code):
    names = re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE)
    assert reward_of({"tests": tests, "names": names}, code).value == 1.0


def test_setup_runs_after_program():
    data = {"tests": "assert left(root) == 2", "names": ["left", "root"]}
    code = "class Node:\n    pass\ndef left(node): return node.left"
    assert reward_of({**data, "setup": "root = Node()\nroot.left = 2"}, code).value == 1.0
    assert is_wrong(reward_of({**data, "setup": "root = Node()\nroot.left = 3"}, code))


def test_prelude_belongs_to_tests():
    """A helper that the program redefines is the original one in the tests."""
    data = {
        "prelude": "def square(n): return n * n\ndef root(n): pass\n",
        "tests": "assert square(root(49)) == 49",
        "names": ["root"],
    }
    assert reward_of(data, "def root(n): return round(square(n) ** 0.25)").value == 1.0
    assert is_wrong(reward_of(data, "def square(n): return 49\ndef root(n): return 1"))


ALWAYS = (
    "class Yes{base}:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "    def __bool__(self): return True\n    def __ne__(self, other): return False\n"
)
TRUE = '[{"value": 3}, {"value": true}]'
CHEATS = {
    "leaves": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "exits when called": "import sys\ndef add(a, b): sys.exit(0)",
    "no program": "I would rather not.",
    "no function": "def addition(a, b): return a + b",
    "needs more": "def add(a, b, c): return a + b + c",
    "prints a verdict": 'print(\'{"passed": true, "why": ""}\')',
    "writes a verdict and leaves": "import os\nfor fd in range(20):\n    try: os.write(fd, b'{\"passed\": true, "
    "\"why\": \"\"}\\n')\n    except OSError: pass\nos._exit(0)",
    "writes true and leaves": f"import os\nfor fd in range(20):\n    try: os.write(fd, b'{TRUE}')\n"
    "    except OSError: pass\nos._exit(0)",
    "writes too few": "import os\nfor fd in range(20):\n    try: os.write(fd, b'[]')\n    except OSError: pass\n"
    "os._exit(0)",
    **{f"writes {what}": f"import os\nos.write(3, b'{what}')\nos._exit(0)" for what in (
        "null", "5", "true", '"broken"', '{"broken": [null]}', '[5, null]', '[{"raised": 5}, {}]', "[NaN, NaN]", "{}"
    )},
    "writes odd values": "import os\nos.write(3, b'[{\"value\": {\"result\": 0}}, {\"value\": {\"int\": []}}]')\n"
    "os._exit(0)",
    "writes depth": "import os\nos.write(3, b'[' * 100_000 + b']' * 100_000)\nos._exit(0)",
    "equals everything": ALWAYS.format(base="") + "def add(a, b): return Yes()",
    "a number that equals everything": ALWAYS.format(base="(int)") + "def add(a, b): return Yes(1)",
    "the class itself": ALWAYS.format(base="(type)") + "class C(metaclass=Yes): pass\ndef add(a, b): return C",
    "patches builtins": "import builtins\nbuiltins.bool = lambda *_: True\nbuiltins.AssertionError = ValueError\n"
    "builtins.isinstance = lambda *_: True\ndef add(a, b): return None",
    "patches json": "import json\njson.dumps = lambda *_: '{\"passed\": true, \"why\": \"\"}'\ndef add(a, b): return 0",
    "patches the judge": "import __main__\n__main__.judge = __main__.answer = lambda **_: {'passed': True, 'why': ''}\n"
    "__main__.encode = lambda *_: True\ndef add(a, b): return 0",
    "patches its frame": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n"
    "        f.f_globals['encode'] = lambda *_: True\n        f = f.f_back\n    return 0",
    "raises assertion error": "def add(a, b): raise AssertionError",
    "raises keyboard interrupt": "def add(a, b): raise KeyboardInterrupt",
    "raises error without text": "class E(BaseException):\n    def __str__(self): raise E\n    __repr__ = __str__\n"
    "def add(a, b): raise E",
    "returns itself": "def add(a, b): return add",
    "returns a circle": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "looks for the tests": "import glob, os, re\ndef add(a, b):\n    seen = ''\n    for path in [*glob.glob('/proc/[0-9]*/"
    "cmdline'), *glob.glob('/proc/[0-9]*/environ'), *glob.glob('/tmp/*'), *glob.glob('*.py')]:\n        try: seen += "
    "open(path, errors='replace').read(100_000)\n        except OSError: pass\n"
    "    found = re.search(r'add\\(%d, %d\\) == (\\d+)' % (a, b), seen)\n    return int(found[1]) if found else None",
    "a zero byte": "def add(a, b): return a + b\n\0",
    "half a character": "def add(a, b): return a + b\n# \ud800",
    "too long": HONEST + "#" * 200_000,
    "does not parse": "def add(a, b) return a + b",
    "deep": "x = " + "(" * 5000 + ")" * 5000,
}  # fmt: skip


# One cheat of each kind: early end, forged answer, equal to everything, patch, spy, and no program.
SOME_CHEATS = (
    "leaves when called",
    "writes true and leaves",
    "equals everything",
    "patches the judge",
    "looks for the tests",
    "deep",
)


@pytest.mark.parametrize("cheat", slow_but(SOME_CHEATS, CHEATS))
def test_cheats_score_zero(cheat):
    assert is_wrong(reward_of(ADD, CHEATS[cheat]))


@pytest.mark.parametrize(
    "tests",
    [
        "assert all(map(lambda c: add(*c) == 3, [(1, 2)]))",
        slow("assert not list(filter(lambda c: add(*c) != 3, [(1, 2)]))"),
        slow("assert callable(add)\nfor got, want in zip(map(lambda c: add(*c), [(1, 2)]), [3]):\n    assert got == want"),
    ],
)  # fmt: skip
def test_program_cannot_end_iterations_of_tests(tests):
    code = "def add(a, b): raise StopIteration"
    assert is_wrong(reward_of({"tests": tests, "names": ["add"]}, code), "StopIteration")


def test_object_that_contains_everything_scores_zero():
    code = "class All:\n    def __contains__(self, one): return True\n    def __iter__(self): return iter([1])\n"
    data = {"tests": "assert 8 in divisors(8)", "names": ["divisors"]}
    assert is_wrong(reward_of(data, code + "def divisors(n): return All()"))


def test_tests_that_make_other_calls_in_each_run_give_no_reward(monkeypatch):
    monkeypatch.setattr(verifiers, "MAX_ROUNDS", 3)
    data = {"tests": "import os\nassert size(os.urandom(9)) == 9", "names": ["size"]}
    reward = reward_of(data, "def size(b): return len(b)")
    assert reward.value is None and "make other calls in each run" in reward.error


def test_reports_forged_answer_to_fewer_calls():
    assert is_wrong(reward_of(ADD, CHEATS["writes too few"]), "forged its answer")


BOMBS = {
    "a loop": "while True: pass",
    "a loop when called": "def add(a, b):\n    while True: pass",
    "a loop that cannot be ended": "def add(a, b):\n    while True:\n        try:\n            while True: pass\n"
    "        except BaseException: pass",
    "much output": "import os, sys\nwhile True: os.write(3, b'x' * 1_000_000)",
    "a large value": "def add(a, b): return [0] * 10**8",
    "a large text": "def add(a, b): return 'x' * 10**8",
    "a large number": "def add(a, b): return 7 ** 10**8",
    "forks": "import os\ndef add(a, b):\n    while True:\n        try: os.fork()\n        except OSError: pass",
}


@pytest.mark.parametrize("bomb", slow_but(["a loop when called", "a large value"], BOMBS))
def test_bombs_score_zero(bomb):
    assert is_wrong(reward_of(ADD, BOMBS[bomb], QUICK))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        slow("", "output is another"),
        ("print(4)", "case 1 of 2: the output is another"),
        ("print(2 * int(input()))\nraise SystemExit(1)", "ended with code 1"),
        slow("import os\nos._exit(0)", "output is another"),
        slow("print(4); print(42)", "output is another"),
        slow("while True: print(4)", "case 0"),
        ("print('x' * 5_000_000)", "wrote too much"),
        ("print(4)\n\0", "zero bytes"),
        slow("while True: pass", "took more than 1 s"),
    ],
)
def test_wrong_output_scores_zero(code, why):
    assert is_wrong(reward_of(DOUBLE, code, QUICK), why)


def test_time_limit_covers_all_runs():
    data = {"cases": [{"input": "", "output": "1"}] * 9}
    slow = "import time\ntime.sleep(0.4)\nprint(1)"
    assert is_wrong(reward_of(data, slow, QUICK), "took more than 1 s")


def test_expected_values_never_reach_program():
    """Nor does the program run where the verdict is made, except for calls of its names."""
    boxes = []

    def sandbox():
        boxes.append([])
        return LocalSandbox(boxes[-1])

    secret, mark = 987_654_321, "marked_program"
    tests = f"assert add(1, 2) == 3\nassert add({secret} - 1, 1) == 987654321"
    assert reward_of({**ADD, "tests": tests}, HONEST + f"# {mark}", sandbox=sandbox).value == 1.0
    [bench], [box] = [[b for b in boxes if (mark in str(b)) == has] for has in (False, True)]
    assert len(bench) == 2 and len(box) == 1, "calls are found and made at once"
    assert str(secret) in str(bench) and str(secret) not in str(box)
    reward_of({"cases": [{"input": "1", "output": str(secret)}]}, f"# {mark}", sandbox=sandbox)
    assert mark in str(boxes[-1]) and str(secret) not in str(boxes[-1])


class Broken(LocalSandbox):
    async def exec(self, argv, *, timeout_s, stdin=b""):
        raise RuntimeError("the sandbox is gone")


class Hangs(LocalSandbox):
    async def __aenter__(self):
        await asyncio.sleep(60)


class Fragile(LocalSandbox):
    """Sandbox that fails this many times while certain programs run in it."""

    left = 0

    async def exec(self, argv, *, timeout_s, stdin=b""):
        if "poison" in f"{argv} {stdin}" and Fragile.left:
            Fragile.left -= 1
            raise RuntimeError("the sandbox is lost")
        return await super().exec(argv, timeout_s=timeout_s, stdin=stdin)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        slow(ADD, HONEST + "# poison", id="the program"),
        slow({**ADD, "tests": 'assert add("poi", "son")'}, HONEST, id="what it gave"),
        pytest.param(DOUBLE, "print(2 * int(input()))  # poison", id="a case"),
    ],
)
def test_program_that_breaks_its_sandbox_scores_zero(data, code, monkeypatch):
    """It breaks two sandboxes while others run. Otherwise bad programs would gain by breaking theirs."""
    monkeypatch.setattr(Fragile, "left", 2)
    why = "the program broke its sandbox: RuntimeError: the sandbox is lost"
    assert is_wrong(reward_of(data, code, sandbox=Fragile), why)
    monkeypatch.setattr(Fragile, "left", 1)
    assert reward_of(data, code, sandbox=Fragile).value == 1.0


def test_limits_concurrent_programs_and_excludes_waiting_time():
    inside, counts = 0, []

    class Counting(LocalSandbox):
        async def __aenter__(self):
            nonlocal inside
            inside += 1
            counts.append(inside)
            await asyncio.sleep(0.2)
            return self

        async def __aexit__(self, kind, error, trace):
            nonlocal inside
            inside -= 1

        async def exec(self, argv, *, timeout_s, stdin=b""):
            return Ran(0, stdin, b"")

    data = {"cases": [{"input": "1", "output": "1"}]}
    attempt = Attempt(messages=({"role": "assistant", "content": "x"},))
    task = Task(id="t", kind="code", messages=({"role": "user", "content": "?"},), data=data)
    config = VerifierConfig(timeout_s=0.6, code_timeout_s=0.1, code_concurrency=2)
    verifier = CodeVerifier(config, sandbox=Counting)

    async def batch():
        return await asyncio.gather(*(verifier(task, attempt) for _ in range(8)))

    for _ in range(2):  # each batch has a new event loop
        assert {reward.value for reward in asyncio.run(batch())} == {1.0}
    assert max(counts) == 2


@pytest.mark.parametrize(
    ("data", "sandbox", "why"),
    [
        (ADD, Broken, "RuntimeError: the sandbox is gone"),
        slow(DOUBLE, Broken, "RuntimeError: the sandbox is gone"),
        slow(ADD, Hangs, "TimeoutError"),
        ({}, LocalSandbox, "neither tests nor cases"),
        ({"cases": []}, LocalSandbox, "'t' has cases []"),
        ({"cases": [{"input": "1"}]}, LocalSandbox, "'t' has a case without input and output"),
        ({**ADD, "tests": "assert add(1, 2) = 3"}, LocalSandbox, "SyntaxError"),
        ({**ADD, "tests": "assert 1 == 1"}, LocalSandbox, "call nothing of the code"),
        ({**ADD, "tests": "add(1, 2)"}, LocalSandbox, "the tests assert nothing"),
        ({**ADD, "tests": "assert add(lambda: 1, 2)"}, LocalSandbox, "an object of class function"),
        slow(
            {**ADD, "tests": "while True: pass\nassert add(1, 2)"},
            LocalSandbox,
            "took more than 1 s",
        ),
    ],
)
def test_environment_failure_gives_no_reward(data, sandbox, why):
    config = VerifierConfig(timeout_s=2.1 if sandbox is Hangs else 30, code_timeout_s=1)
    reward = reward_of(data, HONEST, config, sandbox)
    assert reward.value is None and why in reward.error


@pytest.mark.slow
def test_hanging_tests_score_zero():
    data = {"tests": "n = add(1, 2)\nassert n == 3 or [x for x in iter(int, 1)]", "names": ["add"]}
    assert is_wrong(reward_of(data, "def add(a, b): return 4", QUICK), "took more than 1 s")


@pytest.mark.slow
def test_time_limit_covers_all_runs_of_tests():
    data = {
        "tests": "import time\ntime.sleep(0.3)\nn = 5\nwhile n:\n    n = less(n)\nassert n == 0",
        "names": ["less"],
    }
    code = "def less(n): return n - 1"
    assert is_wrong(reward_of(data, code, QUICK), "the tests: took more than 1 s")
    assert reward_of(data, code).value == 1.0


def test_unreached_assert_scores_zero():
    data = {"tests": "for n in primes(9):\n    assert n in (2, 3, 5, 7)", "names": ["primes"]}
    assert is_wrong(reward_of(data, "def primes(n): return []"), "no assert was reached")
    assert reward_of(data, "def primes(n): return [2, 3, 5, 7]").value == 1.0


def test_calls_that_never_settle_score_zero(monkeypatch):
    monkeypatch.setattr(verifiers, "MAX_ROUNDS", 2)
    data = {
        "tests": "n = 0\nwhile n < 99:\n    n = next_of(n)\nassert n == 99",
        "names": ["next_of"],
    }
    assert is_wrong(reward_of(data, "def next_of(n): return n + 1"), "the calls are others")


def circle():
    value = []
    value.append([value])
    return value


VALUES = [
    None, True, 0, -7, 2**59, -(2**70), 1.5, float("inf"), 1 + 2j, "", "é\ud800", b"\0\xff", bytearray(b"x"),
    [1, [2]], (1, (2,)), {1, (2, 3)}, frozenset({3, 5}), {}, {1: "a", (1, 2): [None], "k": {"int": "0x1"}},
    {"value": 3}, [{"set": [1]}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_survive_round_trip(value):
    back = code_child.decode(json.loads(json.dumps(code_child.encode(value))))
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize(
    "value", [object(), [len], iter([1]), [0] * code_child.MAX_VALUES, circle()]
)
def test_rejects_unserializable_or_large_values(value):
    with pytest.raises(code_child.Unserializable):
        code_child.encode(value)


def test_decodes_plain_value_of_subclass():
    class Text(str):
        def __eq__(self, other):
            return True

    back = code_child.decode(code_child.encode([Text("a")]))
    assert back == ["a"] and type(back[0]) is str and back != ["b"]


def test_judge_and_answer_agree_in_one_process():
    """Runs both ends round by round, as the sandboxes do."""
    tests = {"tests": "assert add(add(1, 1), 1) == 3", "prelude": "", "names": ["add"]}
    [inner, outer] = code_child.judge(**tests, calls=[], outcomes=[])["calls"]
    assert inner == {"function": {"name": "add"}, "args": [1, 1], "kwargs": {"dict": []}}
    assert outer["args"] == [{"result": 0}, 1]
    outcomes = code_child.answer(HONEST, "", [inner, outer])
    assert outcomes == [{"value": 2}, {"value": 3}]
    # After the inner result is known, the outer call has only numbers.
    calls = code_child.judge(**tests, calls=[inner, outer], outcomes=outcomes)["calls"]
    assert calls[1]["args"] == [2, 1]
    reward_of = [
        code_child.judge(**tests, calls=calls, outcomes=[{"value": 2}, {"value": n}])
        for n in (3, 4)
    ]
    assert reward_of[0] == {"passed": True, "why": ""}
    assert reward_of[1] == {"passed": False, "why": "AssertionError assert 1 does not hold"}


def test_copy_of_result_is_same_reference():
    [first, used] = code_child.judge(
        "import copy\nassert f(copy.deepcopy(f(1))) == 1", "", ["f"], [], []
    )["calls"]
    assert (first["args"], used["args"]) == ([1], [{"result": 0}])


@pytest.mark.parametrize(
    "test",
    ["assert f({}) == 1", "assert f({}) is None", "assert not f({})", "assert f({}) + 1 == 3"],
)
def test_collects_calls_of_all_asserts(test):
    tests = "\n".join(test.format(n) for n in (5, 6, 7))
    result = code_child.judge(tests, "", ["f"], [], [])
    assert [call["args"] for call in result["calls"]] == [[5], [6], [7]]


@pytest.mark.parametrize(
    ("code", "calls", "outcomes"),
    [
        ("def", [], {"broken": "SyntaxError invalid syntax (solution.py, line 1)"}),
        ("raise SystemExit(3)", [], {"broken": "SystemExit 3"}),
        ("", ["nothing"], [{"raised": ["KeyError", "'nothing'"]}]),
        ("def f(): raise ValueError('no')", ["f"], [{"raised": ["ValueError", "no"]}]),
        ("class f: pass", ["f"], [{"object": "f"}]),
    ],
)
def test_reports_failures_of_program(code, calls, outcomes):
    calls = [{"function": {"name": name}, "args": [], "kwargs": {"dict": []}} for name in calls]
    assert code_child.answer(code, "", calls) == outcomes
