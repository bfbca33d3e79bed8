"""Child processes; only sandboxes and launch scripts start others.

A `Worker` is a process that answers calls over its pipes, one JSON line each way; `serve` is its end of
them. A call has a time limit, a reply a size limit, and whatever the worker started dies with it. A `Program` runs by
itself and writes a log. On Linux both die with whoever started them, however that ends and whatever they are computing.
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

_STDERR_KEPT = 4000  # bytes, for the message of a worker that died
_CHUNK = 65536


class WorkerError(RuntimeError):
    """The called function raised; the worker is ready for the next call."""


class Worker:
    """A running `command` that calls `serve`; a context manager that kills its process group.

    cwd: its folder. reply_limit: bytes of a reply. Its standard error is read and only the end kept.
    """

    def __init__(self, command: Sequence[str], *, cwd=None, reply_limit: int = 2**20):
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
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(stream.fileno(), False)
        self._name = " ".join(command)
        self._reply_limit = reply_limit
        self._stderr = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close()

    def call(self, function: str, seconds: float, /, **arguments) -> Any:
        """What `function` returns for the arguments (all of it JSON).

        WorkerError if it raises. After any other error the worker is gone: TimeoutError if there is
        no answer within `seconds`, ChildProcessError if the process ends, is closed already or sends
        more than the reply limit.
        """
        if self._process.stdin.closed:
            raise ChildProcessError(f"{self._name} was closed; start a new Worker")
        request = json.dumps({"function": function, "arguments": arguments}).encode() + b"\n"
        try:
            reply = json.loads(self._exchange(request, seconds))
        except BaseException:
            self.close()
            raise
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def close(self) -> None:
        """Kills the worker and all that it started."""
        process = self._process
        if process.stdin.closed:
            return
        # Before it is waited for: until then its number cannot belong to another group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()

    def _exchange(self, request: bytes, seconds: float) -> bytearray:
        """Sends the line and returns the answering one, reading standard error meanwhile."""
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        deadline = time.monotonic() + seconds
        reply = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stderr, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{self._name} did not answer within {seconds} s")
                for stream in (key.fileobj for key, _ in selector.select(left)):
                    if stream is stdin:
                        request = request[self._send(request) :]
                        if not request:
                            selector.unregister(stdin)
                        continue
                    data = stream.read(_CHUNK)
                    if stream is stderr:
                        self._stderr = (self._stderr + data)[-_STDERR_KEPT:]
                        if not data:
                            selector.unregister(stderr)
                    elif not data:
                        raise self._ended()
                    else:
                        reply += data
                if len(reply) > self._reply_limit:
                    raise ChildProcessError(
                        f"{self._name} sent more than {self._reply_limit} bytes; "
                        "let it write files, or raise reply_limit"
                    )
        return reply

    def _send(self, data: bytes) -> int:
        try:
            return os.write(self._process.stdin.fileno(), data)
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> ChildProcessError:
        last = self._process.stderr.read(2**20) or b""  # None: something it started holds the pipe
        text = (self._stderr + last)[-_STDERR_KEPT:].decode(errors="replace").strip()
        return ChildProcessError(f"{self._name} ended without an answer; it wrote:\n{text}")


class Program:
    """A command that runs by itself, in a process group of its own, until it ends or is killed.

    log: file that its output and errors are added to. env: its environment (None: this process's). cores: of those that this
    process may use, the ones that it may (none: all). A command that there is not ends with code 127 and says so in the log. OSError.

    Attributes:
      pid: of the command itself.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: str | os.PathLike,
        env: Mapping[str, str] | None = None,
        cwd=None,
        cores: Sequence[int] = (),
    ):
        # Nothing is written to it. That it closes is how the kernel knows that this process is gone, with all that it
        # forked and that did not become another program.
        stdin, self._alive = os.pipe()
        # This file, run as a script, arms that and turns into the command.
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
        """None while it runs; minus the signal that killed it. What it left in its group is killed."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self.kill()
        return self._process.returncode

    def terminate(self) -> None:
        """Asks it to end, by SIGTERM to itself alone: what it started is its own to end."""
        if self.exit_code() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kills it and all of its group."""
        if self._process.returncode is None:
            # Before it is waited for: until then its number cannot belong to another group.
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._alive)


def serve(*functions: Callable[..., Any]) -> None:
    """Answers the calls that come in on standard input, by function name, until it closes.

    What the functions print goes to standard error, also what their libraries print.
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
    """While armed, the kernel kills this process, with its group if it leads one, once nobody holds the other end of
    standard input: what computes without giving up the interpreter's lock runs neither a thread nor a handler of
    signals. What comes in kills, too: only between a call and its reply."""
    if not hasattr(
        fcntl, "F_SETSIG"
    ):  # Linux's alone; elsewhere the end of the input is seen between calls
        return
    calls = sys.stdin.fileno()
    flags = fcntl.fcntl(calls, fcntl.F_GETFL) & ~os.O_ASYNC
    own = -os.getpid() if os.getpgrp() == os.getpid() else os.getpid()
    if armed:
        fcntl.fcntl(calls, fcntl.F_SETOWN, own)
        fcntl.fcntl(calls, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(calls, fcntl.F_SETFL, flags | os.O_ASYNC if armed else flags)
    if armed and _nobody_writes_to(calls):  # before it was armed
        os.kill(own, signal.SIGKILL)


def _nobody_writes_to(stream: int) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _become(cores: str, argv: list[str]) -> None:
    """Turns this process, whose standard input is a `Program`'s, into its command."""
    _die_with_caller(True)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and a command inherits
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)  # as shells do


if __name__ == "__main__":
    _become(sys.argv[1], sys.argv[2:])
