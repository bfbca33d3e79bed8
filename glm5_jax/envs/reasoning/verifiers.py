"""Verifies attempts of Reasoning RL (GLM-5 3.2) and of search: right answers are worth 1, wrong ones 0.

  math     data: answer             the reply's answer (final_answer.py) equals it (math_answers.py)
  science  data: answer, choices    the reply names that letter of the choices
  code     data: tests, names, ...  the reply's program passes them, in sandboxes
  tir      data: answer, min_calls  as math, after at least min_calls calls of the task's tools
  search   data: answers            the reply's answer is one of them, by SQuAD's rules (search/answers.py)

A truncated attempt has no final answer and is worth 0. A fault of the policy is worth 0, and `error`
describes it. A failure with another cause (a sandbox, a task without an answer) has the value None, as for
every `Verifier`. The time limit of a verdict starts only when its turn comes, so verdicts do not wait on
each other's clocks. If a sandbox fails while a program runs, the program runs again. If an empty program
works there, the program caused the failure.
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

from glm5_jax.envs.concurrency import ConcurrencyLimit
from glm5_jax.envs.reasoning import code_child, final_answer
from glm5_jax.envs.search import answers
from glm5_jax.rl.types import Attempt, Message, Reward, Task, reward_without_verifier
from glm5_jax.runtime.process import PipeWorker, WorkerError
from glm5_jax.text.messages import tool_function

START_TIMEOUT_S = 120  # loading SymPy on a busy machine
MAX_MATH_WORKERS = 4  # unless the config sets more
MAX_NESTED = 12  # depth of nested brackets in a final answer
MAX_CODE_BYTES = 100_000  # a program is passed to Python as one argument
SEARCH_SCORES = ("exact", "f1")
MAX_ROUNDS = 32  # runs of tests whose calls depend on what earlier ones returned
_ROOT = pathlib.Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """Limits of the verifiers. Raises ValueError for values out of range.

    Attributes:
      timeout_s: time limit of one verdict on a program, in seconds, including the tests; after it the
          reward is None.
      math_timeout_s: time limit of one comparison of formulas, in seconds; after it the answer is wrong.
      math_workers: number of child processes that compare (100 MB each); None: number of processors, at
          most `MAX_MATH_WORKERS`. Several, so that a slow answer does not block the others.
      code_timeout_s: time limit of all runs of one program together, in seconds, and of the tests on its
          results; after it the program is wrong.
      code_memory_bytes: memory of a sandbox, in bytes.
      code_concurrency: maximum number of programs that run at once; None: number of processors, so that no
          program takes another's time.
      python: Python executable in the sandbox.
      search: score of an answer to search: "exact", or "f1", the F1 of its words.
    """

    timeout_s: float = 180.0
    math_timeout_s: float = 10.0
    math_workers: int | None = None
    code_timeout_s: float = 15.0
    code_memory_bytes: int = 2**29
    code_concurrency: int | None = None
    python: str = "python3"
    search: str = "exact"

    def __post_init__(self):
        if self.search not in SEARCH_SCORES:
            raise ValueError(f"search is {self.search!r}; use one of {', '.join(SEARCH_SCORES)}")
        for name in ("timeout_s", "math_timeout_s", "code_timeout_s", "code_memory_bytes"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be positive and finite")
        for name in ("math_workers", "code_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive, or None")
        if self.timeout_s <= 2 * self.code_timeout_s:
            raise ValueError(
                f"timeout_s is {self.timeout_s}; make it more than twice code_timeout_s ({self.code_timeout_s})"
            )


@dataclasses.dataclass(frozen=True)
class AnswerVerdict:
    """Verdict on an attempt.

    Attributes:
      right: whether the attempt is right.
      error: fault of the attempt; "" if there is none, or none that can be named.
      parts: further parts of the reward, by name.
    """

    right: bool
    error: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class _Binary:
    """Verifier whose `decide` returns a verdict; a context manager, and `close` ends its workers."""

    def __init__(self, config: VerifierConfig = VerifierConfig()):
        self._config = config

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        if reward := reward_without_verifier(attempt, {"right": 0.0}):
            return reward
        try:
            verdict = await self.decide(task, attempt)
        except Exception as error:
            # No error here is the policy's fault, and one reward must not end a run.
            return Reward(None, error=f"{type(error).__name__}: {error}")
        right = float(verdict.right)
        return Reward(right, {"right": right, **verdict.parts}, verdict.error)

    async def decide(self, task: Task, attempt: Attempt) -> AnswerVerdict:
        """Returns the verdict on an attempt that ended normally. Raises if something other than the policy fails."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the verifier's workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()


