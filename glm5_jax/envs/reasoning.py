"""Verifiers of Reasoning RL (GLM-5, section 3.2) and of search: right is 1, all else 0.

  math     data: answer             what the reply claims (final_answer.py) means the same (math_answers.py)
  science  data: answer, choices    the reply claims that one letter of so many
  code     data: tests, names, ...  the reply's program passes them, in sandboxes
  tir      data: answer, min_calls  as math, after calls of the task's tools, at least so many
  search   data: answers            the reply claims one of them, as SQuAD compares (search/answers.py)

An attempt that was cut off has no final answer: 0. What the policy breaks is 0, with `error` saying what;
what fails for other reasons (a sandbox, a task without an answer) is None, as for every `Verifier`. Nobody waits on
the clock of another's verdict, and what fails while a program runs is tried again: if others work it is its doing.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from glm5_jax.core.process import Worker, WorkerError
from glm5_jax.envs import code_child, final_answer
from glm5_jax.envs.search import answers
from glm5_jax.envs.turns import Turns
from glm5_jax.rl.types import Attempt, Message, Reward, Task, settled
from glm5_jax.text.messages import tool_function

START_SECONDS = 120  # for a child that loads SymPy on a machine under load
MOST_CODE = 100_000  # bytes of a program, which goes to its Python as one argument
WORTH = ("exact", "f1")
MOST_ROUNDS = 32  # runs of tests whose calls depend on what earlier ones returned
_ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
    """Limits. Construction refuses values out of range (ValueError).

    Attributes:
      seconds: for one verdict on a program, all that is not the policy's included; past it the reward is None.
      math_seconds: to compare two formulas; past it the answer is wrong.
      math_workers: child processes that compare (100 MB each).
      code_seconds: for all runs of one program together, and as much for the tests on what it gives; past it the
        program is wrong.
      code_memory: bytes of a sandbox.
      code_at_once: programs; None: as many as processors, so that no program takes another's time.
      python: the sandbox's.
      search: what an answer to search is worth: "exact", or "f1", the share of words that it has in common.
    """

    seconds: float = 180.0
    math_seconds: float = 10.0
    math_workers: int = 1
    code_seconds: float = 15.0
    code_memory: int = 2**29
    code_at_once: int | None = None
    python: str = "python3"
    search: str = "exact"

    def __post_init__(self):
        if self.search not in WORTH:
            raise ValueError(f"search is {self.search!r}; use one of {', '.join(WORTH)}")
        for name in ("seconds", "math_seconds", "code_seconds", "math_workers", "code_memory"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be positive and finite")
        if self.code_at_once is not None and self.code_at_once < 1:
            raise ValueError(f"code_at_once is {self.code_at_once}; it must be positive, or None")
        if self.seconds <= 2 * self.code_seconds:
            raise ValueError(
                f"seconds is {self.seconds}; twice what a program may take ({self.code_seconds}) must be less"
            )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether an attempt is right, its parts by name, and what is wrong with it, if anything can be said."""

    right: bool
    error: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class _Binary:
    """A verifier whose `decide` gives a verdict. A context manager: `close` ends what it started."""

    def __init__(self, config: VerifierConfig = VerifierConfig()):
        self._config = config

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        if reward := settled(attempt, {"right": 0.0}):
            return reward
        try:
            verdict = await self.decide(task, attempt)
        except Exception as error:
            # Whatever it is, it is not the policy's fault, and one reward must not end a run.
            return Reward(None, error=f"{type(error).__name__}: {error}")
        right = float(verdict.right)
        return Reward(right, {"right": right, **verdict.parts}, verdict.error)

    async def decide(self, task: Task, attempt: Attempt) -> Verdict:
        """The verdict on an attempt that came to its end; raises for what is not the policy's fault."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what the verifier started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()


class MathVerifier(_Binary):
    """Compares the reply's final answer with data["answer"], as formulas, in child processes."""

    def __init__(self, config: VerifierConfig = VerifierConfig()):
        super().__init__(config)
        self._threads = concurrent.futures.ThreadPoolExecutor(config.math_workers)
        self._own = threading.local()
        self._workers: list[Worker] = []

    async def decide(self, task: Task, attempt: Attempt) -> Verdict:
        truth = _of(task, "answer", str)
        answer = final_answer.final_answer(attempt.reply)
        if not answer:
            return Verdict(False, "the reply has no final answer")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._compare, answer, truth)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _compare(self, answer: str, truth: str) -> Verdict:
        seconds = self._config.math_seconds
        sent = {"answer": answer, "truth": truth, "seconds": math.ceil(seconds) + 1}
        for last in (False, True):
            worker = self._worker()
            try:
                return Verdict(worker.call("equal", seconds, **sent))
            except WorkerError as error:
                return Verdict(False, f"the answer cannot be compared: {error}")
            except TimeoutError:
                self._forget(worker)
                return Verdict(False, f"the answer took more than {seconds} s to compare")
            except ChildProcessError as error:
                self._forget(worker)
                # It may have died before, of something else.
                if last:
                    return Verdict(False, f"the answer broke the comparison: {error}")

    def _worker(self) -> Worker:
        """This thread's, a new one if the last is gone."""
        worker = getattr(self._own, "worker", None)
        if worker is None:
            command = [sys.executable, "-m", "glm5_jax.envs.math_answers"]
            worker = Worker(command, cwd=_ROOT)  # the package need not be installed
            self._workers.append(worker)
            worker.call("ready", START_SECONDS)
            self._own.worker = worker
        return worker

    def _forget(self, worker: Worker) -> None:
        self._own.worker = None
        self._workers.remove(worker)


