"""Attempts tasks, each once, and keeps the results in a folder, so that the same evaluation continues there.

WORKDIR/config.json     what the results depend on; a folder with another config is refused
WORKDIR/results.json    {task: {reward, error, seconds}}, updated after every task
WORKDIR/logs            output of the tests
"""

import asyncio
import json
import pathlib
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm5_jax.envs.terminal.trial import TrialResult
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.files import replace_text
from glm5_jax.runtime.terminal import make_printable


class TaskEvaluation:
    """An agent's attempts at tasks. Raises ValueError if the folder has results of another agent or of other tasks.

    Args:
      names: names of the tasks.
      attempt: function that attempts a task.
      workdir: folder of the results.
      identity: what the results depend on.
      concurrency: number of concurrent attempts.
      resources: context of all attempts.
    """

    def __init__(
        self,
        names: Sequence[str],
        attempt: Callable[[str], Awaitable[TrialResult]],
        workdir: pathlib.Path,
        *,
        identity: Mapping[str, Any],
        concurrency: int,
        resources: AbstractAsyncContextManager,
    ):
        self._names, self._attempt, self._workdir = tuple(names), attempt, workdir
        self._concurrency, self._resources = concurrency, resources
        self._results: dict[str, dict] = {}
        workdir.mkdir(parents=True, exist_ok=True)
        self._resume(dict(identity))

    def _resume(self, identity: dict[str, Any]) -> None:
        """Reads the results of an earlier run. Raises ValueError if it had another agent or other tasks."""
        file = self._workdir / "config.json"
        if file.exists():
            before = json.loads(file.read_text())
            for name in sorted(before.keys() | identity.keys()):
                if before.get(name) != identity.get(name):
                    raise ValueError(
                        f"{self._workdir} holds results of another {name} ({before.get(name)}, not {identity.get(name)}); "
                        "give another --workdir"
                    )
        _write(file, identity)
        results = self._workdir / "results.json"
        if results.exists():
            self._results = json.loads(results.read_text())

    async def run(self) -> None:
        """Attempts all tasks without a reward."""
        # SIGTERM cancels like Ctrl-C, so that sandboxes are ended and built images removed.
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        remaining = [name for name in self._names if self._reward(name) is None]
        slots = asyncio.Semaphore(self._concurrency)
        done = len(self._names) - len(remaining)
        with ProgressBar(len(self._names), done, "task") as bar:

            async def attempt(name: str) -> None:
                nonlocal done
                async with slots:
                    result = await self._attempt(name)
                done += 1
                self._keep(name, result)
                bar.update(done, f"{name}  {_reward_text(result)}")

            async with self._resources, asyncio.TaskGroup() as group:
                for name in remaining:
                    group.create_task(attempt(name))

    def _reward(self, name: str) -> float | None:
        return self._results.get(name, {}).get("reward")

    def _keep(self, name: str, result: TrialResult) -> None:
        logs = self._workdir / "logs"
        logs.mkdir(exist_ok=True)
        (logs / f"{name}.txt").write_text(result.log)
        self._results[name] = {
            "reward": result.reward,
            "error": result.error,
            "seconds": round(result.duration_s, 3),
        }
        _write(self._workdir / "results.json", dict(sorted(self._results.items())))

    def show(self) -> None:
        """Prints all results as a table, with the mean reward."""
        table = Table("task", "reward", "seconds", "error")
        for name in self._names:
            result = self._results[name]
            reward = "-" if result["reward"] is None else f"{result['reward']:g}"
            error = make_printable(" ".join((result["error"] or "").split()))
            table.add_row(
                Text(make_printable(name)), reward, f"{result['seconds']:.1f}", Text(error[:200])
            )
        console = Console()
        console.print(table)
        rewards = [self._reward(name) for name in self._names]
        graded = [reward for reward in rewards if reward is not None]
        mean = (
            f"mean reward {sum(graded) / len(graded):.3f} of {len(graded)} tasks" if graded else ""
        )
        failed = len(rewards) - len(graded)
        rest = (
            f"{failed} could not be graded: the same command attempts them again" if failed else ""
        )
        console.print(Text("; ".join(filter(None, (mean, rest)))))
        console.print(Text(f"results  {self._workdir / 'results.json'}"), soft_wrap=True)


def _reward_text(result: TrialResult) -> str:
    return "no reward" if result.reward is None else f"reward {result.reward:g}"


def _write(file: pathlib.Path, content: dict) -> None:
    replace_text(file, json.dumps(content, indent=1) + "\n")
