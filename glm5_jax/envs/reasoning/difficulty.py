"""Selects tasks that are worth training on: a student rarely solves them, a stronger policy does (GLM-5,
section 3.2).

The thresholds are not from the paper, which prints none. A task that the stronger policy never solves may
have a wrong answer.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm5_jax.data.conversation import read_json
from glm5_jax.rl.types import Task
from glm5_jax.runtime.files import read_lines

NAMED = 5  # number of tasks that an error names


@dataclasses.dataclass(kw_only=True, frozen=True)
class DifficultyConfig:
    """Thresholds of `keep_hard`. Raises ValueError for values out of range.

    Attributes:
      max_student_pass_rate: highest pass rate of the student at which a task is hard enough, inclusive.
      min_teacher_pass_rate: pass rate that the stronger policy must exceed.
      min_tries: minimum number of tries of each policy at every task, so that a rate is meaningful.
    """

    max_student_pass_rate: float = 0.25
    min_teacher_pass_rate: float = 0.0
    min_tries: int = 1

    def __post_init__(self):
        for name, below in (
            ("max_student_pass_rate", 1.0),
            ("min_teacher_pass_rate", math.nextafter(1, 0)),
        ):
            if not 0 <= getattr(self, name) <= below:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to {below}")
        if self.min_tries < 1:
            raise ValueError(f"min_tries is {self.min_tries}; it must be at least 1")


class Verdicts(NamedTuple):
    """Number of a policy's tries at a task, and of those that passed."""

    passes: int
    tries: int

    @property
    def rate(self) -> float:
        """Returns the share of the tries that passed."""
        return self.passes / self.tries


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifficultyReport:
    """Result of `keep_hard`: ids of tasks, in the order of the tasks; `str` returns a table of counts by kind
    of task.

    Attributes:
      retained: tasks of the right difficulty.
      too_easy: tasks that the student solves too often.
      unsolved: tasks that the teacher solves too rarely.
      table: counts by kind of task.
    """

    retained: tuple[str, ...]
    too_easy: tuple[str, ...]
    unsolved: tuple[str, ...]
    table: str

    def __str__(self):
        return self.table


def read_verdicts(path: str | os.PathLike) -> dict[str, Verdicts]:
    """Returns a policy's verdicts by task id from a file that experiments/task_pass_rates.py writes.

    Each line is {"task": id, "passes": ..., "tries": ...}; counts of one task are added. Raises ValueError
    that names an invalid line.
    """
    passes, tries = Counter(), Counter()
    for line in read_lines(path):
        try:
            verdict = read_json(line.content)
            task, passed, tried = (verdict[name] for name in ("task", "passes", "tries"))
            is_typed = type(passed) is type(tried) is int and type(task) is str
            if not (is_typed and 0 <= passed <= tried and tried > 0):
                raise ValueError("passes must be from 0 to tries, and tries at least 1")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{os.fspath(path)}:{line.number} is no verdict ({error}); "
                'write {"task": id, "passes": 1, "tries": 8}'
            ) from None
        passes[task] += passed
        tries[task] += tried
    return {task: Verdicts(passes[task], tries[task]) for task in tries}


def keep_hard(
    tasks: Sequence[Task],
    student: dict[str, Verdicts],
    teacher: dict[str, Verdicts],
    config: DifficultyConfig = DifficultyConfig(),
) -> tuple[list[Task], DifficultyReport]:
    """Returns the tasks that the student solves rarely and the teacher, a stronger policy, sometimes, with a report.

    Raises ValueError for tasks without enough verdicts of both, and for verdicts on unknown tasks.
    """
    known = {task.id for task in tasks}
    for who, verdicts in (("student", student), ("teacher", teacher)):
        _check_none(verdicts.keys() - known, f"the {who} has verdicts on unknown tasks")
        few = (t for t in known if t not in verdicts or verdicts[t].tries < config.min_tries)
        _check_none(few, f"the {who} tried tasks less than {config.min_tries} times")
    groups = {"retained": [], "too_easy": [], "unsolved": []}
    for task in tasks:
        if student[task.id].rate > config.max_student_pass_rate:
            groups["too_easy"].append(task)
        elif not teacher[task.id].rate > config.min_teacher_pass_rate:
            groups["unsolved"].append(task)
        else:
            groups["retained"].append(task)
    ids = {name: tuple(task.id for task in group) for name, group in groups.items()}
    return groups["retained"], DifficultyReport(**ids, table=_table(groups))


def _check_none(ids: Iterable[str], what: str) -> None:
    ids = sorted(ids)
    if ids:
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        raise ValueError(f"{what}: {', '.join(ids[:NAMED])}{more}")


def _table(groups: dict[str, list[Task]]) -> str:
    counts = {name: Counter(task.kind for task in group) for name, group in groups.items()}
    rows = [f"{'':12}" + "".join(f"{name:>10}" for name in groups)]
    for kind in sorted({task.kind for group in groups.values() for task in group}):
        rows.append(f"{kind:12}" + "".join(f"{counts[name][kind]:10,}" for name in groups))
    return "\n".join(rows)
