"""Conversations as a source of a mixture: files of jsonl, or generated ones, a record for every sample.

What is wrong with a line is said before training begins, and nothing is left out: `select` (the command
experiments/check_chats.py) is what filters, and says what it drops.
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.core.console import ProgressBar
from glm5_jax.data.chat_tasks import ChatTaskConfig, lines
from glm5_jax.data.conversation import Conversation, parse, record, trained
from glm5_jax.data.record import TokenRecord
from glm5_jax.data.sources import held_out
from glm5_jax.text.chat import VARIANTS, ChatError
from glm5_jax.text.thinking import MODES
from glm5_jax.text.tokenizer import Tokenizer

LONGEST = 202_752  # tokens of SFT's longest samples (GLM-5 3.1)
CATEGORIES = ("general", "reasoning", "coding", "agent")  # of SFT's data (GLM-5 3.1)
QUIET_BYTES = 2**25  # a second or so of checking, before there is a progress bar
BYTES_PER_TOKEN = 4  # a guess, for how many conversations are read ahead
_COMMAND = "python -m experiments.check_chats"


@dataclasses.dataclass(frozen=True)
class ChatSourceConfig:
    """Conversations of one category as a source of a mixture.

    Attributes:
      chats: a jsonl file or a glob (conversation.py says what a line is), or what to generate.
      category: one of `CATEGORIES`; a name for metrics and messages.
      mode: of thinking, for lines that name none.
      weight: the source's share of the rows, relative to the other sources; the paper prints none.
      max_tokens: that a sample may have; rows must hold it whole.
      variant: of the layout (text/chat.py).
      mask_errors: whether the assistant's mistakes are left out of the loss.
    """

    chats: str | ChatTaskConfig
    category: str = "general"
    mode: str = "interleaved"
    weight: float = 1.0
    max_tokens: int = LONGEST
    variant: str = "glm5"
    mask_errors: bool = True

    def __post_init__(self):
        choices = (("category", CATEGORIES), ("mode", MODES), ("variant", tuple(VARIANTS)))
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; use one of {', '.join(known)}"
                )
        if not self.weight > 0:
            raise ValueError(
                f"the weight of source {self.name!r} is {self.weight}; make it positive"
            )
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 2")

    @property
    def name(self) -> str:
        """How messages and metrics call the source."""
        what = self.chats if isinstance(self.chats, str) else self.chats.name
        return f"{self.category}:{what}:{self.mode}"

    @property
    def length(self) -> int:
        """Tokens of the longest sample."""
        return self.max_tokens

    def open(self, tokenizer: Tokenizer, fraction: float, *, training: bool) -> "Chats":
        """The samples of one side; ValueError names the first lines that are wrong, or says that there
        is none."""
        return Chats(self, tokenizer, fraction, training=training)


class _Place(NamedTuple):
    """Where a sample stands: number of its file, line, first byte, bytes, number in the conversation."""

    file: int
    line: int
    offset: int
    size: int
    sample: int


class Chats:
    """A random-access sequence of the records of one side of a source's split. Opening parses every line, and
    lays out those that may be too long."""

    def __init__(
        self, config: ChatSourceConfig, tokenizer: Tokenizer, fraction: float, *, training: bool
    ):
        self._config, self._tokenizer = config, tokenizer
        self._lines, self._paths = None, []
        if isinstance(config.chats, ChatTaskConfig):
            self._lines = list(lines(config.chats, config.mode))
        else:
            self._paths = _files(config)
        places, wrong, num_bytes, seen = [], [], 0, 0
        for place, line in self._everything():
            try:
                seen += 1
                conversation = parse(line)
                samples = trained(conversation, config.mode, config.mask_errors)
                if not samples:
                    raise ChatError("no token of it is learnt; remove it, or correct a reply")
                if len(line) > config.max_tokens:  # a token is a byte at least
                    self._check_lengths(samples, conversation)
            except ValueError as error:
                wrong.append(f"{self._where(place)}: {error}")
                continue
            if held_out(asked(conversation), fraction) != training:
                num_bytes += len(line)
                places += [place._replace(sample=i) for i in range(len(samples))]
        if wrong:
            more = f" (and {len(wrong) - 1} lines more)" if len(wrong) > 1 else ""
            raise ValueError(
                f"source {config.name!r}: {wrong[0]}{more}; {_COMMAND} FILE --write=NEW lists them "
                "and writes what is right"
            )
        if not places:
            split = "training" if training else "held-out"
            raise ValueError(
                f"source {config.name!r} has no {split} conversation among {seen}, held_out_fraction "
                f"{fraction}; add conversations or change the fraction"
            )
        self._places = np.array(places, np.int64)
        self.mean_tokens = max(1, num_bytes // BYTES_PER_TOKEN // len(places))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> TokenRecord:
        config, place = self._config, _Place(*self._places[index].tolist())
        conversation = parse(self._read(place))
        sample = trained(conversation, config.mode, config.mask_errors)[place.sample]
        return record(
            sample,
            conversation,
            self._tokenizer,
            variant=config.variant,
            mask_errors=config.mask_errors,
        )

    def conversation(self, index: int) -> Conversation:
        """The conversation that sample `index` is of."""
        return parse(self._read(_Place(*self._places[index].tolist())))

    def _everything(self) -> Iterator[tuple[_Place, bytes]]:
        """Every line and its place."""
        if self._lines is not None:
            for number, line in enumerate(self._lines):
                yield _Place(0, number + 1, number, len(line), 0), line
        sizes = [path.stat().st_size for path in self._paths]
        before = shown = 0
        total = sum(sizes)
        bar = ProgressBar(total, unit="byte") if total > QUIET_BYTES else contextlib.nullcontext()
        with bar:
            for number, path in enumerate(self._paths):
                for line, offset, content in numbered_lines(path):
                    yield _Place(number, line, offset, len(content), 0), content
                    if before + offset > shown + QUIET_BYTES:
                        shown = before + offset
                        bar.update(shown, f"checking {path.name}")
                before += sizes[number]

    def _read(self, place: _Place) -> bytes:
        if self._lines is not None:
            return self._lines[place.offset]
        with self._paths[place.file].open("rb") as file:
            file.seek(place.offset)
            return file.read(place.size)

    def _where(self, place: _Place) -> str:
        return f"{self._paths[place.file] if self._paths else 'conversation'}, line {place.line}"

    def _check_lengths(self, samples, conversation: Conversation) -> None:
        longest = max(
            len(sample.render(self._tokenizer, conversation.tools, self._config.variant).ids)
            for sample in samples
        )
        check_length(longest, self._config.max_tokens)


def numbered_lines(path: pathlib.Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, first byte, content) of a file's lines that are not empty."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, offset, line
            offset += len(line)


def asked(conversation: Conversation) -> str:
    """What a user asks first: several answers to it stand on one side of the held-out split."""
    messages = conversation.messages
    first = next((m for m in messages if m["role"] == "user"), messages[0])
    return json.dumps(first.get("content"), sort_keys=True)


def check_length(tokens: int, most: int) -> None:
    """ChatError for a sample of more tokens than the most there may be."""
    if tokens > most:
        raise ChatError(f"a sample of it has {tokens:,} tokens, more than {most:,}; shorten it")


# --- filters ---

Verifier = Callable[[Mapping, Conversation], str | None]


class Selected(NamedTuple):
    """A line that is kept: where it stands, its bytes, what it says and its samples' records."""

    place: str
    line: bytes
    conversation: Conversation
    records: list[TokenRecord]


