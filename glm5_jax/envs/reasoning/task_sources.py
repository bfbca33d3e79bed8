"""Provides tasks of Reasoning RL and of search, from shipped data sets or generated.

  math     gsm8k       word problems
           svamp       shorter ones, with numbers that do not matter
           addition    the sum of two numbers, with the same or different numbers of digits
           chain       values modulo ten, each from an earlier one; the question asks for the last (data/chat_tasks.py)
  science  choices     chemical elements and mechanics, multiple choice
  code     mbpp        small programs for a sentence and one of its tests
           humaneval   functions to complete
  tir      products    the product of two numbers, with a calculator that must be used
  search   musique     questions of two to four hops over passages of Wikipedia
           worlds      questions over passages about a world that is generated for each

A task depends only on the config and its number. A hash of its question decides the side of the held-out
split, with the same hash as for conversations. So a question of one side never occurs on the other, also
with other seeds and in supervised fine-tuning. A sum with swapped numbers is the same question; a product,
which the calculator computes, is another.
"""

import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from glm5_jax.data import chat_tasks
from glm5_jax.data.sources import ASSETS, is_held_out
from glm5_jax.envs.reasoning.final_answer import LETTERS
from glm5_jax.envs.reasoning.python_tool import PYTHON
from glm5_jax.envs.search import problems, worlds
from glm5_jax.envs.search.tools import MUSIQUE, SEARCH_TOOLS, corpus_of
from glm5_jax.rl.types import Task

