"""Lengths of a benchmark: those of the command line, or one line with the error."""

import pytest

from experiments.benchmarks.measure import lengths


def test_sorts_lengths_and_uses_defaults():
    assert lengths(["4096", "1024"], (7,)) == [1024, 4096]
    assert lengths([], (8, 7)) == [7, 8]


@pytest.mark.parametrize("word", ["1k", "0", "-3", "1.5", ""])
def test_names_invalid_length(word, capsys):
    with pytest.raises(SystemExit) as stopped:
        lengths(["1024", word], ())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: length {word!r}; give positive numbers")
