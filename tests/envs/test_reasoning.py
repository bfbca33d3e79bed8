"""Verifiers of reasoning: right answers score 1, wrong ones 0, and other failures give no reward."""

import asyncio
import os
import pathlib
import signal
import sys
import time

import pytest

from glm5_jax.envs.reasoning import task_sources, verifiers
from glm5_jax.envs.reasoning.verifiers import (
    KINDS,
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
from tests.envs.local_sandbox import LocalSandbox
from tests.envs.reasoning_solutions import SOLUTIONS, call, cheats, reply_with, result
from tests.envs.terminal.folders import slow_but

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = VerifierConfig(timeout_s=200, math_timeout_s=60)
CALCULATE = {"type": "function", "function": {"name": "calculate", "parameters": {}}}
NEVER_ENDS = "\\boxed{10^{10^{10}}}"
ROOT_OF_TWO = "\\sqrt{2}"  # must be computed to be compared


@pytest.fixture(scope="module")
def formulas():
    with MathVerifier(CONFIG) as verifier:
        yield verifier


def task(kind="math", tools=(), **data):
    return Task(
        id="t", kind=kind, messages=({"role": "user", "content": "?"},), data=data, tools=tools
    )


def reward_of(verifier, problem, *messages, **options) -> Reward:
    return asyncio.run(verifier(problem, Attempt(messages=messages, **options)))


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
        ("\\{-1, 3\\}", "\\boxed{1 \\pm 2}"),
        ("\\{-1, 3\\}", "\\boxed{x = -1 \\text{ or } x = 3}"),
        ("12345", "\\boxed{12,345\\text{ m}}"),
        ("\\{2120, 3\\}", "\\boxed{x = 2120 \\text{ and } x = 3}"),
        ("0.0015", "\\boxed{1.5 \\cdot 10^{-3}}"),
        ("\\{1/2, -3/4\\}", "\\boxed{\\{\\frac12, -\\frac{3}{4}\\}}"),
        ("\\{3.5, 1\\}", "\\boxed{3\\frac12, 1}"),
        ("0.5", "\\boxed{50\\%}"),
        ("1e-05", "0.00001"),
        ("1.5e3", "\\boxed{1500}"),
        ("2024-01-05", "The answer is 2024-1-5."),
        ("H2O2", "\\boxed{\\mathrm{H_2O_2}}"),
        ("New York", "New York"),
        ("[1, 2, 3]", "[1, 2, 3]"),
        ("[2,\\infty)", "\\boxed{\\left[2, \\infty\\right)}"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}"),
        ("2^{10}", "\\boxed{4^5}"),
        ("2x+3", "\\boxed{3+2x}"),
        ("1/2", "\\boxed{1 / 2}"),
        ("1/2", "\\boxed{{1 \\over 2}}"),
        ("-3/4", "\\boxed{\\frac{3}{-4}}"),
        ("1/6", "\\boxed{0.1\\overline{6}}"),
        ("18", "\\boxed{\\ 18\\ }"),
        ("18", "\\boxed{\\bf 18}"),
        ("18", "\\boxed{\\textcolor{red}{18}}"),
        ("18", "\\boxed{\\underline{18}}"),
        ("18", "\\boxed{\\approx 18}"),
        ("18", "答案：18"),
        ("1800000", "\\boxed{1~800~000}"),
        ("18 m/s", "\\boxed{18\\,\\mathrm{m/s}}"),
        ("18 cm^2", "\\boxed{18 \\text{ cm}^{2}}"),
        ("3+4i", "\\boxed{3+4\\mathrm{i}}"),
        ("(1, 2)", "\\boxed{(x, y) = (1, 2)}"),
        ("(2,\\infty)", "\\boxed{x > 2}"),
        ("[1,2)", "\\boxed{1 \\le x < 2}"),
        ("[1,2)", "\\boxed{x \\in [1,2)}"),
        ("(-\\infty,2)\\cup(3,\\infty)", "\\boxed{x<2 \\text{ or } x>3}"),
        ("3:45 PM", "\\boxed{3{:}45 \\text{ p.m.}}"),
        ("Tuesday", "\\boxed{\\textbf{Tuesday}}"),
        ("\\emptyset", "\\boxed{\\varnothing}"),
    ],
)  # fmt: skip
def test_accepts_equivalent_answers(formulas, truth, reply):
    assert reward_of(formulas, task(answer=truth), reply_with(reply)) == Reward(1.0, {"right": 1.0})


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
        ("2024-01-05", "2018"),
        ("2024-01-05", "2024-05-01"),
        ("1/2/2024", "2/1/2024"),
        ("H2O2", "H4O"),
        ("18 m/s", "\\boxed{18 \\text{ km/h}}"),
        ("3:45 PM", "\\boxed{3:45 AM}"),
        ("(1, 2)", "\\boxed{(y, x) = (1, 2)}"),
        ("(2,\\infty)", "\\boxed{x \\ge 2}"),
        ("(2,\\infty)", "\\boxed{x < 2}"),
        ("[1,2)", "\\boxed{1 \\le x > 2}"),
        ("1e-05", "-2.2817"),
        ("18", "\\boxed{yes}"),
        ("123456789012345678901", "123456789012345678902"),
        ("18", "\\boxed{__import__('os')._exit(0)}"),
        ("18", "\\boxed{\ud800 \0 \\frac{}{}}"),
        pytest.param("18", "\\boxed{" + "{" * 200 + "}" * 200 + "}", marks=pytest.mark.slow),
    ],
)
def test_rejects_different_answers(formulas, truth, reply):
    reward = reward_of(formulas, task(answer=truth), reply_with(reply))
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
        ("85", "27\\,\\text{or}58"), ("85", "27\\,\\text{and}\\,58"), ("85", "27\\{58\\}"), ("3696", "48\\{77\\}10^{0}"),
        ("31", "27\\,\\text{and}-58"), ("3696", "\\;48\\times 10^0\\,\\text{or}\\!77"), ("-31", "27-\\:\\$58≈10^{0}"),
        ("\\{85, 3\\}", "\\{27\\,\\text{or}\\,58, 3\\}"), ("1566", "27 \\times 10^0\\infty58"), ("-31", "27+\\infty 58"),
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
def test_rejects_answers_that_need_computation(formulas, truth, left, layout):
    """Otherwise repeating the question would be an answer."""
    assert reward_of(formulas, task(answer=truth), reply_with(layout.format(left))).value == 0.0


