"""Records agents' requests to engines: multi-turn chats of a scripted search policy, token by token.

The loop, the tools, the tasks, the template and the tokenizer are those of training. A chat's prompts are built as in
the gateway (`rl.rollouts.sessions`). Only the policy is scripted. It searches for one hop of a question after the other, reads
the search results in a random order, sometimes searches with other words, and writes its thoughts. So attempts at one
task start alike and soon differ, and have between a few and some dozens of turns.
"""

import asyncio
import dataclasses
import itertools
import json
import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from glm5_jax.agents.context import CONTEXTS, TokenCounter
from glm5_jax.agents.loop import ANSWER, ChatAgent, LoopConfig
from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.reasoning.task_sources import TaskConfig, tasks
from glm5_jax.envs.search.problems import Hop, fill_question
from glm5_jax.envs.search.tools import corpus_of, search_tools
from glm5_jax.rl.rollouts.sessions import Session
from glm5_jax.rl.types import Message, Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply

# Yields (thought, answer) or (thought, (tool, arguments)); receives the output of the tool.
Script = Generator[tuple[str, str | tuple[str, Mapping]], Any, None]


class TraceTurn(NamedTuple):
    """Prompt ids of a request and the reply's ids, with the token that ends the reply."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


Trace = tuple[TraceTurn, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Tasks and randomness of the recorded chats. Raises ValueError for values out of range.

    Attributes:
      num_tasks: number of tasks, equally many of each kind.
      attempts: attempts at each task, adjacent in the result, like a sampled group.
      doubts: probability of another search with other words first.
      seed: seed; all random choices depend on it, the task and the number of the attempt.
    """

    num_tasks: int = 64
    attempts: int = 8
    doubts: float = 0.3
    seed: int = 0

    def __post_init__(self):
        for name in ("num_tasks", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.doubts < 1:
            raise ValueError(f"doubts is {self.doubts}; it must be from 0 to below 1")


# Questions over Wikipedia, and over made-up worlds of short passages.
KINDS = tuple(TaskConfig(kind="worlds", hops=hops) for hops in (2, 3, 4)) + (
    TaskConfig(kind="musique"),
)


def record_traces(config: TraceConfig, tokenizer: Tokenizer) -> list[Trace]:
    """Returns a trace of each attempt; those at one task are adjacent."""
    return asyncio.run(_record_traces(config, tokenizer))


async def _record_traces(config: TraceConfig, tokenizer: Tokenizer) -> list[Trace]:
    toolbox, counter = Toolbox(search_tools()), TokenCounter(tokenizer)
    limits = LoopConfig(context=CONTEXTS["everything"])
    traces = []
    for task in itertools.islice(_tasks(config), config.num_tasks):
        for attempt in range(config.attempts):
            # A string, because seeds of other types depend on the process.
            rng = random.Random(f"{config.seed} {task.id} {attempt}")
            policy = ScriptedPolicy(_script(task, rng, config.doubts), tokenizer)
            trace = await ChatAgent(client=policy, tools=toolbox, counter=counter, config=limits)(
                task
            )
            if trace.ended != ANSWER:
                raise ValueError(f"the attempt at {task.id} ended with {trace.ended} {trace.error}")
            traces.append(tuple(policy.turns))
    return traces


def _tasks(config: TraceConfig) -> Iterator[Task]:
    """Yields tasks of all kinds in turn. Raises ValueError if a kind has too few."""
    kinds = [tasks(dataclasses.replace(kind, seed=config.seed)) for kind in KINDS]
    for number, kind in enumerate(itertools.cycle(kinds)):
        task = next(kind, None)
        if task is None:
            raise ValueError(f"num_tasks is {config.num_tasks}, there are only {number}; lower it")
        yield task


class ScriptedPolicy:
    """A policy that follows a script: client of an agent, and session of its chat.

    Attributes:
      turns: turns so far.
    """

    def __init__(self, script: Script, tokenizer: Tokenizer):
        """Creates the policy.

        Args:
          script: yields (thought, call) or (thought, answer), and is sent the tool's output.
          tokenizer: tokenizer of the chat.
        """
        self._script, self._tokenizer, self._session = script, tokenizer, Session(tokenizer)
        self.turns: list[TraceTurn] = []

    async def chat(self, messages: Sequence[Message], **fields) -> dict:
        """Returns the scripted reply to a request, see `agents.client.Chats`."""
        plan = self._session.plan(messages, fields["tools"])
        tool_output = messages[-1]["content"] if self.turns else None
        ids = self._encode_reply(*self._script.send(tool_output))
        message = parse_reply(ids, fields["tools"], tokenizer=self._tokenizer).message
        sampled = ids, [0.0] * len(ids), [0] * len(ids)
        self._session.add(self._session.make_turn(plan, *sampled, "stop", message))
        self.turns.append(TraceTurn(plan.ids, tuple(ids)))
        calls = [
            {"function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        reason = "tool_calls" if calls else "stop"
        return {"message": message | {"tool_calls": calls}, "finish_reason": reason}

    def _encode_reply(self, thought: str, content: str | tuple[str, Mapping]) -> list[int]:
        """Returns the tokens of a reply that training would include in the loss."""
        reply = {"role": "assistant", "content": None, "reasoning_content": thought}
        if isinstance(content, str):
            reply["content"] = content
        else:
            name, arguments = content
            call = {"name": name, "arguments": json.dumps(arguments)}
            reply["tool_calls"] = [{"type": "function", "function": call}]
        chat = render_chat(
            [{"role": "user", "content": ""}, reply],
            self._tokenizer,
            clear_thinking=False,
            close=True,
            first=1,
        )
        return [i for i, is_trained in zip(chat.ids, chat.loss_mask) if is_trained]


def _script(task: Task, rng: random.Random, doubts: float) -> Script:
    """Yields the (thought, call) and (thought, answer) of an attempt."""
    corpus, answers = corpus_of(task.data["corpus"]), []
    for hop in (Hop(**hop) for hop in task.data["hops"]):
        question, title = fill_question(hop, answers), corpus.passages[hop.passage].title
        thought = f"{rng.choice(_BEGIN)} {question} {_summary(answers)}"
        read = set()
        for query in _queries(question, title, hop.answer, rng, doubts):
            results = yield (
                f"{thought} {rng.choice(_SEARCH)} {query!r}.",
                ("search", {"query": query}),
            )
            unread_ids = [
                int(i) for i in re.findall(r"(?m)^\[(\d+)\]", results) if int(i) not in read
            ]
            # Read mostly in the order of the results.
            unread_ids.sort(key=lambda i, rank=iter(range(99)): next(rank) + rng.uniform(0, 3))
            for i in unread_ids:
                name = corpus.passages[i].title
                thought = f"{rng.choice(_OPEN)} [{i}] {name}. {rng.choice(_WHY)}"
                page = yield thought, ("open", {"id": i})
                read.add(i)
                quote = page.partition("\n")[2][: rng.randint(40, 200)]
                if i == hop.passage:
                    break
                thought = f"{rng.choice(_NOT)} {name}: {quote!r}. I still have to find: {question}"
            if hop.passage in read:
                break
        thought = (
            f"{rng.choice(_CONCLUSION)} {quote!r}. So the answer to {question!r} is {hop.answer}."
        )
        if rng.random() < 0.5:
            yield (
                f"{thought} {rng.choice(_CHECK)}",
                ("find", {"id": hop.passage, "text": hop.answer}),
            )
        answers.append(hop.answer)
    yield f"{_summary(answers)} {rng.choice(_END)}", f"The answer is {task.data['answers'][0]}."


def _queries(question: str, title: str, answer: str, draw, doubts: float) -> Iterator[str]:
    """Yields the queries for a hop; the last one is certain to find the passage."""
    words = question.rstrip("?").split()
    while draw.random() < doubts:
        yield " ".join(draw.sample(words, max(1, len(words) // 2)))
    yield from (question, title, f"{title} {question}", f"{title} {answer}")
    yield f"{title} {title} {title}"


def _summary(answers: Sequence[str]) -> str:
    return f"So far I know: {', then '.join(answers)}." if answers else "So far I know nothing."


_BEGIN = (
    "Let me take this step by step. First I need to find out:",
    "The question has several parts, and the next one is:",
    "To go on, I have to answer this:",
    "What I have to look up now is:",
)
_SEARCH = ("I will search for", "A search should help, with the words", "Let me look for")
_OPEN = (
    "The result that looks best is",
    "I will open",
    "Let me read",
    "Among these, the next to look at is",
)
_WHY = (
    "Its beginning mentions what I am after, but the rest is cut off.",
    "I am not sure that it says what I need, so I had better read all of it.",
    "If it does not say it, I will go on with the next one.",
    "",
)
_NOT = ("This is not what I need.", "It speaks of something else.", "No answer here, in")
_CONCLUSION = ("Here it is:", "This passage says it:", "Good, that is what I was looking for:")
_CHECK = ("Let me make sure of it.", "I will check where it stands in the passage.")
_END = ("That answers the whole question.", "All parts are answered now.", "I can answer.")
