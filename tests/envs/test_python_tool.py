"""The tool that runs programs: its answers, its limits, and failures of policy and environment."""

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.reasoning.python_tool import PYTHON, Python
from glm5_jax.envs.sandbox import ExecResult, SandboxConfig, SandboxError
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task
from glm5_jax.text.tool_calls import ToolCall

TASK = Task(id="t", kind="tir", messages=({"role": "user", "content": "?"},), tools=(PYTHON,))


def giving(code, stdout, stderr, timed_out=False, truncated=False, out_of_memory=False, **options):
    """Returns a tool whose programs all end with this result."""
    result = ExecResult(
        code=code,
        stdout=stdout,
        stderr=stderr,
        timed_out=timed_out,
        truncated=truncated,
        out_of_memory=out_of_memory,
    )

    async def run(code, config):
        return result

    return Python(run=run, **options)


def answer(tool, code="print(1)"):
    call = ToolCall("python", {"code": code}, None, "")
    return asyncio.run(Toolbox({"python": tool}, [TASK])(TASK, call))


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ((0, b"1\n", b""), "1"),
        ((0, b"", b"a warning"), ""),
        ((1, b"1\n", b"Traceback\n  line\nKeyError: 2\n"), "1\nError: KeyError: 2"),
        ((3, b"", b""), "Error: exit code 3"),
        ((137, b"1\n", b"", True), "1\nError: no end within 10 s"),
        ((137, b"", b"Killed", False, False, True), "Error: out of memory"),
        ((0, b"a\xff", b""), "a\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_reports_result_of_program(result, expected):
    assert answer(giving(*result)) == expected


def test_shortens_long_output():
    text = answer(giving(1, b"0123456789" * 9, b"x" * 90, max_characters=7))
    assert text == "0123\n[...]\n789\nError: xxxx\n[...]\nxxx"


def test_rejects_code_that_is_no_text():
    tool = giving(0, b"ran", b"")
    for code, why in ((1, "no text"), ("\0", "null"), ("\ud800", "half a character")):
        assert why in answer(tool, code)


@given(st.text(st.characters(exclude_categories=())) | st.integers() | st.none())
def test_answers_any_code(code):
    assert isinstance(answer(giving(0, b"1", b""), code), str)


@pytest.mark.parametrize("error", [SandboxError("lost"), OSError("no room")])
def test_environment_failure_raises_tool_error(error):
    async def run(code, config):
        raise error

    with pytest.raises(ToolError, match=str(error)):
        answer(Python(run=run))


@pytest.mark.parametrize("error", [SandboxError("lost"), OSError("no room")])
def test_reports_program_that_breaks_its_sandbox(error):
    """If other programs run. Otherwise a bad attempt would gain by breaking its sandbox, since it would not count."""
    failures = 2

    async def run(code, config):
        nonlocal failures
        if code and failures:
            failures -= 1
            raise error
        return ExecResult(code=0, stdout=b"ran", stderr=b"")

    assert answer(Python(run=run)) == "Error: the program broke its sandbox"
    failures = 1
    assert answer(Python(run=run)) == "ran"


def test_limits_concurrent_programs_in_every_turn():
    """Each turn of attempts has a new event loop."""
    running, counts = 0, []

    async def run(code, config):
        nonlocal running
        running += 1
        counts.append(running)
        await asyncio.sleep(0.001)
        running -= 1
        return ExecResult(code=0, stdout=b"", stderr=b"")

    tool = Python(run=run, at_once=3)

    async def turn():
        await asyncio.gather(*(tool(TASK, {"code": "1"}) for _ in range(10)))

    for _ in range(2):
        asyncio.run(turn())
    assert max(counts) == 3 and len(counts) == 20


def test_rejects_invalid_options():
    with pytest.raises(ValueError, match="at_once is 0"):
        Python(at_once=0)


@pytest.mark.usefixtures("isolation", "nothing_left")
class TestInASandbox:
    def test_runs_programs(self):
        tool = Python()
        assert answer(tool, "print(6 * 7)") == "42"
        assert answer(tool, "print(1)\n1 / 0") == "1\nError: ZeroDivisionError: division by zero"
        assert answer(tool, "import sys; sys.exit(4)") == "Error: exit code 4"

    def test_ends_endless_program(self):
        output = answer(
            Python(SandboxConfig(timeout_s=1.0)), "print(1, flush=True)\nwhile True: pass"
        )
        assert output == "1\nError: no end within 1 s"

    @settings(max_examples=8, deadline=None)
    @given(st.text(max_size=40))
    def test_answers_any_program(self, code):
        assert isinstance(answer(Python(SandboxConfig(timeout_s=3.0)), code), str)
