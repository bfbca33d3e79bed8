"""Reads and writes pages of the KV cache on the device, to move them between engines."""

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32

from glm5_jax.inference.sampling import AnyArray
from glm5_jax.inference.step_arrays import DeviceState
from glm5_jax.model.cache import LayerCache


class PageContents(NamedTuple):
    """Contents of some pages, for engines with the same page size, formats and drafts.

    Attributes:
      layers: pages [n z ...] of the layers, in order.
      mtp: pages of the MTP layer; None without drafts.
    """

    layers: tuple[LayerCache, ...]
    mtp: LayerCache | None


class PrefixPages(NamedTuple):
    """Consecutive pages of the prefix of a prompt, to move them to another engine.

    Attributes:
      start: index of the first page in the prompt.
      count: number of pages; the arrays may have further ones as padding.
      layout: `layout_of` the contents.
      arrays: leaves [n ...] of the contents, on the device or the host.
    """

    start: int
    count: int
    layout: str
    arrays: Sequence[AnyArray]


def layout_of(contents: PageContents) -> str:
    """Returns a text that is equal for two engines if pages of one fit the other."""
    shapes = [(a.shape[1:], a.dtype.name) for a in jax.tree.leaves(contents)]
    text = f"{jax.tree.structure(contents)} {shapes}"
    return hashlib.sha256(text.encode()).hexdigest()


@functools.partial(jax.jit, static_argnames="sharding")
def read_pages(
    device: DeviceState, pages: Int32[Array, " n"], sharding: NamedSharding | None
) -> PageContents:
    """Returns the contents of pages; an invalid number reads zeros. sharding: see `Runner`; None: one device."""
    contents = jax.tree.map(
        lambda a: a.at[pages].get(mode="fill", fill_value=0),
        PageContents(device.layers, device.mtp),
    )
    return contents if sharding is None else lax.with_sharding_constraint(contents, sharding)


@functools.partial(jax.jit, donate_argnames="device")
def write_pages(
    device: DeviceState, contents: PageContents, pages: Int32[Array, " n"]
) -> DeviceState:
    """Writes the contents of pages; those with an invalid number are dropped."""
    layers, mtp = jax.tree.map(
        lambda a, new: a.at[pages].set(new, mode="drop"),
        PageContents(device.layers, device.mtp),
        contents,
    )
    return device._replace(layers=layers, mtp=mtp)