@pytest.mark.parametrize(
    "hedge",
    [
        "18 or 19", "18, 19", "18; 19", "18 = 19", "18 \\text{ (or 19)}", "[18, 19]", "(18, 19)", "18 \\vee 19",
        "18 \\cup 19", "18 \\to 19", "18 \\quad 19", "18 \\\\ 19", "18 \\mid 19", "18 \\leq x \\leq 19", "18.5 \\pm 0.5",
        "x = 18, y = 19", "\\begin{cases} 18 \\\\ 19 \\end{cases}", "18} \\boxed{19", "18 \\neq 19", "\\boxed{18} \\boxed{19}",
        "$18$ \\text{The final answer is 19. I hope}", "18 \\text{answer: } $19$", "\\{18, 19\\}", "18 \\% 19",
    ],
)  # fmt: skip
def test_rejects_answers_with_two_results(formulas, hedge):
    rights = [
        reward_of(formulas, task(answer=truth), reply_with(f"\\boxed{{{hedge}}}")).value
        for truth in ("18", "19")
    ]
    assert sum(rights) <= 1


@pytest.mark.parametrize(
    ("truth", "left"),
    [
        ("\\frac{\\pi}{4}", "\\int_0^1 \\frac{1}{1+x^2} dx"),
        ("\\frac{\\pi^2}{6}", "\\sum_{n=1}^{\\infty} \\frac{1}{n^2}"),
        ("e", "\\lim_{n \\to \\infty} (1+\\frac{1}{n})^n"),
        ("2x", "\\frac{d}{dx} x^2"),
        ("\\frac{x^3}{3}", "\\int_0^x t^2 dt"),
        ("\\ln 2", "\\int_1^2 \\frac{1}{x} dx"),
        ("\\frac{\\sqrt{3}}{2}", "\\cos(\\frac{\\pi}{6})"),
        ("\\frac{\\sqrt{3}}{2}", "x = \\cos(\\frac{\\pi}{6})"),
        ("\\frac{\\pi}{4}", "\\int_0^1 \\frac{1}{1+x^2} dx ="),
    ],
)
def test_rejects_formulas_that_leave_the_question_to_compute(formulas, truth, left):
    assert reward_of(formulas, task(answer=truth), reply_with(f"\\boxed{{{left}}}")).value == 0.0
    assert reward_of(formulas, task(answer=left), reply_with(f"\\boxed{{{left}}}")).value == 1.0


