"""Runs a job on emulated hosts through the parts of a rehearsal: two steps, a stop of everything, and two more steps."""

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from glm5_jax.checkpoint.store import latest_step
from glm5_jax.inference.client import Client, ServerError
from glm5_jax.metrics import metrics_log
from glm5_jax.runtime.client import is_healthy
from launch.rehearsal.substitution import Rehearsal

STEPS = 2  # of each of the two parts of the run
TAIL_LINES = 30  # of a log in an error
HEALTH_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.2


class RehearsalFailed(Exception):
    """Raised if a program died, did not save, or did not finish; the message names its log."""


class Death(NamedTuple):
    """End of a program that should run.

    Attributes:
      program: name of the replica or pod.
      code: exit code.
      log: file with its output.
    """

    program: str
    code: int
    log: pathlib.Path

    def __str__(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        tail = "\n".join(text.splitlines()[-TAIL_LINES:])
        return f"{self.program} ended with code {self.code}; {self.log} ends:\n{tail}"


class Job(Protocol):
    """Run of a script or manifest on emulated hosts."""

    @property
    def deaths(self) -> Sequence[Death]:
        """Programs that have died since the start."""
        ...

    @property
    def num_processes(self) -> dict[str, int]:
        """Number of started processes of each role."""
        ...

    def start(self) -> None:
        """Starts the run, again if it has ended."""
        ...

    def poll(self) -> int | None:
        """Returns the exit code; None: it runs."""
        ...

    def request_stop(self) -> None:
        """Sends SIGTERM, as the scheduler does before it takes the hosts away."""
        ...

    def stop_problems(self) -> list[str]:
        """Returns what went wrong at the stop, after the end."""
        ...

    def kill(self) -> None:
        """Kills all programs."""
        ...


class Times(NamedTuple):
    """Seconds of the parts of a rehearsal."""

    first_steps: float
    stop: float
    last_steps: float


def run_parts(
    job: Job, workdir: pathlib.Path, options: Rehearsal, file: pathlib.Path, timeout_s: float
) -> Times:
    """Runs two steps, stops everything, and runs two more.

    - workdir: folder of the run.
    - options, file: options of its programs, and the file from which they read them.
    - timeout_s: time limit of each part, in seconds.

    Raises RehearsalFailed.
    """
    began = time.monotonic()
    job.start()
    _wait(job, lambda: _last_step(workdir) >= STEPS, timeout_s, f"step {STEPS}")
    stepped = time.monotonic()
    print(f"{stepped - began:.0f} s until step {STEPS}; SIGTERM to all", flush=True)
    job.request_stop()
    _wait_for_end(job, timeout_s)
    if problems := job.stop_problems():
        raise RehearsalFailed("; ".join(problems))
    saved = latest_step(workdir) or 0
    if saved < STEPS:
        raise RehearsalFailed(f"the newest checkpoint is of step {saved}, after {STEPS} steps")
    stopped = time.monotonic()
    print(
        f"{stopped - stepped:.0f} s until all had stopped, with a checkpoint of step {saved}",
        flush=True,
    )
    last = saved + STEPS
    dataclasses.replace(options, steps=last).write(file)
    job.start()
    _wait(job, lambda: False, timeout_s, f"step {last}")
    if (code := job.poll()) != 0 or latest_step(workdir) != last:
        raise RehearsalFailed(
            f"after the restart the run ended with code {code} and a checkpoint of step {latest_step(workdir)}, "
            f"not with code 0 and step {last}"
        )
    _check_metrics(workdir, saved, last)
    ended = time.monotonic()
    print(f"{ended - stopped:.0f} s until step {last}, from the checkpoint", flush=True)
    return Times(stepped - began, stopped - stepped, ended - stopped)


_RECEIVED = "glm5_received_tokens_total"  # metric of pages from other engines


def run_server_parts(job: Job, url: str, timeout_s: float, receives_pages: bool = False) -> Times:
    """Waits for a reply of the server at `url`, stops everything, and waits for a reply of the restarted server.

    Raises RehearsalFailed.

    Args:
      job: job of the servers.
      url: server that clients use.
      timeout_s: time limit of each part, in seconds.
      receives_pages: whether other servers must have prefilled the prompt.
    """
    began = time.monotonic()
    job.start()
    _wait_for_reply(job, url, timeout_s, receives_pages)
    replied = time.monotonic()
    print(f"{replied - began:.0f} s until a reply; SIGTERM to all", flush=True)
    job.request_stop()
    _wait_for_end(job, timeout_s)
    if problems := job.stop_problems():
        raise RehearsalFailed("; ".join(problems))
    stopped = time.monotonic()
    print(f"{stopped - replied:.0f} s until all had stopped", flush=True)
    job.start()
    _wait_for_reply(job, url, timeout_s, receives_pages)
    ended = time.monotonic()
    print(f"{ended - stopped:.0f} s until another reply", flush=True)
    return Times(replied - began, stopped - replied, ended - stopped)


def _wait_for_reply(job: Job, url: str, timeout_s: float, receives_pages: bool) -> None:
    """Waits until a server is healthy, and requests some tokens after a prompt of some pages. Raises RehearsalFailed."""
    _wait(job, lambda: is_healthy(f"{url}/health", HEALTH_TIMEOUT_S), timeout_s, f"{url}/health")
    body = json.dumps({"prompt": "To be, or not to be: " * 20, "max_tokens": 4}).encode()
    client, metrics = Client(url, timeout_s=timeout_s, direct=True), ""
    try:
        with client.open("/v1/completions", body) as reply:
            json.load(reply)
        if receives_pages:
            with client.open("/metrics") as reply:
                metrics = reply.read().decode()
    except (ServerError, OSError, ValueError) as error:
        raise RehearsalFailed(f"{url} does not answer: {error}") from error
    if receives_pages and not re.search(rf"^{_RECEIVED} [1-9]", metrics, re.MULTILINE):
        raise RehearsalFailed(f"{url} has received no pages of the prompt; its log says why")


def _wait(job: Job, is_done: Callable[[], bool], timeout_s: float, goal: str) -> None:
    """Waits until `is_done()` or the job's end with code 0. Raises RehearsalFailed if a program dies, and after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        code = job.poll()
        if deaths := job.deaths:
            raise RehearsalFailed("\n".join(map(str, deaths)))
        if code == 0:
            return
        if code is not None:
            raise RehearsalFailed(f"the job ended with code {code} before {goal}")
        if time.monotonic() > deadline:
            raise RehearsalFailed(f"{goal} was not reached within {timeout_s:g} s")
        time.sleep(_POLL_INTERVAL_S)


def _wait_for_end(job: Job, timeout_s: float) -> None:
    """Waits for the job's end after a stop was requested. Raises RehearsalFailed after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while job.poll() is None:
        if time.monotonic() > deadline:
            raise RehearsalFailed(f"not all programs stopped within {timeout_s:g} s")
        time.sleep(_POLL_INTERVAL_S)


def _last_step(workdir: pathlib.Path) -> int:
    """Returns the last step in the metrics of a run; 0: none."""
    steps, _ = metrics_log.column(metrics_log.read(workdir), "learning_rate")
    return max(steps, default=0)


def _check_metrics(workdir: pathlib.Path, saved: int, last: int) -> None:
    """Raises RehearsalFailed unless each step after the restart is in the metrics."""
    steps, _ = metrics_log.column(metrics_log.read(workdir), "learning_rate")
    if missing := set(range(saved + 1, last + 1)) - set(steps):
        raise RehearsalFailed(f"the metrics in {workdir} lack steps {sorted(missing)}")
