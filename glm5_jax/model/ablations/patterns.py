"""Beam search for the layers that get windows (GLM-5 2.1.2, "SWA Pattern").

The search starts from a model whose layers are all full, and gives more of them a window in each step,
until half have one. The paper's search has a beam of 8, converts two layers a step, and scores by RULER
at 16K.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from glm5_jax.config import LAYER_KINDS

Pattern = tuple[str, ...]  # one of LAYER_KINDS per layer


class PatternSearchResult(NamedTuple):
    """Result of `search`.

    Attributes:
      pattern: the best pattern with the final number of converted layers.
      score: its score.
      scores: scores of all evaluated patterns, in the order of evaluation.
    """

    pattern: Pattern
    score: float
    scores: dict[Pattern, float]


def search(
    params,
    num_layers: int,
    score: Callable[[object, Pattern], float],
    *,
    kind: str = "window",
    num_converted: int | None = None,
    beam: int = 8,
    per_step: int = 2,
) -> PatternSearchResult:
    """Finds the pattern with `num_converted` layers of `kind` that scores best, by a beam search.

    A step converts `per_step` more layers of every pattern in the beam, in every combination (fewer in the last
    step), and retains the best `beam` patterns. Equal scores go to the pattern whose converted layers come
    first. No pattern is evaluated twice.

    Args:
      score: score(params, pattern); higher is better.
      num_converted: None: half of the layers.

    Raises ValueError if a number is out of range, or if a score is NaN.
    """
    num_converted = num_layers // 2 if num_converted is None else num_converted
    if not 0 < num_converted <= num_layers:
        raise ValueError(f"num_converted is {num_converted}; choose 1 to {num_layers} layers")
    if beam < 1 or per_step < 1:
        raise ValueError(f"beam is {beam} and per_step {per_step}; both must be positive")
    if kind not in LAYER_KINDS or kind == "full":
        raise ValueError(f"kind is {kind!r}; use one of {', '.join(LAYER_KINDS[1:])}")
    scores: dict[Pattern, float] = {}
    candidates: list[tuple[int, ...]] = [()]
    while len(candidates[0]) < num_converted:
        more = min(per_step, num_converted - len(candidates[0]))
        ranked = []
        for layers in sorted(_extend(candidates, num_layers, more)):
            pattern = tuple(kind if i in layers else "full" for i in range(num_layers))
            scores[pattern] = float(score(params, pattern))
            if scores[pattern] != scores[pattern]:
                raise ValueError(f"score is {scores[pattern]} for {pattern}; it must be a number")
            ranked.append((-scores[pattern], layers, pattern))
        ranked.sort()
        candidates = [layers for _, layers, _ in ranked[:beam]]
    negative_score, _, pattern = ranked[0]
    return PatternSearchResult(pattern=pattern, score=-negative_score, scores=scores)


def _extend(candidates, num_layers: int, more: int) -> set[tuple[int, ...]]:
    """Returns every set of layers that adds `more` layers to one of candidates, in ascending order."""
    return {
        tuple(sorted((*layers, *added)))
        for layers in candidates
        for added in itertools.combinations(sorted(set(range(num_layers)) - set(layers)), more)
    }
