"""Right answers are 1 and wrong ones 0, whatever they are made of; what else fails is no reward."""

import asyncio
import json
import os
import pathlib
import signal
import sys
import time

import pytest

from glm5_jax.data import chat_tasks
from glm5_jax.envs.reasoning import task_sources
from glm5_jax.envs.reasoning.final_answer import LETTERS
from glm5_jax.envs.reasoning.verifiers import (
    KINDS,
    AnswerVerdict,
    CodeVerifier,
    MathVerifier,
    ScienceVerifier,
    SearchVerifier,
    TirVerifier,
    VerifierConfig,
    verifier_for,
)
from glm5_jax.rl.types import Attempt, Reward, Task
from glm5_jax.runtime.process import PipeWorker
from tests.envs import search_solvers
from tests.envs.local_sandbox import LocalSandbox
from tests.envs.terminal.folders import slow_but
from tests.envs.test_reasoning_code import ALWAYS, shipped
from tests.envs.test_reasoning_tasks import made, question, right_answer

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = VerifierConfig(timeout_s=200, math_timeout_s=60)
CALCULATE = {"type": "function", "function": {"name": "calculate", "parameters": {}}}
NEVER_ENDS = "\\boxed{10^{10^{10}}}"
ROOT_OF_TWO = "\\sqrt{2}"  # what must be computed to be compared


@pytest.fixture(scope="module")
def formulas():
    with MathVerifier(CONFIG) as verifier:
        yield verifier


def task(kind="math", tools=(), **data):
    return Task(
        id="t", kind=kind, messages=({"role": "user", "content": "?"},), data=data, tools=tools
    )


def said(content):
    return {"role": "assistant", "content": content}


def judged(verifier, asked, *messages, **options) -> Reward:
    return asyncio.run(verifier(asked, Attempt(messages=messages, **options)))


@pytest.mark.parametrize(
    ("truth", "reply"),
    [
        ("18", "18"),
        ("18", "She has \\boxed{18 \\text{ eggs}}."),
        ("18", "Answer: $18.00"),
        ("70000", "#### 70,000"),
        ("0.5", "\\boxed{\\frac{1}{2}}"),
        ("1/2", "\\boxed{\\dfrac{3}{6}}"),
        ("\\frac12", "0.5"),
        ("1/3", "0.333333"),
        ("50", "50%"),
        ("1000", "\\boxed{10^3}"),
        ("1500", "\\boxed{1.5e3}"),
        ("5", "\\boxed{x = 5}"),
        ("2\\sqrt{2}", "\\boxed{\\sqrt{8}}"),
        ("(x+1)^2", "The answer is $x^2 + 2x + 1$."),
        ("\\{4, 5\\}", "\\boxed{5, 4}"),
        ("(1, 2)", "\\boxed{(1, 2)}"),
        ("\\text{yes}", "\\boxed{Yes}"),
        ("123456789012345678901", "123456789012345678901"),
        ("85", "27+58=85"),
        ("85", "\\boxed{27 + 58 = 85}"),
        ("18", "\\boxed{\\text{Total} \\approx 18^\\circ}"),
        ("18", "\\boxed{18\\,\\mathrm{cm}^{2}}"),
        ("18", "\\boxed{\\mathbf{18}}"),
        ("18", "\\boxed{(18)}"),
        ("1800", "\\boxed{1.8 \\times 10^3}"),
        ("3.5", "\\boxed{3\\frac{1}{2}}"),
        ("-1/3", "\\boxed{-\\frac{1}{3}}"),
        ("\\{4, 5\\}", "\\boxed{x = 4, x = 5}"),
        ("\\{4, 5\\}", "\\boxed{x=4 \\text{ or } 5}"),
        ("\\{-2, 2\\}", "\\boxed{\\pm 2}"),
        ("[2,\\infty)", "\\boxed{\\left[2, \\infty\\right)}"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}"),
        ("2^{10}", "\\boxed{4^5}"),
        ("2x+3", "\\boxed{3+2x}"),
    ],
)  # fmt: skip
def test_what_means_the_same_is_right(formulas, truth, reply):
    assert judged(formulas, task(answer=truth), said(reply)) == Reward(1.0, {"right": 1.0})


