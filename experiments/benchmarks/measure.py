"""Provides both arms of a benchmark with two threads, the same tokens and the same clocks."""

import os
import sys
import time
from collections.abc import Callable

import numpy as np

THREADS = 2
VOCAB_SIZE = 1024
PROMPT, NEW_TOKENS = 512, 64  # tokens of the decode rows


def pin() -> None:
    """Binds this process to two cores. Call it before jax or torch start their threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])


def lengths(arguments: list[str], default: tuple[int, ...]) -> list[int]:
    """Returns the lengths in tokens of a command line, ascending, or the default.

    Exits with code 2 and one line for an invalid length.
    """
    wrong = [word for word in arguments if not word.isdigit() or int(word) < 1]
    if wrong:
        message = f"error: length {wrong[0]!r}; give positive numbers of tokens, as in 4096"
        print(message, file=sys.stderr)
        raise SystemExit(2)
    return sorted(map(int, arguments or default))


def tokens(b: int, t: int) -> np.ndarray:
    """Returns int32[b t], the same in both arms; 0 and 1 (end of text) do not occur."""
    return np.random.default_rng(0).integers(2, VOCAB_SIZE, (b, t), dtype=np.int32)


class Clock:
    """Measures seconds of wall time and of this process's CPU time (all threads) from its creation to `read`."""

    def __init__(self):
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Returns {"wall", "cpu"} so far."""
        return {
            "wall": time.perf_counter() - self._wall,
            "cpu": time.process_time() - self._cpu,
        }


def gemm_rate(matmul: Callable[[], object]) -> float:
    """Returns the FLOP/s of matmul(), which multiplies two float32[2048 2048]; the best of seven."""
    times = []
    for _ in range(8):
        clock = Clock()
        matmul()
        times.append(clock.read()["wall"])
    return 2 * 2048**3 / min(times[1:])