_WITH_TOOLS = ("tir", "search")  # domains
BOXED = "\nPut your final answer within \\boxed{}."
# Chemical elements in the order of their atomic numbers.
ELEMENTS = tuple(
    "hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium "
    "aluminium silicon phosphorus sulfur chlorine argon potassium calcium scandium titanium vanadium "
    "chromium manganese iron cobalt nickel copper zinc gallium germanium arsenic selenium bromine "
    "krypton rubidium strontium yttrium zirconium niobium molybdenum technetium ruthenium rhodium "
    "palladium silver cadmium indium tin antimony tellurium iodine xenon".split()
)
SYMBOLS = tuple(
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br "
    "Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Tasks of one kind. Raises ValueError for values out of range.

    Attributes:
      kind: one of `KINDS`.
      size: number of tasks on both sides of the split; of a shipped data set, at most that many.
      seed: random seed; a generated task depends only on it, its number and this config.
      digits: number of digits of both numbers, for addition and products.
      fewer: number of digits of the second number, for addition; None: the same as the first.
      steps: number of values, for chain.
      hops: number of passages that an answer takes, for worlds.
      choices: number of answers to choose from.
      held_out_fraction: share of questions that are held out for evaluation.
      instruction: text after every question, such as `BOXED`.
      python: whether tasks of tir and search also offer the tool `python` (GLM-5 3.2, 4.2.4).
    """

    kind: str = "addition"
    size: int = 1000
    seed: int = 0
    digits: int = 2
    fewer: int | None = None
    steps: int = 5
    hops: int = 2
    choices: int = 4
    held_out_fraction: float = 0.05  # as for SFT: a question must be on the same side in all stages
    instruction: str = ""
    python: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if self.python and self.domain not in _WITH_TOOLS:
            raise ValueError(
                f"python is true, and {self.kind} has no tools; only tasks of {' and '.join(_WITH_TOOLS)} have"
            )
        if self.fewer is not None and not 1 <= self.fewer < self.digits:
            raise ValueError(
                f"fewer is {self.fewer}; it must be from 1 to {self.digits - 1}, below digits, or None"
            )
        for name, minimum, maximum in (
            ("size", 1, 10**7),
            ("seed", 0, 2**63),
            ("digits", 1, 1000),
            ("steps", 2, len(chat_tasks.NAMES)),
            ("hops", problems.MIN_HOPS, problems.MAX_HOPS),
            ("choices", 2, len(LETTERS)),
            ("held_out_fraction", 0, 1),
        ):
            if not minimum <= getattr(self, name) <= maximum:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from {minimum} to {maximum}"
                )

    @property
    def domain(self) -> str:
        """Returns the kind of its tasks, which selects the verifier."""
        return KINDS[self.kind].domain

    @property
    def name(self) -> str:
        """Returns the beginning of the ids of its tasks, with everything but the number that they depend on."""
        of = KINDS[self.kind].field
        if not of:
            return self.kind
        fewer = "" if self.fewer is None or self.kind != "addition" else f"+{self.fewer}"
        return f"{self.kind}{getattr(self, of)}{fewer}-seed{self.seed}"


class _Problem(NamedTuple):
    """Question with the data of its verifier.

    Attributes:
      question: text.
      data: data of the task.
      tools: tools of the task.
      key: text by which equal questions are recognised; None: the question.
    """

    question: str
    data: Mapping[str, Any]
    tools: tuple[Mapping, ...] = ()
    key: str | None = None


class _Kind(NamedTuple):
    """Kind of tasks.

    Attributes:
      domain: kind of verifier.
      make: function that yields the tasks in order.
      field: field of the config that generated tasks depend on; None for shipped ones.
    """

    domain: str
    make: Callable[[TaskConfig], Iterator[_Problem]]
    field: str | None = None


def tasks(config: TaskConfig, *, evaluation: bool = False) -> Iterator[Task]:
    """Yields the tasks of one side of the split, in the order of their numbers."""
    for number, problem in enumerate(
        itertools.islice(KINDS[config.kind].make(config), config.size)
    ):
        key = (problem.question if problem.key is None else problem.key).strip()
        if is_held_out(key, config.held_out_fraction) == evaluation:
            message = {"role": "user", "content": problem.question + config.instruction}
            name = f"{config.name}-{number}"
            tools = (*problem.tools, PYTHON) if config.python else problem.tools
            yield Task(
                id=name, kind=config.domain, messages=(message,), data=problem.data, tools=tools
            )


def _conversations(kind: str) -> Callable[[TaskConfig], Iterator[_Problem]]:
    """Returns a source of the problems of data/chat_tasks.py: the first question and the answer."""

    def make(config: TaskConfig) -> Iterator[_Problem]:
        seed = config.seed if kind == "chain" else 0
        chats = chat_tasks.ChatTaskConfig(
            kind=kind, size=config.size, seed=seed, steps=config.steps
        )
        for line in chat_tasks.make_lines(chats, "interleaved"):
            chat = json.loads(line)
            yield _Problem(
                chat["messages"][0]["content"], {"answer": chat["answer"].replace(",", "")}
            )

    return make


def _svamp(config: TaskConfig) -> Iterator[_Problem]:
    for problem in chat_tasks.load_asset("svamp.jsonl"):
        yield _Problem(problem["question"], {"answer": problem["answer"]})


def _mbpp(config: TaskConfig) -> Iterator[_Problem]:
    for problem in chat_tasks.load_asset("mbpp.jsonl"):
        data = {
            "tests": "\n".join(problem["tests"]),
            "names": problem["names"],
            "setup": problem.get("setup", ""),
        }
        yield _Problem(f"{problem['text']}\n{problem['tests'][0]}", data)


def _humaneval(config: TaskConfig) -> Iterator[_Problem]:
    for problem in chat_tasks.load_asset("humaneval.jsonl"):
        question = f"Complete this program.\n```python\n{problem['prompt'].rstrip()}\n```"
        names = [problem["name"]]
        data = {"tests": problem["tests"], "names": names, "prelude": problem["prompt"]}
        yield _Problem(question, data)


def _addition(config: TaskConfig) -> Iterator[_Problem]:
    for rng in _randoms(config):
        if config.fewer is not None:
            left, right = _number(rng, config.digits), _number(rng, config.fewer)
            yield _Problem(f"{left}+{right}?", {"answer": str(left + right)})
            continue
        left, right = sorted((_number(rng, config.digits), _number(rng, config.digits)))
        key = f"{left}+{right}?"
        if rng.integers(2):
            left, right = right, left
        yield _Problem(f"{left}+{right}?", {"answer": str(left + right)}, key=key)


def _products(config: TaskConfig) -> Iterator[_Problem]:
    [calculate] = (t for t in chat_tasks.shop_tools() if t["function"]["name"] == "calculate")
    for rng in _randoms(config):
        left, right = _number(rng, config.digits), _number(rng, config.digits)
        data = {"answer": str(left * right), "min_calls": 1}
        yield _Problem(f"{left}*{right}?", data, (calculate,))


def _musique(config: TaskConfig) -> Iterator[_Problem]:
    path = ASSETS / "musique_questions.jsonl"
    for problem in problems.read_problems(path, corpus_of(MUSIQUE)):
        yield _Problem(problem.question, {**problem.data, "corpus": MUSIQUE}, SEARCH_TOOLS)


def _worlds(config: TaskConfig) -> Iterator[_Problem]:
    for number in itertools.count():
        key = config.hops, config.seed, number
        problem = worlds.problem(*key)
        data = {**problem.data, "corpus": worlds.world_name(*key)}
        yield _Problem(problem.question, data, SEARCH_TOOLS)


def _randoms(config: TaskConfig) -> Iterator[np.random.Generator]:
    """Yields one random generator per number."""
    for number in itertools.count():
        yield np.random.default_rng([zlib.crc32(config.kind.encode()), config.seed, number])


def _number(rng, digits: int) -> int:
    return int("".join(map(str, [rng.integers(digits > 1, 10), *rng.integers(0, 10, digits - 1)])))


def _choices(config: TaskConfig) -> Iterator[_Problem]:
    """Yields multiple-choice questions; the same question with other answers is on the same side of the split."""
    for rng in _randoms(config):
        question, right, wrong = (_element if rng.integers(2) else _mechanics)(rng)
        wrong = list(dict.fromkeys(answer for answer in wrong if answer != right))
        others = rng.permutation(len(wrong))[: config.choices - 1]
        position = int(rng.integers(config.choices))
        answers = [wrong[i] for i in others]
        answers.insert(position, right)
        shown = "\n".join(f"{letter}) {answer}" for letter, answer in zip(LETTERS, answers))
        data = {"answer": LETTERS[position], "choices": config.choices}
        yield _Problem(f"{question}\n{shown}", data, key=question)


def _element(rng) -> tuple[str, str, list[str]]:
    number = int(rng.integers(len(SYMBOLS)))
    name, symbol = ELEMENTS[number], SYMBOLS[number]
    return (
        (f"Which is the symbol of {name}?", symbol, list(SYMBOLS)),
        (f"Which element has the symbol {symbol}?", name, list(ELEMENTS)),
        (f"Which element has the atomic number {number + 1}?", name, list(ELEMENTS)),
    )[rng.integers(3)]


def _mechanics(rng) -> tuple[str, str, list[str]]:
    a, b = (int(n) for n in rng.integers(2, 31, 2))
    question, unit = (
        (f"A force gives {a} kg an acceleration of {b} m/s^2. How large is it?", "N"),
        (f"A body moves at {a} m/s for {b} s. How far does it come?", "m"),
        (f"{a} A flow through {b} ohm. What is the voltage?", "V"),
        (f"A machine of {a} W runs for {b} s. How much energy does it take?", "J"),
    )[rng.integers(4)]
    wrong = [a + b, a * (b + 1), a * (b - 1), (a + 1) * b, (a - 1) * b, 2 * a * b, 10 * a * b]
    wrong += [a * b + 1, a * b + 2, a * b + 3, a * b + 5, a * b + 7, a * b + 10]
    return question, f"{a * b} {unit}", [f"{n} {unit}" for n in wrong]


KINDS = {
    "gsm8k": _Kind("math", _conversations("gsm8k")),
    "svamp": _Kind("math", _svamp),
    "addition": _Kind("math", _addition, "digits"),
    "chain": _Kind("math", _conversations("chain"), "steps"),
    "choices": _Kind("science", _choices, "choices"),
    "mbpp": _Kind("code", _mbpp),
    "humaneval": _Kind("code", _humaneval),
    "products": _Kind("tir", _products, "digits"),
    "musique": _Kind("search", _musique),
    "worlds": _Kind("search", _worlds, "hops"),
}
