"""The exact k largest of long rows, deterministic: equal ones go to the lower place."""

from typing import NamedTuple

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    k: int


def top_k(scores, k: int, *, implementation="auto"):
    """int32[m min(k, s)]: the places of the k largest of each row of scores float32[m s], ascending.

    As a stable descending sort in which -0.0 equals 0.0 and NaN is -inf takes them: of equal scores the
    first. Never differentiated.

    implementation: see `dispatch.choose`.
    """
    k = min(k, scores.shape[-1])
    choice = dispatch.choose("top_k", implementation, scores, k)
    return choice.function("select")(Static(choice, k), scores)
