"""Draws when the host prepares a step and when the device computes it."""

import pathlib
import queue
import threading
import time

import jax
import numpy as np
from flax import nnx

from experiments.benchmarks.glm5_arm import BASELINE
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.metrics import charts, html_page
from glm5_jax.model import glm5

BATCH, PROMPT, NEW = 8, 256, 60
SHOWN = 12  # number of steps in the picture


def record_steps(
    engine: Engine, prompts: list[list[int]], sampling: Sampling
) -> list[tuple[float, float, float, float]]:
    """Returns the times of every step, in seconds.

    (host starts to prepare it, host has launched it, device has computed it, host has processed its output).
    """
    runner, launched_steps, ready = engine._runner, queue.Queue(), {}
    sent, processed = [], []

    def wait_for_outputs():
        # In a separate thread, so that waiting does not delay the engine.
        while (item := launched_steps.get()) is not None:
            number, outputs = item
            jax.block_until_ready(outputs)
            ready[number] = time.perf_counter()

    launch, receive, step = runner.launch, engine._receive, engine.step
    began = 0.0

    def timed_launch(works):
        parts = launch(works)
        if parts:
            launched_steps.put((len(sent), [part.output for part in parts]))
            sent.append((began, time.perf_counter()))
        return parts

    def timed_receive():
        receive()
        processed.append(time.perf_counter())

    def timed_step():
        nonlocal began
        began = time.perf_counter()
        return step()

    runner.launch, engine._receive, engine.step = timed_launch, timed_receive, timed_step
    watcher = threading.Thread(target=wait_for_outputs)
    watcher.start()
    try:
        engine.generate(prompts, sampling)
    finally:
        launched_steps.put(None)
        watcher.join()
        runner.launch, engine._receive, engine.step = launch, receive, step
    return [(*sent[i], ready[i], processed[i]) for i in range(len(sent))]


def timeline(folder: pathlib.Path) -> None:
    """Prints the share of decodes that were launched before the previous one was done, and writes timeline.html."""
    model = glm5.Glm5(BASELINE, rngs=nnx.Rngs(0))
    engine = Engine(
        model,
        config=EngineConfig(
            max_num_seqs=BATCH, max_length=PROMPT + NEW + 1, max_batched_tokens=BATCH * PROMPT
        ),
    )
    sampling = Sampling(max_tokens=NEW, ignore_eos=True, temperature=0)
    for seed in range(2):  # the first compiles
        rng = np.random.default_rng(seed)
        prompts = rng.integers(2, BASELINE.vocab_size, (BATCH, PROMPT)).tolist()
        steps = record_steps(engine, prompts, sampling)[1:]
    before = [step[2] for step in steps[:-1]]
    ahead = [step[1] < end for step, end in zip(steps[1:], before)]
    starts = [max(step[1], end) for step, end in zip(steps[1:], before)]
    busy = sum(step[2] - start for step, start in zip(steps[1:], starts))
    share = busy / (steps[-1][2] - before[0])
    print(
        f"timeline: {100 * np.mean(ahead):.0f}% of {len(ahead)} steps were sent off while the device computed the one "
        f"before (target 90%); the device computed {100 * share:.0f}% of the time"
    )
    middle = slice(len(ahead) // 2, len(ahead) // 2 + SHOWN)
    zero = steps[1:][middle][0][0]
    rows = {
        "host prepares": [(step[0], step[1]) for step in steps[1:][middle]],
        "device computes": [
            (start, step[2]) for start, step in zip(starts[middle], steps[1:][middle])
        ],
        "host takes": [(step[2], step[3]) for step in steps[1:][middle]],
    }
    rows = {
        name: [(1e3 * (a - zero), 1e3 * (b - zero)) for a, b in spans]
        for name, spans in rows.items()
    }
    title = f"{SHOWN} steps of {BATCH} requests"
    picture = charts.span_chart(rows, x_label="milliseconds", y_label=title)
    figure = html_page.figure(picture)
    path = html_page.write(folder / "timeline.html", "Timeline", "", [figure])
    print(f"timeline: {path}")
