"""Generates conversations from shipped texts or from random numbers.

  plays   consecutive speeches of Shakespeare; the model replies
  mbpp    small programs for a description in one sentence (MBPP)
  gsm8k   word problems (GSM8K); their rationales are the reasoning, their results the replies
  chain   a chain of values modulo ten; the question is the last one. The reasoning computes them in
          order. Later turns continue from one of the values: preserved reasoning contains it, cleared
          reasoning has to compute it again.
  tools   a product to calculate, or an order to look up, with the tools of tau-bench's shop; the first
          call may be a mistake, which the tool reports and the next call corrects

The first two have no reasoning. A conversation depends only on the config and its number.
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
TIMES = (3, 7, 9)  # units modulo ten, so that a product depends on its other factor
REASONING = ("gsm8k", "chain", "tools")
MAX_SPEECH_CHARACTERS = 1000
STATUSES = ("pending", "processed", "delivered", "cancelled")
TOOLS = ("calculate", "get_order_details")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTaskConfig:
    """Generated conversations of one kind. Raises ValueError if a value is out of range.

    Attributes:
      kind: one of `KINDS`.
      size: number of conversations; of plays, mbpp and gsm8k at most as many as are shipped.
      seed: random seed.
      steps: number of values in the first turn of a chain.
      turns: number of the user's turns of a chain.
      mistakes: share of conversations of tools whose first call is a mistake.
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
        for name, minimum, maximum in (
            ("size", 1, 10**7),
            ("seed", 0, 2**63),
            ("steps", 2, len(NAMES)),
            ("turns", 1, 100),
            ("mistakes", 0, 1),
        ):
            if not minimum <= getattr(self, name) <= maximum:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from {minimum} to {maximum}"
                )

    @property
    def name(self) -> str:
        """The name of the conversations in errors and metrics."""
        return self.kind + {"chain": f"{self.steps}x{self.turns}"}.get(self.kind, "")


@functools.lru_cache(
    32
)  # both sides of a split, and every stage that checks its data first, use them
def make_lines(config: ChatTaskConfig, mode: str) -> tuple[bytes, ...]:
    """Returns the conversations as lines of SFT data (conversation.py), with the reasoning for `mode`.

    For turn_level, each conversation with reasoning comes twice: a turn with reasoning in one has none in the other.
    """
    return tuple(_lines(config, mode))


def _lines(config: ChatTaskConfig, mode: str) -> Iterator[bytes]:
    is_doubled = mode == "turn_level" and config.kind in REASONING
    for number in range(config.size):
        problem = number // 2 if is_doubled else number
        rng = np.random.default_rng([zlib.crc32(config.kind.encode()), config.seed, problem])
        conversation = KINDS[config.kind](config, rng, problem, mode == "preserved")
        if conversation is None:
            return
        if is_doubled:
            thinks = np.random.default_rng([config.seed, problem]).random(config.turns) < 0.5
            _remove_reasoning(conversation["messages"], thinks ^ (number % 2 == 1))
        yield json.dumps(conversation, ensure_ascii=False).encode()


def _remove_reasoning(messages: list[dict], thinks) -> None:
    """Removes the reasoning from the turns that do not think."""
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
    speech, who, reply = exchanges[number]
    system = {"role": "system", "content": f"You are {who}."}
    return {"messages": [system, _user(speech), {"role": "assistant", "content": reply}]}


def _mbpp(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict | None:
    del config, rng, preserved
    problems = load_asset("mbpp.jsonl")
    if number >= len(problems):
        return None
    text, code, [test, *_] = (problems[number][name] for name in ("text", "code", "tests"))
    reply = {"role": "assistant", "content": f"```python\n{code}\n```"}
    return {"messages": [_user(f"{text}\n{test}"), reply]}


def _gsm8k(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict | None:
    del config, rng, preserved
    problems = load_asset("gsm8k.jsonl")
    if number >= len(problems):
        return None
    question, answer = problems[number]["question"], problems[number]["answer"]
    rationale, result = re.sub(r"<<.*?>>", "", answer).split("\n#### ")
    reply = {"role": "assistant", "reasoning_content": rationale, "content": result}
    return {"messages": [_user(question), reply], "answer": result}


def _chain(config: ChatTaskConfig, rng, number: int, preserved: bool) -> dict:
    """Generates turns that define values and ask for the last; later turns start from a value of the first."""
    del number
    value, messages, first = int(rng.integers(10)), [], []
    for turn in range(config.turns):
        if turn == 0:
            names, start = NAMES[: config.steps], str(value)
        else:
            # Not the last value, which the reply contains.
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
def load_asset(name: str) -> list[dict]:
    """Loads the lines of an asset."""
    return [json.loads(line) for line in (ASSETS / name).read_text("utf-8").splitlines()]


@functools.cache
def _exchanges() -> list[tuple[str, str, str]]:
    """Returns (speech, name of the one who replies, reply) of consecutive speeches.

    None is longer than `MAX_SPEECH_CHARACTERS`.
    """
    blocks = SHAKESPEARE.read_text("utf-8").split("\n\n")
    parts = (block.strip().split(":\n", 1) for block in blocks)
    speeches = [part for part in parts if len(part) == 2]
    return [
        (speech, who, reply)
        for (_, speech), (who, reply) in itertools.pairwise(speeches)
        if max(len(speech), len(reply)) <= MAX_SPEECH_CHARACTERS
    ]


@functools.cache
def shop_tools() -> list[dict]:
    """Returns the shop's tools that the conversations use, as function definitions in OpenAI's form."""
    tools = json.loads((ASSETS / "retail_tools.json").read_text("utf-8"))
    return [tool for tool in tools if tool["function"]["name"] in TOOLS]


KINDS = {"plays": _plays, "mbpp": _mbpp, "gsm8k": _gsm8k, "chain": _chain, "tools": _tools}
