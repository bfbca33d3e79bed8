"""Generates long-context tasks of an exact length, as training data and for evals/ruler.py.

The kinds follow RULER (arXiv 2404.06654, section 3 and its released settings) and MRCR (Michelangelo,
arXiv 2409.12640; OpenAI's version of it):

  needle       one note "key: value" in a haystack; the answer is the value of the key
  multi_key    notes with `num_needles` keys; the answer is the value of one of them
  multi_value  one key with `num_needles` values; the answers are all of them
  multi_query  `num_needles` keys with a value each; the answers are all values
  variable     `num_chains` chains of `num_hops` assignments x2 = x1; the answers are all names of one value
  frequent     words whose frequencies fall as 1 / rank**zipf; the answers are the `num_frequent` most frequent
  mrcr         requests and replies; one request occurs `num_repeats` times among others that share its
               form or its topic; the answer repeats the n-th reply to it after a random tag

The answers are at the end of a task's tokens, in an order that its question fixes, so that they can be compared with greedy
decoding of the prompt.
"""

import dataclasses
import itertools
import zlib

import numpy as np

from glm5_jax.data.document import RandomAccess
from glm5_jax.data.record import TokenRecord
from glm5_jax.data.sources import SourceConfig, open_source
from glm5_jax.data.task_kinds import BUILD, KINDS
from glm5_jax.data.task_renderers import (
    MAX_REPEATS,
    NUM_FORMS,
    NUM_TOPICS,
    TextRenderer,
    TokenRenderer,
)
from glm5_jax.text.tokenizer import Tokenizer

