"""Trains two dense layers to retrieve, on tasks of bare tokens, and scores them by length.

    python -m tests.evals.retrieval_run '{"kind": "needle"}' 16:200,64:25 64,128,256

Arguments:
- Fields of `TaskConfig` as JSON.
- LENGTH:STEPS of training stages. All but the last end as soon as their loss is below `SOLVED`.
- The lengths that are scored.

With {"kind": "multi_key", "haystack": "notes"} only its key distinguishes a needle from the rest of the
context; experiments/ablations/retriever.py explains how that is learned quickly.

The last line is JSON: loss, CPU seconds of training without compilation, share solved by length.
"""

import dataclasses
import functools
import json
import sys
import time

import jax
import numpy as np

from experiments.ablations import retriever
from glm5_jax.data.sources import SHAKESPEARE
from glm5_jax.data.synthetic import LongContextTaskConfig, LongContextTasks
from glm5_jax.evals.ruler import RulerConfig, ruler, table
from glm5_jax.text.tokenizer import Tokenizer
from glm5_jax.training.optimizer import OptimizerConfig
from glm5_jax.training.schedule import ScheduleConfig, make_schedule
from glm5_jax.training.step import make_step
from glm5_jax.training.step_config import StepConfig

ROWS = 64
SAMPLES = 300
SOLVED = 0.1  # nats per answer token
MODEL = dataclasses.replace(retriever.model(), eos_token_id=(), pad_token_id=None)
TASK = LongContextTaskConfig(surface="tokens", num_keys=32, num_values=32, num_noise=32)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train([SHAKESPEARE.read_text("utf-8")], retriever.VOCAB)


def batch(tasks, number: int) -> dict[str, np.ndarray]:
    records = [tasks[number * ROWS + i] for i in range(ROWS)]
    streams = ("token_ids", "loss_mask", "ce_weight")
    rows = {name: np.stack([getattr(r, name) for r in records]) for name in streams}
    shape = rows["token_ids"].shape
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return rows | {"segment_ids": np.ones(shape, np.int32), "positions": positions}


def train(task: LongContextTaskConfig, stages: list[tuple[int, int]], peak: float = 5e-3):
    """Returns (params, last loss, CPU seconds) after stages of (length, steps)."""
    total = sum(steps for _, steps in stages)
    schedule = ScheduleConfig(kind="constant", peak=peak, warmup_steps=20, total_steps=total)
    optimizer = OptimizerConfig(ns_dtype="float32")
    step = make_step(
        MODEL, StepConfig(mtp_steps=0, remat="none"), optimizer, make_schedule(schedule)
    )
    state, seconds = step.initialise(jax.random.key(0)), 0.0
    for length, steps in stages:
        stage_task = dataclasses.replace(task, length=length)
        if task.kind == "multi_key":
            num_needles = length // 6
            stage_task = dataclasses.replace(
                stage_task, num_needles=num_needles, num_questions=num_needles
            )
        tasks = LongContextTasks(stage_task, tokenizer())
        for number in range(steps):
            state, metrics = step.train(state, batch(tasks, number))
            if not number:
                jax.block_until_ready(state)
                began = time.process_time()
            if number % 25 == 24:
                loss = float(metrics["loss"]["ce"])
                print(length, number + 1, loss, flush=True)
                if loss < SOLVED and (length, steps) != stages[-1]:
                    break
        jax.block_until_ready(state)
        seconds += time.process_time() - began
    return state["params"], float(metrics["loss"]["ce"]), seconds


def main(fields: dict, stages: list[tuple[int, int]], lengths: list[int]) -> None:
    task = dataclasses.replace(TASK, **fields)
    params, loss, seconds = train(task, stages)
    config = RulerConfig(
        kinds=(task.kind,), lengths=tuple(lengths), samples=SAMPLES, batch_size=50, task=task
    )
    scores = ruler(params, MODEL, tokenizer(), config)
    print(table(scores))
    solved = {name.split("/")[1]: float(score.exact.mean()) for name, score in scores.items()}
    print(json.dumps({"loss": loss, "seconds": round(seconds, 1), "solved": solved}))


if __name__ == "__main__":
    main(
        json.loads(sys.argv[1]),
        [tuple(map(int, stage.split(":"))) for stage in sys.argv[2].split(",")],
        [int(length) for length in sys.argv[3].split(",")],
    )
