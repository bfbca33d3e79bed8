"""Evaluates a served model on the tasks of a file (`task_file`).

Each attempt is a conversation with the server, whose tools run here; the task's verifier judges the reply. A folder has

- results.jsonl: one line per attempt {task, attempt, reward, error, parts, reply}, appended as attempts end;
- config.json: what the results depend on. A folder with another config is refused.

A later evaluation in the same folder makes only the attempts that are missing or have no reward. An attempt has none
if the server, a tool or the verifier failed.
"""

import asyncio
import dataclasses
import json
import pathlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5_jax.agents.client import ChatClient
from glm5_jax.agents.context import Counter
from glm5_jax.agents.loop import ChatAgent, LoopConfig
from glm5_jax.data.conversation import read_json
from glm5_jax.inference.client import ServerError
from glm5_jax.rl.rollouts.rollout import ToolError, Tools
from glm5_jax.rl.types import Reward, Task, Verifier
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.files import read_lines, replace_text
from glm5_jax.runtime.json_encoding import json_bytes

Key = tuple[str, int]  # id of the task and number of the attempt
FAILURES_IN_A_ROW = 20  # attempts without a reward, after which the server is considered down


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionEvaluation:
    """Attempts of a served model at tasks, with results in a folder.

    Attributes:
      tasks: tasks with unique ids.
      attempts: number of attempts at each task.
      connect: function that returns a client of the server.
      tools: tools of the tasks.
      verify: judge of the attempts.
      counter: counter of the tokens of prompts.
      limits: limits of an attempt; the length of the server's context, if it reports one, limits the tokens too.
      fields: fields of every request, such as the temperature.
      concurrency: number of concurrent attempts.
      folder: folder of the results.
      close: releases the resources of the verifier.
    """

    tasks: Sequence[Task]
    attempts: int
    connect: Callable[[], ChatClient]
    tools: Tools
    verify: Verifier
    counter: Counter
    limits: LoopConfig
    fields: Mapping[str, Any]
    concurrency: int
    folder: pathlib.Path
    close: Callable[[], None] = lambda: None

    @property
    def results_file(self) -> pathlib.Path:
        return self.folder / "results.jsonl"

    def check_folder(self, identity: Mapping[str, Any]) -> None:
        """Creates the folder, with what its results depend on.

        Raises ValueError if it has results of something else.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file, text = self.folder / "config.json", json.dumps(identity, indent=1, sort_keys=True)
        if not file.exists():
            replace_text(file, text + "\n")
            return
        before, identity = json.loads(file.read_text()), json.loads(text)
        for name in sorted(before.keys() | identity.keys()):
            if before.get(name) != identity.get(name):
                raise ValueError(
                    f"{self.folder} has results with {name} = {before.get(name)!r}, not {identity.get(name)!r}; "
                    "give another --workdir"
                )

    def results(self) -> dict[Key, dict]:
        """Returns the results so far; of several for one attempt the last. An incomplete last line is left out."""
        results = {}
        if self.results_file.exists():
            for line in read_lines(self.results_file):
                try:
                    result = read_json(line.content)
                    results[result["task"], result["attempt"]] = result
                except (ValueError, LookupError, TypeError):
                    continue  # a line that was cut off when an evaluation was killed
        return results

    async def run(self) -> None:
        """Makes all attempts that have no reward. Raises ServerError if the server seems to be down."""
        done = {key for key, result in self.results().items() if result["reward"] is not None}
        keys = [(task, number) for task in self.tasks for number in range(self.attempts)]
        remaining = [(task, number) for task, number in keys if (task.id, number) not in done]
        try:
            async with self.connect() as client:
                agent = ChatAgent(
                    client=client,
                    tools=self.tools,
                    counter=self.counter,
                    config=await self._limits(client),
                    fields=self.fields,
                )
                await self._run_attempts(agent, remaining, len(keys))
        finally:
            self.close()

    async def _limits(self, client: ChatClient) -> LoopConfig:
        """Returns the limits of an attempt that fits the server's context."""
        length = await client.context_length()
        if length is None or length >= self.limits.max_tokens:
            return self.limits
        return dataclasses.replace(self.limits, max_tokens=length)

    async def _run_attempts(
        self, agent: ChatAgent, remaining: Sequence[tuple[Task, int]], total: int
    ) -> None:
        done, failures, queue = total - len(remaining), 0, iter(remaining)
        with ProgressBar(total, done, "attempt") as bar, self.results_file.open("ab") as file:
            if file.tell():
                file.write(b"\n")  # ends a line that was cut off

            async def work() -> None:
                nonlocal done, failures
                for task, number in queue:
                    result = {"task": task.id, "attempt": number} | await self._attempt(agent, task)
                    # A server's error message may hold half of a surrogate pair.
                    file.write(json_bytes(result) + b"\n")
                    file.flush()
                    failures = 0 if result["reward"] is not None else failures + 1
                    if failures >= FAILURES_IN_A_ROW:
                        raise ServerError(
                            f"{failures} attempts in a row have no reward; the last: {result['error']}"
                        )
                    done += 1
                    bar.update(done, f"{task.id}  {_text(result['reward'])}")

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.concurrency, len(remaining))):
                        group.create_task(work())
            except* ServerError as errors:
                raise errors.exceptions[0] from None

    async def _attempt(self, agent: ChatAgent, task: Task) -> dict[str, Any]:
        """Returns the result of an attempt, without its key."""
        try:
            attempt = (await agent(task)).attempt
            reward, reply = await self.verify(task, attempt), attempt.reply
        except (ServerError, ToolError, ValueError) as error:  # ValueError: the prompt is too long
            reward, reply = Reward(None, error=f"{type(error).__name__}: {error}"), ""
        return {
            "reward": reward.value,
            "error": reward.error,
            "parts": dict(reward.parts),
            "reply": reply,
        }

    def rewards_by_kind(self) -> tuple[dict[str, list[float]], int]:
        """Returns the mean rewards of the tasks of each kind, and the number of attempts without a reward."""
        results, rewards, num_failed = self.results(), defaultdict(list), 0
        for task in self.tasks:
            values = [
                results.get((task.id, number), {}).get("reward") for number in range(self.attempts)
            ]
            num_failed += values.count(None)
            if graded := [value for value in values if value is not None]:
                rewards[task.kind].append(sum(graded) / len(graded))
        return dict(rewards), num_failed


def _text(reward: float | None) -> str:
    return "no reward" if reward is None else f"reward {reward:g}"
