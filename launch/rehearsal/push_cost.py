"""Cost of a push of weights: bytes over each link, bytes of host memory, and seconds (glm5_jax/rl/weights).

Each process of the trainer offers its shards, and each engine process pulls those of its devices. A number is requested from
the trainer by one engine, which passes it on to the others.
"""

import dataclasses
import math
from typing import Any

import jax

from launch.aot.serving_programs import abstract_weights
from launch.rehearsal.memory import abstract_axes
from pallas_kernels.chips import CHIPS

MAX_DURATION_S = 60.0  # target for 64 engines of GLM-5
MAX_SHARE = 0.1  # of the time between two pushes
GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushCost:
    """Cost of a push of all weights to all engines.

    Attributes:
      weight_bytes: bytes of the weights in the form that engines hold.
      num_engines: number of engines.
      trainer_hosts: number of the trainer's hosts.
      engine_hosts: number of hosts of one engine.
      received_bytes: bytes that a host of an engine receives and holds until it loads them.
      bytes_per_s: network bandwidth of a host in one direction; None: not known.
    """

    weight_bytes: int
    num_engines: int
    trainer_hosts: int
    engine_hosts: int
    received_bytes: int
    bytes_per_s: float | None

    @property
    def offered_bytes(self) -> int:
        """Bytes that a host of the trainer holds during the push."""
        return math.ceil(self.weight_bytes / self.trainer_hosts)

    @property
    def sent_by_trainer(self) -> int:
        """Bytes that a host of the trainer sends."""
        return math.ceil(self.received_bytes * self.engine_hosts / self.trainer_hosts)

    @property
    def sent_by_engine(self) -> int:
        """Bytes that a host of an engine sends to other engines."""
        return math.ceil(self.received_bytes * (self.num_engines - 1) / self.num_engines)

    @property
    def duration_s(self) -> float | None:
        """Time of the busiest link, in seconds, while engines sample; None: not known."""
        if self.bytes_per_s is None:
            return None
        busiest = max(self.received_bytes, self.sent_by_trainer, self.sent_by_engine)
        return busiest / self.bytes_per_s


def push_cost(config: Any, chip: str, is_quantised: bool) -> PushCost:
    """Returns the cost of a push in a run with engine processes. Raises ValueError if their mesh does not fit them.

    is_quantised: whether engines hold W4A8 weights, to which the trainer converts them, as to FP8 with
      engine.quantization.
    """
    cluster, kind = config.cluster, CHIPS[chip]
    devices = cluster.engine_hosts * max(1, cluster.engine_devices) * kind.num_devices
    mesh = abstract_axes(cluster.engine_mesh, chip, devices)
    weights = abstract_weights(
        config.model,
        mesh,
        is_quantised,
        config.engine.execution(),
        config.engine.quantization,
    )
    per_host = min(devices, kind.per_host * kind.num_devices)
    received = total = 0
    for x in jax.tree.leaves(weights):
        size = math.prod(x.shape)
        shard = math.prod(x.sharding.shard_shape(x.shape))
        # Devices with the same shard receive it once.
        received += min(per_host, size // shard) * shard * x.dtype.itemsize
        total += size * x.dtype.itemsize
    return PushCost(
        weight_bytes=total,
        num_engines=cluster.engines,
        trainer_hosts=cluster.hosts,
        engine_hosts=math.ceil(devices / per_host),
        received_bytes=received,
        bytes_per_s=None if kind.network is None else kind.network * kind.per_host,
    )


def describe_push(cost: PushCost) -> str:
    """Returns a line with the bytes and seconds of a push."""
    text = (
        f"{cost.weight_bytes / GB:,.0f} GB for each of {cost.num_engines} engines: a trainer's host sends "
        f"{cost.sent_by_trainer / GB:,.1f} GB, an engine's receives {cost.received_bytes / GB:,.1f} and sends "
        f"{cost.sent_by_engine / GB:,.1f}"
    )
    if cost.duration_s is None:
        return f"{text}; the bandwidth is not known"
    return (
        f"{text}; at least {cost.duration_s:,.1f} s while engines sample, which is {MAX_SHARE:.0%} of the time between "
        f"two pushes if that is {cost.duration_s / MAX_SHARE:,.0f} s"
    )
