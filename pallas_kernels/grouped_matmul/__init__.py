"""Rows sorted by expert, each through its own expert's weights."""

import functools
from typing import NamedTuple

import jax

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing; expected_rows: how many rows are likely to be filled."""

    choice: dispatch.Choice
    expected_rows: int


def grouped_matmul(x, w, group_sizes, *, implementation="auto"):
    """[m n], row by row x [m k] times its expert's w [e k n]; rows are sorted, int32[e] for each expert.

    Rows beyond the sum of group_sizes come out as zero and get no gradient, and neither do experts without
    rows; a Pallas form does nothing for them but write those zeros. Sums are wide and always in the same
    order. The result has the dtype of x.

    ValueError if the shapes do not fit. implementation: see `dispatch.choose`.
    """
    _check(x, w, group_sizes)
    choice = dispatch.choose("grouped_matmul", implementation, x, w)
    return _matmul(Static(choice, x.shape[0]), x, w, group_sizes)


def grouped_swiglu(
    x, group_sizes, gate, up, down, *, expected_rows: int | None = None, implementation="auto"
):
    """SwiGLU of rows x [m d] sorted by expert, int32[e] rows each, with gate, up [e d f] and down [e f d].

    Rows beyond the sum of group_sizes come out as zero, and so do the gradients of experts without rows.
    expected_rows (default m) is how many rows are likely to be filled; it sets block sizes and no result.

    implementation: see `dispatch.choose`.
    """
    _check(x, gate, group_sizes)
    choice = dispatch.choose("grouped_matmul", implementation, x, gate)
    static = Static(choice, expected_rows or x.shape[0])
    return _swiglu(static, x, group_sizes, gate, up, down)


def _check(x, w, group_sizes):
    if x.ndim != 2 or w.ndim != 3 or group_sizes.shape != w.shape[:1] or w.shape[1] != x.shape[1]:
        raise ValueError(
            f"grouped_matmul: rows {x.shape}, weights {w.shape} and group sizes {group_sizes.shape}; "
            "it takes [m k], [e k n] and [e]"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static, x, w, group_sizes):
    return static.choice.function("forward")(static, x, w, group_sizes)


def _saving(static, x, w, group_sizes):
    return _matmul(static, x, w, group_sizes), (x, w, group_sizes)


def _backward(static, saved, dy):
    return *static.choice.function("backward")(static, saved, dy), None


_matmul.defvjp(_saving, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(static, *args):
    return _swiglu_saving(static, *args)[0]


def _swiglu_saving(static, *args):
    y, g, u = static.choice.function("swiglu_forward")(static, *args)
    return y, (*args, g, u)


def _swiglu_backward(static, saved, dy):
    dx, *dw = static.choice.function("swiglu_backward")(static, saved, dy)
    return dx, None, *dw


_swiglu.defvjp(_swiglu_saving, _swiglu_backward)
