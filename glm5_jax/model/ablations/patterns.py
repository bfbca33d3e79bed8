"""Which layers become windows: the paper's beam search (GLM-5 2.1.2, "SWA Pattern").

The search starts from a model whose layers are all full and gives more of them a window in each step,
until half have one; the paper's has a beam of 8, two layers a step, and scores by RULER at 16K.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from glm5_jax.config import LAYER_KINDS

Pattern = tuple[str, ...]  # a kind of LAYER_KINDS per layer


class Found(NamedTuple):
    """pattern: the best one of its size; score: its score; scores: of every pattern that was evaluated, in
    the order of evaluation."""

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
) -> Found:
    """The pattern with `num_converted` layers of `kind` (default: half) that `score(params, pattern)` likes
    best, higher being better, among those that a beam meets.

    A step gives every pattern of the beam `per_step` more such layers in every way (fewer in the last one)
    and keeps the best `beam`; equal scores go to the pattern whose converted layers come first. No pattern
    is evaluated twice. ValueError for numbers that cannot be, and where a score is not a number.
    """
    num_converted = num_layers // 2 if num_converted is None else num_converted
    if not 0 < num_converted <= num_layers:
        raise ValueError(f"num_converted is {num_converted}; choose 1 to {num_layers} layers")
    if beam < 1 or per_step < 1:
        raise ValueError(f"beam is {beam} and per_step {per_step}; both must be positive")
    if kind not in LAYER_KINDS or kind == "full":
        raise ValueError(f"kind is {kind!r}; use one of {', '.join(LAYER_KINDS[1:])}")
    scores: dict[Pattern, float] = {}
    kept: list[tuple[int, ...]] = [()]
    while len(kept[0]) < num_converted:
        more = min(per_step, num_converted - len(kept[0]))
        ranked = []
        for layers in sorted(_extended(kept, num_layers, more)):
            pattern = tuple(kind if i in layers else "full" for i in range(num_layers))
            scores[pattern] = float(score(params, pattern))
            if scores[pattern] != scores[pattern]:
                raise ValueError(f"score is {scores[pattern]} for {pattern}; it must be a number")
            ranked.append((-scores[pattern], layers, pattern))
        ranked.sort()
        kept = [layers for _, layers, _ in ranked[:beam]]
    best = ranked[0]
    return Found(best[2], -best[0], scores)


def _extended(kept, num_layers: int, more: int) -> set[tuple[int, ...]]:
    """Every set of layers that is one of `kept` and so many more, ascending."""
    return {
        tuple(sorted((*layers, *added)))
        for layers in kept
        for added in itertools.combinations(sorted(set(range(num_layers)) - set(layers)), more)
    }
