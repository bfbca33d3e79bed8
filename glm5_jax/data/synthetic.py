"""Long-context tasks at an exact length, as training data and for evals/ruler.py.

The kinds follow RULER (arXiv 2404.06654, section 3 and its released settings) and MRCR (Michelangelo,
arXiv 2409.12640; OpenAI's version of it):

  needle       one note "key: value" in a haystack; the value of the key is asked
  multi_key    notes with `num_needles` keys, one of which is asked
  multi_value  one key with `num_needles` values, all of which are asked
  multi_query  `num_needles` keys with a value each, all asked
  variable     `num_chains` chains of `num_hops` assignments x2 = x1; all names of one value are asked
  frequent     words whose frequencies fall as 1 / rank**zipf; the `num_frequent` most frequent are asked
  mrcr         requests and replies, one request made `num_repeats` times among others that share its
               form or its topic; the n-th reply to it is to be repeated behind a random tag

A task's answers stand at the end of its tokens, in an order that its question fixes, so that plain
greedy decoding of the prompt can be held against them.
"""

import dataclasses
import itertools
import zlib

import numpy as np

from glm5_jax.data.record import TokenRecord
from glm5_jax.data.sources import Source, SourceConfig, open_source
from glm5_jax.data.surfaces import MAX_REPEATS, NUM_FORMS, NUM_TOPICS, TextSurface, TokenSurface
from glm5_jax.data.task_kinds import BUILD, KINDS
from glm5_jax.text.tokenizer import Tokenizer

SURFACES = ("text", "tokens")
HAYSTACKS = ("noise", "notes")
LOSSES = ("answers", "all")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """One kind of task at one length. Construction refuses values out of range (ValueError).

    Attributes:
      kind: one of `KINDS`.
      length: tokens of prompt and answers together, exactly.
      surface: "text" (sentences) or "tokens" (bare ids); surfaces.py.
      seed: with an index and this config, all that an item depends on.
      size: how many items there are.
      loss: what a record trains on, "answers" or "all" tokens.
      haystack: between the notes of the four needle kinds: "noise" (text, or ids without meaning), or
        "notes" with other keys (RULER's second and third multi-key task), where only the key tells
        the needle. Needs as many keys as notes fit.
      source: text of the haystack and of MRCR's replies; not used by "tokens".
      num_needles, num_chains, num_hops, num_frequent, zipf: RULER's settings.
      num_questions: of "multi_key": so many of the keys are asked, one after the other; the last is the
        task, the others with their answers end the prompt, and records train on those answers as well.
        A sequence then teaches many retrievals in place of one.
      num_repeats: identical requests, 2..8 (OpenAI's MRCR: 2, 4 or 8).
      reply_tokens: tokens of an MRCR reply (at most, on text); not theirs, which are long.
      num_keys, num_values, num_noise, value_tokens: on tokens, ids of each role, and ids of a value.
    """

    kind: str = "needle"
    length: int = 4096
    surface: str = "text"
    seed: int = 0
    size: int = 1_000_000
    loss: str = "answers"
    haystack: str = "noise"
    source: SourceConfig = SourceConfig("shakespeare")
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
        least = {"length": 2, "seed": 0, "num_repeats": 2, "num_keys": NUM_FORMS + NUM_TOPICS}
        for name in _COUNTS:
            if getattr(self, name) < least.get(name, 1):
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least {least.get(name, 1)}"
                )
        if self.num_repeats > MAX_REPEATS:
            raise ValueError(f"num_repeats is {self.num_repeats}; it must be 2..{MAX_REPEATS}")
        if self.num_questions > (self.num_needles if self.kind == "multi_key" else 1):
            raise ValueError(
                f"num_questions is {self.num_questions}; only kind 'multi_key' asks several times, at "
                f"most num_needles {self.num_needles}"
            )
        if not self.zipf >= 1:  # flatter ranks would take words without end to tell apart
            raise ValueError(f"zipf is {self.zipf}; it must be at least 1")


_COUNTS = (
    "length seed size num_needles num_questions num_chains num_hops num_frequent num_repeats "
    "reply_tokens num_keys num_values num_noise value_tokens"
).split()


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A prompt and what greedy decoding should write after it.

    Attributes:
      prompt: int32[p].
      answers: int32 arrays that follow the prompt in this order; separators belong to the answer behind
        them. p and their lengths sum to the config's length.
      kind: one of `KINDS`.
      depths: for every part of the prompt that holds an answer, the share of the prompt before it;
        empty for "frequent", which has no such place.
      practice: (start, end) of the answers to earlier questions in the prompt.
    """

    prompt: np.ndarray
    answers: tuple[np.ndarray, ...]
    kind: str
    depths: tuple[float, ...]
    practice: tuple[tuple[int, int], ...] = ()

    @property
    def token_ids(self) -> np.ndarray:
        """int32[length]: the prompt and the answers."""
        return np.concatenate([self.prompt, *self.answers])

    @property
    def answer_numbers(self) -> np.ndarray:
        """int32[length]: 1 on the tokens of the first answer, 2 on the second's, 0 on the prompt."""
        sizes = [len(self.prompt), *map(len, self.answers)]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


