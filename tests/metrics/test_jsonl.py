"""Tests of files of lines after a full disk and with an incomplete last line."""

import contextlib
import logging
import resource

import pytest

from glm5_jax.metrics.jsonl import append_lines, read_complete_lines, read_objects


@contextlib.contextmanager
def limit_file_size(size):
    """Limits the size of this process's files, so that a write ends in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [3, 0])
def test_failed_append_preserves_file(tmp_path, num_bytes):
    path = tmp_path / "lines"
    append_lines(path, b"one\ntwo\n")
    with limit_file_size(8 + num_bytes), pytest.raises(OSError):
        append_lines(path, b"three\nfour\n")
    assert path.read_bytes() == b"one\ntwo\n"
    append_lines(path, b"three\n")
    assert read_complete_lines(path) == [b"one", b"two", b"three"]


def test_drops_incomplete_line_with_warning(tmp_path, caplog):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    with caplog.at_level(logging.WARNING):
        assert read_complete_lines(path) == [b"one"]
    assert f"{path} ends in an incomplete line of 2 bytes" in caplog.text
    caplog.clear()
    append_lines(path, b"two\n")
    assert read_complete_lines(path) == [b"one", b"two"] and not caplog.text


def test_appends_after_incomplete_line(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    append_lines(path, b'{"a": 3}\n')
    append_lines(path, b"[4]\n")
    assert list(read_objects(path)) == [{"a": 1}, {"a": 3}]
