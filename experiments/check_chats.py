"""Says what is wrong with SFT data, line by line, and what the rest of it would train.

    python -m experiments.check_chats FILE.jsonl [FILE.jsonl ...]

A line that cannot be used, that says the same as one before, or of which no token is learnt is an error, and
the exit code is then 1. Mistakes of the assistant, which stay in the context unlearnt, are told but are none
(glm5_jax/data/conversation.py). Tokens are those of the shipped tokenizer, in the lines' own modes or else
interleaved thinking.
"""

import dataclasses
import hashlib
import json
import pathlib
import sys

from glm5_jax.core.console import ProgressBar
from glm5_jax.data.conversation import parse, records
from glm5_jax.text.chat import ChatError
from glm5_jax.text.tokenizer import Tokenizer

LENGTH = 202_752  # tokens of SFT's longest samples (GLM-5 3.1)


@dataclasses.dataclass
class Count:
    """What the files hold: lines, errors among them, samples, their tokens, those learnt, mistakes, and
    samples longer than LENGTH."""

    lines: int = 0
    errors: int = 0
    samples: int = 0
    tokens: int = 0
    learnt: int = 0
    mistakes: int = 0
    long: int = 0

    def __str__(self) -> str:
        share = self.learnt / max(1, self.tokens)
        return (
            f"{self.lines:,} lines, {self.errors:,} with errors; {self.samples:,} samples of {self.tokens:,} "
            f"tokens, {share:.0%} of them learnt; {self.mistakes:,} mistakes that are not learnt; "
            f"{self.long:,} samples longer than {LENGTH:,} tokens"
        )


def check(
    path: pathlib.Path, tokenizer: Tokenizer, count: Count, seen: dict[bytes, str], tell
) -> None:
    """Adds a file to the count; tell(text) for every line that is wrong or has a mistake. seen: where each
    conversation so far stands, by its hash."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            count.lines += 1
            try:
                conversation = parse(line)
                content = json.dumps([conversation.messages, conversation.tools])
                key = hashlib.blake2b(content.encode(), digest_size=16).digest()
                if key in seen:
                    raise ChatError(f"the same conversation stands in {seen[key]}; remove one")
                seen[key] = where
                found = records(conversation, tokenizer)
                if not found:
                    raise ChatError("no token of it is learnt; remove it, or correct a reply")
            except ValueError as error:
                count.errors += 1
                tell(f"{where}: {error}")
                continue
            for i, mistake in sorted(conversation.mistakes.items()):
                tell(f"{where}: message {i} is not learnt: {mistake}")
            count.mistakes += len(conversation.mistakes)
            count.samples += len(found)
            count.tokens += sum(map(len, found))
            count.learnt += int(sum(record.loss_mask.sum() for record in found))
            long = sum(len(record) > LENGTH for record in found)
            if long:
                tell(f"{where}: {long} samples are longer than {LENGTH:,} tokens")
            count.long += long


def main(arguments: list[str]) -> int:
    """Exit code of the program with these arguments."""
    paths = [pathlib.Path(argument) for argument in arguments]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        what = f"no file {missing[0]}" if missing else "no file given"
        print(
            f"error: {what}; use python -m experiments.check_chats FILE.jsonl ...", file=sys.stderr
        )
        return 2
    tokenizer, count, seen = Tokenizer.default(), Count(), {}
    with ProgressBar(len(paths), unit="file") as bar:
        for done, path in enumerate(paths, start=1):
            check(path, tokenizer, count, seen, bar.print)
            bar.update(done, path.name)
    print(count)
    return 1 if count.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
