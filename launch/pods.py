"""Describes pods of chips by name and returns their compile-only devices and meshes, without the hardware.

    v5p:8x8x16          a slice of TPUs, with libtpu's name and shape; also v5e, v6e (two dimensions) and tpu7x
    4*v6e:16x16         four slices, connected by the data-centre network
    h200:128x8          128 hosts of 8 NVIDIA GPUs; h200:1x128x8 includes the number of partitions; also h100

Shapes count chips. A tpu7x is two JAX devices.
"""

import dataclasses
import importlib.util
import math
import pathlib
import re
import sys
from collections.abc import Sequence

from jax.experimental import topologies
from jax.sharding import Mesh

from glm5_jax.parallel.mesh import axis_order, make_mesh, resolve
from launch.xla_flags import FLAGS, GPU_SHARE, OFFLINE, REMOVED
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.compat import JAX_VERSION

FOLDER = pathlib.Path(__file__).parent
TORUS = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}  # number of torus dimensions
GPUS = ("h100", "h200")  # FOLDER/NAME.txtpb describes each to its compiler
# Module of each platform's compiler, and the distribution that has it.
COMPILERS = {"tpu": ("libtpu", "libtpu"), "cuda": ("jax_cuda13_plugin", "jax-cuda13-plugin")}
_FORM = re.compile(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Pod:
    """Pod of chips of one kind; `parse` returns the pod of a name.

    Attributes:
      chip: kind of its chips, a key of `pallas_kernels.chips.CHIPS`.
      shape: TPUs: chips along each torus dimension of a slice; GPUs: (hosts, GPUs of a host) of a partition.
      num_slices: number of TPU slices, or of GPU partitions.
    """

    chip: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def platform(self) -> str:
        """JAX's name of the platform: tpu or cuda."""
        return "tpu" if self.chip in TORUS else "cuda"

    @property
    def devices_per_slice(self) -> int:
        return math.prod(self.shape) * CHIPS[self.chip].num_devices

    @property
    def num_devices(self) -> int:
        """Number of JAX devices of the pod."""
        return self.num_slices * self.devices_per_slice

    @property
    def device(self) -> Chip:
        """Resources of one JAX device."""
        return CHIPS[self.chip].device

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of a device's memory that JAX may use under `launch.run`; None: not known."""
        share = 1 if self.platform == "tpu" else GPU_SHARE
        return int(share * self.device.memory) if self.device.memory else None

    @property
    def options(self) -> dict[str, str | bool]:
        """XLA options for training on the pod, as JAX's `compiler_options`.

        XLA:GPU takes booleans there, not "true". Options that this jax's XLA has removed are left out, because
        `compiler_options` refuses unknown options, while XLA_FLAGS ignores them.
        """
        removed = REMOVED if JAX_VERSION >= (0, 11) else ()
        options = {name: value for name, value in FLAGS[self.chip].items() if name not in removed}
        if self.platform == "tpu":
            return {**options}
        return {
            name: {"true": True, "false": False}.get(value, value)
            for name, value in options.items()
        }

    @property
    def shortcuts(self) -> dict[str, str]:
        """Options for compiling without the chip, for programs that are reported and never run."""
        return OFFLINE.get(self.chip, {})

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        if self.platform == "cuda" and self.num_slices > 1:
            return f"{self.chip}:{self.num_slices}x{shape}"
        return f"{self.num_slices}*{self.chip}:{shape}".removeprefix("1*")


def parse(text: str) -> Pod:
    """Returns the pod of a name. Raises ValueError, with one line, for an invalid name."""
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in (*TORUS, *GPUS):
        raise ValueError(
            f"target {text!r} is not a pod; use v5e:16x16, v6e:16x16, v5p:8x8x16, tpu7x:4x4x8, slices of them as in "
            "4*v6e:16x16, and h100:128x8, h200:128x8"
        )
    slices, chip = int(match[1] or 1), match[2]
    shape = tuple(int(number) for number in match[3].split("x"))
    if chip in GPUS:
        if match[1]:
            raise ValueError(
                f"target {text!r}: GPUs have no slices; their partitions are the first number of {chip}:2x64x8"
            )
        if len(shape) == 3:
            slices, shape = shape[0], shape[1:]
        if len(shape) != 2:
            raise ValueError(
                f"target {text!r}: give hosts x GPUs as in {chip}:128x8, or partitions x hosts x GPUs"
            )
        if shape[1] > (max_gpus := CHIPS[chip].per_host):
            raise ValueError(
                f"target {text!r}: a host has up to {max_gpus} {chip}, not {shape[1]}; give more hosts, as in {chip}:128x{max_gpus}"
            )
    elif len(shape) != TORUS[chip]:
        example = "8x8x16" if TORUS[chip] == 3 else "16x16"
        raise ValueError(
            f"target {text!r}: a slice of {chip} has {TORUS[chip]} dimensions; give one such as {chip}:{example}"
        )
    if min(slices, *shape) < 1:
        raise ValueError(f"target {text!r} has a size of 0; all are at least 1")
    return Pod(chip, shape, slices)


def list_devices(pod: Pod) -> list:
    """Returns the pod's devices, for compiling only.

    Raises ValueError if the compiler is not installed (`install_hint`) or does not support the pod.
    """
    if fix := install_hint(pod):
        raise ValueError(f"target {str(pod)!r}: {fix}")
    shape = "x".join(map(str, pod.shape))
    try:
        if pod.platform == "cuda":
            return topologies.get_topology_desc(
                "",
                platform="cuda",
                target_config=(FOLDER / f"{pod.chip}.txtpb").read_text(),
                topology=f"{pod.num_slices}x{shape}",
            ).devices
        return topologies.get_topology_desc(
            f"{pod.chip}:{shape}", platform="tpu", num_slices=pod.num_slices
        ).devices
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"target {str(pod)!r}: its compiler says: {reason}") from None


