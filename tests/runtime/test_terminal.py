"""Tests that errors, log messages and progress contain no control characters of files, models or servers."""

import io
import logging
import os
import re
import sys

import pytest

from experiments import check_chats
from glm5_jax.runtime.console import ProgressBar, spinner
from glm5_jax.runtime.terminal import clean_logging, make_printable, print_error, print_page

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_prints_error_with_line_breaks_only(capsys):
    print_error(ValueError(f"a{CLIPBOARD}\n  b"))
    shown = capsys.readouterr()
    assert shown.err == "error: a\ufffd]52;c;cm0gLXJm\ufffd\n  b\n" and not shown.out


def test_truncates_long_error(capsys):
    print_error("x" * 1_000_000)
    assert len(capsys.readouterr().err) < 5000


def test_prints_page_to_reader_that_ends_early(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print_page("x" * 2**17)
        print("more")


def test_makes_log_messages_printable(capsys, monkeypatch):
    handler = type(logging.lastResort)(logging.WARNING)
    monkeypatch.setattr(logging, "lastResort", handler)
    clean_logging()
    logger = logging.Logger("test")  # without handlers, as in a program that configures none
    logger.warning("the service says %s\nand more", CLIPBOARD)
    shown = capsys.readouterr().err
    assert shown == "the service says \ufffd]52;c;cm0gLXJm\ufffd\nand more\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_shows_progress_without_control_characters(is_terminal, monkeypatch):
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    with ProgressBar(2, stream=out) as bar:
        bar.update(1, f"step {CLIPBOARD} [red]")
        bar.print(f"sample {CLIPBOARD}")
        bar.update(2, f"end {CLIPBOARD}")
    with spinner(f"loading {CLIPBOARD}", stream=out):
        pass
    shown = out.getvalue()
    assert "52;c;cm0gLXJm" in shown and "\x1b]" not in shown and "\x07" not in shown
    assert is_terminal or not CONTROL.search(shown)


def test_prints_plain_progress_to_streams_in_jupyter(capsys, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar(1) as bar:
        bar.print("sample")
        bar.update(1, "end")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("sample\n", "step 1/1  end\n")


def test_prints_field_names_of_files_printably(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], '
        '"\\u001b]0;root\\u0007": 1}\n'
    )
    assert check_chats.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "the field \ufffd]0;root\ufffd is not read" in out and not CONTROL.search(out)


def test_keeps_printable_text():
    text = "Hélène 🧑\u200d🚀 日本 שלום\n\tdef f(): pass"
    assert make_printable(text) == text


def test_escapes_characters_that_output_cannot_encode(monkeypatch):
    content = io.BytesIO()
    stream = io.TextIOWrapper(content, encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr("sys.stderr", stream)
    clean_logging()
    ProgressBar(3).print("a sample: é 日")
    print_error("no file é")
    stream.flush()
    assert content.getvalue() == b"a sample: \\xe9 \\u65e5\nerror: no file \\xe9\n"
