"""Files of lines: a full disk leaves them as they were, and a line that was cut off costs itself alone."""

import contextlib
import logging
import resource

import pytest

from glm5_jax.metrics.jsonl import append_lines, read_complete_lines


@contextlib.contextmanager
def room(size):
    """No file of this process may be longer, as on a disk that is full: what is written ends in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("space", [3, 0])
def test_what_has_no_room_leaves_the_file_as_it_was(tmp_path, space):
    path = tmp_path / "lines"
    append_lines(path, b"one\ntwo\n")
    with room(8 + space), pytest.raises(OSError):
        append_lines(path, b"three\nfour\n")
    assert path.read_bytes() == b"one\ntwo\n"
    append_lines(path, b"three\n")
    assert read_complete_lines(path) == [b"one", b"two", b"three"]


def test_a_line_that_was_cut_off_is_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    with caplog.at_level(logging.WARNING):
        assert read_complete_lines(path) == [b"one"]
    assert f"{path} ends in an incomplete line of 2 bytes" in caplog.text
    caplog.clear()
    append_lines(path, b"two\n")
    assert read_complete_lines(path) == [b"one", b"two"] and not caplog.text
