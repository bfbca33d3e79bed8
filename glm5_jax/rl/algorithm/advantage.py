"""Computes the advantage of each attempt from the rewards of its GRPO group, the attempts at one task."""

from collections.abc import Sequence

import numpy as np

BASELINES = ("zscore", "centred", "leave_one_out", "none")


def compute_advantages(rewards: Sequence[float | None], baseline: str = "zscore") -> np.ndarray:
    """Returns the advantages of a group's rewards, float64[g]; 0 for rewards that are None.

    zscore         (r - mean) / (std + 1e-6), the sample's standard deviation (GLM-5 3.2; its ddof is not printed)
    centred        r - mean (GLM-5 3.3)
    leave_one_out  r - mean of the others (RLOO)
    none           r

    A reward is None if the environment failed. Statistics leave it out. If fewer than two rewards remain, or all are
    equal, every baseline but "none" gives 0. Raises ValueError for an unknown baseline, or if a reward is not finite.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline is {baseline!r}; use one of {', '.join(BASELINES)}")
    is_scored = np.array([r is not None for r in rewards], bool)
    scored = np.array([r for r in rewards if r is not None], np.float64)
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards are {list(rewards)}; they must be finite, or None")
    advantages = np.zeros(len(is_scored))
    if baseline == "none":
        advantages[is_scored] = scored
    elif len(scored) > 1 and scored.min() < scored.max():
        deviation = scored - scored.mean()
        if baseline == "zscore":
            deviation = deviation / (scored.std(ddof=1) + 1e-6)
        elif baseline == "leave_one_out":
            deviation = deviation * len(scored) / (len(scored) - 1)
        advantages[is_scored] = deviation
    return advantages
