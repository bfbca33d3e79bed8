"""Describes questions that need two to four passages in turn, and checks that they do."""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

from glm5_jax.envs.search.answers import normalize
from glm5_jax.envs.search.bm25 import words
from glm5_jax.envs.search.passages import Corpus, lines, plain, says

MIN_HOPS, MAX_HOPS = 2, 4
_EARLIER = re.compile(r"#(\d+)")
_SENTENCE = re.compile(r"(?<=[.?!])\s+")


@dataclasses.dataclass(frozen=True)
class Hop:
    """Question that one passage answers.

    Attributes:
      question: text; "#1" in it stands for the answer of the first hop.
      answer: answer.
      passage: number of the passage in the corpus.
    """

    question: str
    answer: str
    passage: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """Question with its accepted answers and its hops."""

    question: str
    answers: tuple[str, ...]
    hops: tuple[Hop, ...]

    @property
    def data(self) -> dict[str, Any]:
        """Returns the problem as a task's data."""
        return {
            "answers": list(self.answers),
            "hops": [dataclasses.asdict(hop) for hop in self.hops],
        }


def fill_question(hop: Hop, answers: Sequence[str]) -> str:
    """Returns a hop's question with the answers of earlier hops filled in."""
    return _EARLIER.sub(lambda match: answers[int(match[1]) - 1], hop.question)


def check(problem: Problem, corpus: Corpus) -> None:
    """Raises ValueError with the reason if a question does not need all its hops.

    A question that passes has

    - two to four hops, each with a separate passage that contains its answer. Each hop except the last has
      a later hop that asks about its answer; the answer of the last is the question's;
    - no answer in the question, also of no hop;
    - a name, which is a word with a capital or a digit that is not the first of its sentence;
    - no passage in the full corpus that contains an answer and all names.

    So the answer cannot be taken from the question, and no passage connects the question's names to it.
    Finding the answer in passages takes at least two of them, starting from a name. This does not prevent
    guessing, prior knowledge, or skipping one hop of three if another passage connects its ends.
    """
    hops, referenced = problem.hops, set()
    if not MIN_HOPS <= len(hops) <= MAX_HOPS:
        raise ValueError(f"it has {len(hops)} hops; {MIN_HOPS} to {MAX_HOPS} are possible")
    if not problem.answers or not all(map(normalize, problem.answers)):
        raise ValueError(f"its answers are {problem.answers}; each must have a word")
    # Each hop has a passage with its answer, and asks only about earlier hops.
    for number, hop in enumerate(hops):
        if not 0 <= hop.passage < len(corpus.passages):
            raise ValueError(f"hop {number + 1} is in passage {hop.passage}, which does not exist")
        known = problem.answers if number == len(hops) - 1 else (hop.answer,)
        if not any(says(corpus.plain_texts[hop.passage], answer) for answer in known):
            raise ValueError(f"passage {hop.passage} does not contain {hop.answer!r}")
        earlier = {int(number_text) for number_text in _EARLIER.findall(hop.question)}
        if not earlier <= set(range(1, number + 1)):
            raise ValueError(f"hop {number + 1} asks about a hop that is not before it")
        referenced |= earlier
    # The hops form a chain that ends in the answer.
    if len({hop.passage for hop in hops}) < len(hops):
        raise ValueError("two of its hops have one passage; give each a separate one")
    if missing := set(range(1, len(hops))) - referenced:
        raise ValueError(f"no later hop asks about hop {min(missing)}")
    if hops[-1].answer not in problem.answers:
        raise ValueError(f"its last hop gives {hops[-1].answer!r}, which does not answer it")
    # The question does not contain an answer, and no passage connects its names with one.
    question = plain(problem.question)
    for answer in (*problem.answers, *(hop.answer for hop in hops)):
        if says(question, answer):
            raise ValueError(f"{answer!r} occurs in the question")
    names = names_of(problem.question)
    if not names:
        raise ValueError("it has no name to search for")
    answers = [plain(answer) for answer in problem.answers]
    for number, text in enumerate(corpus.plain_texts):
        if any(answer in text for answer in answers) and names <= set(text.split()):
            raise ValueError(f"passage {number} has the names of the question and the answer")


def names_of(question: str) -> set[str]:
    """Returns the words with a capital or a digit, except the first of a sentence, normalised by `words`."""
    names = set()
    for sentence in _SENTENCE.split(question.strip()):
        for word in re.findall(r"\w+", sentence.partition(" ")[2]):
            if word[0].isupper() or word[0].isdigit():
                names |= set(words(word))
    return names


def read_problems(path: str | os.PathLike, corpus: Corpus) -> list[Problem]:
    """Reads problems from lines of JSON with question, answers, and hops with question, answer and passage.

    Raises ValueError that names the line and says what is invalid, or why the question does not need its
    hops.
    """
    problems = []
    for number, line in lines(path):
        try:
            hops = tuple(Hop(**hop) for hop in line["hops"])
            problem = Problem(line["question"], tuple(line["answers"]), hops)
            texts = [problem.question, *problem.answers, *(h.question for h in hops)]
            if not all(isinstance(text, str) for text in [*texts, *(h.answer for h in hops)]):
                raise TypeError("a question or an answer is no text")
            if not all(type(hop.passage) is int for hop in hops):
                raise TypeError("a passage is no number")
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: it needs question, answers and hops with question, answer and passage ({error})"
            ) from None
        try:
            check(problem, corpus)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        problems.append(problem)
    return problems
