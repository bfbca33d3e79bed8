"""What the indexer's warm-up loss costs, beside its target (head_probs) and gradients (index_scores)."""

from pallas_kernels.cost import Cost


def compare(b, t, s, i, j, pairs: float, keep: bool = False, item: int = 2) -> Cost:
    """The scores of t queries [b t i j] and s keys [b s j], for `pairs` of a query and a key, beside the target;
    keep: they are written."""
    moved = item * b * (t * i + s) * j + 4 * b * (t * (i + 3) + (1 + keep) * pairs)
    return Cost(2 * b * pairs * i * j, moved, transcendentals=2 * b * pairs)