class ScienceVerifier(_Binary):
    """Compares the letter that the reply claims with data["answer"]; data["choices"]: how many there are."""

    async def decide(self, task: Task, attempt: Attempt) -> Verdict:
        right, num_choices = _of(task, "answer", str), _of(task, "choices", int)
        known = final_answer.LETTERS[:num_choices]
        if len(right) != 1 or right not in known:
            raise ValueError(f"task {task.id!r} has the answer {right!r}; give one of {known}")
        claimed = final_answer.choice(attempt.reply, num_choices)
        return Verdict(claimed == right, "" if claimed else "the reply claims no one letter")


class CodeVerifier(_Binary):
    """Runs the reply's program in a sandbox and compares what it gives, outside of it.

    sandbox: makes an async context manager with `exec`, as `Sandbox` of envs/sandbox; None for that one. data has
    either

      cases: of programs that read and write, [{"input": ..., "output": ...}]; lines must be equal but for
        blanks at their ends, and the program must end with code 0
      tests: Python that asserts; names: of the program's, which it uses. prelude: code before the
        program's that the tests have, too; setup: code behind it. (code_child.py)

    The tests run in a sandbox of their own, so what they expect is never where the program is.
    """

    def __init__(
        self,
        config: VerifierConfig = VerifierConfig(),
        *,
        sandbox: Callable[[], contextlib.AbstractAsyncContextManager[Any]] | None = None,
    ):
        super().__init__(config)
        self._sandbox = sandbox or _isolated(config)
        self._turns = Turns(config.code_at_once or os.cpu_count() or 1)
        self._source = pathlib.Path(code_child.__file__).read_text("utf-8")

    async def decide(self, task: Task, attempt: Attempt) -> Verdict:
        if "cases" not in task.data and "tests" not in task.data:
            raise ValueError(f"task {task.id!r} has neither tests nor cases")
        program = task.data.get("prelude", "") + "\n" + final_answer.program(attempt.reply)
        try:
            size = len(program.encode())
        except UnicodeEncodeError as error:
            return Verdict(False, f"the program is no text: {error}")
        if size > MOST_CODE or "\0" in program:
            return Verdict(False, f"the program has zero bytes or more than {MOST_CODE} of them")
        judge = self._by_cases if "cases" in task.data else self._by_tests
        async with self._turns(), asyncio.timeout(self._config.seconds):
            for last in (False, True):
                clock = _Clock(self._config.code_seconds, of_program=True)
                try:
                    return await judge(task, program, clock)
                except _Lost as error:
                    await self._check_works()
                    if last:
                        return Verdict(False, f"the program broke its sandbox: {error}")

    async def _check_works(self) -> None:
        """Raises unless a program runs."""
        async with self._sandbox() as box:
            clock = _Clock(self._config.code_seconds)
            ran = await clock.run(box, [self._config.python, "-I", "-c", ""], "")
            if wrong := clock.problem(ran):
                raise RuntimeError(f"an empty program {wrong}")

    async def _by_cases(self, task: Task, program: str, clock: "_Clock") -> Verdict:
        cases = _of(task, "cases", list)
        if not all(isinstance(case.get(end), str) for case in cases for end in ("input", "output")):
            raise ValueError(
                f"task {task.id!r} has a case without input and output; give two texts"
            )
        async with self._sandbox() as box:
            for number, case in enumerate(cases):
                ran = await clock.run(
                    box, [self._config.python, "-I", "-X", "utf8", "-c", program], case["input"]
                )
                what = f"case {number} of {len(cases)}"
                if wrong := clock.problem(ran):
                    return Verdict(False, f"{what}: the program {wrong}")
                if _lines(ran.stdout.decode(errors="replace")) != _lines(case["output"]):
                    return Verdict(False, f"{what}: the output is another")
        return Verdict(True)

    async def _by_tests(self, task: Task, program: str, clock: "_Clock") -> Verdict:
        tests = {
            "tests": _of(task, "tests", str),
            "names": list(task.data.get("names", ())),
            "prelude": task.data.get("prelude", ""),
        }
        calls, outcomes, own = [], [], _Clock(clock.whole)
        async with self._sandbox() as bench, self._sandbox() as box:
            for _ in range(MOST_ROUNDS):
                request = {**tests, "calls": calls, "outcomes": outcomes}
                result, wrong = await self._child(bench, "judge", request, own)
                if wrong and not outcomes:
                    raise RuntimeError(f"the tests of task {task.id!r}: {wrong}")
                if wrong:
                    return Verdict(False, f"with the program's results, the tests: {wrong}")
                if "passed" in result:
                    return Verdict(result["passed"], result["why"])
                calls = result["calls"]
                request = {"code": program, "setup": task.data.get("setup", ""), "calls": calls}
                outcomes, wrong = await self._child(box, "answer", request, clock)
                own.of_program = True  # what it gave is among what is tested from here on
                if not wrong and isinstance(outcomes, dict) and "broken" in outcomes:
                    wrong = f"does not run: {outcomes['broken']}"
                if not wrong and not (isinstance(outcomes, list) and len(outcomes) == len(calls)):
                    wrong = "forged its answer"
                if wrong:
                    return Verdict(False, f"the program {wrong}")
        return Verdict(False, f"the calls are others in each of {MOST_ROUNDS} runs of the tests")

    async def _child(self, box, role: str, request: Mapping, clock: "_Clock") -> tuple[Any, str]:
        """(what an end of code_child.py answers, "") or (None, what is wrong with it)."""
        command = [self._config.python, "-I", "-c", self._source, role]
        ran = await clock.run(box, command, json.dumps(request))
        if wrong := clock.problem(ran):
            return None, wrong
        try:
            result = json.loads(ran.stdout)
        except (ValueError, RecursionError):
            return None, "ended without an answer"
        if isinstance(result, dict) and "failed" in result:
            return None, f"failed: {result['failed']}"
        return result, ""


