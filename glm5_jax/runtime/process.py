"""Starts child processes; only sandboxes and launch scripts start others.

A `PipeWorker` is a process that replies to calls over its pipes, one JSON line each way; `serve` runs in the child. A call
has a time limit and a reply a size limit. Killing the worker kills all processes that it started.

A `ChildProcess` is a command that runs independently and writes a log. `run_program` runs one to its end.

On Linux the kernel kills both when their parent ends, however it ends and whatever they are computing.
"""

import fcntl
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

_STDERR_BYTES = 4000  # end of standard error that the message of a dead worker quotes
_CHUNK = 65536


class WorkerError(RuntimeError):
    """The called function raised; the worker is ready for the next call."""


class PipeWorker:
    """Runs `command`, which calls `serve`; a context manager that kills its process group on exit.

    cwd: working directory; None: this process's. max_reply_bytes: largest reply. Only the end of its standard error is
    stored.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike | None = None,
        max_reply_bytes: int = 2**20,
    ):
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
        )
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None, "all are pipes"
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        for stream in (stdin, stdout, stderr):
            os.set_blocking(stream.fileno(), False)
        self._name = " ".join(command)
        self._max_reply_bytes = max_reply_bytes
        self._stderr_end = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    def call(self, function: str, timeout_s: float, /, **arguments) -> Any:
        """Calls a function of the worker and returns its result; arguments and result are JSON.

        Raises WorkerError if the function raises. All other errors close the worker:

        - TimeoutError if there is no reply within `timeout_s` seconds.
        - ChildProcessError if the process ends, was closed before, or sends more than `max_reply_bytes`.
        """
        if self._stdin.closed:
            raise ChildProcessError(f"{self._name} was closed; start a new Worker")
        request = json.dumps({"function": function, "arguments": arguments}).encode() + b"\n"
        try:
            reply = json.loads(self._exchange(request, timeout_s))
        except BaseException:
            self.close()
            raise
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def close(self) -> None:
        """Kills the worker and all processes that it started."""
        process = self._process
        if self._stdin.closed:
            return
        # Before it is waited for: until then its number cannot belong to another group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()

    def _exchange(self, request: bytes, timeout_s: float) -> bytearray:
        """Sends a line and returns the reply line; reads standard error meanwhile."""
        deadline = time.monotonic() + timeout_s
        reply = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._stderr, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(f"{self._name} did not answer within {timeout_s} s")
                for stream in (key.fileobj for key, _ in selector.select(remaining)):
                    # Send the rest of the request, or read what has arrived.
                    if stream is self._stdin:
                        request = request[self._send(request) :]
                        if not request:
                            selector.unregister(self._stdin)
                    elif stream is self._stderr:
                        data = self._stderr.read(_CHUNK)
                        self._stderr_end = (self._stderr_end + data)[-_STDERR_BYTES:]
                        if not data:
                            selector.unregister(self._stderr)
                    elif data := self._stdout.read(_CHUNK):
                        reply += data
                    else:
                        raise self._death_error()
                if len(reply) > self._max_reply_bytes:
                    raise ChildProcessError(
                        f"{self._name} sent more than {self._max_reply_bytes} bytes; "
                        "let it write files, or raise max_reply_bytes"
                    )
        return reply

    def _send(self, data: bytes) -> int:
        try:
            return os.write(self._stdin.fileno(), data)
        except BrokenPipeError:
            raise self._death_error() from None

    def _death_error(self) -> ChildProcessError:
        # None: a process that it started still holds the pipe.
        last = self._stderr.read(2**20) or b""
        text = (self._stderr_end + last)[-_STDERR_BYTES:].decode(errors="replace").strip()
        return ChildProcessError(f"{self._name} ended without an answer; it wrote:\n{text}")


class ProgramError(OSError):
    """Raised for a program that failed, is missing or did not end in time; the text names it and quotes its errors."""


def run_program(
    command: Sequence[str],
    *,
    timeout_s: float,
    cwd: str | os.PathLike | None = None,
) -> bytes:
    """Runs a program to its end, without input, and returns its standard output. Raises ProgramError."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise ProgramError(f"{command[0]} had no end within {timeout_s:g} s") from None
    except FileNotFoundError:
        raise ProgramError(f"{command[0]} is not installed; install it") from None
    if done.returncode:
        end = done.stderr[-_STDERR_BYTES:].decode(errors="replace").strip()[-500:]
        raise ProgramError(f"{' '.join(command)[:200]} ended with {done.returncode}: {end}")
    return done.stdout


