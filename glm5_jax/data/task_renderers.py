"""Renders the parts of the long-context tasks in synthetic.py, as bare token ids or as sentences.

A renderer draws words (keys, values, names) and renders the parts of a task with them, as token ids. Both have the same
methods, so that one generator works with either:

  tokens  one id per word, from disjoint pools. They measure retrieval instead of language, and a model of a million weights
          learns them within minutes.
  text    English sentences between the lines of a haystack, any source of documents.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from glm5_jax.data.document import RandomAccess
from glm5_jax.text.tokenizer import Tokenizer

MAX_REPEATS = 8  # of near-identical requests, as in OpenAI's MRCR (2, 4 or 8)
NUM_FORMS = 8
NUM_TOPICS = 16
CACHED_DOCUMENTS = 4096  # tokenised documents of a haystack in the cache

Ids = list[int]
Word = tuple[int, ...]


class TokenRenderer:
    """Renderer of tasks as bare ids: a word is one id, a value `value_tokens` ids; an id has one role in every task.

    The roles are the same for all seeds. A part begins with a marker: `note key value`, `assign name value`, `user form
    topic reply ...`. A question begins with the marker of its kind of task. Single and multi-key retrieval share a marker,
    because they are the same skill.
    """

    MARKERS = (
        *("note", "assign", "user", "reply"),
        *("recall", "recall all", "recall each", "trace", "count", "repeat"),
        *(f"number {n}" for n in range(1, MAX_REPEATS + 1)),
    )
    QUESTIONS = {"multi_value": "recall all", "multi_query": "recall each"}
    slack = 1.0  # ratio of the longest task of a config to the first

    def __init__(self, tokenizer: Tokenizer, config: Any):
        """Assigns ids to roles; config: a `LongContextTaskConfig`. Raises ValueError if the tokenizer has too few ids."""
        special = set(tokenizer.special_ids.values())
        sizes = tokenizer.token_bytes()
        ordinary = np.array([i for i, n in enumerate(sizes) if n and i not in special], np.int32)
        # Keys come last, so that a longer context that needs more keys does not change the other roles.
        shapes = (len(self.MARKERS), config.num_values, config.num_noise, config.num_keys)
        if sum(shapes) > len(ordinary):
            raise ValueError(
                f"num_keys {config.num_keys}, num_values {config.num_values} and num_noise "
                f"{config.num_noise} with {len(self.MARKERS)} markers exceed the tokenizer's "
                f"{len(ordinary)} ordinary ids; choose smaller pools"
            )
        ordinary = np.random.default_rng(0).permutation(ordinary)
        ends = np.cumsum(shapes)
        markers, self._values, self._noise, self._keys, _ = np.split(ordinary, ends)
        self.markers = dict(zip(self.MARKERS, markers.tolist(), strict=True))
        self._value_tokens = config.value_tokens
        self.forms = [(key,) for key in self._keys[:NUM_FORMS].tolist()]
        self.topics = [(key,) for key in self._keys[NUM_FORMS:][:NUM_TOPICS].tolist()]

    def keys(self, rng: np.random.Generator) -> Iterator[tuple]:
        """Yields distinct keys or names, until the pool is exhausted."""
        return ((key,) for key in rng.permutation(self._keys).tolist())

    def value(self, rng: np.random.Generator) -> tuple:
        return tuple(_draw(rng, self._values, self._value_tokens).tolist())

    def tag(self, rng: np.random.Generator) -> tuple:
        return tuple(_draw(rng, self._keys, 1).tolist())

    def reply(self, rng: np.random.Generator, size: int) -> Ids:
        return _draw(rng, self._values, size).tolist()

    def haystack(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (`size` meaningless ids, ascending offsets at which a part may be inserted)."""
        return _draw(rng, self._noise, size), np.arange(size + 1)

    def intro(self, kind: str) -> Ids:
        return []

    def note(self, key: Word, value: Word) -> Ids:
        return [self.markers["note"], *key, *value]

    def assign(self, name: Word, value: Word) -> Ids:
        return [self.markers["assign"], *name, *value]

    def word(self, word: Word) -> Ids:
        return [*word]

    def round(self, form: Word, topic: Word, reply: Ids) -> Ids:
        return [self.markers["user"], *form, *topic, self.markers["reply"], *reply]

    def recall(self, kind: str, keys: Sequence) -> Ids:
        marker = self.markers[self.QUESTIONS.get(kind, "recall")]
        return [marker, *itertools.chain(*keys)]

    def trace(self, value: Word, count: int) -> Ids:
        return [self.markers["trace"], *value]

    def count(self, count: int) -> Ids:
        return [self.markers["count"]]

    def repeat(self, tag: Word, number: int, form: Word, topic: Word) -> Ids:
        return [self.markers["repeat"], *tag, self.markers[f"number {number}"], *form, *topic]

    def answer(self, index: int, word: Word) -> Ids:
        """Returns the ids of the answer with this index, including the separator before it."""
        return [*word]

    def tagged(self, tag: Word, reply: Ids) -> Ids:
        return [*tag, *reply]


