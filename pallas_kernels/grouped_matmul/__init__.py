"""Rows sorted by expert, each through its own expert's weights."""

from pallas_kernels import dispatch


def grouped_swiglu(
    x, group_sizes, gate, up, down, *, expected_rows: int | None = None, implementation="auto"
):
    """SwiGLU of rows x [m d] sorted by expert, int32[e] rows each, with gate, up [e d f] and down [e f d].

    Rows beyond the sum of group_sizes come out as zero, and so do the gradients of experts without rows.
    expected_rows (default m) is how many rows are likely to be filled; it sets block sizes and no result.

    implementation: see `dispatch.choose`.
    """
    choice = dispatch.choose("grouped_matmul", implementation, x, gate)
    run = choice.function("grouped_swiglu")
    return run(x, group_sizes, gate, up, down, expected_rows or x.shape[0])
