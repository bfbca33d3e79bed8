"""Task services of agents. One consists of tasks, the tools that they offer, and the verifier that judges attempts; others
are subclasses of `ChatService`, as that of terminal tasks (`terminal.service`).

service = AgentService(
    ServiceConfig(name="search", hub="http://10.0.0.2:8100", port=8201), tasks, held_out, toolbox, verifier, tokenizer
)
asyncio.run(service.serve())
"""

from collections.abc import Sequence

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import Counter, TokenCounter
from glm5_jax.agents.loop import Agent, LoopConfig, Trace
from glm5_jax.rl.rollout import Tools
from glm5_jax.rl.service import Asked, Outcome, ServiceConfig, TaskService
from glm5_jax.rl.types import Reward, Task, Verifier
from glm5_jax.text.tokenizer import Tokenizer


class ChatService(TaskService):
    """Attempts tasks over a chat with the policy; a subclass says in `work` how. ValueError for a task whose messages
    leave no room for a reply.

    max_tokens: of an attempt, as in `LoopConfig`. reply_seconds: that the gateway has for a reply.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        counter: Counter,
        max_tokens: int,
        reply_seconds: float,
    ):
        super().__init__(config, len(tasks), len(held_out))
        self._tasks, self._held_out = tuple(tasks), tuple(held_out)
        self._counter, self._reply_seconds = counter, reply_seconds
        for task in (*self._tasks, *self._held_out):
            if (count := counter.prompt(task)) >= max_tokens:
                raise ValueError(
                    f"task {task.id!r} has {count} tokens, and max_tokens is {max_tokens}; raise it, or leave the "
                    "task out"
                )

    async def work(self, task: Task, client: ChatClient) -> tuple[Trace | None, Reward]:
        """An attempt: what became of it, None if that is not known, and what it is worth. What it raises is the
        environment's failure."""
        raise NotImplementedError

    async def attempt(self, asked: Asked, place: int) -> Outcome:
        task = (self._held_out if asked.held_out else self._tasks)[place]
        client = ChatClient(
            asked.base_url, api_key=self.api_key, seconds=self._reply_seconds, concurrency=1
        )
        async with client:
            trace, reward = await self.work(task, client)
        if trace is None:
            return Outcome(task.messages, reward)
        replies = sum(message["role"] == "assistant" for message in trace.messages)
        metrics = {
            "replies": replies,
            "tool_failures": len(trace.failures),
            "restarts": len(trace.restarts),
            f"ended_{trace.ended}": 1.0,
        }
        return Outcome((*task.messages, *trace.messages), reward, metrics)


class AgentService(ChatService):
    """Attempts tasks by `agents.loop.Agent`. ValueError for limits of the agent that the service's own would always come
    before.

    tokenizer, variant: those of the gateway, by which prompts are counted; thinking: whether replies begin with
    reasoning, where a task does not say.
    """

    def __init__(
        self,
        config: ServiceConfig,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        tools: Tools,
        verifier: Verifier,
        tokenizer: Tokenizer,
        loop: LoopConfig = LoopConfig(),
        *,
        variant: str = "glm5",
        thinking: bool = True,
    ):
        counter = TokenCounter(tokenizer, variant, thinking)
        # A reply may take as long as the agent has.
        super().__init__(config, tasks, held_out, counter, loop.max_tokens, loop.seconds)
        if loop.seconds >= config.seconds:
            raise ValueError(
                f"an agent has {loop.seconds:g} s and a rollout with its verdict {config.seconds:g} s; raise seconds of "
                "the service, or what the agent takes too long for counts as a failure of the environment"
            )
        self._tools, self._verifier, self._loop = tools, verifier, loop
        self._fields = {} if thinking else {"chat_template_kwargs": {"enable_thinking": False}}

    async def work(self, task: Task, client: ChatClient) -> tuple[Trace, Reward]:
        agent = Agent(client, self._tools, self._counter, self._loop, self._fields)
        trace = await agent(task)
        return trace, await self._verifier(task, trace.attempt)