@pytest.mark.parametrize(
    ("truth", "reply"),
    [
        ("2^x", "e^{x \\ln 2}"),
        ("\\frac{\\pi}{4}", "\\int_0^1 \\frac{1}{1+x^2} dx = \\frac{\\pi}{4}"),
        ("\\frac{\\pi}{4}", "I = \\int_0^1 \\frac{1}{1+x^2} dx = \\frac{\\pi}{4}"),
        ("\\frac{\\pi^2}{6}", "\\sum_{n=1}^{\\infty} \\frac{1}{n^2} = \\frac{\\pi^2}{6}"),
        ("\\frac{\\sqrt{3}}{2}", "\\cos(\\frac{\\pi}{6}) = \\frac{\\sqrt{3}}{2}"),
        ("\\frac{\\ln 3}{\\ln 2}", "\\log_2 3"),
        ("e^2", "e^{2}"),
        ("2\\sin x\\cos x", "\\sin(2x)"),
        ("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}"),
        ("\\sum_{k=1}^{n} k", "\\frac{n(n+1)}{2}"),
    ],
)
def test_accepts_other_forms_of_formulas(formulas, truth, reply):
    assert reward_of(formulas, task(answer=truth), reply_with(f"\\boxed{{{reply}}}")).value == 1.0


@pytest.mark.parametrize("reply", ["", "hello there", "\\boxed{}", "\\boxed{" + "1+" * 5000 + "1}"])
def test_missing_answer_scores_zero(formulas, reply):
    reward = reward_of(formulas, task(answer="18"), reply_with(reply))
    assert reward == Reward(0.0, {"right": 0.0}, "the reply has no final answer")


def test_endless_comparison_scores_zero_and_next_one_works():
    with MathVerifier(VerifierConfig(timeout_s=200, math_timeout_s=1)) as verifier:
        assert reward_of(verifier, task(answer="5"), reply_with("5")).value == 1.0
        start = time.monotonic()
        reward = reward_of(verifier, task(answer=ROOT_OF_TWO), reply_with(NEVER_ENDS))
        assert (reward.value, reward.error) == (0.0, "the answer took more than 1 s to compare")
        assert time.monotonic() - start < 20
        assert reward_of(verifier, task(answer="5"), reply_with("5")).value == 1.0