@pytest.mark.parametrize(
    ("truth", "reply"),
    [
        ("18", "19"),
        ("18", "\\boxed{18} or rather \\boxed{19}"),
        ("18", "\\boxed{18, 19}"),
        ("18", "\\boxed{18 or 19}"),
        ("18", "\\boxed{18 \\pm 1}"),
        ("18", "\\boxed{18x}"),
        ("18", "\\boxed{18 million}"),
        ("18", "The answer is 18 or 19."),
        ("18", "\\boxed{x < 18}"),
        ("18", "\\boxed{18 \\neq 18}"),
        ("18", "\\boxed{\\infty}"),
        ("18", "\\boxed{\\frac{18}{0}}"),
        ("1/3", "0.33"),
        ("(1, 2)", "\\boxed{(2, 1)}"),
        ("yes", "\\boxed{sey}"),
        ("18", "\\boxed{yes}"),
        ("123456789012345678901", "123456789012345678902"),
        ("18", "\\boxed{__import__('os')._exit(0)}"),
        ("18", "\\boxed{\ud800 \0 \\frac{}{}}"),
        pytest.param("18", "\\boxed{" + "{" * 200 + "}" * 200 + "}", marks=pytest.mark.slow),
    ],
)
def test_what_means_something_else_is_wrong(formulas, truth, reply):
    reward = judged(formulas, task(answer=truth), said(reply))
    assert (reward.value, reward.parts) == (0.0, {"right": 0.0})


