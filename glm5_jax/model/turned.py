"""A residual stream in another basis, and the norms that read it back (QuaRot, arXiv 2404.00456).

A rotation of the stream goes into every weight that reads or writes it (inference/quantize/rotation.py), but
not through the last norm: RMSNorm commutes with a rotation only without its weight, and that of the hidden
state cannot move on, as the MTP layer norms the hidden state once more. So the stream is turned back there.
"""

import dataclasses
from typing import Self

import jax

from pallas_kernels.pointwise import rms_norm
from pallas_kernels.quantised import Compound


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Turned(Compound):
    """The weight [d] of a norm whose input is in another basis, and back [d d], from there to its own."""

    weight: jax.Array
    back: jax.Array

    def astype(self, dtype):
        return Turned(self.weight.astype(dtype), self.back.astype(dtype))

    def each(self, function, letters, shape) -> Self:
        return Turned(function(letters, shape), function(f"{letters} {letters}", 2 * shape))


def read_out(x, w, eps: float):
    """`rms_norm` of the residual stream x [b t d] with weight w [d], which may be `Turned`."""
    if isinstance(w, Turned):
        x, w = x @ w.back, w.weight
    return rms_norm(x, w, eps)
