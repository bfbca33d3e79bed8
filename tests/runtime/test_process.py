"""Tests worker processes, which are killed with their children if they hang, die or flood, and child programs."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from glm5_jax.runtime.process import ChildProcess, PipeWorker, WorkerError

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVER = """
import os, signal, subprocess, sys, time
from glm5_jax.runtime.process import serve

def double(number):
    return 2 * number

def length(text):
    return len(text)

def noisy(lines):
    print("not a reply")
    os.system("echo nor this")
    print(("x" * 1000 + "\\n") * lines, file=sys.stderr)
    return "done"

def flood(size):
    return "x" * size

def pid():
    return os.getpid()

def fall():
    print("why it fell", file=sys.stderr)
    os._exit(3)

def hang(file):
    child = subprocess.Popen(["sleep", "60"])
    with open(file, "w") as out:
        out.write(str(child.pid))
    time.sleep(60)

def hold(file):
    child = subprocess.Popen(["sleep", "60"])
    with open(file, "w") as out:
        out.write(f"{os.getpid()} {child.pid}")
    signal.alarm(60)  # ends even if the test is killed
    sum(range(10**15))  # no other thread and no signal handler can run

serve(double, length, noisy, flood, pid, fall, hang, hold)
"""
# A program that starts a worker and is killed before it can close it.
CALLER = """
import sys
from glm5_jax.runtime.process import PipeWorker

worker = PipeWorker([sys.executable, "-c", sys.argv[1]])
if sys.argv[2]:
    worker.call("hold", 600, file=sys.argv[2])
