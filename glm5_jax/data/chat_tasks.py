"""Conversations that are made of what is shipped, or from nothing.

  plays   speeches of Shakespeare's; the model is the one who replies
  mbpp    small programs for what a sentence asks (MBPP)
  gsm8k   word problems (GSM8K); their rationales are the reasoning, their results the replies
  chain   values that follow from each other modulo ten; the last is asked. Reasoning works them out in
          turn. Later turns go on from one of the values, which preserved reasoning holds already and
          cleared reasoning has to work out again.
  tools   a product to calculate, or an order to look up, with the tools of tau-bench's shop; a first
          call may be a mistake, which the tool's answer says and the next call corrects

The first two have no reasoning. A conversation depends on the config and its number alone.
"""

import dataclasses
import functools
import itertools
import json
import re
import zlib
from collections.abc import Iterator

import numpy as np

from glm5_jax.data.sources import ASSETS, SHAKESPEARE

NAMES = "abcdefghij"
TIMES = (3, 7, 9)  # units modulo ten: no product forgets what it is made of
REASONING = ("gsm8k", "chain", "tools")
LONGEST_SPEECH = 1000  # characters
STATUSES = ("pending", "processed", "delivered", "cancelled")
TOOLS = ("calculate", "get_order_details")


@dataclasses.dataclass(frozen=True)
class ChatTaskConfig:
    """Conversations of one kind. Construction refuses values out of range (ValueError).

    Attributes:
      kind: one of `KINDS`.
      size: how many conversations there are, of plays, mbpp and gsm8k at most as many as are shipped.
      seed: with a number and this config, all that a conversation depends on.
      steps: of chain: values in the first turn.
      turns: of chain: user's turns.
      mistakes: of tools: share of conversations whose first call is a mistake.
    """

    kind: str = "chain"
    size: int = 20_000
    seed: int = 0
    steps: int = 5
    turns: int = 1
    mistakes: float = 0.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        for name, least, most in (
            ("size", 1, 10**7),
            ("seed", 0, 2**63),
            ("steps", 2, len(NAMES)),
            ("turns", 1, 100),
            ("mistakes", 0, 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from {least} to {most}"
                )

    @property
    def name(self) -> str:
        """How messages and metrics call the conversations."""
        return self.kind + {"chain": f"{self.steps}x{self.turns}"}.get(self.kind, "")


@functools.lru_cache(32)  # both sides of a split, and every stage that looks ahead, ask for them
def lines(config: ChatTaskConfig, mode: str) -> tuple[bytes, ...]:
    """The conversations as lines of SFT data (conversation.py), with reasoning as `mode` needs it.

    Of turn_level what has reasoning comes twice, its turns with it where the other's have none.
    """
    return tuple(_lines(config, mode))


def _lines(config: ChatTaskConfig, mode: str) -> Iterator[bytes]:
    twice = mode == "turn_level" and config.kind in REASONING
    for number in range(config.size):
        problem = number // 2 if twice else number
        rng = np.random.default_rng([zlib.crc32(config.kind.encode()), config.seed, problem])
        made = KINDS[config.kind](config, rng, problem, mode == "preserved")
        if made is None:
            return
        if twice:
            thinks = np.random.default_rng([config.seed, problem]).random(config.turns) < 0.5
            _silence(made["messages"], thinks ^ (number % 2 == 1))
        yield json.dumps(made, ensure_ascii=False).encode()


def _silence(messages: list[dict], thinks) -> None:
    """Takes the reasoning out of the turns that do not think."""
    turn = -1
    for message in messages:
        turn += message["role"] == "user"
        if message["role"] == "assistant" and not thinks[turn]:
            message.pop("reasoning_content", None)


def _plays(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict | None:
    del config, rng, preserved
    exchanges = _exchanges()
    if number >= len(exchanges):
        return None
    said, who, reply = exchanges[number]
    system = {"role": "system", "content": f"You are {who}."}
    return {"messages": [system, _user(said), {"role": "assistant", "content": reply}]}


def _mbpp(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict | None:
    del config, rng, preserved
    problems = shipped("mbpp.jsonl")
    if number >= len(problems):
        return None
    text, code, [test, *_] = (problems[number][name] for name in ("text", "code", "tests"))
    reply = {"role": "assistant", "content": f"```python\n{code}\n```"}
    return {"messages": [_user(f"{text}\n{test}"), reply]}


def _gsm8k(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict | None:
    del config, rng, preserved
    problems = shipped("gsm8k.jsonl")
    if number >= len(problems):
        return None
    question, answer = problems[number]["question"], problems[number]["answer"]
    rationale, result = re.sub(r"<<.*?>>", "", answer).split("\n#### ")
    reply = {"role": "assistant", "reasoning_content": rationale, "content": result}
    return {"messages": [_user(question), reply], "answer": result}


def _chain(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict:
    """Turns that each define values and ask for the last; those after the first start from one of it."""
    del number
    value, messages, first = int(rng.integers(10)), [], []
    for turn in range(config.turns):
        if turn == 0:
            names, start = NAMES[: config.steps], str(value)
        else:
            # Not the last, which the reply said.
            at = int(rng.integers(config.steps - 1))
            names, start = "xy", NAMES[at]
            value = first[at][1]
        defined, steps = [], []
        for i, name in enumerate(names):
            times = bool(rng.integers(2))
            operand = int(rng.choice(TIMES)) if times else int(rng.integers(1, 10))
            sign = "*" if times else "+"
            result = (value * operand if times else value + operand) % 10
            defined.append(f"{name}={start if i == 0 else names[i - 1]}{sign}{operand}")
            steps.append((f"{name}={value}{sign}{operand}={result}", result))
            value = result
        known = [] if turn == 0 or preserved else first[: at + 1]
        if turn == 0:
            first = steps
        reasoning = " ".join(text for text, _ in [*known, *steps])
        messages += [
            _user(f"{' '.join(defined)} {names[-1]}?"),
            {"role": "assistant", "reasoning_content": reasoning, "content": str(value)},
        ]
    return {"messages": messages, "answer": str(value)}


def _tools(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict:
    del number, preserved
    if rng.integers(2):
        factors = rng.integers(11, 100, 2)
        expression = f"{factors[0]}*{factors[1]}"
        question, name, arguments = f"{expression}?", "calculate", {"expression": expression}
        result = reply = str(factors.prod())
    else:
        order = f"#W{rng.integers(10**6, 10**7)}"
        status = STATUSES[rng.integers(len(STATUSES))]
        question, name, arguments = f"Where is {order}?", "get_order_details", {"order_id": order}
        result = json.dumps({"order_id": order, "status": status})
        reply = f"It is {status}."
    messages = [_user(question)]
    if rng.random() < config.mistakes:
        wrong, error = _MISTAKES[rng.integers(len(_MISTAKES))](name, arguments)
        messages += [_call("I call a tool.", wrong), {"role": "tool", "content": f"Error: {error}"}]
    call = {"name": name, "arguments": arguments}
    messages += [
        _call(f"I use {name}.", call),
        {"role": "tool", "content": result},
        {"role": "assistant", "reasoning_content": "That is it.", "content": reply},
    ]
    return {"messages": messages, "tools": shop_tools(), "answer": reply}


_MISTAKES = (
    lambda name, arguments: ({"name": "lookup", "arguments": arguments}, "no tool lookup"),
    lambda name, arguments: (
        {"name": name, "arguments": {"input": [*arguments.values()][0]}},
        f"{name} has no input",
    ),
    lambda name, arguments: (
        {"name": name, "arguments": [*arguments.values()][0]},
        "arguments are no object",
    ),
)


def _user(content: str) -> dict:
    return {"role": "user", "content": content}


def _call(reasoning: str, call: dict) -> dict:
    return {"role": "assistant", "reasoning_content": reasoning, "tool_calls": [call]}


@functools.cache
def shipped(name: str) -> list[dict]:
    """The lines of an asset."""
    return [json.loads(line) for line in (ASSETS / name).read_text("utf-8").splitlines()]


@functools.cache
def _exchanges() -> list[tuple[str, str, str]]:
    """(what was said, who replies, what) of neighbouring speeches, none longer than `LONGEST_SPEECH`."""
    blocks = SHAKESPEARE.read_text("utf-8").split("\n\n")
    parts = (block.strip().split(":\n", 1) for block in blocks)
    speeches = [part for part in parts if len(part) == 2]
    return [
        (said, who, reply)
        for (_, said), (who, reply) in itertools.pairwise(speeches)
        if max(len(said), len(reply)) <= LONGEST_SPEECH
    ]


@functools.cache
def shop_tools() -> list[dict]:
    """What of the shop's tools the conversations use, as OpenAI describes functions."""
    tools = json.loads((ASSETS / "retail_tools.json").read_text("utf-8"))
    return [tool for tool in tools if tool["function"]["name"] in TOOLS]


KINDS = {"plays": _plays, "mbpp": _mbpp, "gsm8k": _gsm8k, "chain": _chain, "tools": _tools}
