"""Scores of the lightning indexer, with gradients: I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s] / sqrt(j))."""

import functools
from typing import NamedTuple

import jax

from pallas_kernels import dispatch


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice


def index_scores(idx_q, idx_w, idx_k, *, implementation="auto"):
    """wide[b t s] scores of queries idx_q [b t i j] with head weights idx_w [b t i] over idx_k [b s j].

    Nothing is masked. The backward computes the dot products again; neither pass holds more than the
    scores, so t is a block of queries.

    implementation: see `dispatch.choose`.
    """
    choice = dispatch.choose("index_scores", implementation, idx_q, idx_w, idx_k)
    return _scores(Static(choice), idx_q, idx_w, idx_k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(static, idx_q, idx_w, idx_k):
    return static.choice.function("forward")(static, idx_q, idx_w, idx_k)


def _saving(static, *args):
    return _scores(static, *args), args


def _backward(static, saved, dscores):
    return static.choice.function("backward")(static, saved, dscores)


_scores.defvjp(_saving, _backward)