print(worker.call("pid", 600), flush=True)
sys.stdin.read()
"""
SECONDS = 60  # limit of fast calls, because a busy machine may take long to start Python


@pytest.fixture
def worker():
    with PipeWorker([sys.executable, "-c", SERVER], cwd=ROOT, max_reply_bytes=10_000) as worker:
        yield worker


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int) -> bool:
    """Waits up to 10 s for the end of a process, because a kill takes effect later. Returns whether it ended."""
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_worker_answers_several_calls(worker):
    assert [worker.call("double", SECONDS, number=n) for n in (1, 2.5)] == [2, 5.0]


def test_worker_continues_after_exception(worker):
    with pytest.raises(WorkerError, match="TypeError.*surplus"):
        worker.call("double", SECONDS, surplus=1)
    with pytest.raises(WorkerError, match="KeyError: 'triple'"):
        worker.call("triple", SECONDS)
    assert worker.call("double", SECONDS, number=3) == 6


def test_worker_accepts_large_requests_and_printing(worker):
    assert worker.call("length", SECONDS, text="x" * 10**6) == 10**6
    assert worker.call("noisy", SECONDS, lines=1000) == "done"


def test_timeout_kills_worker_and_its_children(worker, tmp_path):
    worker.call("double", SECONDS, number=1)
    file = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="did not answer within 1 s"):
        worker.call("hang", 1, file=str(file))
    assert time.monotonic() - began < 20
    assert ends(int(file.read_text()))
    with pytest.raises(ChildProcessError, match="start a new Worker"):
        worker.call("double", SECONDS, number=1)


def test_closing_kills_children_of_worker(tmp_path):
    file = tmp_path / "pid"
    start = f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(file)!r}, 'w')"
    start += ".write(str(p.pid))"
    with PipeWorker([sys.executable, "-c", f"{start}\n{SERVER}"], cwd=ROOT) as worker:
        assert worker.call("double", SECONDS, number=1) == 2
        pid = int(file.read_text())
        assert is_running(pid)
    assert ends(pid)


def test_busy_worker_dies_with_caller(tmp_path):
    file = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", CALLER, SERVER, str(file)], cwd=ROOT) as caller:
        deadline = time.monotonic() + SECONDS
        while not (file.exists() and file.read_text().count(" ")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pids = [int(pid) for pid in file.read_text().split()]
        time.sleep(0.2)
        assert all(map(is_running, pids)), "the worker runs while the caller waits"
        caller.kill()
    assert all(map(ends, pids))


def test_idle_worker_ends_with_caller():
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CALLER, SERVER, ""]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as caller:
        pid = int(caller.stdout.readline())
        assert is_running(pid)
        caller.kill()
    assert ends(pid)


@pytest.mark.parametrize("is_group_leader", [True, False])
def test_worker_does_not_start_call_of_dead_caller(tmp_path, is_group_leader):
    """The call was sent, and its caller died before it was read. No other process of the caller's group dies, such as
    this test.
    """
    file = tmp_path / "pids"
    call = json.dumps({"function": "hold", "arguments": {"file": str(file)}}).encode() + b"\n"
    command = [sys.executable, "-c", SERVER]
    result = subprocess.run(
        command, cwd=ROOT, input=call, timeout=SECONDS, start_new_session=is_group_leader
    )
    assert result.returncode == -signal.SIGKILL and not file.exists()


def test_quotes_error_of_dead_worker(worker):
    with pytest.raises(ChildProcessError, match="why it fell"):
        worker.call("fall", SECONDS)


def test_quotes_error_of_command_that_never_serves():
    with PipeWorker([sys.executable, "-c", "raise SystemExit('no such arm')"]) as worker:
        with pytest.raises(ChildProcessError, match="no such arm"):
            worker.call("double", SECONDS, text="x" * 10**6)


def test_limits_size_of_reply(worker):
    assert worker.call("flood", SECONDS, size=9000) == "x" * 9000
    with pytest.raises(ChildProcessError, match="more than 10000 bytes"):
        worker.call("flood", SECONDS, size=20_000)


def wait_for_code(program: ChildProcess) -> int:
    """Waits for the exit code of a program."""
    deadline = time.monotonic() + SECONDS
    while (code := program.exit_code()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def shell(tmp_path, script: str, **more) -> ChildProcess:
    return ChildProcess(["sh", "-c", script], log=tmp_path / "log", **more)


def test_program_writes_log_and_returns_code(tmp_path):
    for code in (0, 3):
        assert (
            wait_for_code(
                shell(tmp_path, f"echo {code}; echo to $A >&2; exit {code}", env={"A": "b"})
            )
            == code
        )
    assert (tmp_path / "log").read_text() == "0\nto b\n3\nto b\n"


def test_program_has_pid_of_command(tmp_path):
    program = shell(tmp_path, "echo $$; exec sleep 600")
    while not (tmp_path / "log").read_text().endswith("\n"):
        time.sleep(0.01)
    assert int((tmp_path / "log").read_text()) == program.pid
    assert program.exit_code() is None
    program.terminate()
    assert wait_for_code(program) == -signal.SIGTERM
    program.terminate()
    program.kill()


def test_kills_children_of_ended_program(tmp_path):
    program = shell(tmp_path, "sleep 600 & echo $!")
    assert wait_for_code(program) == 0
    assert ends(int((tmp_path / "log").read_text()))


@pytest.mark.slow
def test_program_outlives_thread_that_started_it(tmp_path):
    started = []
    thread = threading.Thread(target=lambda: started.append(shell(tmp_path, "sleep 600")))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert started[0].exit_code() is None
    started[0].kill()
    assert started[0].exit_code() == -signal.SIGKILL


def test_program_does_not_inherit_ignored_signals(tmp_path):
    assert wait_for_code(shell(tmp_path, "kill -PIPE $$; echo survived")) == -signal.SIGPIPE


def test_limits_program_to_cores(tmp_path):
    code = "import os; print(*os.sched_getaffinity(0))"
    for cores in ([max(os.sched_getaffinity(0))], []):
        (tmp_path / "log").unlink(missing_ok=True)
        assert (
            wait_for_code(
                ChildProcess([sys.executable, "-c", code], log=tmp_path / "log", cores=cores)
            )
            == 0
        )
        used_cores = {int(core) for core in (tmp_path / "log").read_text().split()}
        assert used_cores == {*(cores or os.sched_getaffinity(0))}


def test_logs_program_that_cannot_start(tmp_path):
    assert wait_for_code(ChildProcess(["/no/such/program"], log=tmp_path / "log")) == 127
    assert "/no/such/program cannot be started: No such file" in (tmp_path / "log").read_text()


# Holds the interpreter's lock, as a computation does, and has an idle child.
BUSY = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
signal.alarm(600)
sum(range(10**15))
"""


def test_busy_program_dies_with_caller(tmp_path):
    code = f"""
import sys
from glm5_jax.runtime.process import ChildProcess
ChildProcess([sys.executable, "-c", {BUSY!r}], log={str(tmp_path / "log")!r})
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as caller:
        log = tmp_path / "log"
        while not (log.exists() and log.read_text().endswith("\n")):
            assert caller.poll() is None
            time.sleep(0.01)
        pids = [int(word) for word in log.read_text().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        caller.kill()
    assert all(map(ends, pids))