def select(
    source: Iterable[tuple[str, bytes]],
    tokenizer: Tokenizer,
    drop: Callable[[str, str], None],
    *,
    mode: str = "interleaved",
    max_tokens: int = LONGEST,
    verifiers: Sequence[Verifier] = (),
) -> Iterator[Selected]:
    """The lines of (place, line) that can be trained on; drop(place, reason) is told of every other one.

    Reasons are broken turns and anything else that `parse` refuses, conversations that stood before, that teach
    nothing, or of more than max_tokens, and what a verifier says: verifier(the line's object,
    conversation) is a reason, or None. So rejection sampling is a file with several answers to each
    prompt and a verifier of answers.
    """
    seen: dict[bytes, str] = {}
    for place, line in source:
        try:
            conversation = parse(line)
            content = json.dumps([conversation.messages, conversation.tools], sort_keys=True)
            key = hashlib.blake2b(content.encode(), digest_size=16).digest()
            if key in seen:
                raise ChatError(f"the same conversation stands in {seen[key]}; remove one")
            seen[key] = place
            samples = trained(conversation, mode)
            if not samples:
                raise ChatError("no token of it is learnt; remove it, or correct a reply")
            found = [record(sample, conversation, tokenizer) for sample in samples]
            check_length(max(map(len, found)), max_tokens)
            for verifier in verifiers:
                if reason := verifier(json.loads(line), conversation):
                    raise ChatError(reason)
        except ValueError as error:
            drop(place, str(error))
            continue
        yield Selected(place, line, conversation, found)


def answers_rightly(line: Mapping, conversation: Conversation) -> str | None:
    """Verifier: the last number of the last reply is the line's `answer`, or its whole text is."""
    if "answer" not in line:
        return "it has no answer to hold its reply against; add one, or leave this verifier out"
    given = str(conversation.messages[-1].get("content") or "").strip()
    wanted = str(line["answer"]).strip()
    numbers = _NUMBER.findall(given)
    if given == wanted or (numbers and _value(numbers[-1]) == _value(wanted)):
        return None
    return (
        f"its reply ends in {numbers[-1] if numbers else given[-40:]!r}, its answer is {wanted!r}"
    )


def repeats_nothing(line: Mapping, conversation: Conversation) -> str | None:
    """Verifier: no reply has a stretch of `_STRETCH` words more than `_TIMES` times (numbers ours)."""
    del line
    for i, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        parts = (message.get(name) for name in ("reasoning_content", "content"))
        words = " ".join(part for part in parts if isinstance(part, str)).split()
        counts: dict[tuple, int] = {}
        for first in range(len(words) - _STRETCH + 1):
            stretch = tuple(words[first : first + _STRETCH])
            counts[stretch] = counts.get(stretch, 0) + 1
            if counts[stretch] > _TIMES:
                return f"message {i} says {' '.join(stretch)[:80]!r} more than {_TIMES} times"
    return None


VERIFIERS: dict[str, Verifier] = {"answer": answers_rightly, "repetition": repeats_nothing}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_STRETCH, _TIMES = 8, 4


def _value(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def _files(config: ChatSourceConfig) -> list[pathlib.Path]:
    matches = sorted(glob.glob(os.path.expanduser(config.chats), recursive=True))
    paths = [path for path in map(pathlib.Path, matches) if path.is_file()]
    if not paths:
        raise ValueError(f"source {config.name!r}: no file matches; give a jsonl file or a glob")
    return paths
