"""Says what is wrong with SFT data, line by line, what the rest of it would train, and writes the rest.

    python -m experiments.check_chats FILE.jsonl [FILE.jsonl ...] [--write=NEW.jsonl]

Told and left out of NEW: lines that cannot be used, that say the same as one before, of which no token is learnt,
with a sample of more than --max_tokens tokens, and that a verifier rejects. --verify=answer keeps lines
whose last reply ends in the line's "answer", so that a file with several replies to each prompt becomes the right
ones (rejection sampling); --verify=repetition rejects replies that go round in circles.

Fields that nothing reads, such as misspelt ones, are told with how many lines have them. Mistakes of the
assistant, which stay in the context unlearnt, are told but are no reason (glm5_jax/data/conversation.py). The exit code is 1 if anything was left out, 2 for a wrong argument.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.arguments import Parser
from glm5_jax.core.console import ProgressBar
from glm5_jax.data.chat_data import LONGEST, VERIFIERS, numbered_lines, select
from glm5_jax.data.conversation import unread
from glm5_jax.text.chat import render_chat
from glm5_jax.text.layouts import VARIANTS
from glm5_jax.text.thinking import MODES
from glm5_jax.text.tokenizer import Tokenizer


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments."""
    try:
        options = _parser().parse_args(arguments)
        missing = [path for path in options.files if not path.is_file()]
        if missing:
            raise ValueError(f"no file {missing[0]}; give jsonl files")
        if options.write and options.write.exists():
            raise ValueError(f"{options.write} exists; give --write a new name, or remove it")
        if options.write and not options.write.parent.is_dir():
            raise ValueError(f"no folder {options.write.parent} for --write; make it first")
        if options.max_tokens < 1:
            raise ValueError(f"max_tokens is {options.max_tokens}; it must be positive")
        path = options.tokenizer
        tokenizer = Tokenizer.load(path) if path else Tokenizer.default()
        # Markers that it lacks are its own fault, not every line's.
        render_chat([{"role": "user", "content": ""}], tokenizer, variant=options.variant)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _check(options, tokenizer)


def _check(options, tokenizer: Tokenizer) -> int:
    total = sum(path.stat().st_size for path in options.files)
    fields: dict[str, list] = {}  # that are not read: the first place, and how many lines
    lines = dropped = kept = samples = tokens = learnt = mistakes = 0
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(ProgressBar(total, unit="byte"))
        new = options.write and options.write.with_name(f"{options.write.name}.new")
        out = new and stack.enter_context(new.open("wb"))
        if new:
            stack.callback(new.unlink, missing_ok=True)

        def drop(place: str, reason: str) -> None:
            nonlocal dropped
            dropped += 1
            bar.print(f"{place}: {reason}")

        def places() -> Iterator[tuple[str, bytes]]:
            nonlocal lines
            shown = 0
            for place, line, done in _lines(options.files, bar.print):
                lines += 1
                if done >= shown + 2**20:
                    shown = done
                    bar.update(done, place)
                yield place, line

        for found in select(
            places(),
            tokenizer,
            drop,
            mode=options.mode,
            variant=options.variant,
            max_tokens=options.max_tokens,
            verifiers=[VERIFIERS[name] for name in options.verify],
        ):
            for i, mistake in sorted(found.conversation.mistakes.items()):
                bar.print(f"{found.place}: message {i} is not learnt: {mistake}")
            if behind := _behind_the_last_reply(found.conversation.messages):
                bar.print(f"{found.place}: {behind} messages behind the last reply train nothing")
            for name in unread(found.line):
                fields.setdefault(name, [found.place, 0])[1] += 1
            kept, mistakes = kept + 1, mistakes + len(found.conversation.mistakes)
            samples += len(found.records)
            tokens += sum(map(len, found.records))
            learnt += int(sum(record.loss_mask.sum() for record in found.records))
            if out:
                out.write(found.line.rstrip(b"\r\n") + b"\n")
        bar.update(total, "read")
        if out:
            out.close()
            os.replace(new, options.write)
    for name, (place, count) in sorted(fields.items()):
        print(f"the field {name} is not read: {count:,} lines have it, the first is {place}")
    print(
        f"{lines:,} lines, {dropped:,} of them left out; {samples:,} samples of {tokens:,} tokens, "
        f"{learnt / max(1, tokens):.0%} of them learnt; {mistakes:,} mistakes that are not learnt"
    )
    if out:
        print(f"{kept:,} lines written to {options.write}")
    return 1 if dropped else 0


def _behind_the_last_reply(messages: Sequence[Mapping]) -> int:
    roles = [message["role"] for message in reversed(messages)]
    return roles.index("assistant")


def _lines(
    files: list[pathlib.Path], tell: Callable[[str], None]
) -> Iterator[tuple[str, bytes, int]]:
    """(place, line, bytes read before it) of all files."""
    before = 0
    for path in files:
        empty = True
        for number, offset, line in numbered_lines(path):
            empty = False
            yield f"{path}, line {number}", line, before + offset
        if empty:
            tell(f"{path}: has no line")
        before += path.stat().st_size


def _parser() -> Parser:
    parser = Parser("experiments.check_chats", __doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.jsonl")
    parser.add_argument("--write", type=pathlib.Path, help="where the lines that are right go")
    parser.add_argument("--max_tokens", type=int, default=LONGEST, help="of a sample")
    parser.add_argument("--verify", nargs="+", default=(), choices=VERIFIERS, help="what to reject")
    parser.add_argument("--mode", default="interleaved", choices=MODES, help="of lines without one")
    parser.add_argument("--variant", default="glm5", choices=VARIANTS, help="of the layout")
    parser.add_argument("--tokenizer", help="a tokenizer.json or its folder; default: the shipped")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
