"""Reads and writes the cache of one sequence on the device, to move it between engines."""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32

from glm5_jax.inference.step_arrays import DeviceState, SlotState
from glm5_jax.model.cache import LayerCache


class KVState(NamedTuple):
    """Cache of one sequence, to move it to another engine with the same page size, formats and drafts.

    Attributes:
      layers: pages [n z ...] of the layers, in order.
      mtp: pages of the MTP layer; None without drafts.
      slots: state of its slot.
    """

    layers: tuple[LayerCache, ...]
    mtp: LayerCache | None
    slots: SlotState


@functools.partial(jax.jit, static_argnames="sharding")
def read_slot(
    device: DeviceState,
    pages: Int32[Array, " n"],
    dp_rank: int,
    slot: int,
    sharding: NamedSharding | None,
) -> KVState:
    """Returns the cache of one sequence. sharding: its sharding on a mesh; None: one device."""
    layers, mtp = jax.tree.map(
        lambda a: a.at[pages].get(mode="fill", fill_value=0), (device.layers, device.mtp)
    )
    kv_state = KVState(layers, mtp, jax.tree.map(lambda a: a[dp_rank, slot], device.slots))
    return kv_state if sharding is None else lax.with_sharding_constraint(kv_state, sharding)


@functools.partial(jax.jit, donate_argnames="device")
def write_slot(
    device: DeviceState, kv_state: KVState, pages: Int32[Array, " n"], dp_rank: int, slot: int
) -> DeviceState:
    """Writes the cache of one sequence."""

    def put(a, new):
        # Another engine's table may be wider. Its entries after the sequence's pages are padding.
        count = min(len(pages), len(new))
        return a.at[pages[:count]].set(new[:count], mode="drop")

    layers, mtp = jax.tree.map(put, (device.layers, device.mtp), (kv_state.layers, kv_state.mtp))
    slots = jax.tree.map(lambda a, new: a.at[dp_rank, slot].set(new), device.slots, kv_state.slots)
    return DeviceState(layers, mtp, slots)
