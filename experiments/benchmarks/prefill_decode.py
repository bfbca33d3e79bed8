"""Compares two layouts of two engines under the same load: both prefill and decode, or one prefills and one decodes.

    python -m experiments.benchmarks.prefill_decode [--rate=2] [--long_rate=0.15] [--seconds=120] [--checkpoint=DIR]

Each engine is a server in a process of its own with one core. Chats of 20 to 60 tokens arrive at `--rate` a second, prompts
of 3,000 tokens at `--long_rate` (both Poisson); each gets 40 tokens. Without --checkpoint the weights are random, of the
19.4M model of the other benchmarks. Prints the time to the first token (TTFT) and of each further one (TPOT) of either kind.
Needs two idle cores: with other work on them the two layouts cannot be compared.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.glm5_arm import BASELINE
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.inference.client import Client, ServerError
from glm5_jax.model import glm5
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.process import ChildProcess
from glm5_jax.text.tokenizer import Tokenizer

LONG_TOKENS, NEW_TOKENS = 3000, 40
SHORT_TOKENS = 20, 60
ENGINE = (
    *("page_size=64", "max_length=4096", "max_num_seqs=8"),
    *("prefill_chunk=256", "min_prefill_bucket=128"),  # few programs to compile
)
START_S = 300.0  # until a server has compiled its programs


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Request of the load: its time in seconds, and its prompt."""

    at: float
    ids: list[int]

    @property
    def is_long(self) -> bool:
        """Whether it has a long prompt."""
        return len(self.ids) == LONG_TOKENS


@dataclasses.dataclass(frozen=True)
class Latency:
    """Latencies of one request, in seconds: to the first token, and of each further token."""

    first: float
    further: float


def arrivals(rate: float, long_rate: float, seconds: float, vocab: int) -> list[Arrival]:
    """Returns the requests of a load, in order; rates per second."""
    rng = np.random.default_rng(0)
    load = []
    for is_long, each in ((False, rate), (True, long_rate)):
        at = 0.0
        while (at := at + rng.exponential(1 / each)) < seconds:
            count = LONG_TOKENS if is_long else int(rng.integers(*SHORT_TOKENS))
            load.append(Arrival(at, rng.integers(0, vocab, count).tolist()))
    return sorted(load, key=lambda one: one.at)


@contextlib.contextmanager
def server(checkpoint: str, core: int, *flags: str) -> Iterator[str]:
    """Runs a server on one core, and yields its URL once it has compiled its programs."""
    with tempfile.TemporaryDirectory() as folder:
        ready, log = pathlib.Path(folder) / "ready", pathlib.Path(folder) / "log"
        words = ["warm=True", "engine.warms_prompt_logprobs=False", "engine.moves_pages=True"]
        words += [*(f"engine.{option}" for option in ENGINE), *flags]
        words += ["server.port=0", f"server.ready_file={ready}", f"checkpoint={checkpoint}"]
        command = [sys.executable, "-m", "launch.run", "--experiment=serve:tiny"]
        command += [*(f"--experiment.{word}" for word in words)]
        process = ChildProcess(command, log=log, cores=[core])
        try:
            deadline = time.monotonic() + START_S
            while not (ready.exists() and is_warm(url_of(ready))):
                if process.exit_code() is not None or time.monotonic() > deadline:
                    raise ValueError(f"a server did not start: {log.read_text()[-1000:]}")
                time.sleep(0.5)
            yield url_of(ready)
        finally:
            process.terminate()
            while process.exit_code() is None:
                time.sleep(0.1)


def url_of(ready: pathlib.Path) -> str:
    """Returns the URL of the server that has written this file."""
    return f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"


def is_warm(url: str) -> bool:
    """Returns whether a server has compiled its programs."""
    try:
        Client(url, direct=True).open("/health").close()
    except ServerError:
        return False
    return True


def measure(urls: Sequence[str], load: list[Arrival]) -> list[Latency]:
    """Sends a load to servers in turn and returns the latencies, in the order of the load."""
    with concurrent.futures.ThreadPoolExecutor(len(load)) as pool:
        futures, began = [], time.monotonic()
        with ProgressBar(len(load), unit="request") as bar:
            for number, arrival in enumerate(load):
                time.sleep(max(0.0, began + arrival.at - time.monotonic()))
                futures.append(pool.submit(_request, urls[number % len(urls)], arrival.ids))
                bar.update(number + 1, "sent")
        return [future.result() for future in futures]


def _request(url: str, ids: list[int]) -> Latency:
    body = {"prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    sent, times = time.monotonic(), []
    with Client(url, direct=True).open("/v1/completions", json.dumps(body).encode()) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data:").strip()
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    times += [time.monotonic()] * len(choice.get("token_ids") or ())
    return Latency(times[0] - sent, (times[-1] - times[0]) / (len(times) - 1))


def add_row(table: Table, name: str, load: list[Arrival], latencies: list[Latency]) -> None:
    """Adds the latencies of a layout to a table, of either kind of prompts."""
    for kind, is_long in (("short", False), ("long", True)):
        chosen = [one for arrival, one in zip(load, latencies) if arrival.is_long == is_long]
        first = np.percentile([one.first for one in chosen], (50, 99))
        further = 1e3 * np.percentile([one.further for one in chosen], (50, 99))
        cells = [f"{value:.2f}" for value in first] + [f"{value:.1f}" for value in further]
        table.add_row(name, kind, str(len(chosen)), *cells)


def main(arguments: list[str]) -> int:
    """Runs the program with these arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.prefill_decode")
    parser.add_argument("--rate", type=float, default=2.0, help="chats a second")
    parser.add_argument("--long_rate", type=float, default=0.15, help="long prompts a second")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the load")
    parser.add_argument("--checkpoint", help="model; default: random weights")
    options = parser.parse_args(arguments)
    load = arrivals(options.rate, options.long_rate, options.seconds, BASELINE.vocab_size // 2)
    columns = "TTFT p50, s", "p99", "TPOT p50, ms", "p99"
    table = Table("layout", "prompts", "requests", *columns)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or folder
        if options.checkpoint is None:
            model = glm5.Glm5(BASELINE, rngs=nnx.Rngs(0))
            save_hf(glm5.params_of(model), folder, cfg=BASELINE, tokenizer=Tokenizer.default())
        with server(checkpoint, 0) as first, server(checkpoint, 1) as second:
            add_row(table, "two that do both", load, measure([first, second], load))
        with server(checkpoint, 0) as first:
            with server(checkpoint, 1, f"server.prefill_urls={first}") as second:
                add_row(table, "one prefills, one decodes", load, measure([second], load))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
