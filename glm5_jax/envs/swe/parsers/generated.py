"""Checks parsers that a model wrote, and runs them.

A generated parser is a Python program that reads the log on standard input, and prints a JSON object of names to pass,
fail or skip. It is never executed here: `RunParser` runs it in a sandbox, with 10 s and 256 MiB.

`check_parser` accepts it only if, for each log of the repository,

- its output is such an object, and not empty;
- its counts are the runner's own totals;
- terminal colours and Windows line ends change nothing, and an empty log gives an empty object;
- a planted test that fails is reported as failing;
- a test that gets another name in the log gets it in the output;
- no test's name is a literal of its source.
"""

import ast
import collections
import dataclasses
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from glm5_jax.envs.swe.parsers.report import (
    STATUSES,
    CaseResult,
    ReportError,
    RunOutput,
    RunReport,
    RunTotals,
    Status,
    build_report,
    check_totals,
)

TIME_LIMIT_S = 10.0
MEMORY_BYTES = 256 << 20
MAX_SOURCE_BYTES = 100_000
MAX_OUTPUT_BYTES = 16 << 20
_MIN_LITERAL = 6  # characters of a literal that counts as a test's name

# Runs a source with standard input in a sandbox; returns standard output. Raises ParserRunError.
RunParser = Callable[[str, bytes], Awaitable[bytes]]


class ParserRunError(RuntimeError):
    """Raised if a generated parser fails, exceeds a limit, or writes an error."""


class ParserRejected(ValueError):
    """Raised for a generated parser that fails a check; the text says which, for the model's next attempt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParserLog:
    """Log of a run, with the facts that a parser must find.

    Attributes:
      log: output of the run.
      totals: counts that the runner states.
      failing_test: name of a planted test that fails; None: this run has none.
    """

    log: str
    totals: RunTotals
    failing_test: str | None = None


async def check_parser(source: str, logs: Sequence[ParserLog], run: RunParser) -> None:
    """Raises ParserRejected unless the parser passes all checks on all logs.

    One of the logs must have a planted test. Raises ValueError otherwise.
    """
    if not any(log.failing_test for log in logs):
        raise ValueError("no log has a planted test that fails; run the tests with one")
    _check_source(source)
    try:
        if statuses := read_output(await run(source, b"")):
            raise ParserRejected(
                f"an empty log gives {len(statuses)} tests; it must give an empty object"
            )
        for log in logs:
            await _check_log(source, log, run)
    except (ParserRunError, ReportError) as error:
        raise ParserRejected(str(error)) from None


async def parse_generated(source: str, output: RunOutput, run: RunParser) -> RunReport:
    """Returns the report of a checked parser on a run. Raises ParserRunError and ReportError."""
    statuses = read_output(await run(source, output.log.encode()))
    cases = [CaseResult(name, status) for name, status in statuses.items()]
    return build_report(cases, None, is_crashed=output.is_killed)


def read_output(data: bytes) -> dict[str, Status]:
    """Returns the statuses that a parser printed. Raises ReportError for anything else."""
    if len(data) > MAX_OUTPUT_BYTES:
        raise ReportError(f"the parser printed more than {MAX_OUTPUT_BYTES:,} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"the parser printed no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ReportError(f"the parser printed a {type(value).__name__}; print one object")
    for name, status in value.items():
        if not isinstance(status, str) or status not in STATUSES:
            raise ReportError(f"test {name[:60]!r} is {status!r:.60}; print pass, fail or skip")
    return value


async def _check_log(source: str, log: ParserLog, run: RunParser) -> None:
    statuses = read_output(await run(source, log.log.encode()))
    if not statuses:
        raise ParserRejected("a log with tests gives an empty object")
    check_totals([CaseResult(name, status) for name, status in statuses.items()], log.totals)
    if log.failing_test is not None:
        hits = [name for name in statuses if log.failing_test in name]
        if not hits:
            raise ParserRejected(f"the planted test {log.failing_test!r} is not reported")
        if statuses[hits[0]] != "fail":
            raise ParserRejected(
                f"the planted test {hits[0]!r} fails, and is reported as {statuses[hits[0]]}"
            )
    for change, text in (("terminal colours", _colour(log.log)), ("CRLF", _crlf(log.log))):
        if read_output(await run(source, text.encode())) != statuses:
            raise ParserRejected(f"{change} in the log change the output")
    _check_literals(source, statuses)
    await _check_renaming(source, log.log, statuses, run)


def _check_source(source: str) -> None:
    """Raises ParserRejected unless the source is Python that imports the standard library only."""
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise ParserRejected(f"the source has more than {MAX_SOURCE_BYTES:,} bytes")
    for node in _nodes(source):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for name in names:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                raise ParserRejected(f"it imports {name}; use the standard library only")


def _nodes(source: str) -> Iterator[ast.AST]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ParserRejected(f"the source is not Python: {error}") from None
    return ast.walk(tree)


def _check_literals(source: str, statuses: Mapping[str, Status]) -> None:
    """Raises ParserRejected if a literal of the source holds the name of a test."""
    texts = [
        n.value for n in _nodes(source) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    literals = {text for text in texts if len(text) >= _MIN_LITERAL}
    words = {word for text in literals for word in re.findall(r"\w+", text)}
    for name in statuses:
        last = re.split(r"::|[.#/ >]", name)[-1]
        is_word = len(last) >= _MIN_LITERAL and last in words
        if name in literals or (
            len(name) >= _MIN_LITERAL and any(name in text for text in literals)
        ):
            raise ParserRejected(f"the source holds the name of test {name[:60]!r}")
        if is_word:
            raise ParserRejected(f"the source holds {last[:60]!r}, the name of a test")


async def _check_renaming(
    source: str, log: str, statuses: Mapping[str, Status], run: RunParser
) -> None:
    """Raises ParserRejected if renamed tests do not get their new names, as with a table of hashes of names."""
    words = {name: re.findall(r"\w+", name) for name in statuses}
    counts = collections.Counter(word for parts in words.values() for word in set(parts))
    for name, parts in words.items():
        # A word that only this test has, and that the log holds as a word.
        single = [w for w in parts if counts[w] == 1 and len(w) >= _MIN_LITERAL and not w.isdigit()]
        word = next((w for w in reversed(single) if re.search(rf"\b{re.escape(w)}\b", log)), None)
        if word is None:
            continue
        renamed = f"{word}Qz"
        text = re.sub(rf"\b{re.escape(word)}\b", renamed, log)
        expected = {n.replace(word, renamed) if n == name else n: s for n, s in statuses.items()}
        if read_output(await run(source, text.encode())) != expected:
            raise ParserRejected(
                f"a test that is renamed from {word!r} to {renamed!r} does not get its new name"
            )
        return


def _colour(log: str) -> str:
    """Returns a log with each line in a colour."""
    return "\n".join(f"\x1b[32m{line}\x1b[0m" if line else line for line in log.split("\n"))


def _crlf(log: str) -> str:
    return log.replace("\r\n", "\n").replace("\n", "\r\n")
