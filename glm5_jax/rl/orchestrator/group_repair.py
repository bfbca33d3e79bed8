"""Group repair: which members of a group are trained on, and how the group is filled up (GLM-5 4.1.2).

A member is excluded in three cases:

- FAILED: its environment failed.
- STALE: its oldest token is too old.
- ROLLED_BACK: it has tokens of weights that no longer exist, because the trainer went back to an earlier checkpoint.

A group with more than half of its members is padded with copies of them, in turn. Otherwise it is dropped. GLM-5 says
that the oldest token counts. It does not say which members are repeated, nor whether stale ones are replaced.

Example of a group of 8 with max_staleness = 4 and step = 10, whose oldest versions are 9, 9, 8, 8, 7, 6, 6, 5:

    staleness 1, 1, 2, 2, 3, 4, 4, 5: the last is too old, 4 is not; let the environment of the one before have failed
    6 of 8 remain, more than half: members 0 1 2 3 4 5 0 1
    the baseline is the mean reward of the 6, and the two copies have the advantage of their originals
    with 4 remaining members, the group would be dropped
"""

import itertools
import math
from collections.abc import Sequence

FAILED, ROLLED_BACK, STALE = "failed", "rolled_back", "stale"


def exclusion_reason(
    versions: tuple[int, ...] | None,
    oldest: int,
    newest: float = math.inf,
    rolled_back: Sequence[tuple[int, int]] = (),
) -> str | None:
    """Returns why a member with these versions is excluded: FAILED, ROLLED_BACK or STALE; None if it is not.

    - versions: sampling versions of the member; None: it failed.
    - oldest, newest: versions that may be trained on.
    - rolled_back: pairs (low, high); versions v with low < v <= high may not be trained on.
    """
    if versions is None:
        return FAILED
    if versions[-1] > newest or any(
        low < version <= high for low, high in rolled_back for version in versions
    ):
        return ROLLED_BACK
    return STALE if versions[0] < oldest else None


def repair_group(valid: Sequence[int], group: int) -> tuple[int, ...] | None:
    """Returns the indices of the members of a repaired group; None if the group must be dropped.

    valid: indices of the members that are not excluded, ascending. group: size of a group.
    """
    if 2 * len(valid) <= group:
        return None
    return (*valid, *itertools.islice(itertools.cycle(valid), group - len(valid)))
