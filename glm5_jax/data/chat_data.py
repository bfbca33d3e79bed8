"""Conversations as a source of a mixture: files of jsonl, or generated ones, a record for every sample.

What is wrong with a line is said before training begins, and nothing is left out: `select` (the command
experiments/check_chats.py) is what filters, and says what it drops.
"""

import collections
import contextlib
import dataclasses
import decimal
import glob
import hashlib
import json
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.core.console import ProgressBar
from glm5_jax.data.chat_tasks import ChatTaskConfig, lines
from glm5_jax.data.conversation import (
    Conversation,
    parse,
    record,
    records,
    trained,
    unlearnt,
)
from glm5_jax.data.record import TokenRecord
from glm5_jax.data.sources import held_out
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.messages import ChatError
from glm5_jax.text.thinking import MODES, Sample, SampleRenderer
from glm5_jax.text.tokenizer import Tokenizer

LONGEST = 202_752  # tokens of SFT's longest samples (GLM-5 3.1)
CATEGORIES = ("general", "reasoning", "coding", "agent")  # of SFT's data (GLM-5 3.1)
QUIET_BYTES = 2**25  # a second or so of checking, before there is a progress bar
BYTES_PER_TOKEN = 4  # a guess, for how many conversations are read ahead
_AROUND_TOOLS = 1000  # bytes
_COMMAND = "python -m experiments.check_chats"


