"""Computes the attention mass of sets of keys, and the number of keys for a given mass, in NumPy float64."""

import numpy as np


def of_query(p, chosen, k, level):
    """Returns (selected, best, recent, keys) of one query.

    p [s]: the mass of each visible key. chosen: the keys that the indexer selected. keys: the minimum number of keys
    that hold `level` of the mass.
    """
    p = np.asarray(p, np.float64)
    p = p / p.sum()
    best, held, keys = sorted(p.tolist(), reverse=True), 0.0, 0
    while held < level:
        held += best[keys]
        keys += 1
    return p[list(chosen)].sum(), sum(best[:k]), p[-k:].sum(), keys
