"""Tests progress output: plain lines in files, a bar on a terminal."""

import io
import threading
import time

import pytest

from glm5_jax.runtime import console
from glm5_jax.runtime.console import ProgressBar, spinner


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_writes_first_and_last_step_to_file():
    out = io.StringIO()
    with ProgressBar(50, 0, stream=out) as progress:
        for i in range(1, 51):
            progress.update(i, f"loss {i}")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/50  loss 1")
    assert lines[-1].startswith("step 50/50  loss 50")
    assert len(lines) == 2


def test_writes_line_for_each_slow_step(monkeypatch):
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.0)
    out = io.StringIO()
    with ProgressBar(9000, 100, stream=out) as progress:
        for i in range(101, 104):
            progress.update(i, "text")
    assert [line.split()[1] for line in out.getvalue().splitlines()] == [
        "101/9000",
        "102/9000",
        "103/9000",
    ]


def test_estimates_time_without_first_step(monkeypatch):
    for steps_left, eta in ((999, "16:39"), (59, "0:59"), (3661, "1:01:01")):
        times = iter([1000.0, 1100.0])
        out = io.StringIO()
        with ProgressBar(101 + steps_left, 0, stream=out) as progress:
            monkeypatch.setattr(console.time, "monotonic", lambda times=times: next(times))
            progress.update(1, "compiled for 1000 s")
            progress.update(101, "ran for 100 s")
        first, second = out.getvalue().splitlines()
        assert "eta" not in first
        assert second.endswith(f"eta {eta}"), (steps_left, second)


def test_prints_text_literally():
    out = io.StringIO()
    with ProgressBar(3, stream=out) as progress:
        progress.print("[bold]ROMEO[/bold]: \\ :smile: " + "x" * 300)
    assert out.getvalue() == "[bold]ROMEO[/bold]: \\ :smile: " + "x" * 300 + "\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_keeps_progress_out_of_standard_output(monkeypatch, terminal):
    """The bar and its lines go to standard error, so that output can be piped."""
    monkeypatch.setenv("TERM", "xterm")
    out, shown = io.StringIO(), Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", shown)
    with ProgressBar(2) as progress:
        progress.update(1, "loss 1.25")
        progress.print("a finding")
        print("another")
        progress.update(2, "done")
    assert out.getvalue() == "a finding\nanother\n"
    assert "2/2" in shown.getvalue() and "done" in shown.getvalue()
    assert "finding" not in shown.getvalue() and "another" not in shown.getvalue()


def test_shows_bar_on_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with ProgressBar(10, 5, stream=out) as progress:
        progress.update(7, "loss 1.25")
        progress.print("a sample")
    assert "7/10" in out.getvalue() and "loss 1.25" in out.getvalue()
    assert "a sample" in out.getvalue()


def test_reports_long_wait_until_end(monkeypatch):
    monkeypatch.setattr(console, "WAIT_INTERVAL_S", 0.001)
    out, threads = io.StringIO(), threading.active_count()
    with spinner("compiling [x]", stream=out):
        deadline = time.monotonic() + 60
        while out.getvalue().count("\n") < 2:
            assert time.monotonic() < deadline, "no line was written"
            time.sleep(0.001)
    assert set(out.getvalue().splitlines()) == {"compiling [x]  0:00"}
    assert threading.active_count() <= threads, "no thread is left that would write another line"


def test_spinner_writes_nothing_for_short_wait_to_file():
    out = io.StringIO()
    with spinner("compiling", stream=out):
        pass
    assert out.getvalue() == ""


def test_spinner_shows_seconds_on_terminal():
    out = Terminal()
    with pytest.raises(KeyError), spinner("compiling [x]", stream=out):
        raise KeyError
    assert "compiling [x]" in out.getvalue() and "0:00:00" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[2K")  # the line is cleared
