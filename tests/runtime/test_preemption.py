"""Tests that signals are handled at once, even while the main thread is in a call that does not return."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from glm5_jax.runtime.placement import EXIT_RESTART
from glm5_jax.runtime.preemption import PreemptionGuard, signal_handlers
from tests.contracts.source_tree import ROOT

# The computation is C code that no signal interrupts, like a compiler.
PROGRAM = """
import hashlib
import sys
from glm5_jax.runtime.preemption import PreemptionGuard

with PreemptionGuard(ends=True) as stop:
    stop.unsaved = sys.argv[1] == "unsaved"
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))
    print("stopping" if stop else "not stopped")
"""
FOREVER = 10**9
SECONDS = 5.0  # limit, on a busy machine


@contextlib.contextmanager
def computing(*arguments):
    """Runs a program that computes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ends_at_once_with_nothing_to_save(number):
    with computing("nothing", FOREVER) as process:
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(SECONDS) == EXIT_RESTART
        assert time.monotonic() - began < SECONDS
        assert process.stderr.read() == "\nstopped, with nothing to save\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_unsaved_program(number):
    with computing("unsaved", FOREVER) as process:
        process.send_signal(number)
        assert process.stderr.readline() == "\n"
        message = process.stderr.readline()  # arrives while it computes
        assert message.startswith(
            "stopping once this step is made and saved; the same signal again"
        )
        process.send_signal(number)
        assert process.wait(SECONDS) == 128 + number
        assert process.stderr.read() == "\nstopped at once\n"


def test_sees_stop_request_after_long_call():
    with computing("unsaved", 3 * 10**6) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "stopping\n")
    assert re.fullmatch(r"\nstopping once .*\n", err)


def test_leaves_second_signal_to_earlier_handler(capfd):
    signals = []
    with signal_handlers(lambda number, frame: signals.append(number)):
        before = signal.getsignal(signal.SIGTERM)
        with PreemptionGuard() as stop:
            assert not stop
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop and not signals
            assert capfd.readouterr().err.startswith("\nstopping once this step is made and saved")
            os.kill(os.getpid(), signal.SIGINT)
            assert signals == [signal.SIGINT]
        assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_nested_guard_is_outer_guard():
    with PreemptionGuard(ends=True, unsaved=True) as stop:
        with PreemptionGuard() as inner:
            assert inner is stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
    with PreemptionGuard() as other:
        assert other is not stop and not other
