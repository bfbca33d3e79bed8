"""Fused output projection and softmax cross-entropy: the full logits never exist in memory."""

from typing import NamedTuple

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp

# Name of the log partition for jax.checkpoint policies; the backward needs it.
LOGZ = "cross_entropy_logz"


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend
    chunk: int


def linear_cross_entropy(
    hidden: Float[Array, "m d"],
    head: Float[Array, "d v"],
    targets: Int[Array, " m"],
    chunk: int,
    *,
    implementation: str | backends.Implementation = "auto",
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Returns (nll, log partition), [m], of targets under softmax(hidden @ head), in the accumulation dtype.

    Gradients are exact, also of the log partition. The gradient of the head is summed in the accumulation dtype.

    chunk: rows per step of the XLA form, whose logits exist together. implementation: see
    `backends.select_backend`.
    """
    backend = backends.select_backend("cross_entropy", implementation, hidden, head)
    return _loss(Static(backend, chunk), hidden, head, targets)


@custom_vjp(1)
def _loss(static, hidden, head, targets) -> tuple[Array, Array]:
    return static.backend.function("forward")(static, hidden, head, targets)


def _forward_with_residuals(static, hidden, head, targets):
    nll, logz = _loss(static, hidden, head, targets)
    return (nll, logz), (hidden, head, targets, checkpoint_name(logz, LOGZ))


def _backward(static, saved, cotangents):
    return *static.backend.function("backward")(static, saved, *cotangents), None


_loss.defvjp(_forward_with_residuals, _backward)
