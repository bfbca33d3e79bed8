"""Pods that are not there: their names, their devices as the compilers know them, and meshes of these.

    v5p:8x8x16          a slice of TPUs, named and shaped as libtpu does; also v5e, v6e (two dimensions) and tpu7x
    4*v6e:16x16         four slices, which meet over the data-centre network
    h200:128x8          128 hosts of 8 NVIDIA GPUs; h200:1x128x8 says the partition too; also h100

Shapes count chips. A tpu7x is two devices of JAX.
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

from glm5_jax.core.mesh import make_mesh, nesting, resolve
from launch.xla_flags import FLAGS, GPU_SHARE, OFFLINE, REMOVED
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.compat import JAX_VERSION

FOLDER = pathlib.Path(__file__).parent
TORUS = {"v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}  # dimensions
GPUS = ("h100", "h200")  # those whose FOLDER/NAME.txtpb says what their compiler has to know
# The module of a platform's compiler, and the distribution that brings it.
COMPILERS = {"tpu": ("libtpu", "libtpu"), "cuda": ("jax_cuda13_plugin", "jax-cuda13-plugin")}
_FORM = re.compile(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Pod:
    """Chips of one kind that work together; `parse` makes one of a name.

    Attributes:
      chip: its key in `pallas_kernels.chips.CHIPS`.
      shape: of a slice: chips along each dimension of the torus; of GPUs hosts, GPUs of a host.
      num_slices: slices of TPUs, or partitions of GPUs.
    """

    chip: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def platform(self) -> str:
        """As JAX names it: tpu, cuda."""
        return "tpu" if self.chip in TORUS else "cuda"

    @property
    def devices_per_slice(self) -> int:
        return math.prod(self.shape) * CHIPS[self.chip].num_devices

    @property
    def num_devices(self) -> int:
        """Of JAX, all together."""
        return self.num_slices * self.devices_per_slice

    @property
    def device(self) -> Chip:
        """What one of its devices has."""
        return CHIPS[self.chip].device

    @property
    def usable(self) -> int | None:
        """Bytes of a device's memory that JAX may take, under `launch.run`."""
        share = 1 if self.platform == "tpu" else GPU_SHARE
        return int(share * self.device.memory) if self.device.memory else None

    @property
    def options(self) -> dict[str, str | bool]:
        """Returns the options of training on it, as `compiler_options` of JAX: XLA:GPU takes no "true" there.

        Without those that this jax's XLA has no more: in XLA_FLAGS it passes over them, here it refuses them.
        """
        removed = REMOVED if JAX_VERSION >= (0, 11) else ()
        found = {name: value for name, value in FLAGS[self.chip].items() if name not in removed}
        if self.platform == "tpu":
            return found
        return {
            name: {"true": True, "false": False}.get(value, value) for name, value in found.items()
        }

    @property
    def shortcuts(self) -> dict[str, str]:
        """Options of a compilation without the chip, whose result is told and does not run."""
        return OFFLINE.get(self.chip, {})

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        if self.platform == "cuda" and self.num_slices > 1:
            return f"{self.chip}:{self.num_slices}x{shape}"
        return f"{self.num_slices}*{self.chip}:{shape}".removeprefix("1*")


def parse(text: str) -> Pod:
    """The pod of a name; ValueError, in one line, if there is none."""
    match = _FORM.fullmatch(text)
    if match is None or match[2] not in (*TORUS, *GPUS):
        raise ValueError(
            f"target {text!r} is no pod; there are v5e:16x16, v6e:16x16, v5p:8x8x16, tpu7x:4x4x8, slices of them as in "
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
        if shape[1] > (most := CHIPS[chip].per_host):
            raise ValueError(
                f"target {text!r}: a host has up to {most} {chip}, not {shape[1]}; give more hosts, as in {chip}:128x{most}"
            )
    elif len(shape) != TORUS[chip]:
        example = "8x8x16" if TORUS[chip] == 3 else "16x16"
        raise ValueError(
            f"target {text!r}: a slice of {chip} has {TORUS[chip]} dimensions; give one such as {chip}:{example}"
        )
    if min(slices, *shape) < 1:
        raise ValueError(f"target {text!r} has a size of 0; all are at least 1")
    return Pod(chip, shape, slices)


def devices(pod: Pod) -> list:
    """Its devices, with which programs can be compiled and none can run.

    ValueError if its compiler is not installed (`missing`), or knows no such pod.
    """
    if how := missing(pod):
        raise ValueError(f"target {str(pod)!r}: {how}")
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


def missing(pod: Pod) -> str | None:
    """How to get the compiler of a pod, if it is not installed."""
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


def mesh(pod: Pod, axes: dict[str, int], expert_slices: int = 1) -> Mesh:
    """The mesh that a run has on all its devices (`core.mesh.make_mesh`): axes of `core.mesh`, one of which may be -1 for
    what is left. ValueError if they do not fit the pod, or as `devices` raises.
    """
    sizes = resolve(axes, pod.num_devices)
    if pod.platform == "cuda":
        check_hosts(pod, sizes, expert_slices)
    return make_mesh(axes, devices=devices(pod), expert_slices=expert_slices)


def check_hosts(pod: Pod, sizes: Sequence[int], expert_slices: int = 1) -> None:
    """ValueError if an axis of GPUs would lie partly in a host, or a partition, and reach over its end."""
    inside = 1
    for axis, size in reversed(nesting(sizes, expert_slices)):
        inside *= size
        for unit, what in (
            (pod.shape[1], "GPUs of a host"),
            (pod.devices_per_slice, "GPUs of a partition"),
        ):
            if unit % inside and inside % unit:
                raise ValueError(
                    f"mesh axis {axis}={size} does not fit the {unit} {what} of {pod}: with the axes within, it takes "
                    f"{inside}, which neither divides {unit} nor is a multiple of it"
                )
