"""Cost of scoring and selecting keys; documents are ignored."""

from pallas_kernels.cost import Cost, visible_pairs

ITEMS = {
    "float32": 4,
    "bfloat16": 2,
    "int8": 1,
    "float8": 1,
}  # bytes per number, by the chip's dtypes


def select(
    b: int,
    t: int,
    s: int,
    i: int,
    j: int,
    k: int,
    start: int | None,
    dtype: str = "bfloat16",
    scaled: bool = False,
) -> Cost:
    """Cost of scoring the visible keys of t queries, and of writing k indices each.

    Queries [b t i j], keys [b s j]. scaled: every key has a scale. start: as in `cost.visible_pairs`. Counting
    and comparing for the selection are no products.
    """
    values = b * (t * i + s) * j * ITEMS[dtype]
    moved = values + 4 * b * s * scaled + 4 * b * t * (i + k)
    return Cost(2 * b * visible_pairs(t, s, start) * i * j, moved, dtype)
