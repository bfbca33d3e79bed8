"""Lengths of a benchmark: as the command line names them, or one line that says what is wrong."""

import pytest

from experiments.benchmarks.measure import lengths


def test_named_lengths_ascend_and_none_means_the_default():
    assert lengths(["4096", "1024"], (7,)) == [1024, 4096]
    assert lengths([], (8, 7)) == [7, 8]


@pytest.mark.parametrize("word", ["1k", "0", "-3", "1.5", ""])
def test_what_is_no_length_is_named(word, capsys):
    with pytest.raises(SystemExit) as stopped:
        lengths(["1024", word], ())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: length {word!r}; give positive numbers")
