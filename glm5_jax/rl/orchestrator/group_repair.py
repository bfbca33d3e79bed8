"""Which members of a group are learnt from, and what is made of a group without the others (GLM-5 4.1.2).

A member is left out if its environment failed, if it is stale, or if weights sampled it that were lost, as the trainer
went back to an earlier checkpoint. With more than half of its members left, a group is padded with them in turn; else
it is dropped. GLM-5 says that the oldest token counts; not which members are repeated, nor whether stale ones are made
up for. An example with groups of 8, max_staleness = 4 and step = 10, whose oldest versions are 9, 9, 8, 8, 7, 6, 6, 5:

    staleness 1, 1, 2, 2, 3, 4, 4, 5: the last is too old, 4 is not; say that the environment of the one before failed
    6 of 8 are left, more than half: members 0 1 2 3 4 5 0 1
    the baseline is the mean reward of the 6, and the two copies have the advantage of what they are copies of
    had 4 been left, the group would have been dropped
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from glm5_jax.rl.trajectory import Trajectory

FAILED, LOST, STALE = "failed", "lost", "stale"


def versions(one: Trajectory) -> tuple[int, ...] | None:
    """Of the weights that sampled it, each once, ascending; None if it says nothing of the policy."""
    if one.failed:
        return None
    found = np.unique(np.concatenate([record.weight_version for record in one.records]))
    return tuple(found[found >= 0].tolist())


def left_out(
    versions: tuple[int, ...] | None,
    oldest: int,
    newest: float = math.inf,
    lost: Sequence[tuple[int, int]] = (),
) -> str | None:
    """Why a member that these versions sampled is left out: FAILED, LOST or STALE; None: it is not.

    oldest, newest: versions that may be learnt from. lost: pairs, those above the one and up to the other may not.
    """
    if versions is None:
        return FAILED
    if versions[-1] > newest or any(low < own <= high for low, high in lost for own in versions):
        return LOST
    return STALE if versions[0] < oldest else None


def repaired(valid: Sequence[int], group: int) -> tuple[int, ...] | None:
    """The numbers of the members that make a group of those left, which are in ascending order; None: it is dropped."""
    if 2 * len(valid) <= group:
        return None
    return (*valid, *itertools.islice(itertools.cycle(valid), group - len(valid)))
