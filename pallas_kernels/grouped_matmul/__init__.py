"""Matmul of rows sorted by expert, each with its expert's weights."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels import backends
from pallas_kernels.custom_gradients import custom_vjp


class Static(NamedTuple):
    """Static arguments; expected_rows: expected number of filled rows."""

    backend: backends.Backend
    expected_rows: int


def grouped_matmul(
    x: Float[Array, "m k"],
    w: Float[Array, "e k n"],
    group_sizes: Int[Array, " e"],
    *,
    implementation: str | backends.Implementation = "auto",
) -> Float[Array, "m n"]:
    """Returns [m n]: each row of x times its expert's weights; rows are sorted by expert.

    group_sizes: rows per expert. Rows beyond their sum give zero and get no gradient; neither do experts
    without rows. A Pallas form only writes zeros for them. Sums have the accumulation dtype and always the same
    order. The result has the dtype of x.

    implementation: see `backends.select_backend`. Raises ValueError if the shapes do not match.
    """
    _check(x, w, group_sizes)
    backend = backends.select_backend("grouped_matmul", implementation, x, w)
    return _matmul(Static(backend, x.shape[0]), x, w, group_sizes)


def grouped_swiglu(
    x: Float[Array, "m d"],
    group_sizes: Int[Array, " e"],
    gate: Float[Array, "e d f"],
    up: Float[Array, "e d f"],
    down: Float[Array, "e f d"],
    *,
    expected_rows: int | None = None,
    implementation: str | backends.Implementation = "auto",
) -> Float[Array, "m d"]:
    """Returns SwiGLU of rows sorted by expert, [m d], with the experts' gate, up and down weights.

    group_sizes: rows per expert. Rows beyond their sum give zero, and so do the gradients of experts without rows.
    expected_rows: expected number of filled rows; None: m. It sets block sizes and does not change the result.

    implementation: see `backends.select_backend`. Raises ValueError if the shapes do not match.
    """
    _check(x, gate, group_sizes)
    backend = backends.select_backend("grouped_matmul", implementation, x, gate)
    static = Static(backend, expected_rows or x.shape[0])
    return _swiglu(static, x, group_sizes, gate, up, down)


def _check(x, w, group_sizes):
    if x.ndim != 2 or w.ndim != 3 or group_sizes.shape != w.shape[:1] or w.shape[1] != x.shape[1]:
        raise ValueError(
            f"grouped_matmul: rows {x.shape}, weights {w.shape} and group sizes {group_sizes.shape}; "
            "it takes [m k], [e k n] and [e]"
        )


@custom_vjp(1)
def _matmul(static, x, w, group_sizes):
    return static.backend.function("forward")(static, x, w, group_sizes)


def _forward_with_residuals(static, x, w, group_sizes):
    return _matmul(static, x, w, group_sizes), (x, w, group_sizes)


def _backward(static, saved, dy):
    return *static.backend.function("backward")(static, saved, dy), None


_matmul.defvjp(_forward_with_residuals, _backward)


@custom_vjp(1)
def _swiglu(static, *args):
    return _swiglu_with_residuals(static, *args)[0]


def _swiglu_with_residuals(static, *args):
    y, g, u = static.backend.function("swiglu_forward")(static, *args)
    return y, (*args, g, u)


def _swiglu_backward(static, saved, dy):
    dx, *dw = static.backend.function("swiglu_backward")(static, saved, dy)
    return dx, None, *dw


_swiglu.defvjp(_swiglu_with_residuals, _swiglu_backward)
