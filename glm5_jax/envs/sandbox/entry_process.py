"""Runs `entry` as a child process of an event loop: reads its pipes within limits and waits for its end.

asyncio's subprocesses differ between Python versions in whether a daemon that holds a pipe delays the end
of the process. They can also be cancelled between the fork and the creation of the object that could kill
it.
"""

import asyncio
import fcntl
import marshal
import os
import pathlib
import signal
import subprocess
import sys

# Imported instead of run as a script, which would be compiled each time.
_ENTRY = "import sys; sys.path.append(sys.argv[1]); import entry; entry.main(int(sys.argv[2]))"
_FOLDER = pathlib.Path(__file__).parent
_CHUNK = 1 << 20  # also the pipes' size, so that much output takes few wake-ups
_PAUSE_S = 0.005  # between reads of discarded output, so that it does not occupy the loop


class EntryProcess:
    """Process that runs `entry` on one task, started by the constructor; `close` must be called to release it.

    Must be made in a running event loop.

    Args:
      task: task for `entry.main`.
      stdin: bytes for its standard input.
      output_bytes: maximum bytes retained of each output; the rest is read and discarded.
      end_bytes: maximum bytes retained of the end of a longer output.
      descriptors: descriptors of this process that it inherits; the caller adds those that the task needs.

    Attributes:
      output: retained beginning of "stdout" and "stderr".
      ends: retained end of "stdout" and "stderr" after the beginning.
      truncated: whether output was discarded.
      status: first line that `entry` reported, after it has ended; "" if it was killed before.
      first_line: future that is done when standard output has a line, or the process has ended.
    """

    def __init__(
        self, task: dict, *, stdin: bytes, output_bytes: int, end_bytes: int = 0, descriptors=()
    ):
        self._loop = asyncio.get_running_loop()
        self._limit, self._end_limit = output_bytes, end_bytes
        self._stdin = memoryview(stdin)
        self.output = {"stdout": bytearray(), "stderr": bytearray()}
        self.ends = {"stdout": bytearray(), "stderr": bytearray()}
        self.truncated = False
        self.status = ""
        self.first_line = self._loop.create_future()
        self._exited = self._loop.create_future()
        self._open: dict[str, int] = {}
        # Start the process; it gets the task in a memory file.
        self._status, status_write = os.pipe()
        memory = os.memfd_create("task")
        try:
            os.set_blocking(self._status, False)
            descriptors = (*descriptors, status_write)
            task = task | {"status": status_write, "descriptors": descriptors}
            with open(memory, "wb", closefd=False) as file:
                marshal.dump(task, file)
                file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _ENTRY, str(_FOLDER), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={},
                cwd="/",
                pass_fds=(*descriptors, memory),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(status_write)
            os.close(memory)
        # Watch its end and its pipes.
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            with self._process:  # closes its pipes and waits
                self._process.kill()
            os.close(self._status)
            raise
        self._loop.add_reader(self._pidfd, self._on_exit)
        for name in ("stdin", "stdout", "stderr"):
            descriptor = getattr(self._process, name).fileno()
            os.set_blocking(descriptor, False)
            self._open[name] = descriptor
            if name == "stdin":
                self._loop.add_writer(descriptor, self._on_writable)
            else:
                self._widen(descriptor)
                self._loop.add_reader(descriptor, self._on_readable, name)

    @staticmethod
    def _widen(descriptor: int) -> None:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _CHUNK)
        except OSError:  # above this user's limit; only slower
            pass

    async def wait(self, timeout_s: float) -> bool:
        """Returns whether the process ends within the time limit."""
        done, _ = await asyncio.wait([self._exited], timeout=timeout_s)
        return bool(done)

    def kill(self) -> None:
        """Kills the process and its process group if it has not ended."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills the process if it runs, and closes all descriptors. Can be called again."""
        if self._pidfd < 0:
            return
        if self._process.returncode is None:
            self.kill()
            self._process.wait()
            self._loop.remove_reader(self._pidfd)
        for name in list(self._open):
            self._close(name)
        self._read_status()
        os.close(self._pidfd)
        os.close(self._status)
        self._pidfd = -1

    def _read_status(self) -> None:
        try:
            data = os.read(self._status, 1 << 16)
        except BlockingIOError:
            return
        self.status = self.status or data.decode(errors="replace").split("\n")[0]

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._process.wait()
        # Its output is in the pipes by now; a process that it started may hold them open forever.
        for name in ("stdout", "stderr"):
            for _ in range(4):
                if name in self._open and not self._read(name):
                    break
        for name in list(self._open):
            self._close(name)
        self._read_status()
        self._exited.set_result(None)
        if not self.first_line.done():
            self.first_line.set_result(None)

    def _on_readable(self, name: str) -> None:
        self._read(name)
        if len(self.output[name]) >= self._limit and name in self._open:
            self._loop.remove_reader(self._open[name])
            self._loop.call_later(_PAUSE_S, self._resume, name)

    def _resume(self, name: str) -> None:
        if name in self._open:
            self._loop.add_reader(self._open[name], self._on_readable, name)

    def _read(self, name: str) -> bool:
        """Reads what a pipe holds; returns False if it holds nothing."""
        try:
            data = os.read(self._open[name], _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(name)
            return False
        output = self.output[name]
        room = self._limit - len(output)
        output += data[:room]
        if len(data) > room:
            self.truncated, end = True, self.ends[name]
            end += data[room:]
            del end[: max(0, len(end) - self._end_limit)]
        if name == "stdout" and b"\n" in data and not self.first_line.done():
            self.first_line.set_result(None)
        return True

    def _on_writable(self) -> None:
        try:
            if self._stdin:
                self._stdin = self._stdin[os.write(self._open["stdin"], self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._close("stdin")

    def _close(self, name: str) -> None:
        descriptor = self._open.pop(name)
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        getattr(self._process, name).close()
