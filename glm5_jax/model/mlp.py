"""Dense SwiGLU feed-forward: down(silu(gate x) * up x), without clamp or bias."""

import jax
from flax import nnx
from jaxtyping import Array, Float, PyTree

from glm5_jax.parallel.mesh import Region
from glm5_jax.parallel.params import Declare
from pallas_kernels.quantized_weights import quantized_einsum


class Mlp(nnx.Module):
    """Gate, up and down matrices of a feed-forward layer."""

    def __init__(self, declare: Declare):
        self.gate = declare.normal("gate", "d f")
        self.up = declare.normal("up", "d f")
        self.down = declare.normal("down", "f d")


def swiglu(
    w: PyTree, x: Float[Array, "... d"], sum_axes: tuple[str, ...] = ()
) -> Float[Array, "... d"]:
    """Applies SwiGLU to x.

    sum_axes: mesh axes whose devices hold parts of f, and over which the caller sums the results.
    """
    gate = quantized_einsum("...d,df->...f", x, w["gate"])
    up = quantized_einsum("...d,df->...f", x, w["up"])
    return quantized_einsum("...f,fd->...d", jax.nn.silu(gate) * up, w["down"], sum_axes)


@jax.named_scope("mlp")
def mlp(w: PyTree, x: Float[Array, "b t d"], region: Region) -> Float[Array, "b t d"]:
    """Applies `swiglu` to x [b t d]. If `tensor` shards f, tokens are gathered before and outputs summed after."""
    if region.tensor == 1:
        return swiglu(w, x)
    axes = ("tensor",)
    if not region.shard_sequence:
        return region.psum(swiglu(w, x, axes), axes)
    gathered = region.all_gather(x, axes, 1)
    return region.psum_scatter(swiglu(w, gathered, axes), axes, 1)
