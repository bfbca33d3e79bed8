"""What the makers of chips publish of them: the one table that peaks, floors and offline reports read."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip, or one JAX device of it (`device`). Rates are peaks, without sparsity; None: not published.

    Attributes:
      flops: FLOP/s of matrix products by dtype.
      bandwidth: bytes/s of its memory.
      link: bytes/s in one direction of a link to another chip: ICI in a slice of TPUs, NVLink in a host of GPUs.
      num_links: of these that it has, to its neighbours in the torus (TPU) or all to the switch of its host (GPU).
      network: bytes/s in one direction of the network cards of its host, its share of them.
      per_host: chips of a host, which is one process of JAX.
      memory: bytes of it for programs, as its compiler (TPU) or its driver (GPU) reports them.
      num_devices: JAX devices that it is.
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
        """What one of its JAX devices has of it."""
        n = self.num_devices
        if n == 1:
            return self
        shares = {"flops": {dtype: rate / n for dtype, rate in self.flops.items()}}
        for name in ("bandwidth", "link", "network", "memory"):
            value = getattr(self, name)
            shares[name] = None if value is None else value / n
        return dataclasses.replace(self, **shares, per_host=self.per_host * n, num_devices=1)


_GIB, _GBIT = 2**30, 1e9 / 8

# Named as libtpu names topologies. TPUs: cloud.google.com/tpu/docs/NAME, where a bidirectional ICI bandwidth is that of
# all links in both directions. Their `memory` is what libtpu 0.0.42.1 lets a program have, from its refusal of one that
# needs more (tests/pod/test_chip_flags.py): what it calls G is 2**30. GPUs, in their SXM form: NVIDIA's data sheets,
# network cards those of the DGX user guides, `memory` as openxla/xla has it from drivers (xla/backends/gpu/target_config/
# specs); their float32 is as tensor cores take it (tf32).
CHIPS = {
    "v4": Chip(
        {"bfloat16": 275e12, "int8": 275e12},
        bandwidth=1.2e12,
        link=50e9,  # arXiv 2304.01433, table 4
        num_links=6,
        network=None,  # not published
        per_host=4,
    ),
    "v5e": Chip(
        {"bfloat16": 197e12, "int8": 393e12},
        bandwidth=819e9,
        link=50e9,  # ICI 400 GB/s
        num_links=4,
        network=25 * _GBIT,  # per pod of 256: 6.4 Tbit/s
        per_host=4,
        memory=15.75 * _GIB,
    ),
    "v5p": Chip(
        # int8: jax-ml.github.io/scaling-book/tpus
        {"bfloat16": 459e12, "int8": 918e12, "float8": 459e12},
        bandwidth=2.765e12,
        link=100e9,  # ICI 1200 GB/s
        num_links=6,
        network=50 * _GBIT,
        per_host=4,
        memory=95.74 * _GIB,
    ),
    "v6e": Chip(
        {"bfloat16": 918e12, "int8": 1836e12, "float8": 918e12},
        bandwidth=1.638e12,
        link=100e9,  # ICI 800 GB/s
        num_links=4,
        network=100 * _GBIT,
        per_host=4,
        memory=31.25 * _GIB,
    ),
    "tpu7x": Chip(
        {"bfloat16": 2307e12, "float8": 4614e12},
        bandwidth=7.38e12,
        link=100e9,  # ICI 1200 GB/s
        num_links=6,
        network=100 * _GBIT,
        per_host=4,
        memory=2 * 94.75 * _GIB,
        num_devices=2,  # chiplets, which share the links
    ),
    "a100": Chip(
        {"bfloat16": 312e12, "int8": 624e12, "float32": 156e12},
        bandwidth=2.039e12,  # of the 80 GB model
        link=25e9,  # NVLink 3, 600 GB/s in both directions
        num_links=12,
        network=200 * _GBIT,
        per_host=8,
        memory=85100068864,
    ),
    "h100": Chip(
        {"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 494e12},
        bandwidth=3.35e12,
        link=25e9,  # NVLink 4, 900 GB/s in both directions
        num_links=18,
        network=400 * _GBIT,
        per_host=8,
        memory=84942979072,
    ),
    "h200": Chip(
        {"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12, "float32": 494e12},
        bandwidth=4.8e12,
        link=25e9,
        num_links=18,
        network=400 * _GBIT,
        per_host=8,
        memory=151397597184,
    ),
    "b200": Chip(
        {"bfloat16": 2250e12, "int8": 4500e12, "float8": 4500e12, "float32": 1100e12},
        bandwidth=8e12,
        link=50e9,  # NVLink 5, 1800 GB/s in both directions
        num_links=18,
        network=400 * _GBIT,
        per_host=8,
        memory=191514411008,
    ),
}
# What runtimes call their devices; of these the first that is a part of the name counts.
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


def name_of(device_kind: str) -> str | None:
    """The key in CHIPS of what a runtime calls a device; None if it is not in the table."""
    found = (chip for name, chip in KINDS.items() if name.lower() in device_kind.lower())
    return next(found, None)


def chip_of(device_kind: str) -> Chip | None:
    """What one JAX device has, by what its runtime calls it; None if it is not in the table."""
    name = name_of(device_kind)
    return CHIPS[name].device if name else None
