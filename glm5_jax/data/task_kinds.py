"""Builds the parts, question and answers of each kind of long-context task (described in synthetic.py).

Each builder takes a `LongContextTaskConfig`, a renderer (task_renderers.py), a random generator and the maximum tokens of
parts, question and answers; kinds without a haystack use all of them.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Draft(NamedTuple):
    """Task without its haystack.

    Attributes:
      parts: ids of the parts, in their order.
      needles: indices of the parts that hold the answers.
      question: ids of the question.
      answers: ids of the answers.
      scattered: whether the parts are scattered in the haystack; False: all of them come after it.
      practice: (start, end) of earlier answers in the question.
    """

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
    """Builds the four kinds of needle tasks."""
    # Keys and their values.
    kind, num_needles = config.kind, config.num_needles
    unused = surface.keys(rng)
    one_key = kind in ("needle", "multi_value")
    keys = (
        [_next(unused, config)] * num_needles
        if one_key
        else [_next(unused, config) for _ in range(num_needles)]
    )
    if kind == "needle":
        keys = keys[:1]
    values = _distinct(lambda: surface.value(rng), len(keys), config)
    # Questions, the last of which is the task.
    targets, question, practice = list(range(len(keys))), [], []
    if kind == "multi_query":
        targets = rng.permutation(num_needles).tolist()
    if kind == "multi_key":
        *before, last = rng.permutation(num_needles)[: config.num_questions].tolist()
        for i in before:
            question += surface.recall(kind, [keys[i]])
            start = len(question)
            question += surface.answer(0, values[i])
            practice.append((start, len(question)))
        targets = [last]
    question += surface.recall(
        kind, keys[:1] if kind == "multi_value" else [keys[i] for i in targets]
    )
    answers = [surface.answer(n, values[i]) for n, i in enumerate(targets)]
    notes = [surface.note(key, value) for key, value in zip(keys, values)]
    draft = Draft(notes, targets, question, answers, practice=tuple(practice))
    if config.haystack == "noise":
        return draft
    # A haystack of notes with other keys.
    others, remaining = [], room - draft.size
    while remaining >= min(map(len, notes)):
        note = surface.note(_next(unused, config), surface.value(rng))
        remaining -= len(note)
        others.append(note)
    if others and remaining < 0:
        others.pop()
    indices = _interleave(rng, others, notes)
    return draft._replace(parts=others, needles=[indices[i] for i in targets])


def _variable(config, surface, rng, room: int) -> Draft:
    names = surface.keys(rng)
    values = _distinct(lambda: surface.value(rng), config.num_chains, config)
    chains = [[_next(names, config) for _ in range(config.num_hops + 1)] for _ in values]
    # Chains are interleaved; each stays in its order.
    turns = rng.permutation(np.repeat(np.arange(config.num_chains), config.num_hops + 1)).tolist()
    parts, indices = [], [[] for _ in chains]
    for index, chain in enumerate(turns):
        hop = len(indices[chain])
        what = chains[chain][hop - 1] if hop else values[chain]
        parts.append(surface.assign(chains[chain][hop], what))
        indices[chain].append(index)
    target = int(rng.integers(config.num_chains))
    answers = [surface.answer(n, name) for n, name in enumerate(chains[target])]
    return Draft(parts, indices[target], surface.trace(values[target], len(answers)), answers)


def _frequent(config, surface, rng, room: int) -> Draft:
    num_frequent, zipf, unused = config.num_frequent, config.zipf, surface.keys(rng)
    question, words, sizes = surface.count(num_frequent), [], []

    def size(scale: int) -> int:
        times = _word_counts(scale, zipf)
        while len(words) < len(times):
            words.append(_next(unused, config))
            sizes.append(len(surface.word(words[-1])))
        return int(times @ sizes[: len(times)])

    scale = _min_scale(num_frequent, zipf)
    size(scale)
    answers = [surface.answer(n, word) for n, word in enumerate(words[:num_frequent])]
    remaining = room - Draft([], [], question, answers).size
    step = 1 << max(remaining, 1).bit_length()
    while step := step // 2:
        if size(scale + step) <= remaining:
            scale += step
    while not _is_decided(scale, num_frequent, zipf):
        scale -= 1
    times_of_words = _word_counts(scale, zipf)
    parts = [surface.word(word) for word in words]
    order = rng.permutation(np.repeat(np.arange(len(times_of_words)), times_of_words))
    return Draft([parts[i] for i in order], [], question, answers, scattered=False)


def _word_counts(scale: int, zipf: float) -> np.ndarray:
    """Returns the count of the word of each rank, scale / rank**zipf, down to a count of 1."""
    last = int(scale ** (1 / zipf) + 1e-9)
    return np.floor(scale * np.arange(1, last + 1) ** -zipf + 1e-9).astype(int)


def _is_decided(scale: int, num_frequent: int, zipf: float) -> bool:
    """Returns True if the counts of the most frequent words and the next one are all different."""
    times = _word_counts(scale, zipf)
    return len(times) >= num_frequent and bool((np.diff(times[: num_frequent + 1]) < 0).all())


@functools.lru_cache
def _min_scale(many: int, zipf: float) -> int:
    return next(scale for scale in itertools.count(1) if _is_decided(scale, many, zipf))


def _mrcr(config, surface, rng, room: int) -> Draft:
    forms, topics = surface.forms, surface.topics
    form, topic = int(rng.integers(len(forms))), int(rng.integers(len(topics)))
    replies = _distinct(
        lambda: tuple(surface.reply(rng, config.reply_tokens)), config.num_repeats, config
    )
    target = int(rng.integers(config.num_repeats))
    tag = surface.tag(rng)
    question = surface.repeat(tag, target + 1, forms[form], topics[topic])
    answers = [surface.tagged(tag, [*replies[target]])]
    rounds = [surface.round(forms[form], topics[topic], [*reply]) for reply in replies]
    remaining = room - Draft(rounds, [], question, answers).size
    others = []
    while remaining > 0:
        # Half of the distractors share the form, half the topic.
        other_form = (form + 1 + int(rng.integers(len(forms) - 1))) % len(forms)
        other_topic = (topic + 1 + int(rng.integers(len(topics) - 1))) % len(topics)
        pair = (form, other_topic) if rng.random() < 0.5 else (other_form, topic)
        reply = surface.reply(rng, config.reply_tokens)
        if tuple(reply) in replies:
            continue
        others.append(surface.round(forms[pair[0]], topics[pair[1]], reply))
        remaining -= len(others[-1])
    if others and remaining < 0:
        others.pop()
    indices = _interleave(rng, others, rounds)
    return Draft(others, [indices[target]], question, answers, scattered=False)


def _interleave(rng, others: list, parts: list) -> list[int]:
    """Inserts the parts, in their order, at random positions among the others, and returns their indices."""
    indices = np.sort(rng.choice(len(others) + len(parts), len(parts), replace=False)).tolist()
    for index, part in zip(indices, parts, strict=True):
        others.insert(index, part)
    return indices


def _next(words, config):
    word = next(words, None)
    if word is None:
        raise ValueError(
            f"num_keys {config.num_keys} is too small for kind {config.kind!r} at length "
            f"{config.length} (haystack {config.haystack!r}); raise num_keys"
        )
    return word


def _distinct(draw: Callable, count: int, config) -> list:
    """Draws `count` different values. Raises ValueError if there are too few."""
    words = []
    for _ in range(100 * count):
        if len(words) == count:
            return words
        word = draw()
        if word not in words:
            words.append(word)
    if len(words) == count:
        return words
    raise ValueError(
        f"kind {config.kind!r} needs {count} different values or replies, but {100 * count} draws gave "
        f"{len(words)}; raise num_values, or name a source with more text"
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
