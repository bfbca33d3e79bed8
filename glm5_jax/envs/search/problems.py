"""Questions that take two to four passages, one after the other, and what shows that they do."""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

from glm5_jax.envs.search.answers import normalized
from glm5_jax.envs.search.bm25 import words
from glm5_jax.envs.search.passages import Corpus, lines, plain, says

FEWEST_HOPS, MOST_HOPS = 2, 4
_EARLIER = re.compile(r"#(\d+)")
_SENTENCE = re.compile(r"(?<=[.?!])\s+")


@dataclasses.dataclass(frozen=True)
class Hop:
    """A question that one passage answers; "#1" stands in it for the answer of the first hop. passage: its number."""

    question: str
    answer: str
    passage: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question, all that answers it, and the way to it."""

    question: str
    answers: tuple[str, ...]
    hops: tuple[Hop, ...]

    @property
    def data(self) -> dict[str, Any]:
        """As a task holds it."""
        return {
            "answers": list(self.answers),
            "hops": [dataclasses.asdict(hop) for hop in self.hops],
        }


def asked(hop: Hop, answers: Sequence[str]) -> str:
    """A hop's question with the answers of earlier hops in it."""
    return _EARLIER.sub(lambda found: answers[int(found[1]) - 1], hop.question)


def check(problem: Problem, corpus: Corpus) -> None:
    """ValueError saying why a question does not take its hops. One that passes has

      - two to four hops, each with a passage of its own that says its answer, and each but the last with a later one
        that asks about its answer; the last one's answer is the question's
      - no answer in the question, of a hop neither
      - a name, a word behind a sentence's first that has a capital or a digit, and no passage of the whole corpus that says
        an answer and has all names

    So nobody can take the answer from the question, and no passage connects what the question names to it: whoever
    has it from passages needs two of them, and can begin with none but a name. It does not keep anybody from guessing, from
    what they know already, or from leaving out a hop of three where another passage connects its ends.
    """
    hops, asked_about = problem.hops, set()
    if not FEWEST_HOPS <= len(hops) <= MOST_HOPS:
        raise ValueError(f"it has {len(hops)} hops; {FEWEST_HOPS} to {MOST_HOPS} are possible")
    if not problem.answers or not all(map(normalized, problem.answers)):
        raise ValueError(f"its answers {problem.answers} are not some that have words")
    for number, hop in enumerate(hops):
        if not 0 <= hop.passage < len(corpus.passages):
            raise ValueError(
                f"hop {number + 1} is in passage {hop.passage}, of which there is none"
            )
        known = problem.answers if number == len(hops) - 1 else (hop.answer,)
        if not any(says(corpus.said[hop.passage], answer) for answer in known):
            raise ValueError(f"passage {hop.passage} does not say {hop.answer!r}")
        earlier = {int(found) for found in _EARLIER.findall(hop.question)}
        if not earlier <= set(range(1, number + 1)):
            raise ValueError(f"hop {number + 1} asks about a hop that is not before it")
        asked_about |= earlier
    if len({hop.passage for hop in hops}) < len(hops):
        raise ValueError("two of its hops have one passage; give each its own")
    if missing := set(range(1, len(hops))) - asked_about:
        raise ValueError(f"no later hop asks about hop {min(missing)}")
    if hops[-1].answer not in problem.answers:
        raise ValueError(f"its last hop gives {hops[-1].answer!r}, which does not answer it")
    question = plain(problem.question)
    for answer in (*problem.answers, *(hop.answer for hop in hops)):
        if says(question, answer):
            raise ValueError(f"{answer!r} stands in the question")
    names = names_of(problem.question)
    if not names:
        raise ValueError("it names nothing to begin with")
    answers = [plain(answer) for answer in problem.answers]
    for number, text in enumerate(corpus.said):
        if any(answer in text for answer in answers) and names <= set(text.split()):
            raise ValueError(f"passage {number} alone says what the question names, and the answer")


def names_of(question: str) -> set[str]:
    """The words with a capital or a digit, but a sentence's first, as `words` has them."""
    found = set()
    for sentence in _SENTENCE.split(question.strip()):
        for word in re.findall(r"\w+", sentence.partition(" ")[2]):
            if word[0].isupper() or word[0].isdigit():
                found |= set(words(word))
    return found


def read_problems(path: str | os.PathLike, corpus: Corpus) -> list[Problem]:
    """From lines of JSON: question, answers, and hops with question, answer and passage. ValueError names the line, and
    what is wrong with it, or why its question does not take its hops."""
    found = []
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
        found.append(problem)
    return found
