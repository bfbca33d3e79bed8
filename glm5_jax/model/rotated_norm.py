"""Norm of a residual stream that quantised weights have rotated (QuaRot, arXiv 2404.00456).

A rotation of the residual stream is fused into every weight that reads or writes the stream
(inference/quantize/rotation.py). It cannot pass the final norm:

- RMSNorm commutes with a rotation only if it has no weight.
- The weight cannot move into the next matrix either, because the MTP layer norms the hidden state again.

So `apply_final_norm` rotates the stream back first.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from pallas_kernels.pointwise import rms_norm
from pallas_kernels.quantized_weights import CompositeWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RotatedNorm(CompositeWeight):
    """Norm weight whose input is rotated.

    Attributes:
      weight: norm weight [d].
      back: matrix [d d] that maps the rotated stream to its original basis.
    """

    weight: jax.Array
    back: jax.Array

    def astype(self, dtype) -> "RotatedNorm":
        return RotatedNorm(self.weight.astype(dtype), self.back.astype(dtype))

    def map_arrays(self, function: Callable, letters: str, shape: tuple[int, ...]) -> "RotatedNorm":
        return RotatedNorm(function(letters, shape), function(f"{letters} {letters}", 2 * shape))


def apply_final_norm(
    x: Float[Array, "b t d"], w: Float[Array, " d"] | RotatedNorm, eps: float
) -> Float[Array, "b t d"]:
    """Returns `rms_norm` of the residual stream x with weight w, which may be a `RotatedNorm`."""
    if isinstance(w, RotatedNorm):
        x, w = x @ w.back, w.weight
    return rms_norm(x, w, eps)
