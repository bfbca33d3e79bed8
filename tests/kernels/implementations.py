"""Parametrisation of kernel tests over implementations: XLA, and each Pallas form interpreted."""

import pytest

from pallas_kernels import backends, compat


def implementation_names(kernel: str) -> list[str]:
    """Returns the names of a kernel's implementations, without `ref`, which test_refs compares with XLA's."""
    return ["xla", *(name for name in backends.PALLAS if backends.is_written(kernel, name))]


def interpreted(name: str):
    """Returns a Pallas form under the fastest interpreter of its platform."""
    return backends.make_interpreted(name, True if name == "tpu" else compat.emulator_params(name))


def race_checked(name: str):
    """Returns a Pallas form in the emulator that detects races (see `compat.has_races`)."""
    return backends.make_interpreted(name, compat.emulator_params(name, detect_races=True))


def over_implementations(kernel: str, several_devices: bool = False, slow: str = ""):
    """Parametrises a test by `implementation`.

    several_devices: leaves out Hopper's form, whose emulator deadlocks when devices share few cores.
    slow: names of the implementations of the slow tier, separated by spaces.
    """
    params = [
        pytest.param(
            "xla" if name == "xla" else interpreted(name),
            id=name,
            marks=marks(name in slow.split()),
        )
        for name in implementation_names(kernel)
        if not (several_devices and name == "gpu")
    ]
    return pytest.mark.parametrize("implementation", params)


def over_pallas_forms(kernel: str, slow: str = ""):
    """Parametrises a test by `name`, tpu or gpu. slow: see `over_implementations`."""
    names = [name for name in implementation_names(kernel) if name != "xla"]
    params = [pytest.param(name, marks=marks(name in slow.split())) for name in names]
    return pytest.mark.parametrize("name", params)


def marks(slow: bool) -> list:
    """Returns the pytest marks of a parameter."""
    return [pytest.mark.slow] if slow else []


def in_tiers(quick, slow) -> list:
    """Returns a parameter's values: those of the default tier, and the others marked as slow."""
    each = (value if isinstance(value, tuple) else (value,) for value in slow)
    return [*quick, *(pytest.param(*value, marks=pytest.mark.slow) for value in each)]


def over_cases(kernel: str, cases, quick: dict):
    """Parametrises a test by `name`, one of cases, and `implementation`.

    quick: {implementation: names of the default tier}; the other names are for the slow tier.
    """
    params = [
        pytest.param(name, *p.values, id=f"{name}-{p.id}", marks=marks(name not in quick[p.id]))
        for p in over_implementations(kernel).args[1]
        for name in cases
    ]
    return pytest.mark.parametrize(("name", "implementation"), params)
