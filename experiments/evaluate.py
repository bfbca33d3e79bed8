"""Evaluates an agent at the tasks of a folder.

    python -m launch.run --experiment=experiments/evaluate.py:harbor --experiment.tasks=DIR --experiment.agent=oracle --workdir=OUT

:harbor  terminal tasks: folders in Harbor's format in DIR (or DIR itself, if it is one). Each is attempted in a sandbox
         and graded in another; about a second a task, beside what the agent and the tests take.

agent is oracle (the task's own solution, which must be worth 1), nop (does nothing, which must be worth 0), script:
what --experiment.script=FILE does, at every task, or policy: a model behind OpenAI's API, such as that of
experiments/serve.py, which works with a shell,

    --experiment.agent=policy --experiment.endpoint.base_url=http://127.0.0.1:8000

of whose context --experiment.policy.max_tokens takes no more than there is (small models have less than the default).
OUT/results.json, {task: {reward, error, seconds}}, is written as tasks are done; what their tests printed is in
OUT/logs, what a policy wrote and was answered in OUT/chats. reward is null, with the reason, where nothing can be said
of the attempt, as when its server fails; the same command again attempts these and what is left.

A reward of less than 1 says what the attempt changed that is not graded ("changed, not graded: PATH"): of a task with
environment_mode = "shared" everything is, since its tests run in the agent's sandbox. Where the form of a task's tests
lets an attempt forge its reward, a warning says so (envs/terminal/forms.py lists the forms).

--experiment.images='{"python:3.12": "DIR"}' names root file systems that stand for images; "host", as for debian and
ubuntu, is this machine's programs. It needs root, for sandboxes with users of their own; there never is a network.
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
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import TokenCounter
from glm5_jax.agents.loop import Trace
from glm5_jax.core.console import ProgressBar
from glm5_jax.core.server import check_url, read_key
from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.terminal import (
    Agent,
    AttemptConfig,
    Nop,
    Oracle,
    Policy,
    Result,
    Script,
    TaskError,
    TaskLimits,
    TerminalTask,
    Trials,
    find_tasks,
    load_task,
)
from glm5_jax.envs.terminal.forms import forgeable
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.experiment import choose

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    """Where a policy is asked, and how. Construction refuses values out of range (ValueError).

    Attributes:
      base_url: of a server with OpenAI's API, without /v1; None: there is none.
      model: its name there; None: whatever the server has.
      api_key_file: file that holds the API key that the server wants; None: it wants none.
      tokenizer: the checkpoint by whose tokenizer tokens are counted; None: the shipped one, which counts more than
        those of large models.
      temperature, top_p: of each reply; None: as the server has it.
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


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """What is attempted, and by whom.

    Attributes:
      tasks: a folder of tasks, or one of them.
      agent: who attempts them; see `AGENTS`.
      script: what the agent `script` runs.
      endpoint, policy: where the agent `policy` is asked, and its limits.
      images: names of images and the root file systems that stand for them, or "host".
      at_once: how many tasks are attempted at a time; each has its own limit of processors and memory.
      limits: what tasks may ask of this machine; one that asks for more gets no reward.
    """

    tasks: str | None = None
    agent: str = "oracle"
    script: str | None = None
    endpoint: EndpointConfig = EndpointConfig()
    policy: AttemptConfig = AttemptConfig()
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    at_once: int = 2
    limits: TaskLimits = TaskLimits()

    def __post_init__(self):
        if self.at_once < 1:
            raise ValueError(f"at_once is {self.at_once}; it must be positive")
        if self.agent not in AGENTS:
            raise ValueError(f"agent is {self.agent!r}; it can be {', '.join(AGENTS)}")
        if (self.script is not None) != (self.agent == "script"):
            raise ValueError(
                f"agent is {self.agent!r} and script is {self.script!r}; the agent 'script', and it alone, runs one: "
                "give --experiment.agent=script --experiment.script=FILE"
            )
        if (self.endpoint.base_url is not None) != (self.agent == "policy"):
            raise ValueError(
                f"agent is {self.agent!r} and endpoint.base_url is {self.endpoint.base_url!r}; the agent 'policy', and it "
                "alone, has a server: give --experiment.agent=policy --experiment.endpoint.base_url=http://HOST:PORT"
            )


def _script(config: EvaluateConfig, workdir: pathlib.Path) -> Agent:
    file = pathlib.Path(config.script)
    if not file.is_file():
        raise ValueError(f"no file {file} for the agent to run; --experiment.script=FILE names one")
    return Script(file)


def _policy(config: EvaluateConfig, workdir: pathlib.Path) -> Agent:
    from glm5_jax.checkpoint.models import load_tokenizer

    end, chats = config.endpoint, workdir / "chats"
    given = {"temperature": end.temperature, "top_p": end.top_p}

    def connect() -> ChatClient:
        seconds = config.policy.reply_seconds
        return ChatClient(end.base_url, end.model, api_key=end.key, seconds=seconds)

    def told(task: TerminalTask, trace: Trace) -> None:
        chats.mkdir(exist_ok=True)
        messages = (*config.policy.asked(task).messages, *trace.messages)
        _write(
            chats / f"{task.name}.json",
            {"ended": trace.ended, "error": trace.error, "messages": messages},
        )

    tokenizer = load_tokenizer(end.tokenizer) if end.tokenizer else Tokenizer.default()
    fields = {name: value for name, value in given.items() if value is not None}
    return Policy(connect, TokenCounter(tokenizer), config.policy, fields, told)


