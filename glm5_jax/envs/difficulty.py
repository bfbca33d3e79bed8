"""Which tasks are worth learning from: a student rarely solves them, a stronger policy does (GLM-5, section 3.2).

The thresholds are ours; the paper prints none. What the stronger policy never solves may have a wrong answer.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm5_jax.rl.types import Task

NAMED = 5  # tasks that an error names


@dataclasses.dataclass(frozen=True)
class DifficultyConfig:
    """Construction refuses values out of range (ValueError).

    Attributes:
      most_of_student: pass rate up to which a task is hard enough for the student.
      above_of_teacher: pass rate that the stronger policy must exceed.
      min_tries: of each policy at every task, so that a rate means something.
    """

    most_of_student: float = 0.25
    above_of_teacher: float = 0.0
    min_tries: int = 1

    def __post_init__(self):
        for name, below in (("most_of_student", 1.0), ("above_of_teacher", math.nextafter(1, 0))):
            if not 0 <= getattr(self, name) <= below:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to {below}")
        if self.min_tries < 1:
            raise ValueError(f"min_tries is {self.min_tries}; it must be at least 1")


class Verdicts(NamedTuple):
    """How often a policy tried a task and passed."""

    passes: int
    tries: int

    @property
    def rate(self) -> float:
        """Share of the tries that passed."""
        return self.passes / self.tries


@dataclasses.dataclass(frozen=True)
class DifficultyReport:
    """What was kept and dropped: ids, in the order of the tasks; `str` shows counts by kind of task."""

    kept: tuple[str, ...]
    too_easy: tuple[str, ...]
    unsolved: tuple[str, ...]
    table: str

    def __str__(self):
        return self.table


def read_verdicts(path: str | os.PathLike) -> dict[str, Verdicts]:
    """A policy's verdicts by task, of lines {"task": id, "passes": ..., "tries": ...}, as experiments/verdicts.py writes
    them; those of one task add up. ValueError naming the line that is none."""
    passes, tries = Counter(), Counter()
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                verdict = json.loads(line)
                task, passed, tried = (verdict[name] for name in ("task", "passes", "tries"))
                whole = type(passed) is type(tried) is int and type(task) is str
                if not (whole and 0 <= passed <= tried and tried > 0):
                    raise ValueError("passes must be from 0 to tries, and tries at least 1")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{os.fspath(path)}:{number} is no verdict ({error}); "
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
    """The tasks that the student solves rarely and the teacher, a stronger policy, sometimes; and why not the others.

    ValueError for tasks without enough verdicts of both, and for verdicts on tasks that are not there.
    """
    known = {task.id for task in tasks}
    for who, verdicts in (("student", student), ("teacher", teacher)):
        _refuse(verdicts.keys() - known, f"the {who} has verdicts on unknown tasks")
        few = (t for t in known if t not in verdicts or verdicts[t].tries < config.min_tries)
        _refuse(few, f"the {who} tried tasks less than {config.min_tries} times")
    groups = {"kept": [], "too_easy": [], "unsolved": []}
    for task in tasks:
        if student[task.id].rate > config.most_of_student:
            groups["too_easy"].append(task)
        elif not teacher[task.id].rate > config.above_of_teacher:
            groups["unsolved"].append(task)
        else:
            groups["kept"].append(task)
    ids = {name: tuple(task.id for task in group) for name, group in groups.items()}
    return groups["kept"], DifficultyReport(**ids, table=_table(groups))


def _refuse(ids: Iterable[str], what: str) -> None:
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