@dataclasses.dataclass(frozen=True)
class ChatSourceConfig:
    """Conversations of one category as a source of a mixture.

    Attributes:
      chats: a jsonl file or a glob (conversation.py says what a line is), or what to generate.
      category: one of `CATEGORIES`; a name for metrics and messages.
      mode: of thinking, for lines that name none.
      weight: the source's share of the rows, relative to the other sources; the paper prints none.
      max_tokens: that a sample may have; rows must hold it whole. None: a row's.
      variant: of the layout (text/chat.py).
      mask_errors: whether the assistant's mistakes are left out of the loss.
    """

    chats: str | ChatTaskConfig
    category: str = "general"
    mode: str = "interleaved"
    weight: float = 1.0
    max_tokens: int | None = None
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
        if self.mode == "preserved" and not VARIANTS[self.variant].keeps:
            raise ValueError(f"mode is 'preserved'; {self.variant} cannot keep earlier reasoning")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 2, or None")

    @property
    def name(self) -> str:
        """How messages and metrics call the source."""
        what = self.chats if isinstance(self.chats, str) else self.chats.name
        return f"{self.category}:{what}:{self.mode}"

    @property
    def length(self) -> int:
        """Tokens that a row must have."""
        return self.max_tokens or 0

    def open(
        self, tokenizer: Tokenizer, fraction: float, *, training: bool, row: int = LONGEST
    ) -> "Chats":
        """The samples of one side, for rows of so many tokens; ValueError names the first line that is wrong,
        or says that there is none."""
        most = self.max_tokens or row
        return Chats(self, tokenizer, fraction, most, training=training)


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
        self,
        config: ChatSourceConfig,
        tokenizer: Tokenizer,
        fraction: float,
        max_tokens: int,
        *,
        training: bool,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._lines, self._paths = None, []
        if isinstance(config.chats, ChatTaskConfig):
            self._lines = lines(config.chats, config.mode)
        else:
            self._paths = _files(config)
        places, wrong, num_bytes, seen = [], [], 0, 0
        for place, line in self._everything():
            try:
                seen += 1
                conversation = parse(line)
                samples = trained(conversation, config.mode, config.mask_errors, config.variant)
                if not samples:
                    raise ChatError(unlearnt(conversation))
                if _bytes_at_most(line, conversation) > max_tokens:
                    check_length(max(map(self._tokens(conversation), samples)), max_tokens)
            except ValueError as error:
                wrong.append(f"{self._where(place)}: {error}")
                continue
            if held_out(asked(conversation), fraction) != training:
                num_bytes += len(line)
                places += [place._replace(sample=i) for i in range(len(samples))]
        if wrong:
            more = f" (and {len(wrong) - 1} lines more)" if len(wrong) > 1 else ""
            raise ValueError(
                f"source {config.name!r}: {wrong[0]}{more}; {_COMMAND} FILE --write=NEW "
                f"--max_tokens={max_tokens} lists them and writes what is right"
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
        samples = trained(conversation, config.mode, config.mask_errors, config.variant)
        renderer = self._renderer(conversation)
        return record(samples[place.sample], conversation, renderer, mask_errors=config.mask_errors)

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

    def _renderer(self, conversation: Conversation) -> SampleRenderer:
        return SampleRenderer(self._tokenizer, conversation.tools, self._config.variant)

    def _tokens(self, conversation: Conversation) -> Callable[[Sample], int]:
        renderer = self._renderer(conversation)
        return lambda sample: len(renderer.render(sample).ids)


def _bytes_at_most(line: bytes, conversation: Conversation) -> int:
    """At least as many as the bytes, so the tokens, of a conversation that is laid out."""
    calls = any(message.get("tool_calls") for message in conversation.messages)
    if conversation.tools is None and not calls:
        return len(line)
    # Around tools stands a text of its own, and JSON within is written with blanks.
    return _AROUND_TOOLS + 2 * len(line)


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
    return unicodedata.normalize("NFC", first["content"]).strip()


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
    variant: str = "glm5",
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
            key = hashlib.blake2b(conversation.key.encode(), digest_size=16).digest()
            if key in seen:
                raise ChatError(f"the same conversation stands in {seen[key]}; remove one")
            found = records(conversation, tokenizer, mode=mode, variant=variant)
            if not found:
                raise ChatError(unlearnt(conversation))
            check_length(max(map(len, found)), max_tokens)
            for verifier in verifiers:
                if reason := verifier(json.loads(line), conversation):
                    raise ChatError(reason)
        except ValueError as error:
            drop(place, str(error))
            continue
        seen[key] = place
        yield Selected(place, line, conversation, found)


def answers_rightly(line: Mapping, conversation: Conversation) -> str | None:
    """Verifier: the last number of the last reply is the line's `answer`, or its whole text is."""
    if line.get("answer") is None:
        return "it has no answer to hold its reply against; add one, or leave this verifier out"
    replies = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
    given, wanted = replies[-1].strip(), str(line["answer"]).strip()
    numbers = _NUMBER.findall(given)
    if given == wanted or (numbers and _value(numbers[-1]) == _value(wanted)):
        return None
    return (
        f"its reply ends in {numbers[-1] if numbers else given[-40:]!r}, its answer is {wanted!r}"
    )


def repeats_nothing(line: Mapping, conversation: Conversation) -> str | None:
    """Verifier: no reply says the same `_STRETCH` characters, blanks left out, more than `_TIMES` times
    (numbers ours)."""
    del line
    for i, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        parts = [message.get("reasoning_content", ""), message["content"]]
        parts += [
            json.dumps(c["arguments"], ensure_ascii=False) for c in message.get("tool_calls", ())
        ]
        for text in ("".join(part.split()) for part in parts):
            counts = collections.Counter(
                text[first : first + _STRETCH] for first in range(len(text) - _STRETCH + 1)
            )
            stretch, times = max(counts.items(), key=lambda x: x[1], default=("", 0))
            # What repeats a shorter piece, as a row of dashes does, counts once for each of its length.
            if times > _TIMES and len(set(stretch)) > 2:
                return f"message {i} says {stretch!r} {times} times"
    return None


VERIFIERS: dict[str, Verifier] = {"answer": answers_rightly, "repetition": repeats_nothing}
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
_STRETCH, _TIMES = 30, 4


def _value(text: str) -> decimal.Decimal | str:
    try:
        return decimal.Decimal(text.replace(",", ""))
    except decimal.InvalidOperation:
        return text


def _files(config: ChatSourceConfig) -> list[pathlib.Path]:
    matches = sorted(glob.glob(os.path.expanduser(config.chats), recursive=True))
    paths = [path for path in map(pathlib.Path, matches) if path.is_file()]
    if not paths:
        raise ValueError(f"source {config.name!r}: no file matches; give a jsonl file or a glob")
    return paths
