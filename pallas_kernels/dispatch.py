"""Which implementation of a kernel runs: the one that is named, or the best one for the chip.

The chip is known when tracing: that of the mesh whose manual region is traced, which need not be here
(ahead-of-time compilation), else jax's default backend.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging

import jax

NAMES = ("ref", "tpu", "gpu")
OF_PLATFORM = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu"}
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
# Pallas forms that "auto" leaves out, by kernel and name, with the reason; who names one gets it.
OPT_IN = {
    (
        "gated_delta",
        "gpu",
    ): "on an H200 (2026-11-26) two runs of 64 heads differed, and some were NaN",
}
LOG = logging.getLogger("pallas_kernels")


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A name of NAMES; interpret: False, True, or the parameters of its platform's emulator."""

    name: str
    interpret: object = False


def interpreted(name: str, params: object = True) -> Implementation:
    """The Pallas form `name`, interpreted on this machine instead of compiled: slow, for tests.

    params: True for the plain interpreter, which takes TPU forms only, or the parameters of an
    emulator (`compat.emulator`).
    """
    return Implementation(name, params)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One implementation of one kernel package; hashable, for the static arguments of a custom_vjp."""

    kernel: str
    name: str
    interpret: object = False

    def function(self, name: str):
        """That function of the implementation's module; a Pallas form is told whether to interpret."""
        function = getattr(_module(self.kernel, self.name), name)
        if self.name == "ref":
            return function
        return functools.partial(function, interpret=self.interpret)


def choose(kernel: str, implementation: str | Implementation, *args) -> Choice:
    """The implementation of a kernel package that is asked for; "auto": the best one that can.

    args go to `refuse(*args)` of a Pallas form's module, which says why it cannot take them, or None.
    ValueError if a named one is unknown, of another platform, or refuses. "auto" takes `ref` instead, also of
    what is in OPT_IN, and every choice that it makes is logged once.
    """
    asked = implementation
    if isinstance(asked, str):
        asked = Implementation(_best(kernel) if asked == "auto" else asked)
    if asked.name not in NAMES:
        raise ValueError(f"{kernel}: implementation {asked.name!r}; use auto, {', '.join(NAMES)}")
    choice = Choice(kernel, asked.name, asked.interpret)
    if asked.name == "ref":
        reason = None
    elif not _has(kernel, asked.name):
        reason = "it is not written"
    elif not asked.interpret and OF_PLATFORM.get(platform()) != asked.name:
        reason = f"this program is for {platform()}"
    elif asked.name == "gpu" and not asked.interpret and not is_hopper():
        reason = f"{device_kind()!r} is not a Hopper GPU"
    else:
        reason = _module(kernel, asked.name).refuse(*args)
    if implementation == "auto":
        reason = reason or OPT_IN.get((kernel, asked.name))
        _log_once(kernel, platform(), asked.name, reason)
        return Choice(kernel, "ref") if reason else choice
    if reason:
        raise ValueError(
            f"{kernel}: implementation {asked.name!r} cannot run: {reason}; use 'auto'"
        )
    return choice


def platform() -> str:
    """The platform that the program being traced is for, as jax names it."""
    device = _device()
    return device.platform if device else jax.default_backend()


def device_kind() -> str:
    """The kind of chip that the program being traced is for, as its maker's runtime names it."""
    device = _device()
    return device.device_kind if device else jax.devices()[0].device_kind


def is_hopper() -> bool:
    """Whether the program being traced is for a GPU of compute capability 9.0."""
    return any(name in device_kind().replace("-", " ").split() for name in HOPPER)


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device


def _best(kernel: str) -> str:
    name = OF_PLATFORM.get(platform(), "ref")
    return name if _has(kernel, name) else "ref"


def _has(kernel: str, name: str) -> bool:
    return importlib.util.find_spec(f"pallas_kernels.{kernel}.{name}") is not None


def _module(kernel: str, name: str):
    # Imported when first used: whoever runs on a CPU need not load Pallas.
    return importlib.import_module(f"pallas_kernels.{kernel}.{name}")


@functools.cache
def _log_once(kernel: str, platform: str, name: str, reason: str | None):
    if reason:
        LOG.info("%s on %s: XLA, as the Pallas form refuses: %s", kernel, platform, reason)
    else:
        LOG.info("%s on %s: %s", kernel, platform, "XLA" if name == "ref" else f"Pallas ({name})")
