"""The implementations that one suite of tests runs over: XLA, and each Pallas form interpreted."""

import importlib.util

import pytest

from pallas_kernels import backends, compat


def written(kernel: str) -> list[str]:
    """The names of the implementations that a kernel package has."""
    modules = (f"pallas_kernels.{kernel}.{name}" for name in backends.NAMES)
    return [m.rpartition(".")[2] for m in modules if importlib.util.find_spec(m)]


def interpreted(name: str):
    """A Pallas form under the fastest interpreter of its platform."""
    return backends.make_interpreted(name, True if name == "tpu" else compat.emulator_params(name))


def watched(name: str):
    """A Pallas form in the emulator that looks for races (see `compat.has_races`)."""
    return backends.make_interpreted(name, compat.emulator_params(name, detect_races=True))


def over_implementations(kernel: str, several_devices: bool = False, slow: str = ""):
    """Parametrises a test by `implementation`.

    several_devices: without Hopper's, whose emulator waits for ever when several devices share few cores.
    slow: the names of those that only the slow tier runs, with spaces between.
    """
    params = [
        pytest.param(
            "ref" if name == "ref" else interpreted(name),
            id=name,
            marks=marks(name in slow.split()),
        )
        for name in written(kernel)
        if not (several_devices and name == "gpu")
    ]
    return pytest.mark.parametrize("implementation", params)


def over_pallas_forms(kernel: str, slow: str = ""):
    """Parametrises a test by `name`, tpu or gpu; slow: as for `over_implementations`."""
    names = [name for name in written(kernel) if name != "ref"]
    params = [pytest.param(name, marks=marks(name in slow.split())) for name in names]
    return pytest.mark.parametrize("name", params)


def marks(slow: bool) -> list:
    """The marks of a test's parameters that are for the slow tier or not."""
    return [pytest.mark.slow] if slow else []


def in_tiers(quick, slow) -> list:
    """Returns a parameter's values for the default tier, and those that only the slow tier takes."""
    each = (value if isinstance(value, tuple) else (value,) for value in slow)
    return [*quick, *(pytest.param(*value, marks=pytest.mark.slow) for value in each)]


def over_cases(kernel: str, cases, quick: dict):
    """Parametrises a test by `name`, one of cases, and `implementation`.

    quick: names of the default tier by implementation; the others are for the slow tier.
    """
    params = [
        pytest.param(name, *p.values, id=f"{name}-{p.id}", marks=marks(name not in quick[p.id]))
        for p in over_implementations(kernel).args[1]
        for name in cases
    ]
    return pytest.mark.parametrize(("name", "implementation"), params)
