"""Generates worlds for search: passages about invented people, towns, companies and books, and multi-hop questions.

Each passage states the relations of one thing, and nothing about the relations of the related things. So a
chain of relations needs one passage for each relation, in order: only the previous passage names the next
thing. A world depends only on its name, so nobody can know it in advance.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from glm5_jax.envs.search.passages import Corpus, Passage
from glm5_jax.envs.search.problems import Hop, Problem, check

COUNTS = {"person": 28, "town": 20, "company": 16, "book": 16}
YEARS = (1100, 2000)
ONE_SEARCH = 10  # results of the first search, which must miss at least one passage of the chain
_NAME = re.compile(r"world(\d)-seed(\d+)-(\d+)")
_ONSETS = "b br d dr f fl g gr k kl l m n p pr qu r s sk st t th tr v z".split()
_VOWELS = "a e i o u ae io ou".split()
_CODAS = ["", "", "n", "r", "l", "s", "rn", "lm", "sk", "th", "nd"]
_SHAPES = {"person": "{} {}", "town": "{}", "company": "{} Works", "book": "Songs of {}"}
_ELSE = (
    "Little else is written down.",
    "Most of what is known comes from letters.",
    "Accounts of the early days differ.",
    "A small museum keeps what is left.",
    "Visitors come for it every spring.",
    "The archive has a longer list.",
)


class _Relation(NamedTuple):
    """Relation between two sorts of things.

    Attributes:
      of: sort of the first thing.
      to: sort of the second thing.
      noun: name of the relation in questions.
      templates: sentences that state the relation in passages.
    """

    of: str
    to: str
    noun: str
    templates: tuple[str, ...]


# Passages use other words than questions, so that a question matches the names in it and not the answer.
RELATIONS = (
    _Relation("person", "town", "birthplace", ("{0} was born in {1}.", "{0} came from {1}.")),
    _Relation("person", "person", "teacher", ("{0} learnt from {1}.", "{1} taught {0}.")),
    _Relation("person", "company", "employer", ("{0} worked for {1}.", "{1} hired {0}.")),
    _Relation("person", "year", "birth year", ("{0} came into the world in {1}.",)),
    _Relation("town", "person", "founder", ("{1} laid the first stone of {0}.",)),
    _Relation("town", "company", "main trade", ("Most people in {0} live by {1}.",)),
    _Relation("town", "year", "charter year", ("{0} has been a city since {1}.",)),
    _Relation("company", "town", "seat", ("{0} has its offices in {1}.", "{0} sits in {1}.")),
    _Relation("company", "person", "owner", ("{0} belongs to {1}.", "{1} bought {0}.")),
    _Relation("company", "year", "opening year", ("{0} began to trade in {1}.",)),
    _Relation("book", "person", "author", ("{1} wrote {0}.", "{0} is by {1}.")),
    _Relation("book", "town", "setting", ("{0} plays in {1}.", "{0} tells of life in {1}.")),
    _Relation("book", "year", "publication year", ("{0} was first printed in {1}.",)),
)


class SearchWorld(NamedTuple):
    """Generated world.

    Attributes:
      things: sort and name of each thing; the passage with the same number describes it.
      related: thing number or year, by (thing, relation), each by its number.
      passage_things: numbers of the things that each passage mentions.
      corpus: passages.
    """

    things: tuple[tuple[str, str], ...]
    related: dict[tuple[int, int], int]
    passage_things: tuple[set[int], ...]
    corpus: Corpus

    def name_of(self, value: int, relation: _Relation) -> str:
        """Returns the text for the second end of a relation in questions and passages."""
        return str(value) if relation.to == "year" else self.things[value][1]


def world_name(hops: int, seed: int, number: int) -> str:
    """Returns the name of a world, for `corpus_named`."""
    return f"world{hops}-seed{seed}-{number}"


def corpus_named(name: str) -> Corpus | None:
    """Returns the passages of a world, or None for a name of another form."""
    match = _NAME.fullmatch(name)
    return _world(_random(*map(int, match.groups()))).corpus if match else None


def problem(hops: int, seed: int, number: int) -> Problem:
    """Returns a question of `hops` hops about a world that no other question uses."""
    rng = _random(hops, seed, number)
    world = _world(rng)
    while True:
        chain = _chain(world, rng, hops)
        if chain is None:
            continue
        candidate = _problem_of(world, *chain)
        results = world.corpus.index.search(candidate.question, ONE_SEARCH)
        if {hop.passage for hop in candidate.hops} <= set(results):
            continue
        check(candidate, world.corpus)
        return candidate


def _random(hops: int, seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([hops, seed, number])


def _world(rng: np.random.Generator) -> SearchWorld:
    things = [
        (sort, name)
        for sort, names in _names(rng)
        for name in itertools.islice(names, COUNTS[sort])
    ]
    numbers = {sort: [i for i, t in enumerate(things) if t[0] == sort] for sort in COUNTS}
    related = {}
    years = iter(rng.permutation(np.arange(*YEARS)).tolist())
    for r, relation in enumerate(RELATIONS):
        subjects = numbers[relation.of]
        if relation.to == "year":
            values = list(itertools.islice(years, len(subjects)))
        else:
            # In a circle nobody is their own teacher, and few values occur twice.
            shuffled = rng.permutation(numbers[relation.to]).tolist()
            values = [shuffled[i % len(shuffled)] for i in range(len(subjects))]
            if relation.of == relation.to:
                values = dict(zip(shuffled, shuffled[1:] + shuffled[:1]))
                values = [values[i] for i in subjects]
        related |= {(i, r): value for i, value in zip(subjects, values)}
    things_of = [{i} for i in range(len(things))]
    for (i, r), value in related.items():
        if RELATIONS[r].to != "year":
            things_of[i].add(value)
    world = SearchWorld(tuple(things), related, tuple(things_of), Corpus(()))
    passages = [_passage(world, i, rng) for i in range(len(things))]
    return world._replace(corpus=Corpus(passages))


def _names(rng: np.random.Generator) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields each sort with names whose words occur in no other name."""
    new = _words(rng)
    for sort, shape in _SHAPES.items():
        count = shape.count("{}")
        yield sort, (shape.format(*itertools.islice(new, count)) for _ in itertools.count())


