"""What agents ask of engines, recorded: multi-turn chats of a scripted policy that searches, token by token.

The loop, the tools, the tasks, the template and the tokenizer are those of training, and a chat's prompts are put together as
the gateway does (`rl.sessions`). Scripted is the policy alone: it looks for one hop of a question after the other, reads what a
search shows in an order that is drawn, now and then searches in other words, and thinks aloud. So attempts at one task begin
alike and soon part, and have a few to some dozens of turns.
"""

import asyncio
import dataclasses
import itertools
import json
import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

from glm5_jax.agents.context import CONTEXTS, TokenCounter
from glm5_jax.agents.loop import ANSWER, Agent, LoopConfig
from glm5_jax.agents.tools import Toolbox
from glm5_jax.envs.reasoning_tasks import TaskConfig, tasks
from glm5_jax.envs.search.problems import Hop, asked
from glm5_jax.envs.search.tools import corpus_of, search_tools
from glm5_jax.rl.sessions import Session
from glm5_jax.rl.types import Message, Task
from glm5_jax.text.chat import render_chat
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.text.tool_calls import parse_reply


class Turn(NamedTuple):
    """What an engine reads, and what it writes then; ids with the token that ends the reply."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


Trace = tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class TraceConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      num_tasks: an equal number of each kind.
      attempts: at each task, one behind the other, as a group is sampled.
      doubts: how often a search is put in other words first.
      seed: all that is drawn depends on it, the task and the number of the attempt.
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
KINDS = tuple(TaskConfig("worlds", hops=hops) for hops in (2, 3, 4)) + (TaskConfig("musique"),)


def record(config: TraceConfig, tokenizer: Tokenizer) -> list[Trace]:
    """A trace of each attempt, those at one task behind each other."""
    return asyncio.run(_record(config, tokenizer))


async def _record(config: TraceConfig, tokenizer: Tokenizer) -> list[Trace]:
    toolbox, counter = Toolbox(search_tools()), TokenCounter(tokenizer)
    limits = LoopConfig(context=CONTEXTS["everything"])
    found = []
    for task in itertools.islice(_tasks(config), config.num_tasks):
        for attempt in range(config.attempts):
            # A text, as seeds of other types depend on the process.
            draw = random.Random(f"{config.seed} {task.id} {attempt}")
            reader = Reader(_reads(task, draw, config.doubts), tokenizer)
            trace = await Agent(reader, toolbox, counter, limits)(task)
            if trace.ended != ANSWER:
                raise ValueError(f"the attempt at {task.id} ended with {trace.ended} {trace.error}")
            found.append(tuple(reader.turns))
    return found


def _tasks(config: TraceConfig) -> Iterator[Task]:
    """Of all kinds by turns; ValueError where one has too few."""
    kinds = [tasks(dataclasses.replace(kind, seed=config.seed)) for kind in KINDS]
    for number, kind in enumerate(itertools.cycle(kinds)):
        task = next(kind, None)
        if task is None:
            raise ValueError(f"num_tasks is {config.num_tasks}, there are but {number}; lower it")
        yield task


class Reader:
    """A policy that follows a script, as the client of an agent, and the session of its chat.

    Attributes:
      turns: so far.
    """

    def __init__(self, script: Generator, tokenizer: Tokenizer):
        """script: gives (thought, call) or (thought, answer), and is sent what the tool says."""
        self._script, self._tokenizer, self._session = script, tokenizer, Session(tokenizer)
        self.turns: list[Turn] = []

    async def chat(self, messages: Sequence[Message], **fields) -> dict:
        """See `agents.client.Chats`."""
        plan = self._session.plan(messages, fields["tools"])
        heard = messages[-1]["content"] if self.turns else None
        ids = self._written(*self._script.send(heard))
        message = parse_reply(ids, fields["tools"], tokenizer=self._tokenizer).message
        sampled = ids, [0.0] * len(ids), [0] * len(ids)
        self._session.add(self._session.answer(plan, *sampled, "stop", message))
        self.turns.append(Turn(plan.ids, tuple(ids)))
        calls = [
            {"function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        reason = "tool_calls" if calls else "stop"
        return {"message": message | {"tool_calls": calls}, "finish_reason": reason}

    def _written(self, thought: str, said: str | tuple[str, Mapping]) -> list[int]:
        """The tokens of a reply: what a model would be trained to write of it."""
        reply = {"role": "assistant", "content": None, "reasoning_content": thought}
        if isinstance(said, str):
            reply["content"] = said
        else:
            name, arguments = said
            call = {"name": name, "arguments": json.dumps(arguments)}
            reply["tool_calls"] = [{"type": "function", "function": call}]
        chat = render_chat(
            [{"role": "user", "content": ""}, reply],
            self._tokenizer,
            clear_thinking=False,
            close=True,
            first=1,
        )
        return [i for i, learnt in zip(chat.ids, chat.loss_mask) if learnt]


def _reads(task: Task, draw: random.Random, doubts: float) -> Generator:
    """The script of an attempt."""
    corpus, answers = corpus_of(task.data["corpus"]), []
    for hop in (Hop(**hop) for hop in task.data["hops"]):
        question, title = asked(hop, answers), corpus.passages[hop.passage].title
        thought = f"{draw.choice(_BEGIN)} {question} {_known(answers)}"
        read = set()
        for query in _queries(question, title, hop.answer, draw, doubts):
            found = yield (
                f"{thought} {draw.choice(_SEARCH)} {query!r}.",
                ("search", {"query": query}),
            )
            shown = [int(i) for i in re.findall(r"(?m)^\[(\d+)\]", found) if int(i) not in read]
            # Mostly in the order of the results.
            shown.sort(key=lambda i, rank=iter(range(99)): next(rank) + draw.uniform(0, 3))
            for i in shown:
                name = corpus.passages[i].title
                thought = f"{draw.choice(_OPEN)} [{i}] {name}. {draw.choice(_WHY)}"
                page = yield thought, ("open", {"id": i})
                read.add(i)
                quote = page.partition("\n")[2][: draw.randint(40, 200)]
                if i == hop.passage:
                    break
                thought = f"{draw.choice(_NOT)} {name}: {quote!r}. I still have to find: {question}"
            if hop.passage in read:
                break
        thought = f"{draw.choice(_FOUND)} {quote!r}. So the answer to {question!r} is {hop.answer}."
        if draw.random() < 0.5:
            yield (
                f"{thought} {draw.choice(_CHECK)}",
                ("find", {"id": hop.passage, "text": hop.answer}),
            )
        answers.append(hop.answer)
    yield f"{_known(answers)} {draw.choice(_END)}", f"The answer is {task.data['answers'][0]}."


def _queries(question: str, title: str, answer: str, draw, doubts: float) -> Iterator[str]:
    """What is searched for, the last of which finds the passage for sure."""
    words = question.rstrip("?").split()
    while draw.random() < doubts:
        yield " ".join(draw.sample(words, max(1, len(words) // 2)))
    yield from (question, title, f"{title} {question}", f"{title} {answer}")
    yield f"{title} {title} {title}"


def _known(answers: Sequence[str]) -> str:
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
_FOUND = ("Here it is:", "This passage says it:", "Good, that is what I was looking for:")
_CHECK = ("Let me make sure of it.", "I will check where it stands in the passage.")
_END = ("That answers the whole question.", "All parts are answered now.", "I can answer.")
