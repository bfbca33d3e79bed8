"""A child process of an event loop: its pipes are read within bounds, its end is waited for.

asyncio's own subprocesses differ between Python versions in whether a daemon that holds a pipe delays
the end of the process, and can be cancelled between the fork and the object that could kill it.
"""

import asyncio
import fcntl
import marshal
import os
import pathlib
import signal
import subprocess
import sys

# Imported, and not run as a script, which would be compiled anew each time.
_GATE = "import sys; sys.path.append(sys.argv[1]); import gate; gate.main(int(sys.argv[2]))"
_FOLDER = pathlib.Path(__file__).parent
_CHUNK = 1 << 20  # also the pipes' size: few wake-ups for much output
_PAUSE = 0.005  # seconds between reads of what is thrown away, so that it does not fill the loop


class Child:
    """`gate.py` at work on one task, from construction on; only `close` ends what it holds.

    stdin: what it is given to read. output_bytes: what is kept of each of its outputs; of the rest, which is
    read and thrown away, the last end_bytes are in `ends`, and `truncated` is set. status: the first line that the gate reported, once it has
    ended; "" if it was killed before it could. descriptors: which of this process it inherits; the
    task's own are added by the caller. Must be made in a running event loop.
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
                [sys.executable, "-I", "-S", "-c", _GATE, str(_FOLDER), str(memory)],
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
        except OSError:  # beyond what this user may have: slower, not different
            pass

    async def wait(self, seconds: float) -> bool:
        """Whether the process ends within so many seconds."""
        done, _ = await asyncio.wait([self._exited], timeout=seconds)
        return bool(done)

    def kill(self) -> None:
        """Kills the process and its process group, if it has not ended."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills what still runs and closes all descriptors. Can be called again."""
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
        # What it wrote is in the pipes by now; something it left behind may hold them open for ever.
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
            self._loop.call_later(_PAUSE, self._resume, name)

    def _resume(self, name: str) -> None:
        if name in self._open:
            self._loop.add_reader(self._open[name], self._on_readable, name)

    def _read(self, name: str) -> bool:
        """Takes what a pipe holds; False if that is nothing."""
        try:
            data = os.read(self._open[name], _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(name)
            return False
        kept = self.output[name]
        room = self._limit - len(kept)
        kept += data[:room]
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