class ChildProcess:
    """Runs a command in its own process group, until it ends or is killed.

    - log: file that its standard output and error are appended to.
    - env: its environment; None: this process's.
    - cwd: its working directory; None: this process's.
    - cores: CPU cores that it may use, out of those of this process; empty: all of them.

    A command that does not exist ends with code 127 and a line in the log. Raises OSError if no process can be started.

    Attributes:
      pid: process id of the command.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: str | os.PathLike,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        cores: Sequence[int] = (),
    ):
        # Nothing is written to this pipe. Its closing tells the kernel that this process is gone, with all its forks
        # that did not exec another program.
        stdin, self._alive = os.pipe()
        # This file, run as a script, arms the kill and then execs the command.
        shim = [sys.executable, "-I", "-S", __file__, ",".join(map(str, cores)), *argv]
        try:
            with open(log, "ab") as output:
                self._process = subprocess.Popen(
                    shim,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=cwd,
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            os.close(stdin)
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """Returns the exit code: None while it runs, -N after signal N. Kills what is left of its process group."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self.kill()
        return self._process.returncode

    def terminate(self) -> None:
        """Sends SIGTERM to the command itself, which has to end its own children."""
        if self.exit_code() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kills the command and its process group."""
        if self._process.returncode is None:
            # Before it is waited for: until then its number cannot belong to another group.
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._alive)


def serve(*functions: Callable[..., Any]) -> None:
    """Replies to calls from standard input, by function name, until it closes.

    Output that the functions or their libraries print goes to standard error.
    """
    table = {function.__name__: function for function in functions}
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with replies:
        for line in sys.stdin:
            _die_with_caller(True)
            request = json.loads(line)
            try:
                reply = {"result": table[request["function"]](**request["arguments"])}
            except Exception as error:
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            text = json.dumps(reply) + "\n"
            _die_with_caller(False)
            replies.write(text)
            replies.flush()


def _die_with_caller(armed: bool) -> None:
    """Arms or disarms the kill of this process when the other end of standard input closes.

    The kernel sends the kill, to the process group if this process leads one, because code that holds the
    interpreter's lock runs neither threads nor signal handlers. Arriving input kills, too, so arm it only between a
    call and its reply.
    """
    # F_SETSIG exists on Linux only. Elsewhere the end of the input is noticed between calls.
    if not hasattr(fcntl, "F_SETSIG"):
        return
    calls = sys.stdin.fileno()
    flags = fcntl.fcntl(calls, fcntl.F_GETFL) & ~os.O_ASYNC
    target = -os.getpid() if os.getpgrp() == os.getpid() else os.getpid()
    if armed:
        fcntl.fcntl(calls, fcntl.F_SETOWN, target)
        fcntl.fcntl(calls, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(calls, fcntl.F_SETFL, flags | os.O_ASYNC if armed else flags)
    if armed and _is_closed(calls):  # it closed before this was armed
        os.kill(target, signal.SIGKILL)


def _is_closed(stream: int) -> bool:
    """Returns True if no process holds the writing end of a pipe."""
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _become(cores: str, argv: list[str]) -> None:
    """Execs the command of a `ChildProcess` in this process, whose standard input is that pipe."""
    _die_with_caller(True)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores these, and a command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)  # as shells do


if __name__ == "__main__":
    _become(sys.argv[1], sys.argv[2:])
