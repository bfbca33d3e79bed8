"""Checks SFT data line by line, reports the number of training tokens, and can write the valid lines to a new file.

    python -m experiments.check_chats FILE.jsonl [FILE.jsonl ...] [--write=NEW.jsonl]

Reported, and left out of NEW, are lines

- that cannot be parsed;
- that repeat an earlier line;
- without a token to train on;
- with a sample of more than --max_tokens tokens;
- that a verifier rejects.

--verify=answer keeps lines whose last reply ends in the line's "answer". So a file with several replies to each prompt
is reduced to the right ones (rejection sampling). --verify=repetition rejects replies that repeat themselves.

Unread fields, such as misspelt ones, are listed with their number of lines. The assistant's mistakes, which stay in
the context but outside the loss, are listed too; they are no reason to leave a line out
(glm5_jax/data/conversation.py). The exit code is 1 if a line was left out or none is valid, 2 for a wrong argument.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.arguments import Parser
from glm5_jax.data.chat_data import MAX_TOKENS, VERIFIERS, SelectedLine, filter_lines
from glm5_jax.data.conversation import unread_fields
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.files import read_lines
from glm5_jax.runtime.terminal import make_printable, print_error
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.thinking import MODES
from glm5_jax.text.tokenizer import Tokenizer


def main(arguments: list[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        missing = [path for path in options.files if not path.is_file()]
        if missing:
            if missing[0].is_dir():
                raise ValueError(
                    f"{missing[0]} is a folder; give jsonl files, as {missing[0]}/*.jsonl"
                )
            raise ValueError(f"no file {missing[0]}; give jsonl files")
        if options.write and options.write.exists():
            raise ValueError(f"{options.write} exists; give --write a new name, or remove it")
        if options.write and not options.write.parent.is_dir():
            raise ValueError(f"no folder {options.write.parent} for --write; make it first")
        if options.max_tokens < 1:
            raise ValueError(f"max_tokens is {options.max_tokens}; it must be positive")
        path = options.tokenizer
        tokenizer = Tokenizer.load(path) if path else Tokenizer.default()
        # A tokenizer without the layout's markers is one error, not an error of every line.
        render_chat([{"role": "user", "content": ""}], tokenizer, variant=options.variant)
    except ValueError as error:
        print_error(error)
        return 2
    return _check(options, tokenizer)


@dataclasses.dataclass
class _Counts:
    """Counts of the lines read so far.

    Attributes:
      lines, dropped, num_valid: lines; those that are left out; those that are valid.
      samples, tokens, trained: samples of the valid lines, their tokens, and those that are trained on.
      mistakes: mistakes in the valid lines.
      fields: (first location, number of lines) of each field that is not read.
      has_reasoning: whether a reply of a valid line has reasoning.
    """

    lines: int = 0
    dropped: int = 0
    num_valid: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    mistakes: int = 0
    fields: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    has_reasoning: bool = False

    def add(self, chat: SelectedLine) -> None:
        """Counts a valid line."""
        for name in unread_fields(chat.line):
            first, count = self.fields.get(name, (chat.place, 0))
            self.fields[name] = first, count + 1
        self.num_valid += 1
        self.mistakes += len(chat.conversation.mistakes)
        self.samples += len(chat.counts)
        self.tokens += sum(count for count, _ in chat.counts)
        self.trained += sum(count for _, count in chat.counts)
        messages = chat.conversation.messages
        self.has_reasoning |= any(message.get("reasoning_content") for message in messages)

    def print(self) -> None:
        """Prints the fields that are not read, and the counts."""
        for name, (location, count) in sorted(self.fields.items()):
            line = f"the field {name} is not read: {count:,} lines have it, the first is {location}"
            print(make_printable(line))
        # The server's default is a reply with thinking, which a model of such chats has never seen.
        if self.num_valid and not self.has_reasoning:
            print('no reply has reasoning; request replies without it: reasoning_effort="none"')
        print(
            f"{self.lines:,} lines, {self.dropped:,} of them left out; {self.samples:,} samples of {self.tokens:,} "
            f"tokens, {self.trained / max(1, self.tokens):.0%} of them trained on; {self.mistakes:,} mistakes that are "
            "not trained on"
        )


def _check(options, tokenizer: Tokenizer) -> int:
    total = sum(path.stat().st_size for path in options.files)
    counts = _Counts()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(ProgressBar(total, unit="byte"))
        new = options.write and options.write.with_name(f"{options.write.name}.new")
        out = new and stack.enter_context(new.open("wb"))
        if new:
            stack.callback(new.unlink, missing_ok=True)

        def drop(location: str, reason: str) -> None:
            counts.dropped += 1
            bar.print(f"{location}: {reason}")

        def located_lines() -> Iterator[tuple[str, bytes]]:
            shown = 0
            for location, line, done in _lines(options.files, bar.print):
                counts.lines += 1
                if done >= shown + 2**20:
                    shown = done
                    bar.update(done, location)
                yield location, line

        # Report and count each valid line, and write it if there is an output file.
        for chat in filter_lines(
            located_lines(),
            tokenizer,
            drop,
            mode=options.mode,
            variant=options.variant,
            max_tokens=options.max_tokens,
            verifiers=[VERIFIERS[name] for name in options.verify],
        ):
            for i, mistake in sorted(chat.conversation.mistakes.items()):
                bar.print(f"{chat.place}: message {i} is not trained on: {mistake}")
            if num_after_reply := _num_after_last_reply(chat.conversation.messages):
                bar.print(
                    f"{chat.place}: {num_after_reply} messages after the last reply are not trained on"
                )
            counts.add(chat)
            if out:
                out.write(chat.line.rstrip(b"\r\n") + b"\n")
        bar.update(total, "read")
        if out:
            out.close()
            os.replace(new, options.write)
    counts.print()
    if out:
        print(f"{counts.num_valid:,} lines written to {options.write}")
    return 0 if counts.num_valid and not counts.dropped else 1


def _num_after_last_reply(messages: Sequence[Mapping]) -> int:
    roles = [message["role"] for message in reversed(messages)]
    return roles.index("assistant")


def _lines(
    files: list[pathlib.Path], report: Callable[[str], None]
) -> Iterator[tuple[str, bytes, int]]:
    """Yields (location, line, bytes before it) of all files."""
    before = 0
    for path in files:
        empty = True
        for line in read_lines(path):
            empty = False
            yield f"{path}, line {line.number}", line.content, before + line.offset
        if empty:
            report(f"{path}: has no line")
        before += path.stat().st_size


def _parser() -> Parser:
    parser = Parser("experiments.check_chats", __doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.jsonl")
    parser.add_argument("--write", type=pathlib.Path, help="new file for the valid lines")
    parser.add_argument("--max_tokens", type=int, default=MAX_TOKENS, help="maximum of a sample")
    parser.add_argument(
        "--verify", nargs="+", default=(), choices=VERIFIERS, help="checks that reject lines"
    )
    parser.add_argument(
        "--mode", default="interleaved", choices=MODES, help="thinking mode of lines without one"
    )
    parser.add_argument(
        "--variant", default="glm5", choices=VARIANTS, help="variant of the chat layout"
    )
    parser.add_argument(
        "--tokenizer", help="a tokenizer.json or its folder; default: the shipped one"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
