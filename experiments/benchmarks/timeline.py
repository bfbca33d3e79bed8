"""When the host prepares a step and when the device computes it, as a picture."""

import pathlib
import queue
import threading
import time

import jax
import numpy as np
from flax import nnx

from experiments.benchmarks.glm5_arm import BASELINE
from glm5_jax.core import charts
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.sampling import Sampling
from glm5_jax.model import glm5
from glm5_jax.training import report

BATCH, PROMPT, NEW = 8, 256, 60
SHOWN = 12  # steps of the picture


def record(engine: Engine, prompts, sampling) -> list[tuple[float, float, float, float]]:
    """Of every step: seconds when the host began to prepare it and had sent it off, when the device had computed it,
    and when the host had taken what came back."""
    runner, watched, ready = engine._runner, queue.Queue(), {}
    sent, taken = [], []

    def watch():
        # A thread of its own, so that asking does not delay what is asked about.
        while (item := watched.get()) is not None:
            number, drew = item
            jax.block_until_ready(drew)
            ready[number] = time.perf_counter()

    launch, receive, step = runner.launch, engine._receive, engine.step
    began = 0.0

    def timed_launch(works):
        parts = launch(works)
        if parts:
            watched.put((len(sent), [part.drew for part in parts]))
            sent.append((began, time.perf_counter()))
        return parts

    def timed_receive():
        receive()
        taken.append(time.perf_counter())

    def timed_step():
        nonlocal began
        began = time.perf_counter()
        return step()

    runner.launch, engine._receive, engine.step = timed_launch, timed_receive, timed_step
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        engine.generate(prompts, sampling)
    finally:
        watched.put(None)
        watcher.join()
        runner.launch, engine._receive, engine.step = launch, receive, step
    return [(*sent[i], ready[i], taken[i]) for i in range(len(sent))]


def timeline(folder: pathlib.Path) -> None:
    """Prints how many decodes were sent off while the device computed the one before, and writes timeline.html."""
    model = glm5.Glm5(BASELINE, rngs=nnx.Rngs(0))
    engine = Engine(model, max_batch=BATCH, max_length=PROMPT + NEW + 1, step_tokens=BATCH * PROMPT)
    sampling = Sampling(max_tokens=NEW, ignore_eos=True, temperature=0)
    for seed in range(2):  # the first compiles
        rng = np.random.default_rng(seed)
        asked = rng.integers(2, BASELINE.vocab_size, (BATCH, PROMPT)).tolist()
        steps = record(engine, asked, sampling)[1:]
    before = [one[2] for one in steps[:-1]]
    ahead = [own[1] < end for own, end in zip(steps[1:], before)]
    starts = [max(own[1], end) for own, end in zip(steps[1:], before)]
    busy = sum(own[2] - start for own, start in zip(steps[1:], starts))
    share = busy / (steps[-1][2] - before[0])
    print(
        f"timeline: {100 * np.mean(ahead):.0f}% of {len(ahead)} steps were sent off while the device computed the one "
        f"before (target 90%); the device computed {100 * share:.0f}% of the time"
    )
    middle = slice(len(ahead) // 2, len(ahead) // 2 + SHOWN)
    zero = steps[1:][middle][0][0]
    rows = {
        "host prepares": [(own[0], own[1]) for own in steps[1:][middle]],
        "device computes": [
            (start, own[2]) for start, own in zip(starts[middle], steps[1:][middle])
        ],
        "host takes": [(own[2], own[3]) for own in steps[1:][middle]],
    }
    rows = {
        name: [(1e3 * (a - zero), 1e3 * (b - zero)) for a, b in spans]
        for name, spans in rows.items()
    }
    title = f"{SHOWN} steps of {BATCH} requests"
    picture = charts.span_chart(rows, x_label="milliseconds", y_label=title)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "timeline.html"
    path.write_text(report.page("Timeline", [f"<h1>Timeline</h1><figure>{picture}</figure>"]))
    print(f"timeline: {path}")
