"""The kinds of long-context tasks (synthetic.py says what they are): parts, question and answers.

Each builder takes a `TaskConfig`, a surface (surfaces.py), a random generator and the room, in tokens,
that parts, question and answers may take; kinds that have no haystack fill it.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Draft(NamedTuple):
    """A task without its haystack: parts in their order, which of them hold the answers, whether they
    lie scattered in the haystack or all behind it, and where earlier answers are in the question."""

    parts: list[list[int]]
    needles: list[int]
    question: list[int]
    answers: list[list[int]]
    scattered: bool = True
    practice: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        return sum(map(len, (*self.parts, self.question, *self.answers)))


def _recall(config, surface, rng, room: int) -> Draft:
    """The four kinds of needles."""
    kind, many = config.kind, config.num_needles
    unused = surface.keys(rng)
    one_key = kind in ("needle", "multi_value")
    keys = (
        [_next(unused, config)] * many if one_key else [_next(unused, config) for _ in range(many)]
    )
    if kind == "needle":
        keys = keys[:1]
    values = _distinct(lambda: surface.value(rng), len(keys), config)
    asked, question, practice = list(range(len(keys))), [], []
    if kind == "multi_query":
        asked = rng.permutation(many).tolist()
    if kind == "multi_key":
        *before, last = rng.permutation(many)[: config.num_questions].tolist()
        for i in before:
            question += surface.recall(kind, [keys[i]])
            start = len(question)
            question += surface.answer(0, values[i])
            practice.append((start, len(question)))
        asked = [last]
    question += surface.recall(
        kind, keys[:1] if kind == "multi_value" else [keys[i] for i in asked]
    )
    answers = [surface.answer(n, values[i]) for n, i in enumerate(asked)]
    notes = [surface.note(key, value) for key, value in zip(keys, values)]
    draft = Draft(notes, asked, question, answers, practice=tuple(practice))
    if config.haystack == "noise":
        return draft
    others, left = [], room - draft.size
    while left >= min(map(len, notes)):
        note = surface.note(_next(unused, config), surface.value(rng))
        left -= len(note)
        others.append(note)
    if others and left < 0:
        others.pop()
    places = _interleave(rng, others, notes)
    return draft._replace(parts=others, needles=[places[i] for i in asked])


def _variable(config, surface, rng, room: int) -> Draft:
    names = surface.keys(rng)
    values = _distinct(lambda: surface.value(rng), config.num_chains, config)
    chains = [[_next(names, config) for _ in range(config.num_hops + 1)] for _ in values]
    # Chains are interleaved; each stays in its order.
    turns = rng.permutation(np.repeat(np.arange(config.num_chains), config.num_hops + 1)).tolist()
    parts, places = [], [[] for _ in chains]
    for place, chain in enumerate(turns):
        hop = len(places[chain])
        what = chains[chain][hop - 1] if hop else values[chain]
        parts.append(surface.assign(chains[chain][hop], what))
        places[chain].append(place)
    asked = int(rng.integers(config.num_chains))
    answers = [surface.answer(n, name) for n, name in enumerate(chains[asked])]
    return Draft(parts, places[asked], surface.trace(values[asked], len(answers)), answers)


def _frequent(config, surface, rng, room: int) -> Draft:
    many, zipf, unused = config.num_frequent, config.zipf, surface.keys(rng)
    question, words, sizes = surface.count(many), [], []

    def size(scale: int) -> int:
        found = _times(scale, zipf)
        while len(words) < len(found):
            words.append(_next(unused, config))
            sizes.append(len(surface.word(words[-1])))
        return int(found @ sizes[: len(found)])

    scale = _least_scale(many, zipf)
    size(scale)
    answers = [surface.answer(n, word) for n, word in enumerate(words[:many])]
    left = room - Draft([], [], question, answers).size
    step = 1 << max(left, 1).bit_length()
    while step := step // 2:
        if size(scale + step) <= left:
            scale += step
    while not _decided(scale, many, zipf):
        scale -= 1
    times = _times(scale, zipf)
    parts = [surface.word(word) for word in words]
    order = rng.permutation(np.repeat(np.arange(len(times)), times))
    return Draft([parts[i] for i in order], [], question, answers, scattered=False)


def _times(scale: int, zipf: float) -> np.ndarray:
    """How often the word of each rank comes: scale / rank**zipf, while that is at least once."""
    last = int(scale ** (1 / zipf) + 1e-9)
    return np.floor(scale * np.arange(1, last + 1) ** -zipf + 1e-9).astype(int)


def _decided(scale: int, many: int, zipf: float) -> bool:
    """Whether no two of the most frequent words, nor the next, come equally often."""
    found = _times(scale, zipf)
    return len(found) >= many and bool((np.diff(found[: many + 1]) < 0).all())


@functools.lru_cache
def _least_scale(many: int, zipf: float) -> int:
    return next(scale for scale in itertools.count(1) if _decided(scale, many, zipf))


def _mrcr(config, surface, rng, room: int) -> Draft:
    forms, topics = surface.forms, surface.topics
    form, topic = int(rng.integers(len(forms))), int(rng.integers(len(topics)))
    replies = _distinct(
        lambda: tuple(surface.reply(rng, config.reply_tokens)), config.num_repeats, config
    )
    asked = int(rng.integers(config.num_repeats))
    tag = surface.tag(rng)
    question = surface.repeat(tag, asked + 1, forms[form], topics[topic])
    answers = [surface.tagged(tag, [*replies[asked]])]
    rounds = [surface.round(forms[form], topics[topic], [*reply]) for reply in replies]
    left = room - Draft(rounds, [], question, answers).size
    others = []
    while left > 0:
        # Half of the distractors share the form, half the topic.
        other_form = (form + 1 + int(rng.integers(len(forms) - 1))) % len(forms)
        other_topic = (topic + 1 + int(rng.integers(len(topics) - 1))) % len(topics)
        pair = (form, other_topic) if rng.random() < 0.5 else (other_form, topic)
        reply = surface.reply(rng, config.reply_tokens)
        if tuple(reply) in replies:
            continue
        others.append(surface.round(forms[pair[0]], topics[pair[1]], reply))
        left -= len(others[-1])
    if others and left < 0:
        others.pop()
    places = _interleave(rng, others, rounds)
    return Draft(others, [places[asked]], question, answers, scattered=False)


def _interleave(rng, others: list, parts: list) -> list[int]:
    """Puts the parts, in their order, at random among the others; their places."""
    places = np.sort(rng.choice(len(others) + len(parts), len(parts), replace=False)).tolist()
    for place, part in zip(places, parts, strict=True):
        others.insert(place, part)
    return places


def _next(words, config):
    word = next(words, None)
    if word is None:
        raise ValueError(
            f"num_keys {config.num_keys} is too small for kind {config.kind!r} at length "
            f"{config.length} (haystack {config.haystack!r}); raise num_keys"
        )
    return word


def _distinct(draw: Callable, count: int, config) -> list:
    """`count` different draws."""
    found = []
    for _ in range(100 * count):
        if len(found) == count:
            return found
        word = draw()
        if word not in found:
            found.append(word)
    if len(found) == count:
        return found
    raise ValueError(
        f"kind {config.kind!r} needs {count} different values or replies, but {100 * count} draws gave "
        f"{len(found)}; raise num_values, or name a source with more text"
    )


BUILD = {
    "needle": _recall,
    "multi_key": _recall,
    "multi_value": _recall,
    "multi_query": _recall,
    "variable": _variable,
    "frequent": _frequent,
    "mrcr": _mrcr,
}
KINDS = tuple(BUILD)
