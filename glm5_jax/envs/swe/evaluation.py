"""Evaluates an agent, or a file of predictions, on the instances of a dataset."""

import contextlib
import hashlib
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from glm5_jax.envs.swe.attempts import AttemptRunner, PatchAgent, SweAgent
from glm5_jax.envs.swe.instance import InstanceError, Prediction, encode_record, read_records
from glm5_jax.envs.task_evaluation import TaskEvaluation
from glm5_jax.envs.terminal.trial import TrialResult


def evaluate_instances(
    runner: AttemptRunner,
    agent: SweAgent,
    workdir: pathlib.Path,
    *,
    predictions: str | None = None,
    identity: Mapping[str, Any],
    concurrency: int,
) -> TaskEvaluation:
    """Returns the evaluation of an agent, which writes the report of each attempt to `workdir/reports`.

    predictions: file in SWE-bench's form that replaces the agent; instances without a prediction are left out. Raises
    InstanceError if it has none of these instances.
    """
    names = list(runner.dataset.instances)
    if predictions is not None:
        patches = read_predictions(predictions)
        agent, names = PatchAgent(patches), [name for name in names if name in patches]
        content = pathlib.Path(predictions).read_bytes()
        identity = {**identity, "predictions": hashlib.sha256(content).hexdigest()}
        if not names:
            raise InstanceError(
                f"{predictions} has no prediction for an instance of {runner.dataset.folder}; check instance_id"
            )

    async def attempt(name: str) -> TrialResult:
        start = time.monotonic()
        report = await runner.run(name, agent)
        reports = workdir / "reports"
        reports.mkdir(exist_ok=True)
        (reports / f"{name}.json").write_bytes(encode_record(report))
        return TrialResult(
            reward=report.reward,
            error=report.infra_reason or report.error,
            duration_s=time.monotonic() - start,
        )

    return TaskEvaluation(
        names,
        attempt,
        workdir,
        identity=identity,
        concurrency=concurrency,
        resources=contextlib.nullcontext(),
    )


def read_predictions(path: str) -> dict[str, str]:
    """Returns the patches of a file of predictions, by name of the instance. Raises InstanceError."""
    predictions = read_records(path, Prediction)
    return {prediction.instance_id: prediction.model_patch or "" for prediction in predictions}