# Of a config and the folder of its results.
AGENTS: dict[str, Callable[[EvaluateConfig, pathlib.Path], Agent]] = {
    "oracle": lambda config, workdir: Oracle(),
    "nop": lambda config, workdir: Nop(),
    "script": _script,
    "policy": _policy,
}


def get_config(variant: str = "harbor") -> EvaluateConfig:
    """The variant's experiment; ValueError lists the variants."""
    return choose(variant, {"harbor": EvaluateConfig})


def run(config: EvaluateConfig, workdir: pathlib.Path) -> int:
    """Attempts what has no reward yet; the exit code."""
    try:
        evaluation = Evaluation(config, workdir)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    try:
        asyncio.run(evaluation.run())
    except SandboxError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 1
    evaluation.show()
    return 0


class Evaluation:
    """An agent at tasks, with its results in a workdir. ValueError if it cannot begin there."""

    def __init__(self, config: EvaluateConfig, workdir: pathlib.Path):
        if config.tasks is None:
            raise ValueError("no tasks; give --experiment.tasks=DIR, a folder of task folders")
        self._folders = {folder.name: folder for folder in find_tasks(config.tasks)}
        self._agent = AGENTS[config.agent](config, workdir)
        self._trials = Trials(dict(config.images), config.limits)
        self._at_once, self._workdir = config.at_once, workdir
        self._results: dict[str, dict] = {}
        told = {"tasks": str(pathlib.Path(config.tasks).resolve()), "agent": config.agent}
        if config.script is not None:
            told["script"] = hashlib.sha256(pathlib.Path(config.script).read_bytes()).hexdigest()
        if config.agent == "policy":
            for part in ("endpoint", "policy"):
                own = dataclasses.asdict(getattr(config, part))
                told |= {f"{part}.{name}": own[name] for name in own if name != "api_key_file"}
        workdir.mkdir(parents=True, exist_ok=True)
        self._go_on(told)

    def _go_on(self, told: dict[str, Any]) -> None:
        """Takes up what a run in this workdir has found, if it was of the same agent at the same tasks."""
        file = self._workdir / "config.json"
        if file.exists():
            before = json.loads(file.read_text())
            for name in sorted(before.keys() | told.keys()):
                if before.get(name) != told.get(name):
                    raise ValueError(
                        f"{self._workdir} holds results of another {name} ({before.get(name)}, not {told.get(name)}); "
                        "give another --workdir"
                    )
        _write(file, told)
        results = self._workdir / "results.json"
        if results.exists():
            self._results = json.loads(results.read_text())

    async def run(self) -> None:
        """Attempts all that has no reward yet."""
        # As Ctrl-C does: sandboxes are ended and what was built is removed.
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        left = [name for name in self._folders if self._reward(name) is None]
        places = asyncio.Semaphore(self._at_once)
        done = len(self._folders) - len(left)
        with ProgressBar(len(self._folders), done, "task") as bar:

            async def attempt(name: str) -> None:
                nonlocal done
                async with places:
                    result = await self._attempt(name)
                done += 1
                self._keep(name, result)
                bar.update(done, f"{name}  {_said(result)}")

            async with self._trials, asyncio.TaskGroup() as group:
                for name in left:
                    group.create_task(attempt(name))

    async def _attempt(self, name: str) -> Result:
        try:
            task = await asyncio.to_thread(load_task, self._folders[name])
        except (TaskError, OSError) as error:
            return Result(None, str(error), 0.0)
        for form in forgeable(task):
            log.warning("task %s: its reward can be forged: %s", name, form)
        return await self._trials.run(task, self._agent)

    def _reward(self, name: str) -> float | None:
        return self._results.get(name, {}).get("reward")

    def _keep(self, name: str, result: Result) -> None:
        logs = self._workdir / "logs"
        logs.mkdir(exist_ok=True)
        (logs / f"{name}.txt").write_text(result.log)
        self._results[name] = {
            "reward": result.reward,
            "error": result.error,
            "seconds": round(result.seconds, 3),
        }
        _write(self._workdir / "results.json", dict(sorted(self._results.items())))

    def show(self) -> None:
        """Prints all results as a table, and what they come to."""
        table = Table("task", "reward", "seconds", "error")
        for name in self._folders:
            found = self._results[name]
            reward = "-" if found["reward"] is None else f"{found['reward']:g}"
            error = " ".join((found["error"] or "").split())
            table.add_row(Text(name), reward, f"{found['seconds']:.1f}", Text(error[:200]))
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


def _said(result: Result) -> str:
    return "no reward" if result.reward is None else f"reward {result.reward:g}"


def _write(file: pathlib.Path, content: dict) -> None:
    """The whole file or none of it."""
    new = file.with_name(file.name + ".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, file)
