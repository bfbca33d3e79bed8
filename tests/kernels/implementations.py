"""The implementations that one suite of tests runs over: XLA, and each Pallas form interpreted."""

import importlib.util

import pytest

from pallas_kernels import compat, dispatch


def written(kernel: str) -> list[str]:
    """The names of the implementations that a kernel package has."""
    modules = (f"pallas_kernels.{kernel}.{name}" for name in dispatch.NAMES)
    return [m.rpartition(".")[2] for m in modules if importlib.util.find_spec(m)]


def interpreted(name: str):
    """A Pallas form under the fastest interpreter of its platform."""
    return dispatch.interpreted(name, True if name == "tpu" else compat.emulator(name))


def watched(name: str):
    """A Pallas form in the emulator that looks for races (see `compat.races_found`)."""
    return dispatch.interpreted(name, compat.emulator(name, detect_races=True))


def over_implementations(kernel: str, several_devices: bool = False, slow: str = ""):
    """Parametrises a test by `implementation`.

    several_devices: without Hopper's, whose emulator waits for ever when several devices share few cores.
    slow: the name of one that the slow tier runs.
    """
    params = [
        pytest.param(
            "ref" if name == "ref" else interpreted(name), id=name, marks=marks(name == slow)
        )
        for name in written(kernel)
        if not (several_devices and name == "gpu")
    ]
    return pytest.mark.parametrize("implementation", params)


def over_pallas_forms(kernel: str, slow: str = ""):
    """Parametrises a test by `name`, one of tpu and gpu; slow: as for `over_implementations`."""
    names = [name for name in written(kernel) if name != "ref"]
    params = [pytest.param(name, marks=marks(name == slow)) for name in names]
    return pytest.mark.parametrize("name", params)


def marks(slow: bool) -> list:
    """The marks of a test's parameters that are for the slow tier or not."""
    return [pytest.mark.slow] if slow else []
