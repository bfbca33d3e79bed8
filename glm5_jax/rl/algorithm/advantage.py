"""From the rewards of a group, the attempts at one task, to the advantage of each."""

from collections.abc import Sequence

import numpy as np

BASELINES = ("zscore", "centred", "leave_one_out", "none")


def advantages(rewards: Sequence[float | None], baseline: str = "zscore") -> np.ndarray:
    """float64[g] of a group's rewards; of those that are None, failures of the environment, 0.

    zscore         (r - mean) / (std + 1e-6), the sample's standard deviation (GLM-5 3.2; its ddof is not printed)
    centred        r - mean (GLM-5 3.3)
    leave_one_out  r - mean of the others (RLOO)
    none           r

    Statistics are those of the rewards that are there. With a single one, and where all are equal, all but
    "none" give 0. ValueError for another baseline, and for a reward that is not finite.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline is {baseline!r}; use one of {', '.join(BASELINES)}")
    there = np.array([r is not None for r in rewards], bool)
    found = np.array([r for r in rewards if r is not None], np.float64)
    if not np.isfinite(found).all():
        raise ValueError(f"rewards are {list(rewards)}; they must be finite, or None")
    out = np.zeros(len(there))
    if baseline == "none":
        out[there] = found
    elif len(found) > 1 and found.min() < found.max():
        away = found - found.mean()
        if baseline == "zscore":
            away = away / (found.std(ddof=1) + 1e-6)
        elif baseline == "leave_one_out":
            away = away * len(found) / (len(found) - 1)
        out[there] = away
    return out
