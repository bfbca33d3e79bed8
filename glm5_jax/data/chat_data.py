"""Reads conversations as a source of a mixture: jsonl files or generated ones, a record for every sample.

Opening a source raises an error for an invalid line, so that training neither fails later nor drops lines. `filter_lines`
(the command experiments/check_chats.py) filters a file, and reports what it drops.
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

from glm5_jax.data.chat_tasks import ChatTaskConfig, make_lines
from glm5_jax.data.conversation import (
    Conversation,
    make_record,
    parse_line,
    trained_samples,
    untrainable_reason,
)
from glm5_jax.data.record import TokenRecord
from glm5_jax.data.sources import is_held_out
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.files import read_line, read_lines
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.messages import ChatError
from glm5_jax.text.thinking import MODES, Sample, SampleRenderer
from glm5_jax.text.tokenizer import Tokenizer

MAX_TOKENS = 202_752  # of the longest samples of SFT (GLM-5 3.1)
CATEGORIES = ("general", "reasoning", "coding", "agent")  # of SFT's data (GLM-5 3.1)
QUIET_BYTES = 2**25  # about a second of checking, before a progress bar appears
BYTES_PER_TOKEN = 4  # an estimate, for the number of prefetched conversations
_TOOLS_PROMPT_BYTES = 1000  # upper bound of the text around tools
_COMMAND = "python -m experiments.check_chats"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatSourceConfig:
    """Conversations of one category as a source of a mixture. Raises ValueError if a value is out of range.

    Attributes:
      chats: jsonl file or glob (see conversation.py for lines), or options of generated conversations.
      category: one of `CATEGORIES`, for the names of metrics and errors.
      mode: mode of thinking for lines without one.
      weight: share of the rows, relative to the other sources; the paper prints none.
      max_tokens: maximum tokens of a sample, which a row must hold; None: the length of a row.
      variant: name of the layout (text/chat.py).
      mask_errors: whether the assistant's mistakes are masked in the loss.
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
        if self.mode == "preserved" and not VARIANTS[self.variant].keeps_reasoning:
            raise ValueError(f"mode is 'preserved'; {self.variant} cannot keep earlier reasoning")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 2, or None")

    @property
    def name(self) -> str:
        """The name of the source in errors and metrics."""
        what = self.chats if isinstance(self.chats, str) else self.chats.name
        return f"{self.category}:{what}:{self.mode}"

    @property
    def length(self) -> int:
        """The minimum tokens of a row; 0: no minimum."""
        return self.max_tokens or 0

    def open(
        self, tokenizer: Tokenizer, fraction: float, *, training: bool, row: int = MAX_TOKENS
    ) -> "ChatSource":
        """Opens the samples of one side of the held-out split.

        fraction: share of held-out conversations. row: length of a row, in tokens. Raises ValueError with the first
        invalid line, or if the side has no conversation.
        """
        max_tokens = self.max_tokens or row
        return ChatSource(self, tokenizer, fraction, max_tokens, training=training)


class _Location(NamedTuple):
    """Location of a sample.

    Attributes:
      file: index of its file.
      line: line number, from 1.
      offset, size: offset and size of the line, in bytes; of generated lines, offset is the index.
      sample: index of the sample in the conversation.
    """

    file: int
    line: int
    offset: int
    size: int
    sample: int