@pytest.mark.parametrize(
    ("truth", "left"),
    [
        ("85", "27+58"), ("85", "27 + 58"), ("85", "x = 27+58"), ("85", "85 = 27+58"), ("85", "27+58=1"),
        ("85", "27\\frac{58}{1}"), ("85", "(27)+(58)"), ("85", "27-(-58)"), ("85", "\\sum_{i=27}^{27} i+58"),
        ("85", "27\\text{+}58"), ("85", "\\text{27+58}"), ("85", "\\mathrm{27+58}"), ("85", "27--58"),
        ("3696", "48*77"), ("3696", "48\\times77"), ("3696", "48 \\cdot 77"), ("3696", "48(77)"), ("3696", "(48)(77)"),
        ("3696", "\\frac{48}{\\frac{1}{77}}"), ("3696", "48/(1/77)"), ("3696", "\\frac{7392}{2}"), ("3696", "7392/2"),
        ("3696", "48:(1:77)"), ("1024", "2^{10}"), ("1024", "2**10"), ("1000", "10^{2+1}"), ("120", "5!"),
        ("4", "\\sqrt{16}"), ("4", "\\binom{4}{1}"), ("4", "\\int_0^4 1 dx"), ("4", "\\max(4, 3)"), ("4", "|-4|"), ("4", "#"), ("85", "27+58;85"),
        ("(1, 2)", "(1, 1+1)"), ("0.5", "1-0.5"), ("1/2", "1/4+1/4"), ("50%", "25\\%+25\\%"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "layout",
    [
        "\\boxed{{{}}}",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("{}", "The answer is ${}$.")),
    ],
)
def test_what_is_still_to_be_computed_is_no_answer(formulas, truth, left, layout):
    """Or who repeats the question has answered it."""
    assert judged(formulas, task(answer=truth), said(layout.format(left))).value == 0.0


@pytest.mark.parametrize(
    "hedge",
    [
        "18 or 19", "18, 19", "18; 19", "18 = 19", "18 \\text{ (or 19)}", "[18, 19]", "(18, 19)", "18 \\vee 19",
        "18 \\cup 19", "18 \\to 19", "18 \\quad 19", "18 \\\\ 19", "18 \\mid 19", "18 \\leq x \\leq 19", "18.5 \\pm 0.5",
        "x = 18, y = 19", "\\begin{cases} 18 \\\\ 19 \\end{cases}", "18} \\boxed{19", "18 \\neq 19", "\\boxed{18} \\boxed{19}",
        "$18$ \\text{The final answer is 19. I hope}", "18 \\text{answer: } $19$", "\\{18, 19\\}", "18 \\% 19",
    ],
)  # fmt: skip
def test_no_answer_is_right_for_two_results(formulas, hedge):
    rights = [
        judged(formulas, task(answer=truth), said(f"\\boxed{{{hedge}}}")).value
        for truth in ("18", "19")
    ]
    assert sum(rights) <= 1


@pytest.mark.parametrize("reply", ["", "hello there", "\\boxed{}", "\\boxed{" + "1+" * 5000 + "1}"])
def test_no_answer_is_wrong(formulas, reply):
    reward = judged(formulas, task(answer="18"), said(reply))
    assert reward == Reward(0.0, {"right": 0.0}, "the reply has no final answer")


def test_an_answer_that_never_ends_is_wrong_and_the_next_one_is_judged():
    with MathVerifier(VerifierConfig(timeout_s=200, math_timeout_s=1)) as verifier:
        assert judged(verifier, task(answer="5"), said("5")).value == 1.0
        start = time.monotonic()
        reward = judged(verifier, task(answer=ROOT_OF_TWO), said(NEVER_ENDS))
        assert (reward.value, reward.error) == (0.0, "the answer took more than 1 s to compare")
        assert time.monotonic() - start < 20
        assert judged(verifier, task(answer="5"), said("5")).value == 1.0


def comparing() -> set[int]:
    """Children of this process that compare formulas."""
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    children = {int(pid) for task in tasks for pid in task.read_text().split()}
    return {
        pid
        for pid in children
        if b"math_answers" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def test_replaces_a_child_that_died_of_something_else(formulas):
    assert judged(formulas, task(answer="5"), said("5")).value == 1.0
    killed = comparing()
    for child in killed:
        os.killpg(child, signal.SIGKILL)
    assert judged(formulas, task(answer="5"), said("5")).value == 1.0
    assert killed and len(comparing() - killed) == 1


def test_compares_answers_side_by_side():
    before = comparing()

    async def both():
        attempts = [Attempt(messages=(said(str(n)),)) for n in range(20)]
        return await asyncio.gather(*(verifier(task(answer="7"), a) for a in attempts))

    with MathVerifier(VerifierConfig(timeout_s=200, math_timeout_s=60, math_workers=2)) as verifier:
        assert [reward.value for reward in asyncio.run(both())] == [
            float(n == 7) for n in range(20)
        ]
        assert len(comparing() - before) == 2


class Slow(MathVerifier):
    def _compare(self, answer, truth):
        time.sleep(0.1)
        return AnswerVerdict(True)


def test_who_waits_for_others_loses_no_time():
    """Or a policy had attempts left out by answers that take long."""

    async def all_of_them():
        return await asyncio.gather(
            *(verifier(task(answer="5"), Attempt(messages=(said("5"),))) for _ in range(6))
        )

    config = VerifierConfig(timeout_s=0.5, math_timeout_s=0.3, code_timeout_s=0.1)
    with Slow(config) as verifier:
        assert {reward.value for reward in asyncio.run(all_of_them())} == {1.0}


DEAF = """
import os, signal, sys
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
os.execv(sys.executable, [sys.executable, "-m", "glm5_jax.envs.reasoning.math_answers"])
"""


@pytest.mark.slow
def test_the_child_ends_by_itself_if_nobody_waits():
    """Also if it is started by one that hears no alarm."""
    with PipeWorker([sys.executable, "-c", DEAF], cwd=ROOT) as worker:
        assert worker.call("ready", 120)
        for answer in ("yes", "1", "\\frac{"):
            worker.call(
                "equal", 60, answer=answer, truth="yes" if answer == "yes" else "2", seconds=1
            )
        time.sleep(1.2)
        assert worker.call("equal", 60, answer="1", truth="1", seconds=60), (
            "it waits for the next call"
        )
        with pytest.raises(ChildProcessError):
            worker.call("equal", 60, answer="10^{10^{10}}", truth=ROOT_OF_TWO, seconds=1)


def test_the_child_compares(monkeypatch):
    """Here, where what ran is seen; its clock is the test's, too."""
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    from glm5_jax.envs.reasoning import math_answers

    assert math_answers.ready()
    assert not math_answers.equal("1/3", "0.5", 60)
    assert math_answers.equal("\\text{yes}", "Yes", 60) and not math_answers.equal("sey", "yes", 60)


@pytest.mark.parametrize("data", [{}, {"answer": ""}, {"answer": 18}])
def test_a_task_without_an_answer_is_no_reward(formulas, data):
    reward = judged(formulas, task(**data), said("18"))
    assert reward.value is None and "'t' has answer" in reward.error


def test_a_child_that_does_not_start_is_no_reward(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with MathVerifier(CONFIG) as verifier:
        reward = judged(verifier, task(answer="18"), said("18"))
    assert reward.value is None and reward.error.startswith("ChildProcessError: /bin/false")


def test_attempts_that_did_not_come_to_their_end(formulas):
    asked = task(answer="18")
    cut = judged(formulas, asked, said("18"), finish_reason="length")
    assert cut == Reward(0.0, {"right": 0.0}, "the attempt was cut off")
    mistake = judged(formulas, asked, said("18"), error="the call names no function")
    assert mistake == Reward(0.0, {"right": 0.0}, "the call names no function")
    failed = judged(formulas, asked, said("18"), finish_reason="failed", error="no more tools")
    assert failed == Reward(None, {}, "no more tools")


def test_a_choice_is_one_letter():
    verifier = ScienceVerifier(CONFIG)
    asked = task("science", answer="B", choices=4)
    assert judged(verifier, asked, said("It must be (B).\nAnswer: B")) == Reward(
        1.0, {"right": 1.0}
    )
    assert judged(verifier, asked, said("C")) == Reward(0.0, {"right": 0.0})
    several = judged(verifier, asked, said("\\boxed{A} \\boxed{B}"))
    assert several == Reward(0.0, {"right": 0.0}, "the reply claims no one letter")
    for wrong in ({"answer": "E", "choices": 4}, {"answer": "AB", "choices": 4}, {"answer": "A"}):
        reward = judged(verifier, task("science", **wrong), said("A"))
        assert reward.value is None and "'t'" in reward.error


def call(*names, ids=False, content=""):
    calls = [{"id": f"call-{n}", "function": {"name": n, "arguments": "{}"}} for n in names]
    if not ids:
        calls = [{"name": name, "arguments": {}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content="408", **more):
    return {"role": "tool", "content": content, **more}


@pytest.fixture(scope="module")
def with_tools():
    with TirVerifier(CONFIG) as verifier:
        yield verifier


@pytest.mark.parametrize(
    ("min_calls", "messages"),
    [
        (1, [call("calculate"), result(), said("408")]),
        (0, [said("408")]),
        (2, [call("calculate", "calculate"), result(), result(), said("408")]),
        (2, [call("calculate"), result("Error: no"), call("calculate"), result(), said("408")]),
        (1, [call("calculate", ids=True), result(tool_call_id="call-calculate"), said("408")]),
    ],
)
def test_a_trace_with_the_answer_is_right(with_tools, min_calls, messages):
    asked = task("tir", (CALCULATE,), answer="408", min_calls=min_calls)
    reward = judged(with_tools, asked, *messages)
    assert reward == Reward(1.0, {"right": 1.0, "trace": 1.0})


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([said("408")], "the attempt called tools 0 times; 1 are asked"),
        ([call("calculator"), result(), said("408")], "there is no tool 'calculator'"),
        ([call("calculate"), result(), call("x"), result(), said("408")], "there is no tool 'x'"),
        ([call("calculate", content="408")], "the attempt ends with a call"),
        ([call("calculate", "calculate", content="408"), result()], "the attempt ends with a call"),
        ([], "the attempt called tools 0 times; 1 are asked"),
    ],
)
def test_a_trace_that_breaks_the_rules_is_wrong(with_tools, messages, why):
    asked = task("tir", (CALCULATE,), answer="408", min_calls=1)
    reward = judged(with_tools, asked, *messages)
    assert reward == Reward(0.0, {"right": 0.0, "trace": 0.0}, why)


def test_a_wrong_answer_behind_a_good_trace_is_wrong(with_tools):
    asked = task("tir", (CALCULATE,), answer="408", min_calls=1)
    reward = judged(with_tools, asked, call("calculate"), result(), said("409"))
    assert reward == Reward(0.0, {"right": 0.0, "trace": 1.0})


@pytest.mark.parametrize(
    "messages",
    [
        [result(), said("408")],
        [call("calculate"), said("408")],
        [call("calculate"), call("calculate"), result(), result(), said("408")],
        [call("calculate"), result(), result(), said("408")],
        [call("calculate", ids=True), result(tool_call_id="call-other"), said("408")],
    ],
)
def test_results_that_belong_to_no_call_are_not_the_policys_fault(with_tools, messages):
    asked = task("tir", (CALCULATE,), answer="408")
    reward = judged(with_tools, asked, *messages)
    assert reward.value is None and reward.error.startswith("ValueError: message")


def worked(kind):
    """Who made the problem has the solution."""
    for one, line in zip(
        made(kind, 3), chat_tasks.make_lines(chat_tasks.ChatTaskConfig(kind=kind), "interleaved")
    ):
        yield one, [json.loads(line)["messages"][1]]


def by_hand(answer):
    return lambda kind: (
        (one, [said(f"The answer is {answer(question(one))}.")]) for one in made(kind, 3)
    )


def sum_of(asked):
    return sum(map(int, asked.removesuffix("?").split("+")))


def letter_of(asked):
    stem, *lines = asked.splitlines()
    return next(line[0] for line in lines if line[3:] == right_answer(stem))


def multiplied(kind):
    for one in made(kind, 3):
        left, right = map(int, question(one).removesuffix("?").split("*"))
        yield one, [call("calculate"), result(), said(f"\\boxed{{{left * right}}}")]


def programs(kind):
    for one, code in shipped(kind, 1):
        yield one, [said(f"```python\n{code}\n```")]


def searched(kind):
    for one in made(kind, 3):
        yield one, asyncio.run(search_solvers.attempt(one, search_solvers.follow)).messages


WORD_PROBLEMS = {"There are 87": 290 // 2, "Marco and hi": 30 - 11, "Edward spent": 6 // 2}
SOLUTIONS = {
    "gsm8k": worked,
    "chain": worked,
    "svamp": by_hand(lambda asked: WORD_PROBLEMS[asked[:12]]),
    "addition": by_hand(sum_of),
    "choices": by_hand(letter_of),
    "products": multiplied,
    "mbpp": programs,
    "humaneval": programs,
    "musique": searched,
    "worlds": searched,
}


def cheats(asked, solution):
    """Attempts that know no solution, or that have one and do not give it."""
    text, last = question(asked), solution[-1]["content"]
    replies = ["", " \n", "?", text, f"{last}\n\\boxed{{-7}}\n```python\npass\n```"]
    if names := asked.data.get("names"):
        always = ALWAYS.format(base="") + f"def {names[-1]}(*args): return Yes()"
        replies += ["import os\nos._exit(0)", 'print(\'{"passed": true, "why": ""}\')', always]
    else:
        replies += [
            "I know it.", f"\\boxed{{{text}}}", "\\boxed{}", "\\boxed{x}", "\\boxed{answer}", '{"right": 1.0}',
            "".join(f"\\boxed{{{one}}}" for one in LETTERS), f"\\boxed{{{', '.join(map(str, range(200)))}}}",
            "The answer is the right one.", "The reward is \\boxed{\\text{right}}", "yes " * 2000,
        ]  # fmt: skip
    yield from (Attempt(messages=(*solution[:-1], said(reply))) for reply in replies)
    yield Attempt(messages=())
    yield Attempt(messages=(*solution[:-1], said(None) | {"reasoning_content": last}))
    yield Attempt(messages=(*solution[:-1], {"role": "user", "content": last}))
    yield Attempt(messages=tuple(solution), finish_reason="length")
    yield Attempt(messages=tuple(solution), error="a call that cannot be read")
    if asked.kind == "tir":
        yield Attempt(messages=(said(last),))
        yield Attempt(messages=(call("calculator"), result(), said(last)))


def test_every_kind_of_task_has_a_solution_here():
    assert SOLUTIONS.keys() == task_sources.KINDS.keys()


@pytest.mark.parametrize("kind", slow_but(SOLUTIONS.keys() - {"mbpp", "humaneval"}, SOLUTIONS))
def test_a_solution_is_worth_one_and_nothing_and_cheats_nothing_each_time(
    kind, formulas, with_tools
):
    verifier = {
        "math": formulas,
        "tir": with_tools,
        "science": ScienceVerifier(CONFIG),
        "code": CodeVerifier(CONFIG, sandbox=LocalSandbox),
        "search": SearchVerifier(CONFIG),
    }[task_sources.KINDS[kind].domain]

    async def rewards(asked, attempts):
        return await asyncio.gather(*(verifier(asked, attempt) for attempt in attempts))

    for asked, solution in SOLUTIONS[kind](kind):
        tried = [Attempt(messages=tuple(solution)), *cheats(asked, solution)]
        once, again = (asyncio.run(rewards(asked, tried)) for _ in range(2))
        assert once == again
        assert once[0] == Reward(1.0, {**once[0].parts, "right": 1.0})
        assert [(a, r) for a, r in zip(tried[1:], once[1:]) if r.value != 0] == []


def test_verifiers_are_found_by_the_kind_of_task():
    assert set(KINDS) == {"math", "science", "code", "tir", "search"}
    assert isinstance(verifier_for("science"), ScienceVerifier)
    with pytest.raises(
        ValueError, match="no verifier of 'poem'; use one of math, science, code, tir, search"
    ):
        verifier_for("poem")


@pytest.mark.parametrize(
    ("field", "value"),
    [("timeout_s", 0), ("math_timeout_s", -1), ("code_timeout_s", float("nan")), ("math_workers", 0), ("timeout_s", 30),
     ("code_concurrency", 0)],
)  # fmt: skip
def test_limits_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        VerifierConfig(**{field: value})
