"""Published figures of accelerators, the only table of peaks, rooflines and offline reports."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, or one of its JAX devices (`device`). Rates are dense peaks; None: not published.

    Attributes:
      flops: FLOP/s of matrix products, by dtype.
      bandwidth: memory bandwidth, in bytes/s.
      link: bandwidth of one link to another chip in one direction, in bytes/s. ICI in a TPU slice, NVLink in a
        GPU host.
      num_links: links of the chip: to its neighbours in the torus (TPU), or to the switch of its host (GPU).
      network: the chip's share of its host's network cards in one direction, in bytes/s.
      per_host: chips per host, which is one JAX process.
      memory: bytes available to programs, as the compiler (TPU) or the driver (GPU) reports them.
      num_devices: JAX devices per chip.
    """

    flops: dict[str, float]
    bandwidth: float
    link: float
    num_links: int
    network: float | None
    per_host: int
    memory: float | None = None
    num_devices: int = 1

    @property
    def device(self) -> "Chip":
        """The chip's resources per JAX device."""
        n = self.num_devices
        if n == 1:
            return self
        shares: dict[str, Any] = {"flops": {dtype: rate / n for dtype, rate in self.flops.items()}}
        for name in ("bandwidth", "link", "network", "memory"):
            value = getattr(self, name)
            shares[name] = None if value is None else value / n
        return dataclasses.replace(self, **shares, per_host=self.per_host * n, num_devices=1)


_GIB, _GBIT = 2**30, 1e9 / 8

# Keys: libtpu's names of topologies.
# TPUs: cloud.google.com/tpu/docs/NAME. A bidirectional ICI bandwidth there counts all links in both directions.
# `memory` is the limit of libtpu 0.0.42.1, from its error for a program that needs more
# (tests/pod/test_chip_flags.py); its "G" is 2**30.
# GPUs: SXM form, NVIDIA's data sheets; network cards from the DGX user guides; `memory` from openxla/xla, which has
# it from drivers (xla/backends/gpu/target_config/specs). float32 is the rate of tensor cores (tf32).
CHIPS = {
    "v4": Chip(
        flops={"bfloat16": 275e12, "int8": 275e12},
        bandwidth=1.2e12,
        link=50e9,  # arXiv 2304.01433, table 4
        num_links=6,
        network=None,  # not published
        per_host=4,
    ),
    "v5e": Chip(
        flops={"bfloat16": 197e12, "int8": 393e12},
        bandwidth=819e9,
        link=50e9,  # ICI 400 GB/s
        num_links=4,
        network=25 * _GBIT,  # per pod of 256: 6.4 Tbit/s
        per_host=4,
        memory=15.75 * _GIB,
    ),
    "v5p": Chip(
        # int8: jax-ml.github.io/scaling-book/tpus
        flops={"bfloat16": 459e12, "int8": 918e12, "float8": 459e12},
        bandwidth=2.765e12,
        link=100e9,  # ICI 1200 GB/s
        num_links=6,
        network=50 * _GBIT,
        per_host=4,
        memory=95.74 * _GIB,
    ),
    "v6e": Chip(
        flops={"bfloat16": 918e12, "int8": 1836e12, "float8": 918e12},
        bandwidth=1.638e12,
        link=100e9,  # ICI 800 GB/s
        num_links=4,
        network=100 * _GBIT,
        per_host=4,
        memory=31.25 * _GIB,
    ),
    "tpu7x": Chip(
        flops={"bfloat16": 2307e12, "float8": 4614e12},
        bandwidth=7.38e12,
        link=100e9,  # ICI 1200 GB/s
        num_links=6,
        network=100 * _GBIT,
        per_host=4,
        memory=2 * 94.75 * _GIB,
        num_devices=2,  # chiplets, which share the links
    ),
    "a100": Chip(
        flops={"bfloat16": 312e12, "int8": 624e12, "float32": 156e12},
        bandwidth=2.039e12,  # of the 80 GB model
        link=25e9,  # NVLink 3, 600 GB/s in both directions
        num_links=12,
        network=200 * _GBIT,
        per_host=8,
        memory=85100068864,
    ),
    "h100": Chip(
        flops={"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 494e12},
        bandwidth=3.35e12,
        link=25e9,  # NVLink 4, 900 GB/s in both directions
        num_links=18,
        network=400 * _GBIT,
        per_host=8,
        memory=84942979072,
    ),
    "h200": Chip(
        flops={"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 494e12},
        bandwidth=4.8e12,
        link=25e9,
        num_links=18,
        network=400 * _GBIT,
        per_host=8,
        memory=151397597184,
    ),
    "b200": Chip(
        flops={"bfloat16": 2250e12, "int8": 4500e12, "float8": 4500e12, "float32": 1100e12},
        bandwidth=8e12,
        link=50e9,  # NVLink 5, 1800 GB/s in both directions
        num_links=18,
        network=400 * _GBIT,
        per_host=8,
        memory=191514411008,
    ),
}
# Device names of runtimes -> key in CHIPS; the first entry that occurs in a device's name counts.
KINDS = {
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
    "B200": "b200",
    "TPU7x": "tpu7x",
    "TPU v6": "v6e",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v4": "v4",
}


def find_chip_name(device_kind: str) -> str | None:
    """Returns the key in CHIPS for a runtime's device kind; None if it is not in the table."""
    matches = (chip for name, chip in KINDS.items() if name.lower() in device_kind.lower())
    return next(matches, None)


def find_chip(device_kind: str) -> Chip | None:
    """Returns the resources of one JAX device by its runtime's device kind; None if it is not in the table."""
    name = find_chip_name(device_kind)
    return CHIPS[name].device if name else None
