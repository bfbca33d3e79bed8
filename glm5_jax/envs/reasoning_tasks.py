"""Tasks of Reasoning RL and of search, from what is shipped or made up.

  math     gsm8k       word problems
           svamp       shorter ones, with numbers that do not matter
           addition    the sum of two numbers of so many digits, or of so many and so many
           chain       values modulo ten that follow from each other; the last is asked (data/chat_tasks.py)
  science  choices     chemical elements and mechanics, one of several answers
  code     mbpp        small programs for what a sentence and one of its tests ask
           humaneval   functions to complete
  tir      products    of two numbers of so many digits, with a calculator that must be used
  search   musique     questions of two to four hops over passages of Wikipedia
           worlds      the same, of so many hops, over passages about a world that is made up for each

A task depends on the config and its number alone. Which side of the held-out split it stands on follows from
its question, by the same hash as for conversations: what is asked on one side is asked on no other, also of
other seeds and in supervised fine-tuning. A sum the other way round is the same question; a product, which the
calculator makes, is another.
"""

import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from glm5_jax.data import chat_tasks
from glm5_jax.data.sources import ASSETS, held_out
from glm5_jax.envs.final_answer import LETTERS
from glm5_jax.envs.search import problems, worlds
from glm5_jax.envs.search.tools import MUSIQUE, SEARCH_TOOLS, corpus_of
from glm5_jax.rl.types import Task

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


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Tasks of one kind. Construction refuses values out of range (ValueError).

    Attributes:
      kind: one of `KINDS`.
      size: how many tasks there are on both sides of the split, of what is shipped at most as many as that.
      seed: with a number and this config, all that a made-up task depends on.
      digits: of addition and products: of both numbers.
      fewer: of addition: digits of the second number, which then are not as many; None: both have as many.
      steps: of chain: values.
      hops: of worlds: passages that an answer takes.
      choices: how many answers there are to choose from.
      held_out_fraction: share of questions that are for evaluation.
      instruction: behind every question, such as `BOXED`.
    """

    kind: str = "addition"
    size: int = 1000
    seed: int = 0
    digits: int = 2
    fewer: int | None = None
    steps: int = 5
    hops: int = 2
    choices: int = 4
    held_out_fraction: float = (
        0.05  # of SFT too: what is asked must stand on one side in all stages
    )
    instruction: str = ""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; use one of {', '.join(KINDS)}")
        if self.fewer is not None and not 1 <= self.fewer < self.digits:
            raise ValueError(
                f"fewer is {self.fewer}; it must be from 1 to {self.digits - 1}, below digits, or None"
            )
        for name, least, most in (
            ("size", 1, 10**7),
            ("seed", 0, 2**63),
            ("digits", 1, 1000),
            ("steps", 2, len(chat_tasks.NAMES)),
            ("hops", problems.FEWEST_HOPS, problems.MOST_HOPS),
            ("choices", 2, len(LETTERS)),
            ("held_out_fraction", 0, 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from {least} to {most}"
                )

    @property
    def domain(self) -> str:
        """The kind of its tasks, whose verifier judges them."""
        return KINDS[self.kind].domain

    @property
    def name(self) -> str:
        """What the ids of its tasks begin with: all that they depend on but their number."""
        of = KINDS[self.kind].field
        if not of:
            return self.kind
        fewer = "" if self.fewer is None or self.kind != "addition" else f"+{self.fewer}"
        return f"{self.kind}{getattr(self, of)}{fewer}-seed{self.seed}"


class _Made(NamedTuple):
    """A question, what its verifier needs, its tools, and what it is known by where questions count as one."""

    question: str
    data: Mapping[str, Any]
    tools: tuple[Mapping, ...] = ()
    key: str | None = None


class _Kind(NamedTuple):
    """domain: of the verifier; make: the tasks in order; field: of the config, if made up, which they depend on."""

    domain: str
    make: Callable[[TaskConfig], Iterator[_Made]]
    field: str | None = None


def tasks(config: TaskConfig, *, evaluation: bool = False) -> Iterator[Task]:
    """The tasks of one side of the split, in the order of their numbers."""
    for number, made in enumerate(itertools.islice(KINDS[config.kind].make(config), config.size)):
        key = (made.question if made.key is None else made.key).strip()
        if held_out(key, config.held_out_fraction) == evaluation:
            message = {"role": "user", "content": made.question + config.instruction}
            name = f"{config.name}-{number}"
            yield Task(name, config.domain, (message,), made.data, made.tools)


def _conversations(kind: str) -> Callable[[TaskConfig], Iterator[_Made]]:
    """The problems of data/chat_tasks.py: what is asked first, and the answer."""

    def make(config: TaskConfig) -> Iterator[_Made]:
        seed = config.seed if kind == "chain" else 0
        chats = chat_tasks.ChatTaskConfig(kind, config.size, seed, config.steps)
        for line in chat_tasks.lines(chats, "interleaved"):
            chat = json.loads(line)
            yield _Made(chat["messages"][0]["content"], {"answer": chat["answer"].replace(",", "")})

    return make


def _svamp(config: TaskConfig) -> Iterator[_Made]:
    for problem in chat_tasks.shipped("svamp.jsonl"):
        yield _Made(problem["question"], {"answer": problem["answer"]})


def _mbpp(config: TaskConfig) -> Iterator[_Made]:
    for problem in chat_tasks.shipped("mbpp.jsonl"):
        data = {
            "tests": "\n".join(problem["tests"]),
            "names": problem["names"],
            "setup": problem.get("setup", ""),
        }
        yield _Made(f"{problem['text']}\n{problem['tests'][0]}", data)


def _humaneval(config: TaskConfig) -> Iterator[_Made]:
    for problem in chat_tasks.shipped("humaneval.jsonl"):
        question = f"Complete this program.\n```python\n{problem['prompt'].rstrip()}\n```"
        names = [problem["name"]]
        data = {"tests": problem["tests"], "names": names, "prelude": problem["prompt"]}
        yield _Made(question, data)


def _addition(config: TaskConfig) -> Iterator[_Made]:
    for rng in _randoms(config):
        if config.fewer is not None:
            left, right = _number(rng, config.digits), _number(rng, config.fewer)
            yield _Made(f"{left}+{right}?", {"answer": str(left + right)})
            continue
        left, right = sorted((_number(rng, config.digits), _number(rng, config.digits)))
        key = f"{left}+{right}?"
        if rng.integers(2):
            left, right = right, left
        yield _Made(f"{left}+{right}?", {"answer": str(left + right)}, key=key)


def _products(config: TaskConfig) -> Iterator[_Made]:
    [calculate] = (t for t in chat_tasks.shop_tools() if t["function"]["name"] == "calculate")
    for rng in _randoms(config):
        left, right = _number(rng, config.digits), _number(rng, config.digits)
        data = {"answer": str(left * right), "min_calls": 1}
        yield _Made(f"{left}*{right}?", data, (calculate,))


def _musique(config: TaskConfig) -> Iterator[_Made]:
    path = ASSETS / "musique_questions.jsonl"
    for problem in problems.read_problems(path, corpus_of(MUSIQUE)):
        yield _Made(problem.question, {**problem.data, "corpus": MUSIQUE}, SEARCH_TOOLS)


def _worlds(config: TaskConfig) -> Iterator[_Made]:
    for number in itertools.count():
        place = config.hops, config.seed, number
        problem = worlds.problem(*place)
        data = {**problem.data, "corpus": worlds.world_name(*place)}
        yield _Made(problem.question, data, SEARCH_TOOLS)


def _randoms(config: TaskConfig) -> Iterator[np.random.Generator]:
    """One per number."""
    for number in itertools.count():
        yield np.random.default_rng([zlib.crc32(config.kind.encode()), config.seed, number])


def _number(rng, digits: int) -> int:
    return int("".join(map(str, [rng.integers(digits > 1, 10), *rng.integers(0, 10, digits - 1)])))


def _choices(config: TaskConfig) -> Iterator[_Made]:
    """The right answer among others of its sort; the same question with other answers stands on the same side."""
    for rng in _randoms(config):
        question, right, wrong = (_element if rng.integers(2) else _mechanics)(rng)
        wrong = list(dict.fromkeys(answer for answer in wrong if answer != right))
        others = rng.permutation(len(wrong))[: config.choices - 1]
        place = int(rng.integers(config.choices))
        answers = [wrong[i] for i in others]
        answers.insert(place, right)
        shown = "\n".join(f"{letter}) {answer}" for letter, answer in zip(LETTERS, answers))
        data = {"answer": LETTERS[place], "choices": config.choices}
        yield _Made(f"{question}\n{shown}", data, key=question)


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
