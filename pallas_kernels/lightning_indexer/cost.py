"""What scoring and selecting keys costs, documents left out of account."""

from pallas_kernels.cost import Cost, visible_pairs

ITEMS = {
    "float32": 4,
    "bfloat16": 2,
    "int8": 1,
    "float8": 1,
}  # bytes of a number, by the chip's dtypes


def select(
    b, t, s, i, j, k, start: int | None, dtype: str = "bfloat16", scaled: bool = False
) -> Cost:
    """Products of t queries [b t i j] with the s keys [b s j] that they see, and k places of each; scaled: every
    key has a scale. start as of `cost.visible_pairs`. What is counted and compared to select is no product."""
    values = b * (t * i + s) * j * ITEMS[dtype]
    moved = values + 4 * b * s * scaled + 4 * b * t * (i + k)
    return Cost(2 * b * visible_pairs(t, s, start) * i * j, moved, dtype)
