"""Checks text of files, models and servers that programs print: errors, log messages, progress and tables have no control character."""

import io
import logging
import re

import pytest

from experiments import check_chats
from glm5_jax.runtime.console import ProgressBar, spinner
from glm5_jax.runtime.terminal import clean_logging, make_printable, print_error

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_prints_an_error_as_one_printable_line(capsys):
    print_error(ValueError(f"a{CLIPBOARD}\n  b"))
    shown = capsys.readouterr()
    assert shown.err == "error: a\ufffd]52;c;cm0gLXJm\ufffd b\n" and not shown.out


def test_cuts_an_error_that_a_file_has_made_long(capsys):
    print_error("x" * 1_000_000)
    assert len(capsys.readouterr().err) < 5000


def test_makes_log_messages_printable(capsys, monkeypatch):
    handler = type(logging.lastResort)(logging.WARNING)
    monkeypatch.setattr(logging, "lastResort", handler)
    clean_logging()
    logger = logging.Logger("alone")  # without handlers, as in a program that sets none up
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
    assert is_terminal or not ACTS.search(shown)


def test_names_a_field_of_a_file_in_printable_text(tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], '
        '"\\u001b]0;root\\u0007": 1}\n'
    )
    assert check_chats.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "the field \ufffd]0;root\ufffd is not read" in out and not ACTS.search(out)


def test_leaves_printable_text_as_it_is():
    text = "Hélène 🧑\u200d🚀 日本 שלום\n\tdef f(): pass"
    assert make_printable(text) == text
