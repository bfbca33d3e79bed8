"""Tests that a file is replaced as a whole or stays as it was."""

import contextlib
import resource
import signal

import pytest

from glm5_jax.runtime.files import replace_text


@contextlib.contextmanager
def file_size_limit(num_bytes):
    """Makes writes beyond this size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_replaces_text(tmp_path):
    path = tmp_path / "a é.json"
    replace_text(path, "old")
    replace_text(path, "new é\n")
    assert path.read_bytes() == "new é\n".encode() and list(tmp_path.iterdir()) == [path]


def test_keeps_old_text_on_full_disk(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with file_size_limit(100), pytest.raises(OSError):
        replace_text(path, "x" * 1000)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