def _isolated(config: VerifierConfig):
    # Not at the top: it needs Linux, and the other verifiers run elsewhere, too.
    from glm5_jax.envs.sandbox import Sandbox, SandboxConfig

    memory = config.code_memory
    limits = SandboxConfig(
        seconds=config.code_seconds, memory_bytes=memory, disk_bytes=max(memory // 2, 1)
    )
    return lambda: Sandbox(limits)


class _Lost(Exception):
    """A sandbox failed while what the policy wrote ran in it, or what that had given."""


class _Clock:
    """Seconds that several runs may take together. of_program: whether they are the policy's."""

    def __init__(self, seconds: float, of_program: bool = False):
        self.whole = self.left = seconds
        self.of_program = of_program

    async def run(self, box, command: Sequence[str], text: str):
        start = time.monotonic()
        try:
            ran = await box.exec(list(command), seconds=max(self.left, 0.01), stdin=text.encode())
        except Exception as error:
            if self.of_program:
                raise _Lost(f"{type(error).__name__}: {error}") from error
            raise
        self.left -= time.monotonic() - start
        return ran

    def problem(self, ran) -> str:
        """What is wrong with how a run ended, "" if nothing."""
        if ran.timed_out:
            return f"took more than {self.whole} s"
        if ran.truncated:
            return "wrote too much"
        if ran.code:
            last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return f"ended with code {ran.code} {' '.join(last)[:300]}".rstrip()
        return ""


class TirVerifier(MathVerifier):
    """As math, if every call was of one of the task's tools and at least data["min_calls"] (0) were made.

    A result without a call, or a call in the middle without one, only the environment can have left: None.
    """

    async def decide(self, task: Task, attempt: Attempt) -> Verdict:
        wrong = trace_problem(attempt.messages, task.tools, task.data.get("min_calls", 0))
        if wrong:
            return Verdict(False, wrong, {"trace": 0.0})
        verdict = await super().decide(task, attempt)
        return dataclasses.replace(verdict, parts={"trace": 1.0})


class SearchVerifier(_Binary):
    """Compares the few words that the reply claims with data["answers"]. parts: "right" and "f1"."""

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        reward = await super().__call__(task, attempt)
        if self._config.search == "exact" or reward.value is None:
            return reward
        return dataclasses.replace(reward, value=reward.parts.get("f1", 0.0))

    async def decide(self, task: Task, attempt: Attempt) -> Verdict:
        known, claimed = _of(task, "answers", list), final_answer.short_answer(attempt.reply)
        f1 = answers.f1(claimed, known)
        return Verdict(
            answers.exact(claimed, known), "" if claimed else "the reply claims nothing", {"f1": f1}
        )


def trace_problem(messages: Sequence[Message], tools: Sequence[Mapping], min_calls: int) -> str:
    """What a policy did wrong in calling tools, "" if nothing. ValueError for calls and results that do not belong
    together, which is the environment's doing."""
    names = {tool_function(tool, i)["name"] for i, tool in enumerate(tools)}
    num_calls, waiting, wrong = 0, [], ""
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            # Results without an id come in the order of the calls.
            which = message.get("tool_call_id") or (waiting[0] if waiting else None)
            if which not in waiting:
                raise ValueError(f"message {i} is a tool's result that no call asked for")
            waiting.remove(which)
            continue
        if waiting:
            raise ValueError(f"message {i} comes before the result of call {waiting[0]!r}")
        for call in message.get("tool_calls") or ():
            name = (call.get("function") or call).get("name")
            num_calls += 1
            waiting.append(call.get("id") or f"#{num_calls}")
            if name not in names:
                wrong = wrong or f"there is no tool {name!r}"
    if not wrong and waiting:
        wrong = "the attempt ends with a call"
    if not wrong and num_calls < min_calls:
        wrong = f"the attempt called tools {num_calls} times; {min_calls} are asked"
    return wrong


def _of(task: Task, name: str, kind: type):
    value = task.data.get(name)
    if not isinstance(value, kind) or not value:
        raise ValueError(f"task {task.id!r} has {name} {value!r}; give {kind.__name__}")
    return value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


KINDS = {
    "math": MathVerifier,
    "science": ScienceVerifier,
    "code": CodeVerifier,
    "tir": TirVerifier,
    "search": SearchVerifier,
}


def verifier_for(kind: str, config: VerifierConfig = VerifierConfig(), **more) -> _Binary:
    """A new verifier of tasks of a kind; `close` it in the end. ValueError for what is none."""
    if kind not in KINDS:
        raise ValueError(f"there is no verifier of {kind!r}; use one of {', '.join(KINDS)}")
    return KINDS[kind](config, **more)