class MathVerifier(_Binary):
    """Compares the reply's final answer with data["answer"], as formulas, in child processes."""

    def __init__(self, config: VerifierConfig = VerifierConfig()):
        super().__init__(config)
        workers = config.math_workers or min(os.cpu_count() or 1, MAX_MATH_WORKERS)
        self._threads = concurrent.futures.ThreadPoolExecutor(workers)
        self._local = threading.local()
        self._workers: list[PipeWorker] = []

    async def decide(self, task: Task, attempt: Attempt) -> AnswerVerdict:
        truth = _required(task, "answer", str)
        if len(truth.split()) > 1 and attempt.reply.strip() == truth.strip():
            # Of several words without a claim only the last number or formula would be read.
            return AnswerVerdict(True)
        # SymPy would read 1e-05 as e - 5.
        truth = final_answer.plain_answer(truth) or truth
        answer = final_answer.final_answer(attempt.reply)
        if not answer:
            return AnswerVerdict(False, "the reply has no final answer")
        if final_answer.nesting_depth(answer) > MAX_NESTED:
            # The parser's time multiplies with each level: 10 levels take 1 s, 30 take 5 s.
            return AnswerVerdict(False, f"the answer nests more than {MAX_NESTED} brackets")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._compare, answer, truth)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _compare(self, answer: str, truth: str) -> AnswerVerdict:
        seconds = self._config.math_timeout_s
        sent = {"answer": answer, "truth": truth, "seconds": math.ceil(seconds) + 1}
        death = None
        for _ in range(2):  # a worker may have died before, from another cause
            worker = self._worker()
            try:
                return AnswerVerdict(worker.call("equal", seconds, **sent))
            except WorkerError as error:
                return AnswerVerdict(False, f"the answer cannot be compared: {error}")
            except TimeoutError:
                self._remove_worker(worker)
                return AnswerVerdict(False, f"the answer took more than {seconds} s to compare")
            except ChildProcessError as error:
                self._remove_worker(worker)
                death = error
        return AnswerVerdict(False, f"the answer broke the comparison: {death}")

    def _worker(self) -> PipeWorker:
        """Returns this thread's worker; starts a new one if there is none."""
        worker = getattr(self._local, "worker", None)
        if worker is None:
            command = [sys.executable, "-m", "glm5_jax.envs.reasoning.math_answers"]
            worker = PipeWorker(command, cwd=_ROOT)  # the package need not be installed
            self._workers.append(worker)
            worker.call("ready", START_TIMEOUT_S)
            self._local.worker = worker
        return worker

    def _remove_worker(self, worker: PipeWorker) -> None:
        self._local.worker = None
        self._workers.remove(worker)


class ScienceVerifier(_Binary):
    """Compares the letter that the reply names with data["answer"]. data["choices"]: number of choices."""

    async def decide(self, task: Task, attempt: Attempt) -> AnswerVerdict:
        right, num_choices = _required(task, "answer", str), _required(task, "choices", int)
        known = final_answer.LETTERS[:num_choices]
        if len(right) != 1 or right not in known:
            raise ValueError(f"task {task.id!r} has the answer {right!r}; give one of {known}")
        claimed = final_answer.chosen_letter(attempt.reply, num_choices)
        return AnswerVerdict(claimed == right, "" if claimed else "the reply claims no one letter")