class LongContextTasks:
    """A random-access sequence of `TokenRecord`s; item i depends on the config and i alone.

    `task(i)` is the same item as a `Task`. The records have the streams of plain text (`loss_mask`,
    `ce_weight`), and the answers as spans. Items of different `stream`s are different draws: what is
    evaluated was not trained on, also where seeds coincide.
    """

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        *,
        source: Source | None = None,
        stream: str = "train",
    ):
        """source: the haystack's documents, in place of `config.source`.

        ValueError if a task does not fit into `config.length`, or the tokenizer or the pools are too
        small.
        """
        self.config = config
        self._stream = zlib.crc32(f"{stream} {config.kind} {config.length}".encode())
        if config.surface == "tokens":
            self._surface = TokenSurface(tokenizer, config)
        else:
            self._surface = TextSurface(tokenizer, source or open_source(config.source))
        needed = int(self._needed(self._rng(0)) * self._surface.slack)
        if config.length < needed:
            raise ValueError(
                f"length {config.length} is too short for kind {config.kind!r} on {config.surface}: "
                f"it takes {needed} tokens; raise length, or ask for less"
            )
        self.task(0)

    def __len__(self) -> int:
        return self.config.size

    @property
    def mean_tokens(self) -> int:
        """Tokens of a record."""
        return self.config.length

    def __getitem__(self, index: int) -> TokenRecord:
        task = self.task(index)
        ends = np.cumsum([len(task.prompt), *map(len, task.answers)]).tolist()
        spans = [(*span, "answer") for span in (*task.practice, *itertools.pairwise(ends))]
        mask = np.full(ends[-1], self.config.loss == "all", np.float32)
        mask[0] = 0
        for start, end, _ in spans:
            mask[start:end] = 1
        return TokenRecord(
            task.token_ids, mask, ce_weight=mask, task_id=f"{task.kind}/{int(index)}", spans=spans
        )

    def task(self, index: int) -> Task:
        """Item `index`, 0 <= index < len(self) (IndexError)."""
        index, config, surface = int(index), self.config, self._surface
        if not 0 <= index < config.size:
            raise IndexError(f"item {index} of {config.size}")
        rng = self._rng(index)
        intro = surface.intro(config.kind)
        draft = BUILD[config.kind](config, surface, rng, config.length - len(intro))
        left = config.length - len(intro) - draft.size
        if left < 0:
            raise ValueError(
                f"item {index} of kind {config.kind!r} takes {config.length - left} tokens, length is "
                f"{config.length}; raise length"
            )
        hay, places = surface.haystack(rng, left)
        # After a reply, text would be read as a part of it; among counted words, as more of them.
        places = places if draft.scattered else np.array([left])
        context, starts = _scatter(rng, hay, places, draft.parts)
        prompt = np.array([*intro, *context, *draft.question], np.int32)
        depths = (float((len(intro) + starts[i]) / len(prompt)) for i in draft.needles)
        answers = tuple(np.array(answer, np.int32) for answer in draft.answers)
        asked = len(prompt) - len(draft.question)
        practice = tuple((asked + start, asked + end) for start, end in draft.practice)
        return Task(prompt, answers, config.kind, tuple(depths), practice)

    def _rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self._stream, self.config.seed, index])

    def _needed(self, rng) -> int:
        """Tokens of a task without any haystack."""
        config = dataclasses.replace(self.config, haystack="noise")
        intro = len(self._surface.intro(config.kind))
        return intro + BUILD[config.kind](config, self._surface, rng, 0).size


def _scatter(rng, hay: np.ndarray, places: np.ndarray, parts) -> tuple[np.ndarray, np.ndarray]:
    """The parts, in their order, at random places of the haystack; and where each begins."""
    depths = np.sort(rng.random(len(parts))) * (len(hay) + 1)
    at = places[np.maximum(np.searchsorted(places, depths, side="right") - 1, 0)]
    pieces, last = [], 0
    for place, part in zip(at, parts, strict=True):
        pieces += [hay[last:place], np.array(part, np.int32)]
        last = place
    sizes = np.array([len(part) for part in parts], np.int64)
    starts = at + np.cumsum(sizes) - sizes
    return np.concatenate([*pieces, hay[last:]]), starts
