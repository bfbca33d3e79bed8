"""Keeps Python's garbage collector from the modules that a command imports."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the collector inside a `with` block of imports, and exempts their objects from later collections.

    It would take more than a third of the time: modules create many objects, and nearly all of them stay.
    """
    was_enabled, has_jax = gc.isenabled(), "jax" in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if not has_jax:  # else there may be models, which an exemption would keep in memory
            gc.freeze()
        if was_enabled:
            gc.enable()
