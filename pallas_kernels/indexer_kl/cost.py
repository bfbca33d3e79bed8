"""Cost of the indexer's warm-up loss, without target (summed_attention_probs) and gradients (index_scores)."""

from pallas_kernels.cost import Cost


def compare(
    b: int, t: int, s: int, i: int, j: int, pairs: float, keep: bool = False, item: int = 2
) -> Cost:
    """Cost of the scores of t queries and s keys, and of their comparison, for `pairs` visible pairs.

    Queries [b t i j], keys [b s j]. keep: the scores are written.
    """
    moved = item * b * (t * i + s) * j + 4 * b * (t * (i + 3) + (1 + keep) * pairs)
    return Cost(2 * b * pairs * i * j, moved, transcendentals=2 * b * pairs)