def install_hint(pod: Pod) -> str | None:
    """Returns how to install the compiler of a pod; None: it is installed."""
    module, name = COMPILERS[pod.platform]
    if importlib.util.find_spec(module) is not None:
        return None
    tag = "py311" if sys.version_info < (3, 12) else "py312"
    lock = (FOLDER / "requirements" / f"{tag}-aot.txt").read_text()
    [pin] = [line for line in lock.splitlines() if line.startswith(f"{name}==")]
    return (
        f"its compiler is not installed; python -m pip install {pin}, or bash launch/test.sh aot, which installs it into "
        ".venv/compilers, and set PYTHONPATH to that folder"
    )


def make_pod_mesh(pod: Pod, axes: dict[str, int], expert_slices: int = 1) -> Mesh:
    """Returns the mesh of a run on all devices of the pod (`parallel.mesh.make_mesh`).

    axes: sizes of the axes of `parallel.mesh`; one may be -1, for the remaining devices.

    Raises ValueError if the axes do not fit the pod, and the errors of `list_devices`.
    """
    sizes = resolve(axes, pod.num_devices)
    if pod.platform == "cuda":
        check_hosts(pod, sizes, expert_slices)
    return make_mesh(axes, devices=list_devices(pod), expert_slices=expert_slices)


def check_hosts(pod: Pod, sizes: Sequence[int], expert_slices: int = 1) -> None:
    """Raises ValueError if an axis of a GPU mesh crosses the boundary of a host or a partition unevenly."""
    stride = 1
    for axis, size in reversed(axis_order(sizes, expert_slices)):
        stride *= size
        for unit, name in (
            (pod.shape[1], "GPUs of a host"),
            (pod.devices_per_slice, "GPUs of a partition"),
        ):
            if unit % stride and stride % unit:
                raise ValueError(
                    f"mesh axis {axis}={size} does not fit the {unit} {name} of {pod}: with the axes within, it takes "
                    f"{stride}, which neither divides {unit} nor is a multiple of it"
                )
