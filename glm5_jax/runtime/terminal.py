"""Makes text of models, files and servers safe for a terminal.

A terminal executes sequences that begin with ESC or its 8-bit forms: they set the clipboard, the title, or the output of
keys. So every program prints such text through `make_printable`: errors by `print_error`, progress and results by
`runtime.console`, log messages after `clean_logging`.
"""

import io
import logging
import os
import sys
import unicodedata

# Characters that reorder the text around them, so that it can be misread.
_BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_MAX_ERROR_CHARS = 4000  # of an error, which may quote any text of a file or a server


def make_printable(text: str) -> str:
    """Returns a text without effect on a terminal: control characters except line end and tab become U+FFFD."""
    return "".join("\ufffd" if _is_control(c) else c for c in text.replace("\r", ""))


def print_error(error: object) -> None:
    """Prints an error on standard error, with its line breaks."""
    text = make_printable(str(error).strip())
    cut = text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]} ..."
    print("error:", cut, file=sys.stderr)


def print_page(text: str) -> None:
    """Prints a long text. A reader that closes the pipe early, such as `head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes standard output again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def clean_logging() -> None:
    """Makes messages of `logging` printable, unless another handler is configured.

    Characters that standard output and error cannot encode, as with PYTHONIOENCODING=ascii, are written as escapes, because
    an error would end a run at its first sample.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())


class _PrintableFormatter(logging.Formatter):
    """Formats a message as its text, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return make_printable(super().format(record))


def _is_control(character: str) -> bool:
    if character in _BIDI_CONTROLS:
        return True
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs")
