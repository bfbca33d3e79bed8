"""No file has more words or names of a private dialect than the baseline allows."""

import json
import pathlib

import pytest

from tests.contracts import language

REFUSED = '''"""What a module is for."""
# whoever comes here is told


class Found:
    """A class of which nothing is wrong."""

    asked = 1


def told(own, most_rows=2):
    """Returns what was learnt. Of those nothing."""
    given, result = own, most_rows
    for whole in result:
        given.here = whole
'''
PLAIN = '''"""Reads records.

The whole file is given to a reader, which is found by its suffix.
"""


def read_records(path, max_rows=2):
    """Returns the records of `path` as they are kept there."""
    result = path.given
    return result
'''


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a file and returns its path."""

    def write_file(text: str, name: str = "module.py") -> pathlib.PurePosixPath:
        (tmp_path / name).write_text(text)
        return pathlib.PurePosixPath(tmp_path / name)

    return write_file


def endings(lines: list[str]) -> list[str]:
    """Returns what stands after the line numbers."""
    return [line.split(":")[1].partition(" ")[2] for line in lines]


@pytest.fixture(scope="module")
def violations(parsed):
    return language.violations()


def test_no_file_exceeds_baseline(violations):
    lines = language.grown(violations, json.loads(language.BASELINE.read_text()))
    assert not lines, "\n".join(lines)


@pytest.mark.usefixtures("parsed")
def test_baseline_equals_current_counts():
    current = language.counts(language.violations())
    assert json.loads(language.BASELINE.read_text()) == current, (
        "fewer than the baseline allows: run python -m tests.contracts.language --write"
    )


def test_finds_refused_phrases(write):
    path = write(REFUSED)
    assert endings(language.phrases(path)) == [
        "'learnt'", "'. Of those'", "'whoever'", "'is told'", "opens with 'What'",
    ]  # fmt: skip
    assert language.phrases(write(PLAIN, "plain.py")) == []


def test_finds_refused_identifiers(write):
    names = [line.rpartition(" ")[2] for line in language.identifiers(write(REFUSED))]
    assert sorted(names) == ["asked", "given", "here", "most_rows", "own", "told", "whole"]
    assert language.identifiers(write(PLAIN, "plain.py")) == []


def test_finds_long_lines_outside_tables_and_code(write):
    long = "word " * 30
    path = write(f"{long}\n| {long} |\n```\n{long}\n```\nshort\n", "page.md")
    assert [line.rpartition(":")[2] for line in language.long_lines(path)] == ["1 150 columns"]


def test_refuses_growth_of_each_count():
    current = {"phrases": {"a.py": ["a.py:1 'anew'", "a.py:2 'anew'"]}}
    assert language.grown(current, {"phrases": {"a.py": 2}}) == []
    lines = language.grown(current, {"phrases": {"a.py": 1}})
    assert lines == ["phrases, 2 of at most 1:", "a.py:1 'anew'", "a.py:2 'anew'"]
    assert language.grown(current, {}) != []
