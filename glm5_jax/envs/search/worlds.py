"""Made-up worlds: passages about people, towns, companies and books that nobody can know before, and questions about
them along chains of relations.

Each passage says what one thing is related to, and nothing of what that is related to in turn. So a chain takes a passage for
each of its relations, in their order: which passage is next only the last one says. A world depends on its name alone.
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
ONE_SEARCH = (
    10  # what the first search may find of a chain is all but one of its passages, in so many
)
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
    """of, to: sorts of things; asked: what the second is to the first, in a question; said: the same in passages."""

    of: str
    to: str
    asked: str
    said: tuple[str, ...]


# Passages have other words than questions, so that a question finds what it names and not what it asks for.
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


class World(NamedTuple):
    """things: sort and name, of which the passage with the same number speaks; related: by thing and relation, each by
    its number, a thing or a year; said: the things of each passage."""

    things: tuple[tuple[str, str], ...]
    related: dict[tuple[int, int], int]
    said: tuple[set[int], ...]
    corpus: Corpus

    def name_of(self, value: int, relation: _Relation) -> str:
        """How a question or a passage calls what a relation gives."""
        return str(value) if relation.to == "year" else self.things[value][1]


def world_name(hops: int, seed: int, number: int) -> str:
    """What `corpus_named` knows a world by."""
    return f"world{hops}-seed{seed}-{number}"


def corpus_named(name: str) -> Corpus | None:
    """The passages of a world, None if that is no world's name."""
    found = _NAME.fullmatch(name)
    return _world(_random(*map(int, found.groups()))).corpus if found else None


def problem(hops: int, seed: int, number: int) -> Problem:
    """A question of so many hops about a world of its own."""
    rng = _random(hops, seed, number)
    world = _world(rng)
    while True:
        chain = _chain(world, rng, hops)
        if chain is None:
            continue
        made = _asked(world, *chain)
        found = world.corpus.index.search(made.question, ONE_SEARCH)
        if {hop.passage for hop in made.hops} <= set(found):
            continue
        check(made, world.corpus)
        return made


def _random(hops: int, seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([hops, seed, number])


def _world(rng: np.random.Generator) -> World:
    things = [
        (sort, name)
        for sort, names in _names(rng)
        for name in itertools.islice(names, COUNTS[sort])
    ]
    numbers = {sort: [i for i, t in enumerate(things) if t[0] == sort] for sort in COUNTS}
    related = {}
    years = iter(rng.permutation(np.arange(*YEARS)).tolist())
    for r, relation in enumerate(RELATIONS):
        own = numbers[relation.of]
        if relation.to == "year":
            values = list(itertools.islice(years, len(own)))
        else:
            # Around a circle nobody is their own teacher, and few values come twice.
            turned = rng.permutation(numbers[relation.to]).tolist()
            values = [turned[i % len(turned)] for i in range(len(own))]
            if relation.of == relation.to:
                values = dict(zip(turned, turned[1:] + turned[:1]))
                values = [values[i] for i in own]
        related |= {(i, r): value for i, value in zip(own, values)}
    said = [{i} for i in range(len(things))]
    for (i, r), value in related.items():
        if RELATIONS[r].to != "year":
            said[i].add(value)
    world = World(tuple(things), related, tuple(said), Corpus(()))
    passages = [_passage(world, i, rng) for i in range(len(things))]
    return world._replace(corpus=Corpus(passages))


def _names(rng: np.random.Generator) -> Iterator[tuple[str, Iterator[str]]]:
    """By sort, names of words that come in no other name."""
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


def _passage(world: World, number: int, rng: np.random.Generator) -> Passage:
    name = world.things[number][1]
    own = [r for r in range(len(RELATIONS)) if (number, r) in world.related]
    draws = rng.random(len(own) + 1).tolist()
    said = []
    for r, draw in zip(own, draws):
        forms = RELATIONS[r].said
        value = world.name_of(world.related[number, r], RELATIONS[r])
        said.append(forms[int(draw * len(forms))].format(name, value))
    said.append(_ELSE[int(draws[-1] * len(_ELSE))])
    return Passage(name, " ".join(said[i] for i in rng.permutation(len(said))))


def _chain(world: World, rng, hops: int) -> tuple[int, list[int]] | None:
    """A thing and relations that follow each other from it; None if a draw leads back, or a passage says more of the
    chain's members than two neighbours, one of the chain other ones than its own and the next: with it a hop could be
    left out."""
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
    own = {a: {a, b} for a, b in zip(members, members[1:] + members[-1:])}
    for thing, said in enumerate(world.said):
        both = said & own.keys()
        if not any(both <= pair for pair in ([own[thing]] if thing in own else own.values())):
            return None
    return first, chain


def _asked(world: World, first: int, chain: list[int]) -> Problem:
    """Their question."""
    at, name = first, world.things[first][1]
    phrase, hops = name, []
    for number, r in enumerate(chain):
        relation = RELATIONS[r]
        of = name if number == 0 else f"#{number}"
        value = world.related[at, r]
        answer = world.name_of(value, relation)
        hops.append(Hop(f"What is the {relation.asked} of {of}?", answer, at))
        phrase, at = f"the {relation.asked} of {phrase}", value
    return Problem(f"What is {phrase}?", (hops[-1].answer,), tuple(hops))