def comparing_children() -> set[int]:
    """Returns the children of this process that compare formulas."""
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    children = {int(pid) for task in tasks for pid in task.read_text().split()}
    return {
        pid
        for pid in children
        if b"math_answers" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def test_replaces_child_that_died(formulas):
    assert reward_of(formulas, task(answer="5"), reply_with("5")).value == 1.0
    killed = comparing_children()
    for child in killed:
        os.killpg(child, signal.SIGKILL)
    assert reward_of(formulas, task(answer="5"), reply_with("5")).value == 1.0
    assert killed and len(comparing_children() - killed) == 1


def test_compares_answers_concurrently():
    before = comparing_children()

    async def both():
        attempts = [Attempt(messages=(reply_with(str(n)),)) for n in range(20)]
        return await asyncio.gather(*(verifier(task(answer="7"), a) for a in attempts))

    with MathVerifier(VerifierConfig(timeout_s=200, math_timeout_s=60, math_workers=2)) as verifier:
        assert [reward.value for reward in asyncio.run(both())] == [
            float(n == 7) for n in range(20)
        ]
        assert len(comparing_children() - before) == 2


class SlowWorker:
    """Worker that takes 0.1 s to find an answer right."""

    def __init__(self, command, cwd):
        pass

    def call(self, name, timeout_s, **arguments):
        if name == "equal":
            time.sleep(0.1)
        return True

    def close(self):
        pass


def test_waiting_time_does_not_count(monkeypatch):
    """Otherwise answers that take long would exclude other attempts."""
    monkeypatch.setattr(verifiers, "PipeWorker", SlowWorker)

    async def all_of_them():
        return await asyncio.gather(
            *(verifier(task(answer="5"), Attempt(messages=(reply_with("5"),))) for _ in range(6))
        )

    config = VerifierConfig(timeout_s=0.5, math_timeout_s=0.3, code_timeout_s=0.1, math_workers=1)
    with MathVerifier(config) as verifier:
        assert {reward.value for reward in asyncio.run(all_of_them())} == {1.0}


DEAF = """
import os, signal, sys
signal.signal(signal.SIGALRM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
os.execv(sys.executable, [sys.executable, "-m", "glm5_jax.envs.reasoning.math_answers"])
"""


@pytest.mark.slow
def test_child_ends_by_itself():
    """Also if its parent blocks the alarm signal."""
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


def test_child_compares_answers(monkeypatch):
    """Runs in this process, so that its lines count for coverage; the alarm is disabled."""
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    from glm5_jax.envs.reasoning import math_answers

    assert math_answers.ready()
    assert not math_answers.equal("1/3", "0.5", 60)
    assert math_answers.equal("\\text{yes}", "Yes", 60) and not math_answers.equal("sey", "yes", 60)


@pytest.mark.parametrize("data", [{}, {"answer": ""}, {"answer": 18}])
def test_task_without_answer_gives_no_reward(formulas, data):
    reward = reward_of(formulas, task(**data), reply_with("18"))
    assert reward.value is None and "'t' has answer" in reward.error


def test_child_that_does_not_start_gives_no_reward(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with MathVerifier(CONFIG) as verifier:
        reward = reward_of(verifier, task(answer="18"), reply_with("18"))
    assert reward.value is None and reward.error.startswith("ChildProcessError: /bin/false")


def test_incomplete_attempts_score_zero(formulas):
    problem = task(answer="18")
    cut = reward_of(formulas, problem, reply_with("18"), finish_reason="length")
    assert cut == Reward(0.0, {"right": 0.0}, "the attempt was cut off")
    mistake = reward_of(formulas, problem, reply_with("18"), error="the call names no function")
    assert mistake == Reward(0.0, {"right": 0.0}, "the call names no function")
    failed = reward_of(
        formulas, problem, reply_with("18"), finish_reason="failed", error="no more tools"
    )
    assert failed == Reward(None, {}, "no more tools")


def test_choice_is_one_letter():
    verifier = ScienceVerifier(CONFIG)
    problem = task("science", answer="B", choices=4)
    assert reward_of(verifier, problem, reply_with("It must be (B).\nAnswer: B")) == Reward(
        1.0, {"right": 1.0}
    )
    assert reward_of(verifier, problem, reply_with("C")) == Reward(0.0, {"right": 0.0})
    several = reward_of(verifier, problem, reply_with("\\boxed{A} \\boxed{B}"))
    assert several == Reward(0.0, {"right": 0.0}, "the reply claims no one letter")
    for wrong in ({"answer": "E", "choices": 4}, {"answer": "AB", "choices": 4}, {"answer": "A"}):
        reward = reward_of(verifier, task("science", **wrong), reply_with("A"))
        assert reward.value is None and "'t'" in reward.error


@pytest.fixture(scope="module")
def with_tools():
    with TirVerifier(CONFIG) as verifier:
        yield verifier


@pytest.mark.parametrize(
    ("min_calls", "messages"),
    [
        (1, [call("calculate"), result(), reply_with("408")]),
        (0, [reply_with("408")]),
        (2, [call("calculate", "calculate"), result(), result(), reply_with("408")]),
        (
            2,
            [
                call("calculate"),
                result("Error: no"),
                call("calculate"),
                result(),
                reply_with("408"),
            ],
        ),
        (
            1,
            [call("calculate", ids=True), result(tool_call_id="call-calculate"), reply_with("408")],
        ),
    ],
)
def test_accepts_valid_trace_with_answer(with_tools, min_calls, messages):
    problem = task("tir", (CALCULATE,), answer="408", min_calls=min_calls)
    reward = reward_of(with_tools, problem, *messages)
    assert reward == Reward(1.0, {"right": 1.0, "trace": 1.0})


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([reply_with("408")], "the attempt called tools 0 times; 1 are asked"),
        ([call("calculator"), result(), reply_with("408")], "there is no tool 'calculator'"),
        (
            [call("calculate"), result(), call("x"), result(), reply_with("408")],
            "there is no tool 'x'",
        ),
        ([call("calculate", content="408")], "the attempt ends with a call"),
        ([call("calculate", "calculate", content="408"), result()], "the attempt ends with a call"),
        ([], "the attempt called tools 0 times; 1 are asked"),
    ],
)
def test_rejects_invalid_trace(with_tools, messages, why):
    problem = task("tir", (CALCULATE,), answer="408", min_calls=1)
    reward = reward_of(with_tools, problem, *messages)
    assert reward == Reward(0.0, {"right": 0.0, "trace": 0.0}, why)


