"""Deeply nested answers: wrong without parsing, which would take the full time of a comparison."""

import asyncio
import time

import pytest

from glm5_jax.envs.reasoning.final_answer import nesting_depth
from glm5_jax.envs.reasoning.verifiers import MAX_NESTED, MathVerifier, VerifierConfig
from glm5_jax.rl.types import Attempt, Task

TASK = Task(
    id="t", kind="math", messages=({"role": "user", "content": "?"},), data={"answer": "x + 1"}
)


@pytest.mark.parametrize(
    ("formula", "levels"),
    [
        ("x + 1", 0),
        (r"\frac{\sqrt{2}}{(3)}", 2),
        ("(1)(2)[3]{4}", 1),
        ("((((", 4),
        ("))))((", 2),
        ("([{" * 300 + "1" + "}])" * 300, 900),
    ],
)
def test_measures_nesting(formula, levels):
    assert nesting_depth(formula) == levels


@pytest.mark.parametrize(
    "answer",
    [
        "(" * 900 + "1" + ")" * 900,
        "{" * 30 + "1" + "}" * 30,
        "[" * 450 + "2" + "]" * 450,
        "f(" * 300 + "x" + ")" * 300,
        "x^{" * 200 + "2" + "}" * 200,
        r"\left(" * 100 + "1" + r"\right)" * 100,
        "(" * 900,
    ],
    ids=["round", "curly", "square", "calls", "powers", "left and right", "not closed"],
)
def test_rejects_deeply_nested_answer_without_comparison(answer):
    # Starting a process that compares would exceed the time limit.
    with MathVerifier(VerifierConfig(timeout_s=200, math_timeout_s=0.01)) as verifier:
        attempt = Attempt(messages=({"role": "assistant", "content": f"Answer: {answer}"},))
        began = time.process_time()
        reward = asyncio.run(verifier(TASK, attempt))
        assert time.process_time() - began < 1
    assert reward.value == 0 and reward.error == f"the answer nests more than {MAX_NESTED} brackets"