def _words(rng: np.random.Generator) -> Iterator[str]:
    parts = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS)
    known = set()
    while True:
        draws = rng.random((64, len(parts)))
        for draw in draws.tolist():
            word = "".join(p[int(share * len(p))] for p, share in zip(parts, draw)).capitalize()
            if word not in known:
                known.add(word)
                yield word


def _passage(world: SearchWorld, number: int, rng: np.random.Generator) -> Passage:
    name = world.things[number][1]
    relations = [r for r in range(len(RELATIONS)) if (number, r) in world.related]
    draws = rng.random(len(relations) + 1).tolist()
    sentences = []
    for r, draw in zip(relations, draws):
        forms = RELATIONS[r].templates
        value = world.name_of(world.related[number, r], RELATIONS[r])
        sentences.append(forms[int(draw * len(forms))].format(name, value))
    sentences.append(_ELSE[int(draws[-1] * len(_ELSE))])
    return Passage(name, " ".join(sentences[i] for i in rng.permutation(len(sentences))))


def _chain(world: SearchWorld, rng, hops: int) -> tuple[int, list[int]] | None:
    """Returns a thing and the relations that lead on from it, or None if the draw is unusable.

    It is unusable if it returns to a member, or if a passage mentions members of the chain other than two
    neighbours (for a passage of the chain: other than its thing and the next), because a hop could then be
    skipped.
    """
    first = at = int(rng.integers(len(world.things)))
    members, chain = [at], []
    for hop in range(hops):
        last = hop == hops - 1
        known = [
            r
            for r, relation in enumerate(RELATIONS)
            if relation.of == world.things[at][0] and (last or relation.to != "year")
        ]
        chain.append(known[rng.integers(len(known))])
        at = world.related[at, chain[-1]]
        if RELATIONS[chain[-1]].to != "year":
            members.append(at)
    if len(set(members)) < len(members):
        return None
    pairs = {a: {a, b} for a, b in zip(members, members[1:] + members[-1:])}
    for thing, mentioned in enumerate(world.passage_things):
        both = mentioned & pairs.keys()
        if not any(both <= pair for pair in ([pairs[thing]] if thing in pairs else pairs.values())):
            return None
    return first, chain


def _problem_of(world: SearchWorld, first: int, chain: list[int]) -> Problem:
    """Returns the question of a chain."""
    at, name = first, world.things[first][1]
    phrase, hops = name, []
    for number, r in enumerate(chain):
        relation = RELATIONS[r]
        of = name if number == 0 else f"#{number}"
        value = world.related[at, r]
        answer = world.name_of(value, relation)
        hops.append(Hop(f"What is the {relation.noun} of {of}?", answer, at))
        phrase, at = f"the {relation.noun} of {phrase}", value
    return Problem(f"What is {phrase}?", (hops[-1].answer,), tuple(hops))