SURFACES = ("text", "tokens")
HAYSTACKS = ("noise", "notes")
LOSSES = ("answers", "all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongContextTaskConfig:
    """Long-context tasks of one kind and length. Raises ValueError if a value is out of range.

    Attributes:
      kind: one of `KINDS`.
      length: exact number of tokens of prompt and answers together.
      surface: "text" (sentences) or "tokens" (bare ids); see task_renderers.py.
      seed: random seed; an item depends on it, its index and this config only.
      size: number of items.
      loss: tokens that a record trains on, "answers" or "all".
      haystack: content between the notes of the four needle kinds: "noise" (text, or meaningless ids), or "notes" with
        other keys (RULER's second and third multi-key task), where only the key identifies the needle. The latter needs
        as many keys as notes fit.
      source: text of the haystack and of MRCR's replies; not used by "tokens".
      num_needles, num_chains, num_hops, num_frequent, zipf: RULER's settings.
      num_questions: number of keys that "multi_key" asks for, one after the other. The last is the task. The others are
        at the end of the prompt with their answers, and records train on those answers as well, so that a sequence
        trains several retrievals.
      num_repeats: number of identical requests, 2..8 (OpenAI's MRCR: 2, 4 or 8).
      reply_tokens: tokens of an MRCR reply (a maximum for text); the published ones are longer.
      num_keys, num_values, num_noise, value_tokens: for "tokens", number of ids of each role, and ids of a value.
    """

    kind: str = "needle"
    length: int = 4096
    surface: str = "text"
    seed: int = 0
    size: int = 1_000_000
    loss: str = "answers"
    haystack: str = "noise"
    source: SourceConfig = SourceConfig(kind="shakespeare")
    num_needles: int = 4
    num_questions: int = 1
    num_chains: int = 1
    num_hops: int = 4
    num_frequent: int = 3
    zipf: float = 2.0
    num_repeats: int = 2
    reply_tokens: int = 32
    num_keys: int = 128
    num_values: int = 128
    num_noise: int = 128
    value_tokens: int = 1

    def __post_init__(self):
        choices = (("kind", KINDS), ("surface", SURFACES), ("loss", LOSSES))
        for name, known in (*choices, ("haystack", HAYSTACKS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; use one of {', '.join(known)}"
                )
        minima = {"length": 2, "seed": 0, "num_repeats": 2, "num_keys": NUM_FORMS + NUM_TOPICS}
        for name in _COUNTS:
            if getattr(self, name) < minima.get(name, 1):
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least {minima.get(name, 1)}"
                )
        if self.num_repeats > MAX_REPEATS:
            raise ValueError(f"num_repeats is {self.num_repeats}; it must be 2..{MAX_REPEATS}")
        if self.num_questions > (self.num_needles if self.kind == "multi_key" else 1):
            raise ValueError(
                f"num_questions is {self.num_questions}; only kind 'multi_key' asks several times, at "
                f"most num_needles {self.num_needles}"
            )
        if not self.zipf >= 1:  # flatter ranks would need too many words to be distinguishable
            raise ValueError(f"zipf is {self.zipf}; it must be at least 1")


_COUNTS = (
    "length seed size num_needles num_questions num_chains num_hops num_frequent num_repeats "
    "reply_tokens num_keys num_values num_noise value_tokens"
).split()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LongContextTask:
    """Long-context task: a prompt and the expected greedy continuation.

    Attributes:
      prompt: int32[p].
      answers: int32 arrays that follow the prompt in this order; a separator belongs to the answer after it. p and
        their lengths sum to the config's length.
      kind: one of `KINDS`.
      depths: for every part of the prompt that holds an answer, the share of the prompt before it; empty for "frequent",
        whose answers are not in one part.
      practice: (start, end) of the answers to earlier questions in the prompt.
    """

    prompt: np.ndarray
    answers: tuple[np.ndarray, ...]
    kind: str
    depths: tuple[float, ...]
    practice: tuple[tuple[int, int], ...] = ()

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt and the answers, int32[length]."""
        return np.concatenate([self.prompt, *self.answers])

    @property
    def answer_numbers(self) -> np.ndarray:
        """The number of the answer of each token, int32[length]: 1 for the first answer, 0 for the prompt."""
        sizes = [len(self.prompt), *map(len, self.answers)]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


class LongContextTasks:
    """Random-access sequence of `TokenRecord`s; item i depends only on the config and i.

    `task(i)` is the same item as a `LongContextTask`. The records have the streams of plain text (`loss_mask`, `ce_weight`),
    and the answers as spans. Different values of `stream` give different random items, so that evaluation uses items that
    were not trained on, even with equal seeds.
    """

    def __init__(
        self,
        config: LongContextTaskConfig,
        tokenizer: Tokenizer,
        *,
        source: RandomAccess[str] | None = None,
        stream: str = "train",
    ):
        """Opens the source, and generates the first task as a check.

        source: documents of the haystack; None: those of `config.source`. stream: name of the random stream. Raises
        ValueError if a task does not fit into `config.length`, or the tokenizer or the pools are too small.
        """
        self.config = config
        self._stream = zlib.crc32(f"{stream} {config.kind} {config.length}".encode())
        if config.surface == "tokens":
            self._surface = TokenRenderer(tokenizer, config)
        else:
            self._surface = TextRenderer(tokenizer, source or open_source(config.source))
        needed = int(self._needed(self._rng(0)) * self._surface.slack)
        if config.length < needed:
            raise ValueError(
                f"length {config.length} is too short for kind {config.kind!r} on {config.surface}: "
                f"it needs {needed} tokens; raise length, or lower the counts"
            )
        self.task(0)

    def __len__(self) -> int:
        return self.config.size

    @property
    def mean_tokens(self) -> int:
        """The tokens of a record."""
        return self.config.length

    def __getitem__(self, index: int) -> TokenRecord:
        task = self.task(index)
        ends = np.cumsum([len(task.prompt), *map(len, task.answers)]).tolist()
        answers = (*task.practice, *itertools.pairwise(ends))
        spans = [(start, end, "answer") for start, end in answers]
        mask = np.full(ends[-1], self.config.loss == "all", np.float32)
        mask[0] = 0
        for start, end, _ in spans:
            mask[start:end] = 1
        return TokenRecord(
            token_ids=task.token_ids,
            loss_mask=mask,
            ce_weight=mask,
            task_id=f"{task.kind}/{int(index)}",
            spans=spans,
        )

    def task(self, index: int) -> LongContextTask:
        """Returns item `index`. Raises IndexError unless 0 <= index < len(self)."""
        index, config, surface = int(index), self.config, self._surface
        if not 0 <= index < config.size:
            raise IndexError(f"item {index} of {config.size}")
        rng = self._rng(index)
        intro = surface.intro(config.kind)
        draft = BUILD[config.kind](config, surface, rng, config.length - len(intro))
        room = config.length - len(intro) - draft.size
        if room < 0:
            raise ValueError(
                f"item {index} of kind {config.kind!r} takes {config.length - room} tokens, length is "
                f"{config.length}; raise length"
            )
        hay, offsets = surface.haystack(rng, room)
        # Otherwise text after a reply would look like part of it, and text among counted words would be counted.
        offsets = offsets if draft.scattered else np.array([room])
        context, starts = _scatter(rng, hay, offsets, draft.parts)
        prompt = np.array([*intro, *context, *draft.question], np.int32)
        depths = (float((len(intro) + starts[i]) / len(prompt)) for i in draft.needles)
        answers = tuple(np.array(answer, np.int32) for answer in draft.answers)
        start_of_question = len(prompt) - len(draft.question)
        practice = tuple(
            (start_of_question + start, start_of_question + end) for start, end in draft.practice
        )
        return LongContextTask(
            prompt=prompt,
            answers=answers,
            kind=config.kind,
            depths=tuple(depths),
            practice=practice,
        )

    def _rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self._stream, self.config.seed, index])

    def _needed(self, rng) -> int:
        """Returns the tokens of a task without a haystack."""
        config = dataclasses.replace(self.config, haystack="noise")
        intro = len(self._surface.intro(config.kind))
        return intro + BUILD[config.kind](config, self._surface, rng, 0).size


def _scatter(rng, hay: np.ndarray, offsets: np.ndarray, parts) -> tuple[np.ndarray, np.ndarray]:
    """Inserts the parts, in their order, at random offsets of the haystack; returns (ids, start of each part)."""
    depths = np.sort(rng.random(len(parts))) * (len(hay) + 1)
    at = offsets[np.maximum(np.searchsorted(offsets, depths, side="right") - 1, 0)]
    pieces, last = [], 0
    for offset, part in zip(at, parts, strict=True):
        pieces += [hay[last:offset], np.array(part, np.int32)]
        last = offset
    sizes = np.array([len(part) for part in parts], np.int64)
    starts = at + np.cumsum(sizes) - sizes
    return np.concatenate([*pieces, hay[last:]]), starts