def test_rejects_wrong_answer_after_valid_trace(with_tools):
    problem = task("tir", (CALCULATE,), answer="408", min_calls=1)
    reward = reward_of(with_tools, problem, call("calculate"), result(), reply_with("409"))
    assert reward == Reward(0.0, {"right": 0.0, "trace": 1.0})


@pytest.mark.parametrize(
    "messages",
    [
        [result(), reply_with("408")],
        [call("calculate"), reply_with("408")],
        [call("calculate"), call("calculate"), result(), result(), reply_with("408")],
        [call("calculate"), result(), result(), reply_with("408")],
        [call("calculate", ids=True), result(tool_call_id="call-other"), reply_with("408")],
    ],
)
def test_unmatched_tool_results_give_no_reward(with_tools, messages):
    problem = task("tir", (CALCULATE,), answer="408")
    reward = reward_of(with_tools, problem, *messages)
    assert reward.value is None and reward.error.startswith("ValueError: message")


def test_every_kind_has_solution():
    assert SOLUTIONS.keys() == task_sources.KINDS.keys()


@pytest.mark.parametrize("kind", slow_but(SOLUTIONS.keys() - {"mbpp", "humaneval"}, SOLUTIONS))
def test_solution_scores_one_and_cheats_score_zero(kind, formulas, with_tools):
    verifier = {
        "math": formulas,
        "tir": with_tools,
        "science": ScienceVerifier(CONFIG),
        "code": CodeVerifier(CONFIG, sandbox=LocalSandbox),
        "search": SearchVerifier(CONFIG),
    }[task_sources.KINDS[kind].domain]

    async def rewards(problem, attempts):
        return await asyncio.gather(*(verifier(problem, attempt) for attempt in attempts))

    for problem, solution in SOLUTIONS[kind](kind):
        tried = [Attempt(messages=tuple(solution)), *cheats(problem, solution)]
        once, again = (asyncio.run(rewards(problem, tried)) for _ in range(2))
        assert once == again
        assert once[0] == Reward(1.0, {**once[0].parts, "right": 1.0})
        assert [(a, r) for a, r in zip(tried[1:], once[1:]) if r.value != 0] == []


def test_finds_verifier_by_kind():
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
def test_names_limit_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        VerifierConfig(**{field: value})
