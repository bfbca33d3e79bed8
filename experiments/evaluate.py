"""Evaluates an agent on a folder of tasks, or a served model on a file of questions.

    glm5 run evaluate:questions --file=FILE.jsonl --endpoint.base_url=http://127.0.0.1:8000 --workdir=OUT
    glm5 run evaluate:harbor --tasks=DIR --agent=oracle --workdir=OUT
    glm5 run evaluate:swe --tasks=DIR --agent=gold --workdir=OUT

:questions  tasks of a .jsonl or .py file, as those of rl_reasoning.py (glm5_jax/envs/reasoning/task_file.py):
         {"question": "7 * 8?", "answer": "56"}. Each reply is judged by the task's verifier; --attempts=N asks
         N times. OUT/results.jsonl has the replies and rewards. The same command continues an evaluation.
         --endpoint.thinking=False requests replies without thinking, for a model of chats without reasoning.
:swe     software engineering tasks: a data set of build_environments.py in DIR, with --agent=gold, nop or policy, or with
         --predictions=FILE in SWE-bench's form. OUT/reports has the lists of tests of each attempt.
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
import collections
import dataclasses
import hashlib
import json
import logging
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import TokenCounter
from glm5_jax.agents.loop import LoopConfig, Trace
from glm5_jax.envs.reasoning.question_evaluation import QuestionEvaluation
from glm5_jax.envs.reasoning.task_file import TaskFile
from glm5_jax.envs.reasoning.verifiers import VerifierConfig
from glm5_jax.envs.sandbox import SandboxError
from glm5_jax.envs.swe.attempts import PatchAgent, SweAgent, SweAttemptConfig, SwePolicy
from glm5_jax.envs.swe.evaluation import evaluate_instances
from glm5_jax.envs.swe.instance import SweInstance
from glm5_jax.envs.swe.layers import SweLimits
from glm5_jax.envs.swe.service import SweShare
from glm5_jax.envs.task_evaluation import TaskEvaluation
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
from glm5_jax.rl.types import Task
from glm5_jax.runtime.addresses import check_url
from glm5_jax.runtime.api_keys import read_key
from glm5_jax.runtime.files import replace_text
from glm5_jax.runtime.terminal import print_error
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
      thinking: whether replies are requested as the server's default has them; False: without thinking, for a model of
        chats without reasoning.
    """

    base_url: str | None = None
    model: str | None = None
    api_key_file: str | None = None
    tokenizer: str | None = None
    temperature: float | None = 0.7  # GLM-5 B.2, of Terminal-Bench 2.0
    top_p: float | None = 1.0  # GLM-5 B.2
    thinking: bool = True

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
    def sampling(self) -> dict[str, Any]:
        """Returns the options of each request: of sampling, and of thinking."""
        options: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        if not self.thinking:
            options["chat_template_kwargs"] = {"enable_thinking": False}
        return {name: value for name, value in options.items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionsConfig:
    """Questions, server and limits of an evaluation. Raises ValueError for values out of range.

    The defaults of sampling are those of GLM-5 6.1 for reasoning: temperature 1, top_p 0.95 and at most 131,072 new tokens,
    or as many as the server's context holds.

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
    endpoint: EndpointConfig = EndpointConfig(temperature=1.0, top_p=0.95)
    attempts: int = 1
    concurrency: int = 16
    limits: LoopConfig = LoopConfig(reply_tokens=131_072)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweEvaluateConfig:
    """Software engineering tasks, agent and limits of an evaluation.

    Attributes:
      tasks: data set of experiments/build_environments.py; None: not set.
      agent: "gold", "nop" or "policy".
      predictions: file of predictions in SWE-bench's form, which replace an agent; None: there is none.
      endpoint, policy: server and limits of the agent `policy`.
      store: folder of built environments; None: `layers` in the data set.
      node_modules: folder in which npm installed test runners; None: tasks of JavaScript get no reward.
      concurrency: number of concurrent attempts.
      limits: limits of sandboxes.
    """

    tasks: str | None = None
    agent: str = "gold"
    predictions: str | None = None
    endpoint: EndpointConfig = EndpointConfig()
    policy: SweAttemptConfig = SweAttemptConfig()
    store: str | None = None
    node_modules: str | None = None
    concurrency: int = 2
    limits: SweLimits = SweLimits()

    def __post_init__(self):
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it must be positive")
        if self.agent not in ("gold", "nop", "policy"):
            raise ValueError(f"agent is {self.agent!r}; it can be gold, nop or policy")
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


def load_endpoint_tokenizer(endpoint: EndpointConfig) -> Tokenizer:
    """Returns the tokenizer that counts an endpoint's tokens."""
    from glm5_jax.checkpoint.models import load_tokenizer

    return load_tokenizer(endpoint.tokenizer) if endpoint.tokenizer else Tokenizer.default()


def _policy(config: EvaluateConfig, workdir: pathlib.Path) -> Agent:
    endpoint = config.endpoint

    def write_chat(task: TerminalTask, trace: Trace) -> None:
        _write_chat(workdir, config.policy.chat_task(task), trace)

    counter = TokenCounter(load_endpoint_tokenizer(endpoint))
    connect = _connector(endpoint, config.policy)
    return Policy(connect, counter, config.policy, endpoint.sampling, write_chat)


def _connector(endpoint: EndpointConfig, policy: AttemptConfig) -> Callable[[], ChatClient]:
    """Returns a function that opens a client of a policy's server."""
    url = endpoint.base_url
    assert url is not None, "the config checks that this agent has a server"
    timeout_s = policy.reply_timeout_s
    return lambda: ChatClient(url, endpoint.model, api_key=endpoint.key, timeout_s=timeout_s)


def _write_chat(workdir: pathlib.Path, task: Task, trace: Trace) -> None:
    chats = workdir / "chats"
    chats.mkdir(exist_ok=True)
    messages = (*task.messages, *trace.messages)
    content = {"ended": trace.ended, "error": trace.error, "messages": messages}
    replace_text(chats / f"{task.id}.json", json.dumps(content, indent=1) + "\n")


# Makers of agents, from the configuration and the results' folder.
AGENTS: dict[str, Callable[[EvaluateConfig, pathlib.Path], Agent]] = {
    "oracle": lambda config, workdir: Oracle(),
    "nop": lambda config, workdir: Nop(),
    "script": _script,
    "policy": _policy,
}


def get_config(
    variant: str = "harbor",
) -> EvaluateConfig | QuestionsConfig | SweEvaluateConfig:
    """Returns the configuration of a variant. Raises ValueError, which lists the variants, for an unknown one."""
    return choose(
        variant,
        {"harbor": EvaluateConfig, "questions": QuestionsConfig, "swe": SweEvaluateConfig},
    )


def run(config: EvaluateConfig | QuestionsConfig | SweEvaluateConfig, workdir: pathlib.Path) -> int:
    """Attempts all tasks without a reward. Returns the exit code."""
    try:
        if isinstance(config, QuestionsConfig):
            evaluation = make_questions(config, workdir)
        elif isinstance(config, SweEvaluateConfig):
            evaluation = make_swe(config, workdir)
        else:
            evaluation = make_terminal(config, workdir)
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
    url, endpoint = config.endpoint.base_url, config.endpoint
    if config.file is None:
        raise ValueError("no file of questions; give --experiment.file=FILE.jsonl")
    if url is None:
        raise ValueError("no server; give --experiment.endpoint.base_url=http://HOST:PORT")
    share = TaskFile(file=config.file, instruction=config.instruction)
    tasks = share.load().tasks
    from experiments.rl_reasoning import Verifiers, make_toolbox

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
        counter=TokenCounter(load_endpoint_tokenizer(endpoint)),
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
    graded = [result for result in evaluation.results().values() if result["reward"] is not None]
    replies = [result["reply"] for result in graded]
    if num_empty := sum(not reply.strip() for reply in replies):
        print(
            f"{num_empty} of {len(replies)} replies have no text after their thinking; for a model of chats without "
            "reasoning: --experiment.endpoint.thinking=False"
        )
    print(f"results  {evaluation.results_file}")


def _interval(values: Sequence[float]) -> str:
    """Returns the interval of a mean as text. It is defined for scores from 0 to 1 only."""
    scores = np.asarray(values)
    if scores.min() < 0 or scores.max() > 1:
        return "-"
    low, high = wilson(scores)
    return f"{low:.3f} to {high:.3f}"


def make_terminal(config: EvaluateConfig, workdir: pathlib.Path) -> TaskEvaluation:
    """Returns the evaluation of terminal tasks. Raises ValueError if the configuration is invalid."""
    if config.tasks is None:
        raise ValueError("no tasks; give --experiment.tasks=DIR, a folder of task folders")
    folders = {folder.name: folder for folder in find_tasks(config.tasks)}
    agent = AGENTS[config.agent](config, workdir)
    trials = TrialRunner(dict(config.images), config.limits, config.build)

    async def attempt(name: str) -> TrialResult:
        try:
            task = await asyncio.to_thread(load_task, folders[name])
        except (TaskError, OSError) as error:
            return TrialResult(reward=None, error=str(error), duration_s=0.0)
        for form in forgeable_forms(task):
            log.warning("task %s: its reward can be forged: %s", name, form)
        return await trials.run(task, agent)

    identity = {"tasks": str(pathlib.Path(config.tasks).resolve()), "agent": config.agent}
    if config.script is not None:
        content = pathlib.Path(config.script).read_bytes()
        identity["script"] = hashlib.sha256(content).hexdigest()
    if config.agent == "policy":
        identity |= _policy_identity(config)
    return TaskEvaluation(
        list(folders),
        attempt,
        workdir,
        identity=identity,
        concurrency=config.concurrency,
        resources=trials,
    )


def make_swe(config: SweEvaluateConfig, workdir: pathlib.Path) -> TaskEvaluation:
    """Returns the evaluation of software engineering tasks. Raises ValueError if the configuration is invalid."""
    if config.tasks is None:
        raise ValueError("no tasks; give --experiment.tasks=DIR, a data set of build_environments")
    share = SweShare(
        dataset=config.tasks,
        store=config.store,
        node_modules=config.node_modules,
        limits=config.limits,
    )
    identity = {"tasks": str(pathlib.Path(config.tasks).resolve()), "agent": config.agent}
    if config.agent == "policy":
        identity |= _policy_identity(config)
    return evaluate_instances(
        share.make_runner(),
        _swe_agent(config, workdir),
        workdir,
        predictions=config.predictions,
        identity=identity,
        concurrency=config.concurrency,
    )


def _swe_agent(config: SweEvaluateConfig, workdir: pathlib.Path) -> SweAgent:
    if config.agent == "gold":
        return PatchAgent()
    if config.agent != "policy":
        return PatchAgent(collections.defaultdict(str))
    endpoint = config.endpoint

    def write_chat(instance: SweInstance, trace: Trace) -> None:
        task = config.policy.instance_task(instance)
        _write_chat(workdir, task, trace)

    counter = TokenCounter(load_endpoint_tokenizer(endpoint))
    connect = _connector(endpoint, config.policy)
    return SwePolicy(connect, counter, config.policy, endpoint.sampling, write_chat)


def _policy_identity(config: EvaluateConfig | SweEvaluateConfig) -> dict[str, Any]:
    """Returns the fields of a policy that results depend on."""
    parts = {"endpoint": config.endpoint, "policy": config.policy}
    return {
        f"{part}.{name}": value
        for part, options in parts.items()
        for name, value in dataclasses.asdict(options).items()
        if name != "api_key_file"
    }


if __name__ == "__main__":
    print((__doc__ or "").split("\n\n")[1].strip())
