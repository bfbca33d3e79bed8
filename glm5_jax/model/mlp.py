"""SwiGLU feed-forward: down(silu(gate x) * up x), without clamp or bias."""

import jax
from flax import nnx

from glm5_jax.core.mesh import Region
from pallas_kernels.quantised import product


class Mlp(nnx.Module):
    """Gate, up and down matrices of a feed-forward."""

    def __init__(self, declare):
        self.gate = declare.normal("gate", "d f")
        self.up = declare.normal("up", "d f")
        self.down = declare.normal("down", "f d")


def swiglu(w, x, cut: tuple[str, ...] = ()):
    """x [... d] -> [... d]; cut: mesh axes whose devices have parts of f, and whose results are to be summed."""
    gate = product("...d,df->...f", x, w["gate"])
    up = product("...d,df->...f", x, w["up"])
    return product("...f,fd->...d", jax.nn.silu(gate) * up, w["down"], cut)


@jax.named_scope("mlp")
def mlp(w, x, region: Region):
    """As `swiglu` on x [b t d]; with f split over `tensor` the tokens are gathered and summed back."""
    if region.tensor == 1:
        return swiglu(w, x)
    axes = ("tensor",)
    if not region.shard_sequence:
        return region.psum(swiglu(w, x, axes), axes)
    whole = region.all_gather(x, axes, 1)
    return region.psum_scatter(swiglu(w, whole, axes), axes, 1)
