"""Checks of generated parsers, whose sources here run in this process."""

import asyncio
import contextlib
import io
import sys
import zlib

import pytest

from glm5_jax.envs.swe.parsers import ReportError, RunOutput, RunTotals
from glm5_jax.envs.swe.parsers.generated import (
    ParserLog,
    ParserRejected,
    ParserRunError,
    check_parser,
    parse_generated,
    read_output,
)

LOG = """suite alpha
  [ok]: adds_numbers (3 ms)
  [err]: divides_numbers in tests/math.tcl
  [skip]: draws_pictures
  [err]: canary_8f3a in tests/canary.tcl
done
"""
LOGS = [ParserLog(log=LOG, totals=RunTotals(tests=4, failed=2), failing_test="canary_8f3a")]
GOOD = r"""
import json, re, sys
text = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdin.read()).replace("\r", "")
words = {"ok": "pass", "err": "fail", "skip": "skip"}
tests = {}
for word, name in re.findall(r"^ *\[(ok|err|skip)\]: (\S+)", text, re.M):
    tests[name] = words[word]
print(json.dumps(tests))
"""


async def run_here(source: str, data: bytes) -> bytes:
    """Runs a source of this file in this process, in place of a sandbox."""
    out, stdin = io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(data.decode(), newline="")
    try:
        with contextlib.redirect_stdout(out):
            exec(source, {})
    except Exception as error:
        raise ParserRunError(f"the parser raised {error!r}") from None
    finally:
        sys.stdin = stdin
    return out.getvalue().encode()


def check(source: str, logs=LOGS) -> None:
    asyncio.run(check_parser(source, logs, run_here))


def test_accepts_good_parser():
    check(GOOD)
    report = asyncio.run(parse_generated(GOOD, RunOutput(log=LOG, exit_code=1), run_here))
    assert report.names("fail") == ["divides_numbers", "canary_8f3a"]
    assert report.names("skip") == ["draws_pictures"]


HASH = "__import__('zlib').crc32(n.encode())"
HASHES = {
    zlib.crc32(n) for n in (b"adds_numbers", b"divides_numbers", b"draws_pictures", b"canary_8f3a")
}
BAD = {
    "other words": (GOOD.replace('"fail"', '"FAILED"'), "is 'FAILED'; print pass, fail or skip"),
    "swaps pass and fail": (
        GOOD.replace('"ok": "pass", "err": "fail"', '"ok": "fail", "err": "pass"'),
        "states failed = 2, and its report lists 1",
    ),
    "drops skip": (
        GOOD.replace("(ok|err|skip)", "(ok|err)"),
        "states tests = 4, and its report lists 3",
    ),
    "ignores failures": (GOOD.replace("(ok|err|skip)", "(ok|skip)"), "states tests = 4"),
    "first line only": (GOOD.replace("re.M)", "re.M)[:1]"), "states tests = 4"),
    "one harness test": (
        "import json, sys\nprint(json.dumps({'__test_harness__': 'fail'} if sys.stdin.read() else {}))\n",
        "states tests = 4, and its report lists 1",
    ),
    "keeps colours": (
        GOOD.replace(r"\x1b\[[0-9;]*m", "never"),
        "terminal colours in the log change the output",
    ),
    "keeps carriage returns": (
        GOOD.replace('.replace("\\r", "")', "").replace(r"(\S+)", "([^ \\n]+)"),
        "CRLF in the log change the output",
    ),
    "answers without a log": (
        GOOD.replace("tests = {}", "tests = {'x': 'pass'}"),
        "an empty log gives 1 tests",
    ),
    "holds a name": (
        GOOD + "\nknown = ['divides_numbers']\n",
        "holds the name of test 'divides_numbers'",
    ),
    "holds a name in a text": (
        GOOD + "\nknown = 'x adds_numbers y'\n",
        "holds the name of test 'adds_numbers'",
    ),
    "has a table of hashes": (
        GOOD.replace(
            "print(", f"tests = {{n: s for n, s in tests.items() if {HASH} in {HASHES}}}\nprint("
        ),
        "does not get its new name",
    ),
    "imports others": ("import numpy\n" + GOOD, "it imports numpy; use the standard library only"),
    "is no Python": ("print(", "the source is not Python"),
    "raises": ("raise OSError('disk')", "the parser raised OSError('disk')"),
    "prints no JSON": ("print('hello')", "the parser printed no JSON"),
    "prints a list": ("print([])", "the parser printed a list"),
    "sees nothing": ("print({})", "a log with tests gives an empty object"),
}


@pytest.mark.parametrize("name", BAD)
def test_rejects_parser(name):
    source, message = BAD[name]
    with pytest.raises(ParserRejected) as error:
        check(source)
    assert message in str(error.value)


def test_rejects_parser_that_passes_planted_failure():
    # The totals agree, since another test is reported as failing in its place.
    source = GOOD.replace(
        "print(", "tests['canary' + '_8f3a'] = 'pass'; tests['adds' + '_numbers'] = 'fail'\nprint("
    )
    source = source.replace("tests['canary", "if text: tests['canary")
    with pytest.raises(
        ParserRejected, match="planted test 'canary_8f3a' fails, and is reported as pass"
    ):
        check(source)


def test_needs_log_with_planted_failure():
    with pytest.raises(ValueError, match="no log has a planted test"):
        check(GOOD, [ParserLog(log=LOG, totals=RunTotals(tests=4))])


def test_rejects_large_output():
    with pytest.raises(ReportError, match="printed more than"):
        read_output(b" " * (17 << 20))