class CodeVerifier(_Binary):
    """Runs the reply's program in a sandbox and compares its results outside of it.

    A task's data have either

    - cases, for programs that read and write: [{"input": ..., "output": ...}]. Lines must be equal except
      for blanks at their ends, and the program must end with code 0;
    - tests: Python code with asserts (code_child.py). names: names of the program that the tests use.
      prelude: code before the program, which the tests have too. setup: code after the program.

    The tests run in a separate sandbox, so the program never has access to what they expect.

    Args:
      config: limits.
      sandbox: function that returns an async context manager with `exec`, like `Sandbox` of envs/sandbox;
          None for that class.
    """

    def __init__(
        self,
        config: VerifierConfig = VerifierConfig(),
        *,
        sandbox: Callable[[], contextlib.AbstractAsyncContextManager[Any]] | None = None,
    ):
        super().__init__(config)
        self._sandbox = sandbox or _isolated_sandbox(config)
        self._concurrency = ConcurrencyLimit(config.code_concurrency or os.cpu_count() or 1)
        self._source = pathlib.Path(code_child.__file__).read_text("utf-8")

    async def decide(self, task: Task, attempt: Attempt) -> AnswerVerdict:
        if "cases" not in task.data and "tests" not in task.data:
            raise ValueError(f"task {task.id!r} has neither tests nor cases")
        program = task.data.get("prelude", "") + "\n" + final_answer.program(attempt.reply)
        try:
            size = len(program.encode())
        except UnicodeEncodeError as error:
            return AnswerVerdict(False, f"the program is no text: {error}")
        if size > MAX_CODE_BYTES or "\0" in program:
            return AnswerVerdict(
                False, f"the program has zero bytes or more than {MAX_CODE_BYTES} of them"
            )
        judge = self._grade_cases if "cases" in task.data else self._grade_tests
        async with self._concurrency(), asyncio.timeout(self._config.timeout_s):
            loss = None
            for _ in range(2):
                clock = _Clock(self._config.code_timeout_s, of_program=True)
                try:
                    return await judge(task, program, clock)
                except _SandboxLost as error:
                    await self._check_works()
                    loss = error
            return AnswerVerdict(False, f"the program broke its sandbox: {loss}")

    async def _check_works(self) -> None:
        """Raises unless an empty program runs."""
        async with self._sandbox() as box:
            clock = _Clock(self._config.code_timeout_s)
            ran = await clock.run(box, [self._config.python, "-I", "-c", ""], "")
            if wrong := clock.problem(ran):
                raise RuntimeError(f"an empty program {wrong}")

    async def _grade_cases(self, task: Task, program: str, clock: "_Clock") -> AnswerVerdict:
        cases = _required(task, "cases", list)
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
                    return AnswerVerdict(False, f"{what}: the program {wrong}")
                if _lines(ran.stdout.decode(errors="replace")) != _lines(case["output"]):
                    return AnswerVerdict(False, f"{what}: the output is another")
        return AnswerVerdict(True)

    async def _grade_tests(self, task: Task, program: str, clock: "_Clock") -> AnswerVerdict:
        tests = {
            "tests": _required(task, "tests", str),
            "names": list(task.data.get("names", ())),
            "prelude": task.data.get("prelude", ""),
        }
        calls, outcomes, tests_clock = [], [], _Clock(clock.limit_s)
        async with self._sandbox() as bench, self._sandbox() as box:
            for _ in range(MAX_ROUNDS):
                request = {**tests, "calls": calls, "outcomes": outcomes}
                result, wrong = await self._run_role(bench, "judge", request, tests_clock)
                if wrong and not outcomes:
                    raise RuntimeError(f"the tests of task {task.id!r}: {wrong}")
                if wrong:
                    return AnswerVerdict(False, f"with the program's results, the tests: {wrong}")
                if "passed" in result:
                    return AnswerVerdict(result["passed"], result["why"])
                calls = result["calls"]
                answer_request = {
                    "code": program,
                    "setup": task.data.get("setup", ""),
                    "calls": calls,
                }
                outcomes, wrong = await self._run_role(box, "answer", answer_request, clock)
                tests_clock.of_program = True  # from here on the tests use the program's results
                if not wrong and isinstance(outcomes, dict) and "broken" in outcomes:
                    wrong = f"does not run: {outcomes['broken']}"
                if not wrong and not (isinstance(outcomes, list) and len(outcomes) == len(calls)):
                    wrong = "forged its answer"
                if wrong:
                    return AnswerVerdict(False, f"the program {wrong}")
            # Otherwise the program's results differ.
            result, _ = await self._run_role(bench, "judge", request, tests_clock)
            if result and result.get("calls") != calls:
                raise RuntimeError(f"the tests of task {task.id!r} make other calls in each run")
        return AnswerVerdict(
            False, f"the calls are others in each of {MAX_ROUNDS} runs of the tests"
        )

    async def _run_role(self, box, role: str, request: Mapping, clock: "_Clock") -> tuple[Any, str]:
        """Returns (result of a role of code_child.py, ""), or (None, reason) if it failed."""
        # Python's -I would ignore the variable.
        command = ["env", "PYTHONHASHSEED=0", self._config.python, "-s", "-c", self._source, role]
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


