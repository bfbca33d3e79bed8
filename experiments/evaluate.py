"""Evaluates an agent on a folder of tasks, or a served model on a file of questions.

    glm5 run evaluate:questions --file=FILE.jsonl --endpoint.base_url=http://127.0.0.1:8000 --workdir=OUT
    glm5 run evaluate:harbor --tasks=DIR --agent=oracle --workdir=OUT

:questions  tasks of a .jsonl or .py file, as those of rl_reasoning.py (glm5_jax/envs/reasoning/task_file.py):
         {"question": "7 * 8?", "answer": "56"}. Each reply is judged by the task's verifier; --attempts=N asks
         N times. OUT/results.jsonl has the replies and rewards. The same command continues an evaluation.
:harbor  terminal tasks: folders in Harbor's format in DIR (or DIR itself, if it is one). Each is attempted in one
         sandbox and graded in another; about a second a task in addition to the agent and the tests.

Agents:

- oracle: runs the task's solution, which must get reward 1;
- nop: does nothing, which must get reward 0;
- script: runs --script=FILE at every task;
- policy: a model with OpenAI's API, such as that of experiments/serve.py, which works with a shell:

    --agent=policy --endpoint.base_url=http://127.0.0.1:8000

--policy.max_tokens must not exceed the model's context, which is below the default for small models.

OUT/results.json, {task: {reward, error, seconds}}, is updated after every task. OUT/logs has the output of the tests,
OUT/chats the messages of a policy. reward is null, with the reason, if the attempt could not be judged, for example
because the model's server failed. The same command attempts these and the remaining tasks.

With a reward below 1, the result lists changes that are not graded ("changed, not graded: PATH") and programs that
still ran ("left running, not graded: NAME"). For a task with environment_mode = "shared" everything is graded, since
its tests run in the agent's sandbox. A warning says so if the form of a task's tests lets an attempt forge its reward
(envs/terminal/forms.py lists the forms).

--images='{"python:3.12": "DIR"}' names root file systems that stand for images. "host", the default for
debian and ubuntu, stands for this machine's programs, which builds do not change. `python -m launch.base_image DIR` makes a
root file system for the base images of Terminal-Bench. --build.network=True lets the RUN lines of
Dockerfiles install packages over this machine's network; attempts and tests never have a network. Needs root, for
sandboxes with users of their own.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import TokenCounter
from glm5_jax.agents.loop import LoopConfig, Trace
from glm5_jax.envs.reasoning.question_evaluation import QuestionEvaluation
from glm5_jax.envs.reasoning.task_file import TaskFile
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.terminal import (
    Agent,
    AttemptConfig,
    BuildConfig,
    Nop,
    Oracle,
    Policy,
    Script,
    TaskError,
    TaskLimits,
    TerminalTask,
    TrialResult,
    TrialRunner,
    find_tasks,
    load_task,
)
from glm5_jax.envs.terminal.forms import forgeable_forms
from glm5_jax.evals.intervals import wilson
from glm5_jax.inference.client import ServerError
from glm5_jax.runtime.addresses import check_url
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.terminal import make_printable, print_error
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Server of a policy and its sampling options. Raises ValueError for values out of range.

    Attributes:
      base_url: URL of a server with OpenAI's API, without /v1; None: none.
      model: name of the model at the server; None: the server's default.
      api_key_file: file with the server's API key; None: the server needs none.
      tokenizer: checkpoint whose tokenizer counts tokens; None: the shipped one, which counts more than those of large
        models.
      temperature, top_p: sampling options of each reply; None: the server's defaults.
    """

    base_url: str | None = None
    model: str | None = None
    api_key_file: str | None = None
    tokenizer: str | None = None
    temperature: float | None = 0.7  # GLM-5 B.2, of Terminal-Bench 2.0
    top_p: float | None = 1.0  # GLM-5 B.2

    def __post_init__(self):
        if self.base_url is not None:
            check_url("base_url", self.base_url)
            if self.base_url.rstrip("/").endswith("/v1"):
                raise ValueError(f"base_url is {self.base_url}; leave /v1 out")
        if self.temperature is not None and not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must not be negative")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def key(self) -> str | None:
        """Returns the API key that the file holds. Raises ValueError if it holds none."""
        return None if self.api_key_file is None else read_key(self.api_key_file)

    @property
    def sampling(self) -> dict[str, float]:
        """Returns the sampling options of each request."""
        options = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in options.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionsConfig:
    """Questions, server and limits of an evaluation. Raises ValueError for values out of range.

    Attributes:
      file: .jsonl or .py file of tasks; None: not set.
      instruction: text after every question.
      endpoint: server of the model.
      attempts: number of attempts at each task.
      concurrency: number of concurrent attempts.
      limits: limits of an attempt.
      verifier: options of the verifiers.
    """

    file: str | None = None
    instruction: str = ""
    endpoint: EndpointConfig = EndpointConfig()
    attempts: int = 1
    concurrency: int = 16
    limits: LoopConfig = LoopConfig()
    verifier: VerifierConfig = VerifierConfig()

    def __post_init__(self):
        for name in ("attempts", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Tasks, agent and limits of an evaluation.

    Attributes:
      tasks: folder of tasks, or a single task's folder; None: not set.
      agent: name of the agent; see `AGENTS`.
      script: file that the agent `script` runs; None for other agents.
      endpoint, policy: server and limits of the agent `policy`.
      images: {name of an image: root file system that stands for it, or "host"}.
      build: options of image builds.
      concurrency: number of concurrent attempts; each has its own limit of processors and memory.
      limits: resources of this machine that a task may request; a task that requests more gets no reward.
    """

    tasks: str | None = None
    agent: str = "oracle"
    script: str | None = None
    endpoint: EndpointConfig = EndpointConfig()
    policy: AttemptConfig = AttemptConfig()
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    build: BuildConfig = BuildConfig()
    concurrency: int = 2
    limits: TaskLimits = TaskLimits()

    def __post_init__(self):
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it must be positive")
        if self.agent not in AGENTS:
            raise ValueError(f"agent is {self.agent!r}; it can be {', '.join(AGENTS)}")
        if (self.script is not None) != (self.agent == "script"):
            raise ValueError(
                f"agent is {self.agent!r} and script is {self.script!r}; only the agent 'script' runs one: "
                "give --experiment.agent=script --experiment.script=FILE"
            )
        if (self.endpoint.base_url is not None) != (self.agent == "policy"):
            raise ValueError(
                f"agent is {self.agent!r} and endpoint.base_url is {self.endpoint.base_url!r}; only the agent "
                "'policy' has a server: give --experiment.agent=policy --experiment.endpoint.base_url=http://HOST:PORT"
            )


def _script(config: EvaluateConfig, workdir: pathlib.Path) -> Agent:
    assert config.script is not None, "the config checks that this agent has a script"
    file = pathlib.Path(config.script)
    if not file.is_file():
        raise ValueError(f"no file {file} for the agent to run; --experiment.script=FILE names one")
    return Script(file)


def _tokenizer(endpoint: EndpointConfig) -> Tokenizer:
    from glm5_jax.checkpoint.models import load_tokenizer

    return load_tokenizer(endpoint.tokenizer) if endpoint.tokenizer else Tokenizer.default()


def _policy(config: EvaluateConfig, workdir: pathlib.Path) -> Agent:
    endpoint, chats = config.endpoint, workdir / "chats"
    url = endpoint.base_url
    assert url is not None, "the config checks that this agent has a server"

    def connect() -> ChatClient:
        timeout_s = config.policy.reply_timeout_s
        return ChatClient(url, endpoint.model, api_key=endpoint.key, timeout_s=timeout_s)

    def write_chat(task: TerminalTask, trace: Trace) -> None:
        chats.mkdir(exist_ok=True)
        messages = (*config.policy.chat_task(task).messages, *trace.messages)
        _write(
            chats / f"{task.name}.json",
            {"ended": trace.ended, "error": trace.error, "messages": messages},
        )

    counter = TokenCounter(_tokenizer(endpoint))
    return Policy(connect, counter, config.policy, endpoint.sampling, write_chat)


# Makers of agents, from the configuration and the results' folder.
AGENTS: dict[str, Callable[[EvaluateConfig, pathlib.Path], Agent]] = {
    "oracle": lambda config, workdir: Oracle(),
    "nop": lambda config, workdir: Nop(),
    "script": _script,
    "policy": _policy,
}


def get_config(variant: str = "harbor") -> EvaluateConfig | QuestionsConfig:
    """Returns the configuration of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(variant, {"harbor": EvaluateConfig, "questions": QuestionsConfig})


def run(config: EvaluateConfig | QuestionsConfig, workdir: pathlib.Path) -> int:
    """Attempts all tasks without a reward. Returns the exit code."""
    try:
        if isinstance(config, QuestionsConfig):
            evaluation = make_questions(config, workdir)
        else:
            evaluation = Evaluation(config, workdir)
    except (ValueError, OSError) as error:
        print_error(error)
        return 2
    try:
        asyncio.run(evaluation.run())
    except (SandboxError, ServerError) as error:
        print_error(error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 1
    if isinstance(evaluation, QuestionEvaluation):
        show_questions(evaluation)
    else:
        evaluation.show()
    return 0


def make_questions(config: QuestionsConfig, workdir: pathlib.Path) -> QuestionEvaluation:
    """Returns the evaluation of questions. Raises ValueError if the configuration is invalid, and OSError."""
    from experiments.rl_reasoning import Verifiers, make_toolbox

    url, endpoint = config.endpoint.base_url, config.endpoint
    if config.file is None:
        raise ValueError("no file of questions; give --experiment.file=FILE.jsonl")
    if url is None:
        raise ValueError("no server; give --experiment.endpoint.base_url=http://HOST:PORT")
    share = TaskFile(file=config.file, instruction=config.instruction)
    tasks = share.load().tasks

    def connect() -> ChatClient:
        return ChatClient(
            url,
            endpoint.model,
            api_key=endpoint.key,
            timeout_s=config.limits.timeout_s,
            concurrency=config.concurrency,
        )

    verify = Verifiers(config.verifier, False, (share,))
    evaluation = QuestionEvaluation(
        tasks=tasks,
        attempts=config.attempts,
        connect=connect,
        tools=make_toolbox(tasks, (share,)),
        verify=verify,
        close=verify.close,
        counter=TokenCounter(_tokenizer(endpoint)),
        limits=config.limits,
        fields=endpoint.sampling,
        concurrency=config.concurrency,
        folder=workdir,
    )
    content = pathlib.Path(config.file).read_bytes()
    evaluation.check_folder(
        {
            "file": hashlib.sha256(content).hexdigest(),
            "instruction": config.instruction,
            "base_url": url,
            "model": endpoint.model,
            **endpoint.sampling,
        }
    )
    return evaluation


def show_questions(evaluation: QuestionEvaluation) -> None:
    """Prints the mean reward of each kind of tasks, with Wilson's interval of 95%."""
    rewards, num_failed = evaluation.rewards_by_kind()
    if len(rewards) > 1:
        rewards["all"] = [value for values in rewards.values() for value in values]
    table = Table("kind", "tasks", "mean reward", "95%")
    for kind, values in rewards.items():
        mean = sum(values) / len(values)
        table.add_row(kind, str(len(values)), f"{mean:.3f}", _interval(values))
    console = Console()
    console.print(table)
    if num_failed:
        print(f"{num_failed} attempts could not be graded: the same command repeats them")
    print(f"results  {evaluation.results_file}")


def _interval(values: Sequence[float]) -> str:
    """Returns the interval of a mean as text. It is defined for scores from 0 to 1 only."""
    scores = np.asarray(values)
    if scores.min() < 0 or scores.max() > 1:
        return "-"
    low, high = wilson(scores)
    return f"{low:.3f} to {high:.3f}"


class Evaluation:
    """An agent's attempts at tasks, with results in a workdir. Raises ValueError if the configuration is invalid."""

    def __init__(self, config: EvaluateConfig, workdir: pathlib.Path):
        if config.tasks is None:
            raise ValueError("no tasks; give --experiment.tasks=DIR, a folder of task folders")
        self._folders = {folder.name: folder for folder in find_tasks(config.tasks)}
        self._agent = AGENTS[config.agent](config, workdir)
        self._trials = TrialRunner(dict(config.images), config.limits, config.build)
        self._concurrency, self._workdir = config.concurrency, workdir
        self._results: dict[str, dict] = {}
        identity = {"tasks": str(pathlib.Path(config.tasks).resolve()), "agent": config.agent}
        if config.script is not None:
            identity["script"] = hashlib.sha256(
                pathlib.Path(config.script).read_bytes()
            ).hexdigest()
        if config.agent == "policy":
            for part in ("endpoint", "policy"):
                fields = dataclasses.asdict(getattr(config, part))
                identity |= {
                    f"{part}.{name}": fields[name] for name in fields if name != "api_key_file"
                }
        workdir.mkdir(parents=True, exist_ok=True)
        self._resume(identity)

    def _resume(self, identity: dict[str, Any]) -> None:
        """Reads the results of an earlier run. Raises ValueError if it had another agent or other tasks."""
        file = self._workdir / "config.json"
        if file.exists():
            before = json.loads(file.read_text())
            for name in sorted(before.keys() | identity.keys()):
                if before.get(name) != identity.get(name):
                    raise ValueError(
                        f"{self._workdir} holds results of another {name} ({before.get(name)}, not {identity.get(name)}); "
                        "give another --workdir"
                    )
        _write(file, identity)
        results = self._workdir / "results.json"
        if results.exists():
            self._results = json.loads(results.read_text())

    async def run(self) -> None:
        """Attempts all tasks without a reward."""
        # SIGTERM cancels like Ctrl-C, so that sandboxes are ended and built images removed.
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        remaining = [name for name in self._folders if self._reward(name) is None]
        slots = asyncio.Semaphore(self._concurrency)
        done = len(self._folders) - len(remaining)
        with ProgressBar(len(self._folders), done, "task") as bar:

            async def attempt(name: str) -> None:
                nonlocal done
                async with slots:
                    result = await self._attempt(name)
                done += 1
                self._keep(name, result)
                bar.update(done, f"{name}  {_reward_text(result)}")

            async with self._trials, asyncio.TaskGroup() as group:
                for name in remaining:
                    group.create_task(attempt(name))

    async def _attempt(self, name: str) -> TrialResult:
        try:
            task = await asyncio.to_thread(load_task, self._folders[name])
        except (TaskError, OSError) as error:
            return TrialResult(reward=None, error=str(error), duration_s=0.0)
        for form in forgeable_forms(task):
            log.warning("task %s: its reward can be forged: %s", name, form)
        return await self._trials.run(task, self._agent)

    def _reward(self, name: str) -> float | None:
        return self._results.get(name, {}).get("reward")

    def _keep(self, name: str, result: TrialResult) -> None:
        logs = self._workdir / "logs"
        logs.mkdir(exist_ok=True)
        (logs / f"{name}.txt").write_text(result.log)
        self._results[name] = {
            "reward": result.reward,
            "error": result.error,
            "seconds": round(result.duration_s, 3),
        }
        _write(self._workdir / "results.json", dict(sorted(self._results.items())))

    def show(self) -> None:
        """Prints all results as a table, with the mean reward."""
        table = Table("task", "reward", "seconds", "error")
        for name in self._folders:
            result = self._results[name]
            reward = "-" if result["reward"] is None else f"{result['reward']:g}"
            error = make_printable(" ".join((result["error"] or "").split()))
            table.add_row(
                Text(make_printable(name)), reward, f"{result['seconds']:.1f}", Text(error[:200])
            )
        console = Console()
        console.print(table)
        rewards = [self._reward(name) for name in self._folders]
        graded = [reward for reward in rewards if reward is not None]
        mean = (
            f"mean reward {sum(graded) / len(graded):.3f} of {len(graded)} tasks" if graded else ""
        )
        failed = len(rewards) - len(graded)
        rest = (
            f"{failed} could not be graded: the same command attempts them again" if failed else ""
        )
        console.print(Text("; ".join(filter(None, (mean, rest)))))
        console.print(Text(f"results  {self._workdir / 'results.json'}"), soft_wrap=True)


def _reward_text(result: TrialResult) -> str:
    return "no reward" if result.reward is None else f"reward {result.reward:g}"


def _write(file: pathlib.Path, content: dict) -> None:
    """Replaces a file atomically."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, file)
