"""Runs a language model at terminal tasks: it works with the tool `bash` until it replies without a call.

    agent = Policy(lambda: ChatClient("http://127.0.0.1:8000"), TokenCounter(tokenizer), AttemptConfig())
    async with TrialRunner() as trials:
        result = await trials.run(task, agent)

As in Terminal-Bench, the state at any limit is graded: reaching a limit is not by itself a reward of 0.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from glm5_jax.agents.client import ChatBackend
from glm5_jax.agents.context import CONTEXTS, ContextConfig, Counter
from glm5_jax.agents.loop import (
    ANSWER,
    CUT_OFF,
    REJECTED,
    TIMEOUT,
    TOKENS,
    TURNS,
    ChatAgent,
    LoopConfig,
    Trace,
)
from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.terminal.bash import Bash, BashConfig
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.envs.terminal.task import TerminalTask
from glm5_jax.rl.rollouts.rollout import ToolError
from glm5_jax.rl.types import Task

KIND = "terminal"
SANDBOX_FAILED = (
    "broken"  # end of a trace whose sandbox failed, in addition to those of `agents.loop`
)
SYSTEM = (
    "You work alone at a Linux machine without a network, by the commands that you run with the tool bash. Nobody is there "
    "to answer questions. Look at what there is, do what the task says, and check that it is done. Then reply without a "
    "call, which ends your work."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptConfig:
    """Limits and prompt of an attempt. Raises ValueError for values out of range.

    Attributes:
      max_turns, max_tokens, reply_tokens: as in `LoopConfig`; max_tokens at most the server's context,
          unless older rounds are left out (`context`).
      timeout_s: time limit of an attempt, in seconds; the task's limit if that is smaller.
      reply_timeout_s: time limit of one reply of the server, in seconds; after it the server has failed.
      context: part of the conversation that each request sends.
      bash: limits of commands.
      thinking: whether replies begin with reasoning.
      system: system prompt.
    """

    max_turns: int = 100  # GLM-5 does not disclose one, Terminus 2 has none
    max_tokens: int = 131_072  # GLM-5 B.2, for Terminal-Bench 2.0 (128K)
    reply_tokens: int | None = 8192  # GLM-5 B.2
    timeout_s: float = 7200.0  # GLM-5 B.2
    reply_timeout_s: float = 600.0  # 8192 tokens at 14 per second
    context: ContextConfig = CONTEXTS["everything"]
    bash: BashConfig = BashConfig()
    thinking: bool = True
    system: str = SYSTEM

    @classmethod
    def from_loop(cls, loop: LoopConfig, bash: BashConfig, thinking: bool) -> Self:
        """Returns the limits of an agent loop, whose time limit is also that of a reply."""
        return cls(
            max_turns=loop.max_turns,
            max_tokens=loop.max_tokens,
            reply_tokens=loop.reply_tokens,
            timeout_s=loop.timeout_s,
            reply_timeout_s=loop.timeout_s,
            context=loop.context,
            bash=bash,
            thinking=thinking,
        )

    def __post_init__(self):
        self.loop()
        if not self.reply_timeout_s > 0:
            raise ValueError(f"reply_timeout_s is {self.reply_timeout_s}; it must be positive")

    def loop(self) -> LoopConfig:
        """Returns the limits as those of the agent loop; commands have their own time limits."""
        return LoopConfig(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            reply_tokens=self.reply_tokens,
            timeout_s=self.timeout_s,
            tool_timeout_s=self.timeout_s,
            ends_on_broken_call=False,  # the work until then is graded in any case
            context=self.context,
        )

    def chat_task(self, task: TerminalTask) -> Task:
        """Returns a terminal task as a chat task."""
        messages = (
            {"role": "system", "content": self.system},
            {"role": "user", "content": task.instruction},
        )
        thinking = (
            None if self.thinking else False
        )  # None, because servers of other models do not know the option
        tools = (self.bash.tool(),)
        return Task(
            id=task.name,
            kind=KIND,
            messages=messages,
            data={"task": task},
            tools=tools,
            thinking=thinking,
        )


class Policy:
    """Agent that runs a model at terminal tasks (`terminal.Agent`), any number at once.

    A failure of its server, ServerError, leaves an attempt without a reward; after anything else the state
    is graded.

    Args:
      connect: function that opens a client of the model's server for each attempt.
      counter: token counter of that server.
      config: limits.
      fields: fields of every request, such as the temperature.
      on_trace: function that receives the trace of each attempt, before it is graded.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[ChatBackend]],
        counter: Counter,
        config: AttemptConfig,
        fields: Mapping[str, Any] | None = None,
        on_trace: Callable[[TerminalTask, Trace], None] = lambda task, trace: None,
    ):
        self._connect, self._counter, self._config = connect, counter, config
        self._fields, self._on_trace = dict(fields or {}), on_trace

    async def run(self, task: TerminalTask, sandbox: Shell) -> str | None:
        """Works at a task; returns a description of the limit that ended it, or None.

        Raises ServerError, SandboxError, and ValueError if the instruction has more than max_tokens tokens.
        """
        toolbox = Toolbox({"bash": Bash(sandbox, self._config.bash)})
        async with self._connect() as client:
            agent = ChatAgent(
                client=client,
                tools=toolbox,
                counter=self._counter,
                config=self._config.loop(),
                fields=self._fields,
            )
            trace = await run_episode(
                agent,
                self._config.chat_task(task),
                lambda trace: self._on_trace(task, trace),
                lambda: sandbox.time_left_s > 0,
            )
        return describe_limit(trace, self._config)


async def run_episode(
    agent: ChatAgent,
    task: Task,
    on_trace: Callable[[Trace], None],
    has_time: Callable[[], bool] = lambda: True,
) -> Trace:
    """Runs an agent in a sandbox to its end and returns the trace, which `on_trace` receives however it ends.

    Raises ServerError, and SandboxError or OSError if the sandbox failed.

    has_time: whether the agent has time left; if not, a cancellation is the end of its time.
    """
    episode = agent.begin(task)
    try:
        trace = await episode.run()
    except ToolError as error:
        # The sandbox failed. The caller finds out whether the policy caused that.
        on_trace(episode.trace(SANDBOX_FAILED, str(error)))
        raise error.__cause__ or error from None
    except asyncio.CancelledError:
        if not has_time():
            on_trace(episode.end_by_timeout())
        raise
    on_trace(trace)
    return trace


def describe_limit(trace: Trace, config: AttemptConfig) -> str | None:
    """Returns a description of the limit that ended a trace; None if the policy ended it."""
    limits = {
        ANSWER: None,
        CUT_OFF: "by a reply that was cut off",
        TURNS: f"after {config.max_turns} replies (max_turns)",
        TOKENS: f"after {config.max_tokens} tokens (max_tokens)",
        TIMEOUT: f"after {config.timeout_s:g} s (timeout_s)",
        REJECTED: f"by its server, which reads no more of it ({trace.error})",
    }
    limit = limits[trace.ended]
    return limit and f"the policy was ended {limit}"