def _isolated_sandbox(config: VerifierConfig):
    # Not imported at the top because it needs Linux, and the other verifiers run elsewhere too.
    from glm5_jax.envs.sandbox import Sandbox, SandboxConfig

    memory = config.code_memory_bytes
    limits = SandboxConfig(
        timeout_s=config.code_timeout_s, memory_bytes=memory, disk_bytes=max(memory // 2, 1)
    )
    return lambda: Sandbox(limits)


class _SandboxLost(Exception):
    """Raised if a sandbox failed while it ran the policy's program, or tests on its results."""


class _Clock:
    """Time that several runs share, in seconds.

    Attributes:
      limit_s: total time.
      left_s: remaining time.
      of_program: whether the runs depend on the policy's program.
    """

    def __init__(self, seconds: float, of_program: bool = False):
        self.limit_s = self.left_s = seconds
        self.of_program = of_program

    async def run(self, box, command: Sequence[str], text: str):
        """Runs a command in a sandbox within the remaining time.

        Raises _SandboxLost if the sandbox fails with the program.
        """
        start = time.monotonic()
        try:
            ran = await box.exec(
                list(command), timeout_s=max(self.left_s, 0.01), stdin=text.encode()
            )
        except Exception as error:
            if self.of_program:
                raise _SandboxLost(f"{type(error).__name__}: {error}") from error
            raise
        self.left_s -= time.monotonic() - start
        return ran

    def problem(self, ran) -> str:
        """Returns how a run failed, or "" if it succeeded."""
        if ran.timed_out:
            return f"took more than {self.limit_s} s"
        if ran.truncated:
            return "wrote too much"
        if ran.code:
            last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return f"ended with code {ran.code} {' '.join(last)[:300]}".rstrip()
        return ""


class TirVerifier(MathVerifier):
    """Verifies math after tool calls: every call must be of one of the task's tools, at least
    data["min_calls"] (0) of them.

    Only the environment can leave a result without a call, or a call in the middle without a result. The
    value is then None.
    """

    async def decide(self, task: Task, attempt: Attempt) -> AnswerVerdict:
        wrong = trace_problem(attempt.messages, task.tools, task.data.get("min_calls", 0))
        if wrong:
            return AnswerVerdict(False, wrong, {"trace": 0.0})
        verdict = await super().decide(task, attempt)
        return dataclasses.replace(verdict, parts={"trace": 1.0})


class SearchVerifier(_Binary):
    """Compares the short answer of the reply with data["answers"]. parts: "right" and "f1"."""

    async def __call__(self, task: Task, attempt: Attempt) -> Reward:
        reward = await super().__call__(task, attempt)
        if self._config.search == "exact" or reward.value is None:
            return reward
        return dataclasses.replace(reward, value=reward.parts.get("f1", 0.0))

    async def decide(self, task: Task, attempt: Attempt) -> AnswerVerdict:
        known, claimed = _required(task, "answers", list), final_answer.short_answer(attempt.reply)
        f1 = answers.f1(claimed, known)
        return AnswerVerdict(
            answers.exact(claimed, known), "" if claimed else "the reply claims nothing", {"f1": f1}
        )


def trace_problem(messages: Sequence[Message], tools: Sequence[Mapping], min_calls: int) -> str:
    """Returns the policy's fault in calling tools, or "" if there is none.

    Raises ValueError if calls and results do not belong together, which only the environment can cause.
    """
    names = {tool_function(tool, i)["name"] for i, tool in enumerate(tools)}
    num_calls, waiting, wrong = 0, [], ""
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            # Results without an id are in the order of the calls.
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


def _required(task: Task, name: str, kind: type):
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
    """Returns a new verifier of tasks of a kind; the caller must `close` it.

    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no verifier of {kind!r}; use one of {', '.join(KINDS)}")
    return KINDS[kind](config, **more)
