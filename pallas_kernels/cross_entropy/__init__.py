"""Output projection and softmax cross-entropy in one: logits never exist as a whole."""

import functools
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import dispatch

LOGZ = "cross_entropy_logz"  # the name of what the backward needs of the forward, for policies of jax.checkpoint


class Static(NamedTuple):
    """What is known when tracing."""

    choice: dispatch.Choice
    chunk: int


def linear_cross_entropy(hidden, head, targets, chunk: int, *, implementation="auto"):
    """(nll, log partition), wide[m], of targets int32[m] under softmax(hidden [m d] @ head [d v]).

    Gradients are exact, also of the log partition; the head's is summed wide.

    chunk: rows whose logits exist at a time in the XLA form. implementation: see `dispatch.choose`.
    """
    choice = dispatch.choose("cross_entropy", implementation, hidden, head)
    return _loss(Static(choice, chunk), hidden, head, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static, hidden, head, targets):
    return static.choice.function("forward")(static, hidden, head, targets)


def _saving(static, hidden, head, targets):
    nll, logz = _loss(static, hidden, head, targets)
    return (nll, logz), (hidden, head, targets, checkpoint_name(logz, LOGZ))


def _backward(static, saved, cotangents):
    return *static.choice.function("backward")(static, saved, *cotangents), None


_loss.defvjp(_saving, _backward)
