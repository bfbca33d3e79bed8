"""Scores sampled tokens by teachers: checkpoints whose log-probs supervise the tasks of an origin (GLM-5 3.5).

1. `open_teachers` checks all checkpoints before anything starts.
2. `TeacherScorer.add_logprobs` packs the records of each origin, and fills their `ref_logp`.

A teacher with a checkpoint is scored by the learner's forward on the learner's mesh. At most
`RlConfig.max_loaded_teachers` of them are on the devices. The weights of the others are read from their checkpoints in
each step. A teacher with a server is scored by that (`teacher_client`).
"""

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from glm5_jax.checkpoint import models, store
from glm5_jax.data.loader import Batch
from glm5_jax.data.record import TokenRecord
from glm5_jax.model.ablations.convert import add_missing_weights
from glm5_jax.rl.algorithm.batch import pack_records
from glm5_jax.rl.config import RlConfig, Teacher
from glm5_jax.rl.trainers.teacher_client import TeacherClient
from glm5_jax.training.stages import Stage

Score = Callable[[PyTree, Batch], np.ndarray]
# How a teacher is opened: by the function that loads its weights, or as a server.
OpenedTeacher = Callable[[], PyTree] | TeacherClient


def open_teachers(
    config: RlConfig, mesh: Mesh | None, previous_stage: Stage | None = None
) -> dict[str, OpenedTeacher]:
    """Checks the checkpoints of all teachers, and returns the teachers by origin.

    A teacher that the previous stage has yet to train is left out. Raises ValueError for an invalid checkpoint.
    """
    teachers: dict[str, OpenedTeacher] = {}
    key = jax.random.key(config.seed)
    for teacher in config.teachers:
        if teacher.url is not None:
            teachers[teacher.origin] = TeacherClient(teacher.url, teacher.key_file)
            continue
        if _is_pending(teacher, previous_stage):
            continue
        try:
            load = models.open_weights(
                teacher.checkpoint, config.model, mesh=mesh, may_differ=config.may_differ
            )
        except ValueError as error:
            raise ValueError(
                f"the teacher of {teacher.origin!r}: {error}; set its checkpoint in --experiment.teachers"
            ) from None
        teachers[teacher.origin] = functools.partial(_load, load, config, key, mesh)
    return teachers


def _load(
    load: Callable[[], PyTree], config: RlConfig, key: jax.Array, mesh: Mesh | None
) -> PyTree:
    """Returns the weights of a teacher. One without adapters gets new ones, which change nothing.

    The step scores trees of its own model.
    """
    return add_missing_weights(load(), config.model, key, mesh=mesh)


def _is_pending(teacher: Teacher, previous_stage: Stage | None) -> bool:
    """Returns True if the teacher is a stage of the same run that has saved no checkpoint yet.

    Its checkpoint may be missing only while the stage before this one has still to train.
    """
    if previous_stage is None or previous_stage.is_finished:
        return False
    path = pathlib.Path(teacher.checkpoint)
    is_same_run = path.parent == previous_stage.workdir.parent
    return is_same_run and store.latest_step(path) is None


def make_scorer(
    config: RlConfig, teachers: Mapping[str, OpenedTeacher], score: Score
) -> "TeacherScorer | None":
    """Returns the scorer of teachers that `open_teachers` has opened; None if there are none."""
    if not teachers:
        return None
    max_loaded = config.max_loaded_teachers
    return TeacherScorer(teachers, score, length=config.length, max_loaded=max_loaded)


class TeacherScorer:
    """Teachers by origin, and the log-probs that they give to sampled tokens.

    Args:
      teachers: teachers by origin; "" is any origin without a teacher of its own.
      score: `Stage.score` of the learner.
      length: tokens of a row.
      max_loaded: maximum number of teachers on the devices at once.
    """

    def __init__(
        self,
        teachers: Mapping[str, OpenedTeacher],
        score: Score,
        *,
        length: int,
        max_loaded: int,
    ):
        self._teachers, self._score = teachers, score
        self._length, self._max_loaded = length, max_loaded
        self._loaded: dict[str, PyTree] = {}  # by origin, the last used one last

    def add_logprobs(
        self, records: Sequence[TokenRecord], origins: Mapping[str, str], num_rows: int
    ) -> list[TokenRecord]:
        """Returns the records with ref_logp of their teacher. Records without ref_kl_weight stay as they are.

        Raises ValueError if a server fails, or a teacher's log-probs are not finite.

        Args:
          origins: origin of each group by its id.
          num_rows: rows that the learner scores at once.
        """
        by_teacher: dict[str, list[TokenRecord]] = {}
        for record in records:
            if record.ref_kl_weight is not None:
                origin = origins[record.group_id]
                by_teacher.setdefault(origin if origin in self._teachers else "", []).append(record)
        scored: dict[int, TokenRecord] = {}
        # Teachers that are loaded come first, because others may take their place.
        for origin in sorted(by_teacher, key=lambda origin: origin not in self._loaded):
            teacher = self._teachers[origin]
            if isinstance(teacher, TeacherClient):
                scores = zip(by_teacher[origin], teacher.score(by_teacher[origin]))
            else:
                scores = self._score_records(by_teacher[origin], origin, teacher, num_rows)
            for record, logp in scores:
                logp = np.where(record.loss_mask, logp, np.nan)
                _check_logprobs(record, logp, origin)
                scored[id(record)] = replace(record, ref_logp=logp)
        return [scored.get(id(record), record) for record in records]

    def _score_records(
        self,
        records: Sequence[TokenRecord],
        origin: str,
        load: Callable[[], PyTree],
        num_rows: int,
    ) -> Iterator[tuple[TokenRecord, np.ndarray]]:
        """Yields each record with its log-probs by the learner's forward.

        The teacher reads num_rows rows at a time, so that one program serves all batches.
        """
        params = self._weights(origin, load)
        batch, rows = pack_records(records, self._length, num_rows, ("token_ids",))
        for first in range(0, len(rows), num_rows):
            part = {name: stream[first : first + num_rows] for name, stream in batch.items()}
            for row_logp, row in zip(self._score(params, part), rows[first:]):
                ends = np.cumsum([len(record) for record in row])
                yield from zip(row, np.split(row_logp, ends))

    def _weights(self, origin: str, load: Callable[[], PyTree]) -> PyTree:
        """Returns the weights of a teacher, and unloads those that were used longest ago if there are too many."""
        if origin in self._loaded:
            params = self._loaded.pop(origin)
        else:
            while len(self._loaded) >= self._max_loaded:
                del self._loaded[next(iter(self._loaded))]
            params = load()
        self._loaded[origin] = params
        return params


def _check_logprobs(record: TokenRecord, logp: np.ndarray, origin: str) -> None:
    """Raises ValueError if a trained token has no finite log-prob; a batch would take NaN for probability 1."""
    trained = logp[record.loss_mask.astype(bool)]
    if not np.isfinite(trained).all():
        name = f"the teacher of {origin!r}" if origin else "the teacher"
        raise ValueError(
            f"{name} gives a token the log-prob {trained[~np.isfinite(trained)][0]}, which is no number; give one "
            "whose weights are whole"
        )