class TextRenderer:
    """Renderer of tasks in English, with invented words (so that no model knows them) and numbers of 7 digits."""

    FORMS = ("poem", "riddle", "letter", "speech", "song", "prayer", "story", "sermon")
    TOPICS = (
        *("rivers", "kings", "bread", "winter", "horses", "gardens", "storms", "silver"),
        *("ships", "bells", "wolves", "candles", "mountains", "roses", "debts", "dreams"),
    )
    ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    INTROS = {
        "variable": "Names are given meanings in the text below. Keep in mind what each stands for.",
        "frequent": "Some words of the list below come more often than others. Count them.",
        "mrcr": "A reader asks a poet for one piece after another. Keep every piece in mind.",
    }
    NOTES = "Notes with codes are hidden in the text below. Keep them in mind."
    slack = 1.5

    def __init__(self, tokenizer: Tokenizer, source: RandomAccess[str]):
        self._encode = tokenizer.encode
        self._hay = _Haystack(source, tokenizer)
        self.forms, self.topics = list(self.FORMS[:NUM_FORMS]), list(self.TOPICS[:NUM_TOPICS])

    def keys(self, rng: np.random.Generator) -> Iterator[str]:
        seen = set()
        while True:
            word = _invent_word(rng)
            if word not in seen:
                seen.add(word)
                yield word

    def value(self, rng: np.random.Generator) -> str:
        return str(rng.integers(10**6, 10**7))

    def tag(self, rng: np.random.Generator) -> str:
        return str(rng.integers(10**6, 10**7))

    def reply(self, rng: np.random.Generator, size: int) -> Ids:
        return self._hay.lines(rng, size)

    def haystack(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        return self._hay.text(rng, size)

    def intro(self, kind: str) -> Ids:
        return self._encode(self.INTROS.get(kind, self.NOTES) + "\n\n")

    def note(self, key: str, value: str) -> Ids:
        return self._encode(f"Note: the code of {key} is {value}.\n")

    def assign(self, name: str, value: str) -> Ids:
        return self._encode(f"Let {name} stand for {value}.\n")

    def word(self, word: str) -> Ids:
        return self._encode(f" {word}")

    def round(self, form: str, topic: str, reply: Ids) -> Ids:
        request = self._encode(f"Reader: Give me a {form} about {topic}.\nPoet: ")
        return [*request, *reply, *self._encode("\n")]

    def recall(self, kind: str, keys: Sequence) -> Ids:
        if kind == "multi_value":
            question = f"What are all the codes of {keys[0]}, in the order of the text?"
        elif kind == "multi_query":
            question = f"What are the codes of {', '.join(keys)}, in this order?"
        else:
            question = f"What is the code of {keys[0]}?"
        return self._encode(f"\n\nQuestion: {question}\nAnswer:")

    def trace(self, value: str, count: int) -> Ids:
        return self._encode(
            f"\n\nQuestion: Which {count} names stand for {value}, directly or through another "
            "name, in the order of the text?\nAnswer:"
        )

    def count(self, count: int) -> Ids:
        return self._encode(
            f"\n\nQuestion: Which {count} words come most often, the most frequent first?\nAnswer:"
        )

    def repeat(self, tag: str, number: int, form: str, topic: str) -> Ids:
        return self._encode(
            f"\n\nReader: Write {tag} and then, word by word, the {self.ORDINALS[number - 1]} "
            f"{form} about {topic}.\nPoet:"
        )

    def answer(self, index: int, word: str) -> Ids:
        return self._encode(f", {word}" if index else f" {word}")

    def tagged(self, tag: str, reply: Ids) -> Ids:
        return [*self._encode(f" {tag} "), *reply]


class _Haystack:
    """Haystack of documents as token ids, line by line."""

    def __init__(self, source: RandomAccess[str], tokenizer: Tokenizer):
        self._source, self._encode = source, tokenizer.encode
        self._document = functools.lru_cache(CACHED_DOCUMENTS)(self._read)

    def text(self, rng, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (`size` ids of text, offsets of its lines).

        The text begins at a random line and continues through the following documents; its last line is truncated.
        """
        parts, starts, have = [], [], 0
        for lines in self._lines_from(rng):
            if have >= size:
                break
            parts.append(lines)
            starts.append(have)
            have += len(lines)
        ids = np.concatenate([np.zeros(0, np.int32), *parts])[:size]
        return ids, np.array(starts or [0])

    def lines(self, rng, size: int) -> Ids:
        """Returns at most `size` ids of complete lines without blank ones; a longer first line is truncated."""
        ids = []
        for line in self._lines_from(rng):
            if len(line) == 1:  # blank
                continue
            if ids and len(ids) + len(line) > size:
                break
            ids += line[:size].tolist()
        return ids

    def _lines_from(self, rng) -> Iterator[np.ndarray]:
        start = int(rng.integers(len(self._source)))
        first = rng.random()
        empty = 0
        for number in itertools.count(start):
            lines = self._document(number % len(self._source))
            yield from lines[int(first * len(lines)) :]
            first, empty = 0.0, 0 if lines else empty + 1
            if empty > len(self._source):
                raise ValueError("the haystack's source holds only empty documents; name another")

    def _read(self, number: int) -> list[np.ndarray]:
        text = self._source[number].rstrip("\n")
        lines = (text + "\n").splitlines(keepends=True) if text else []
        return [np.array(self._encode(line), np.int32) for line in lines]


def _draw(rng, pool: np.ndarray, size: int) -> np.ndarray:
    """Draws with replacement, several times as fast as `rng.choice`."""
    return pool[rng.integers(len(pool), size=size)]


def _invent_word(rng) -> str:
    """Returns a random word of three or four syllables."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = rng.integers(3, 5)
    letters = rng.integers([[len(consonants), len(vowels)]] * syllables)
    return "".join(consonants[c] + vowels[v] for c, v in letters)
