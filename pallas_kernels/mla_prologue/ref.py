"""MLA's projections, norms and rotation in XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pointwise import rms_norm, rotate
from pallas_kernels.quantized_weights import quantized_einsum


def forward(
    static,
    x: Float[Array, "b t d"],
    w: dict[str, Array],
    cos: Float[Array, "b t r/2"],
    sin: Float[Array, "b t r/2"],
    cache: Float[Array, "rows c+r"] | None,
    slots: Int[Array, "b t"] | None,
) -> tuple[Array, Array, Array, Array | None]:
    """Returns (c_q, q, latent, cache); see the package."""
    c_q = quantized_einsum("btd,dq->btq", x, w["q_a"])
    if "q_a_bias" in w:
        c_q = c_q + w["q_a_bias"]
    c_q = rms_norm(c_q, w["q_a_norm"], static.eps)
    q = quantized_einsum("btq,qnx->btnx", c_q, w["q_b"])
    q_nope, q_rope = jnp.split(q, [q.shape[-1] - 2 * cos.shape[-1]], axis=-1)
    q = jnp.concatenate([q_nope, rotate(q_rope, cos, sin)], axis=-1)
    c = quantized_einsum("btd,dx->btx", x, w["kv_a"])
    if "kv_a_bias" in w:
        c = c + w["kv_a_bias"]
    c_kv, k_rope = jnp.split(c, [w["kv_a_norm"].shape[0]], axis=-1)
    c_kv = rms_norm(c_kv, w["kv_a_norm"], static.eps)
    latent = jnp.concatenate([c_kv, rotate(k_rope, cos, sin)], axis=-1)
    if cache is not None and slots is not None:
        row = jnp.where(slots < 0, cache.shape[0], slots).reshape(-1)
        rows = latent.reshape(-1, latent.shape[-1]).astype(cache.dtype)
        cache = cache.at[row].set(rows, mode="drop", unique_indices=True)
    return c_q, q, latent, cache
