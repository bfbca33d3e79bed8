"""Rewards of chats and the loss of Bradley and Terry over pairs of them, with its derivatives, in float64."""

import math


def score(hidden, head):
    """Returns the score of one chat, hidden [t d], from its last token."""
    return sum(float(x) * float(w) for x, w in zip(hidden[-1], head, strict=True))


def loss(chosen, rejected):
    """(mean of log(1 + exp(rejected - chosen)) over pairs of scores, derivatives by the chosen, by the rejected)."""
    count, total, slopes = len(chosen), 0.0, []
    for better, worse in zip(chosen, rejected, strict=True):
        total += math.log1p(math.exp(worse - better))
        slopes.append(-1 / (1 + math.exp(better - worse)) / count)
    return total / count, slopes, [-slope for slope in slopes]
