"""In-place write of new rows into a cache, without touching its other rows."""

from typing import NamedTuple

from jaxtyping import Array, Int, Shaped

from pallas_kernels import backends


class Static(NamedTuple):
    """Static arguments."""

    backend: backends.Backend


def scatter_rows(
    rows: Shaped[Array, "s ..."],
    new: Shaped[Array, "m ..."],
    places: Int[Array, " m"],
    *,
    implementation: str | backends.Implementation = "auto",
) -> Shaped[Array, "s ..."]:
    """Writes new [m ...] to rows [s ...] of the same dtype at places int32[m], and returns rows.

    Places outside 0 to s - 1 are ignored; all others are distinct. It happens in place where rows is donated.
    Nothing carries a gradient.

    A TPU's own scatter uses another layout of rows than kernels that copy single rows (`WordRows`): it would
    copy all rows twice at every call. implementation: see `backends.select_backend`.
    """
    backend = backends.select_backend("scatter_rows", implementation, rows)
    return backend.function("write")(Static(backend), rows, new, places)