class ChatSource:
    """Random-access sequence of the records of one side of a source's split.

    Opening parses every line, and renders those that may be too long.
    """

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
            self._lines = make_lines(config.chats, config.mode)
        else:
            self._paths = _files(config.name, config.chats)
        # Parse every line, and collect the locations of the samples of this side.
        places, wrong, num_bytes, seen = [], [], 0, 0
        for place, line in self._all_lines():
            try:
                seen += 1
                conversation = parse_line(line)
                samples = trained_samples(
                    conversation, config.mode, config.mask_errors, config.variant
                )
                if not samples:
                    raise ChatError(untrainable_reason(conversation))
                if _max_bytes(line, conversation) > max_tokens:
                    check_length(max(map(self._tokens(conversation), samples)), max_tokens)
            except ValueError as error:
                wrong.append(f"{self._describe(place)}: {error}")
                continue
            if is_held_out(first_user_text(conversation), fraction) != training:
                num_bytes += len(line)
                places += [place._replace(sample=i) for i in range(len(samples))]
        # Errors.
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
        self._locations = np.array(places, np.int64)
        self.mean_tokens = max(1, num_bytes // BYTES_PER_TOKEN // len(places))

    def __len__(self) -> int:
        return len(self._locations)

    def __getitem__(self, index: int) -> TokenRecord:
        config, place = self._config, _Location(*self._locations[index].tolist())
        conversation = parse_line(self._read(place))
        samples = trained_samples(conversation, config.mode, config.mask_errors, config.variant)
        renderer = self._renderer(conversation)
        return make_record(
            samples[place.sample], conversation, renderer, mask_errors=config.mask_errors
        )

    def conversation(self, index: int) -> Conversation:
        """Returns the conversation of sample `index`."""
        return parse_line(self._read(_Location(*self._locations[index].tolist())))

    def _all_lines(self) -> Iterator[tuple[_Location, bytes]]:
        """Yields (location, line) of every line, with a progress bar for large files."""
        if self._lines is not None:
            for number, line in enumerate(self._lines):
                yield _Location(0, number + 1, number, len(line), 0), line
        sizes = [path.stat().st_size for path in self._paths]
        before = shown = 0
        total = sum(sizes)
        bar = ProgressBar(total, unit="byte") if total > QUIET_BYTES else None
        with bar or contextlib.nullcontext():
            for number, path in enumerate(self._paths):
                for line, offset, size, content in read_lines(path):
                    yield _Location(number, line, offset, size, 0), content
                    if bar is not None and before + offset > shown + QUIET_BYTES:
                        shown = before + offset
                        bar.update(shown, f"checking {path.name}")
                before += sizes[number]

    def _read(self, place: _Location) -> bytes:
        if self._lines is not None:
            return self._lines[place.offset]
        return read_line(self._paths[place.file], place.offset, place.size)

    def _describe(self, place: _Location) -> str:
        return f"{self._paths[place.file] if self._paths else 'conversation'}, line {place.line}"

    def _renderer(self, conversation: Conversation) -> SampleRenderer:
        return SampleRenderer(self._tokenizer, conversation.tools, self._config.variant)

    def _tokens(self, conversation: Conversation) -> Callable[[Sample], int]:
        renderer = self._renderer(conversation)
        return lambda sample: renderer.count(sample)[0]


def _max_bytes(line: bytes, conversation: Conversation) -> int:
    """Returns an upper bound of the bytes, hence of the tokens, of a rendered conversation."""
    calls = any(message.get("tool_calls") for message in conversation.messages)
    if conversation.tools is None and not calls:
        return len(line)
    # The layout adds a text around tools, and writes JSON with blanks.
    return _TOOLS_PROMPT_BYTES + 2 * len(line)


def first_user_text(conversation: Conversation) -> str:
    """Returns the first user message, so that several answers to it are on one side of the held-out split."""
    messages = conversation.messages
    first = next((m for m in messages if m["role"] == "user"), messages[0])
    return unicodedata.normalize("NFC", first["content"]).strip()


def check_length(tokens: int, max_tokens: int) -> None:
    """Raises ChatError for a sample of more than max_tokens tokens."""
    if tokens > max_tokens:
        raise ChatError(
            f"a sample of it has {tokens:,} tokens, more than {max_tokens:,}; shorten it"
        )


# --- filters ---

Verifier = Callable[[Mapping, Conversation], str | None]


class SelectedLine(NamedTuple):
    """Line that passed the filters.

    Attributes:
      place: file and number of the line.
      line: its bytes.
      conversation: parsed conversation.
      counts: (tokens, trained tokens) of each of its samples.
    """

    place: str
    line: bytes
    conversation: Conversation
    counts: list[tuple[int, int]]


def filter_lines(
    source: Iterable[tuple[str, bytes]],
    tokenizer: Tokenizer,
    drop: Callable[[str, str], None],
    *,
    mode: str = "interleaved",
    variant: str = "glm5",
    max_tokens: int = MAX_TOKENS,
    verifiers: Sequence[Verifier] = (),
) -> Iterator[SelectedLine]:
    """Yields the lines of (place, line) that can be trained on, and calls drop(place, reason) for the others.

    Reasons for dropping a line are:

    - `parse_line` rejects it.
    - An earlier line has the same conversation.
    - It has no token to train on.
    - A sample has more than max_tokens tokens.
    - A verifier rejects it: verifier(object of the line, conversation) returns a reason, or None.

    So rejection sampling needs a file with several answers to each prompt, and a verifier of answers.
    """
    seen: dict[bytes, str] = {}
    for place, line in source:
        try:
            conversation = parse_line(line)
            key = hashlib.blake2b(conversation.key.encode(), digest_size=16).digest()
            if key in seen:
                raise ChatError(f"the same conversation is in {seen[key]}; remove one")
            samples = trained_samples(conversation, mode, variant=variant)
            if not samples:
                raise ChatError(untrainable_reason(conversation))
            renderer = SampleRenderer(tokenizer, conversation.tools, variant)
            counts = [renderer.count(sample, conversation.mistakes) for sample in samples]
            check_length(max(counts)[0], max_tokens)
            for verifier in verifiers:
                if reason := verifier(json.loads(line), conversation):
                    raise ChatError(reason)
        except ValueError as error:
            drop(place, str(error))
            continue
        seen[key] = place
        yield SelectedLine(place, line, conversation, counts)


def check_answer(line: Mapping, conversation: Conversation) -> str | None:
    """Verifies that the last number of the last reply, or its full text, is the line's `answer`."""
    if line.get("answer") is None:
        return "it has no answer to compare its reply with; add one, or leave out this verifier"
    replies = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
    reply, answer = replies[-1].strip(), str(line["answer"]).strip()
    numbers = _NUMBER.findall(reply)
    if reply == answer or (numbers and _value(numbers[-1]) == _value(answer)):
        return None
    return (
        f"its reply ends in {numbers[-1] if numbers else reply[-40:]!r}, its answer is {answer!r}"
    )


def check_repetition(line: Mapping, conversation: Conversation) -> str | None:
    """Verifies that no reply repeats the same `_WINDOW` characters, without blanks, more than `_MAX_REPEATS` times.

    Both numbers are ours.
    """
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
                text[first : first + _WINDOW] for first in range(len(text) - _WINDOW + 1)
            )
            stretch, times = max(counts.items(), key=lambda x: x[1], default=("", 0))
            # A repeated shorter text, such as a row of dashes, counts once per character.
            if times > _MAX_REPEATS and len(set(stretch)) > 2:
                return f"message {i} repeats {stretch!r} {times} times"
    return None


VERIFIERS: dict[str, Verifier] = {"answer": check_answer, "repetition": check_repetition}
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
_WINDOW, _MAX_REPEATS = 30, 4


def _value(text: str) -> decimal.Decimal | str:
    try:
        return decimal.Decimal(text.replace(",", ""))
    except decimal.InvalidOperation:
        return text


def _files(source: str, pattern: str) -> list[pathlib.Path]:
    matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = [path for path in map(pathlib.Path, matches) if path.is_file()]
    if not paths:
        raise ValueError(f"source {source!r}: no file matches; give a jsonl file or a glob")
    if table := next((path for path in paths if path.suffix == ".parquet"), None):
        raise ValueError(
            f'source {source!r}: {table} is a table, and conversations are lines of JSON; convert it: python -c "import '
            f"json, pyarrow.parquet as p; print(*map(json.dumps, p.read_table('{table}').to_pylist()), sep='\\n')\" "
            ">chats.jsonl"
        )
    return paths
