"""Measures the Python memory that a block of code allocates."""

import contextlib
import dataclasses
import tracemalloc


@dataclasses.dataclass
class TracedMemory:
    """Memory of a traced block.

    Attributes:
      peak: maximum of the bytes that the block had allocated; None until it ends.
    """

    peak: int | None = None


@contextlib.contextmanager
def traced_memory():
    """Traces the memory that the block allocates."""
    memory = TracedMemory()
    tracemalloc.start()
    try:
        yield memory
        _, memory.peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
