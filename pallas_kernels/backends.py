"""Selection of the implementation of a kernel: the one that is named, or the best one for the chip.

- `ref` is the meaning of the kernel in a few lines, for small sizes.
- `xla` is the fast form without Pallas, on any platform. A package without `xla.py` has one form for both.
- `tpu` and `gpu` are Pallas forms, where they exist.

The chip is known when tracing. It is that of the mesh whose manual region is traced, which need not exist on this
machine (ahead-of-time compilation). Without a mesh it is jax's default backend.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable

import jax

NAMES = ("ref", "xla", "tpu", "gpu")
PALLAS = ("tpu", "gpu")
BACKEND_OF_PLATFORM = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
# Pallas forms that "auto" leaves out, by kernel and name, with the reason. Naming a form still selects it.
OPT_IN = {
    (
        "gated_delta",
        "gpu",
    ): "on an H200 (2026-11-26) two runs of 64 heads differed, and some were NaN",
}
LOGGER = logging.getLogger("pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Name of an implementation, and whether it is interpreted.

    Attributes:
      name: one of NAMES.
      interpret: False, True, or the parameters of the platform's emulator.
    """

    name: str
    interpret: object = False


def make_interpreted(name: str, params: object = True) -> Implementation:
    """Returns the Pallas form `name`, interpreted on this machine instead of compiled. It is slow, for tests.

    params: True for the plain interpreter, which takes only TPU forms, or the parameters of an emulator
    (`compat.emulator_params`).
    """
    return Implementation(name, params)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of one kernel package; hashable, for the static arguments of a custom_vjp."""

    kernel: str
    name: str
    interpret: object = False

    def function(self, name: str) -> Callable:
        """Returns a function of the implementation's module; a Pallas form gets `interpret` bound."""
        function = getattr(_module(self.kernel, self.name), name)
        if self.name not in PALLAS:
            return function
        return functools.partial(function, interpret=self.interpret)


def select_backend(kernel: str, implementation: str | Implementation, *args) -> Backend:
    """Returns the requested implementation of a kernel package; "auto": the best one that takes the arguments.

    args go to `unsupported_reason(*args)` of a Pallas form's module, which returns the reason why it cannot take
    them, or None. "auto" falls back to `xla` for such arguments and for forms in OPT_IN. Every choice of "auto"
    is logged once. Raises ValueError if a named implementation is unknown, is for another platform, or does not
    support the arguments.
    """
    requested = implementation
    if isinstance(requested, str):
        requested = Implementation(_default_name(kernel) if requested == "auto" else requested)
    if requested.name not in NAMES:
        raise ValueError(
            f"{kernel}: implementation {requested.name!r}; use auto, {', '.join(NAMES)}"
        )
    backend = Backend(kernel, requested.name, requested.interpret)
    if requested.name not in PALLAS:
        reason = None
    elif not is_written(kernel, requested.name):
        reason = "it is not written"
    elif not requested.interpret and BACKEND_OF_PLATFORM.get(platform()) != requested.name:
        reason = f"this program is for {platform()}"
    elif requested.name == "gpu" and not requested.interpret and not is_hopper():
        reason = f"{device_kind()!r} is not a Hopper GPU"
    else:
        reason = _module(kernel, requested.name).unsupported_reason(*args)
    if implementation == "auto":
        reason = reason or OPT_IN.get((kernel, requested.name))
        _log_once(kernel, platform(), requested.name, reason)
        return Backend(kernel, "xla") if reason else backend
    if reason:
        raise ValueError(
            f"{kernel}: implementation {requested.name!r} cannot run: {reason}; use 'auto'"
        )
    return backend


def platform() -> str:
    """Returns the platform that the traced program is for, by jax's name."""
    device = _device()
    return device.platform if device else jax.default_backend()


def device_kind() -> str:
    """Returns the kind of chip that the traced program is for, by the name of its vendor's runtime."""
    device = _device()
    return device.device_kind if device else jax.devices()[0].device_kind


def is_hopper() -> bool:
    """Returns whether the traced program is for a GPU of compute capability 9.0."""
    return any(name in device_kind().replace("-", " ").split() for name in HOPPER)


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device


def _default_name(kernel: str) -> str:
    name = BACKEND_OF_PLATFORM.get(platform(), "xla")
    return name if is_written(kernel, name) else "xla"


def is_written(kernel: str, name: str) -> bool:
    """Returns whether a kernel package has a module of this name."""
    return importlib.util.find_spec(f"pallas_kernels.{kernel}.{name}") is not None


def _module(kernel: str, name: str):
    # Imported at first use: a program on a CPU need not load Pallas.
    name = "ref" if name == "xla" and not is_written(kernel, "xla") else name
    return importlib.import_module(f"pallas_kernels.{kernel}.{name}")


@functools.cache
def _log_once(kernel: str, platform: str, name: str, reason: str | None):
    if reason:
        LOGGER.info("%s on %s: XLA, because the Pallas form cannot: %s", kernel, platform, reason)
    else:
        LOGGER.info(
            "%s on %s: %s", kernel, platform, f"Pallas ({name})" if name in PALLAS else "XLA"
        )
