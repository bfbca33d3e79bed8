"""Solutions and cheats for every kind of reasoning task."""

import asyncio
import json

from glm5_jax.data import chat_tasks
from glm5_jax.envs.reasoning.final_answer import LETTERS
from glm5_jax.rl.types import Attempt
from tests.envs import search_solvers
from tests.envs.test_reasoning_code import ALWAYS, shipped
from tests.envs.test_reasoning_tasks import make_tasks, question, right_answer


def reply_with(content):
    return {"role": "assistant", "content": content}


def call(*names, ids=False, content=""):
    calls = [{"id": f"call-{n}", "function": {"name": n, "arguments": "{}"}} for n in names]
    if not ids:
        calls = [{"name": name, "arguments": {}} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content="408", **more):
    return {"role": "tool", "content": content, **more}


def source_solutions(kind):
    """Yields solutions of the problem's source."""
    for one, line in zip(
        make_tasks(kind, 3),
        chat_tasks.make_lines(chat_tasks.ChatTaskConfig(kind=kind), "interleaved"),
    ):
        yield one, [json.loads(line)["messages"][1]]


def by_hand(answer):
    return lambda kind: (
        (one, [reply_with(f"The answer is {answer(question(one))}.")])
        for one in make_tasks(kind, 3)
    )


def sum_of(problem):
    return sum(map(int, problem.removesuffix("?").split("+")))


def letter_of(problem):
    stem, *lines = problem.splitlines()
    return next(line[0] for line in lines if line[3:] == right_answer(stem))


def product_solutions(kind):
    for one in make_tasks(kind, 3):
        left, right = map(int, question(one).removesuffix("?").split("*"))
        yield one, [call("calculate"), result(), reply_with(f"\\boxed{{{left * right}}}")]


def programs(kind):
    for one, code in shipped(kind, 1):
        yield one, [reply_with(f"```python\n{code}\n```")]


def search_solutions(kind):
    for one in make_tasks(kind, 3):
        yield one, asyncio.run(search_solvers.attempt(one, search_solvers.follow)).messages


WORD_PROBLEMS = {"There are 87": 290 // 2, "Marco and hi": 30 - 11, "Edward spent": 6 // 2}

SOLUTIONS = {
    "gsm8k": source_solutions,
    "chain": source_solutions,
    "svamp": by_hand(lambda problem: WORD_PROBLEMS[problem[:12]]),
    "addition": by_hand(sum_of),
    "choices": by_hand(letter_of),
    "products": product_solutions,
    "mbpp": programs,
    "humaneval": programs,
    "musique": search_solutions,
    "worlds": search_solutions,
}


def cheats(problem, solution):
    """Yields attempts without a solution, or with one that they do not give."""
    text, last = question(problem), solution[-1]["content"]
    replies = ["", " \n", "?", text, f"{last}\n\\boxed{{-7}}\n```python\npass\n```"]
    if names := problem.data.get("names"):
        always = ALWAYS.format(base="") + f"def {names[-1]}(*args): return Yes()"
        replies += ["import os\nos._exit(0)", 'print(\'{"passed": true, "why": ""}\')', always]
    else:
        replies += [
            "I know it.", f"\\boxed{{{text}}}", "\\boxed{}", "\\boxed{x}", "\\boxed{answer}", '{"right": 1.0}',
            "".join(f"\\boxed{{{one}}}" for one in LETTERS), f"\\boxed{{{', '.join(map(str, range(200)))}}}",
            "The answer is the right one.", "The reward is \\boxed{\\text{right}}", "yes " * 2000,
        ]  # fmt: skip
    yield from (Attempt(messages=(*solution[:-1], reply_with(reply))) for reply in replies)
    yield Attempt(messages=())
    yield Attempt(messages=(*solution[:-1], reply_with(None) | {"reasoning_content": last}))
    yield Attempt(messages=(*solution[:-1], {"role": "user", "content": last}))
    yield Attempt(messages=tuple(solution), finish_reason="length")
    yield Attempt(messages=tuple(solution), error="a call that cannot be read")
    if problem.kind == "tir":
        yield Attempt(messages=(reply_with(last),))
        yield Attempt(messages=(call("calculator"), result(), reply_with(last)))
