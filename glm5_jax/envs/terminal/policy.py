"""A language model at terminal tasks: it is told what to do, and works with the tool `bash` until it replies without a
call.

    agent = Policy(lambda: ChatClient("http://127.0.0.1:8000"), TokenCounter(tokenizer), AttemptConfig())
    async with Trials() as trials:
        result = await trials.run(task, agent)

As in Terminal-Bench what it has done by any limit is graded: a limit is no reward of 0 by itself.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from glm5_jax.agents.client import Chats
from glm5_jax.agents.context import CONTEXTS, ContextConfig, Counter
from glm5_jax.agents.loop import (
    ANSWER,
    CUT_OFF,
    SECONDS,
    TOKENS,
    TURNS,
    UNREAD,
    Agent,
    LoopConfig,
    Trace,
)
from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.terminal.bash import Bash, BashConfig
from glm5_jax.envs.terminal.shell import Shell
from glm5_jax.envs.terminal.task import TerminalTask
from glm5_jax.rl.rollout import ToolError
from glm5_jax.rl.types import Task

KIND = "terminal"
BROKEN = "broken"  # how a trace ends whose sandbox has failed, beside the ends of `agents.loop`
SYSTEM = (
    "You work alone at a Linux machine without a network, by the commands that you run with the tool bash. Nobody is there "
    "to answer questions. Look at what there is, do what the task says, and check that it is done. Then reply without a "
    "call, which ends your work."
)


@dataclasses.dataclass(frozen=True)
class AttemptConfig:
    """Limits of an attempt, and what a policy is told. Construction refuses values out of range (ValueError).

    Attributes:
      max_turns, max_tokens, reply_tokens: of `LoopConfig`; max_tokens at most the context that the server has, unless older
        rounds are left out (`context`).
      seconds: for all of it; the task's own limit, if that is less.
      reply_seconds: that the server has for a reply; past them it has failed.
      context: what of the conversation each request sends.
      bash: limits of commands.
      thinking: whether replies begin with reasoning.
      system: what stands before the task's instruction.
    """

    max_turns: int = 100  # ours; GLM-5's is not disclosed, Terminus 2 has none
    max_tokens: int = 131_072  # GLM-5 B.2, of Terminal-Bench 2.0 (128K)
    reply_tokens: int | None = 8192  # GLM-5 B.2
    seconds: float = 7200.0  # GLM-5 B.2
    reply_seconds: float = 600.0  # ours: 8192 tokens, 14 each second
    context: ContextConfig = CONTEXTS["everything"]
    bash: BashConfig = BashConfig()
    thinking: bool = True
    system: str = SYSTEM

    def __post_init__(self):
        self.loop()
        if not self.reply_seconds > 0:
            raise ValueError(f"reply_seconds is {self.reply_seconds}; it must be positive")

    def loop(self) -> LoopConfig:
        """As limits of the loop; those of tools are the commands' own."""
        return LoopConfig(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            reply_tokens=self.reply_tokens,
            seconds=self.seconds,
            tool_seconds=self.seconds,
            ends_on_broken_call=False,  # what it has done would be graded all the same
            context=self.context,
        )

    def asked(self, task: TerminalTask) -> Task:
        """A terminal task as one of chats."""
        messages = (
            {"role": "system", "content": self.system},
            {"role": "user", "content": task.instruction},
        )
        thinking = None if self.thinking else False  # what servers of other models do not know
        tools = (self.bash.tool(),)
        return Task(task.name, KIND, messages, {"task": task}, tools, thinking=thinking)


class Policy:
    """A model as an agent for terminal tasks (`terminal.Agent`), at as many as are asked for.

    connect: opens a client of its server, for each attempt. counter: of tokens, as that server's. fields: of every
    request, such as the temperature. told: is given what became of each attempt, before it is graded.

    Its server's failure, ServerError, leaves an attempt without a reward; all else is graded as it is.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Chats]],
        counter: Counter,
        config: AttemptConfig,
        fields: Mapping[str, Any] | None = None,
        told: Callable[[TerminalTask, Trace], None] = lambda task, trace: None,
    ):
        self._connect, self._counter, self._config = connect, counter, config
        self._fields, self._told = dict(fields or {}), told

    async def run(self, task: TerminalTask, sandbox: Shell) -> str | None:
        """By which limit it was ended. ServerError, SandboxError; ValueError if the instruction has more than max_tokens."""
        toolbox = Toolbox({"bash": Bash(sandbox, self._config.bash)})
        async with self._connect() as client:
            agent = Agent(client, toolbox, self._counter, self._config.loop(), self._fields)
            course = agent.begin(self._config.asked(task))
            try:
                trace = await course.run()
            except ToolError as error:
                # Of the sandbox, which a policy may have broken: that is for the trial to find out.
                self._told(task, course.trace(BROKEN, str(error)))
                raise error.__cause__ from None
            except asyncio.CancelledError:
                # As the task's time is over, unless the whole trial is given up.
                if sandbox.seconds_left <= 0:
                    self._told(task, course.late())
                raise
        self._told(task, trace)
        return self._limit(trace)

    def _limit(self, trace: Trace) -> str | None:
        limits = {
            ANSWER: None,
            CUT_OFF: "by a reply that was cut off",
            TURNS: f"after {self._config.max_turns} replies (max_turns)",
            TOKENS: f"after {self._config.max_tokens} tokens (max_tokens)",
            SECONDS: f"after {self._config.seconds:g} s (seconds)",
            UNREAD: f"by its server, which reads no more of it ({trace.error})",
        }
        limit = limits[trace.ended]
        return limit and f"the policy was ended {limit}"
