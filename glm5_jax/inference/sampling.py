"""The next token of every row: temperature, top-k, top-p, min-p, bias, and a seed of its own.

A row's token follows from its logits, its `Sampling`, its seed and its position alone, never from the batch
that it is in. Log-probs are log_softmax(logits / temperature), before anything is cut off; greedy rows
(temperature below `MIN_TEMPERATURE`) report those of temperature 1.
"""

import dataclasses
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST_TOP_LOGPROBS = 20  # as OpenAI's API allows
MIN_TEMPERATURE = (
    1e-5  # below it the likeliest token is taken, as vLLM does: quotients by it would overflow
)
_MAX_TOP_K = 2**31 - 1  # of an int32; no vocabulary is larger
_MAX_BIAS = 1e30  # sums with logits stay finite


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens. Construction refuses values out of range (ValueError).

    Attributes:
      max_tokens: new tokens at most; None: as many as the model's positions hold.
      temperature: divisor of the logits; below `MIN_TEMPERATURE`: greedy.
      top_p: the most likely tokens that together reach this probability stay, after top_k.
      top_k: so many of the most likely tokens stay; 0: all. Of equal ones the lower ids.
      min_p: tokens of at least this share of the likeliest one's probability stay.
      stop: texts behind which it ends; they are not part of the reply.
      stop_after: token behind which `stop` counts, `</think>` of a reply that begins in thinking; None: it counts from
        the beginning.
      stop_ids: tokens that end it, beside the model's own.
      ignore_eos: whether the model's own end nothing.
      seed: of the draws; None: one is drawn.
      logit_bias: added to the logits of tokens by id.
      top_logprobs: how many of the likeliest tokens' log-probs are told for every token.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_after: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    top_logprobs: int = 0

    def __post_init__(self):
        for name in ("max_tokens", "top_k", "seed", "top_logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        ids = (as_integer("stop_ids", token) for token in self.stop_ids)
        object.__setattr__(self, "stop_ids", tuple(ids))
        bias = {as_integer("logit_bias", token): own for token, own in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        for token, own in bias.items():
            if not abs(own) <= _MAX_BIAS:
                raise ValueError(
                    f"logit_bias of {token} is {own}; its size must be at most {_MAX_BIAS}"
                )
        ranges = {
            "max_tokens": (1, None),
            "temperature": (0, None),
            "top_p": (0, 1),
            "top_k": (0, None),
            "min_p": (0, 1),
            "seed": (0, 2**63 - 1),
            "top_logprobs": (0, MOST_TOP_LOGPROBS),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "seed"):
                continue
            low = not value >= least  # NaN is below everything
            if low or value > (sys.float_info.max if most is None else most):
                upper = "" if most is None else f" to {most}"
                raise ValueError(f"{name} is {value}; it must be from {least}{upper}")
        if self.top_p == 0:
            raise ValueError("top_p is 0, which leaves no token; use top_k=1 or temperature=0")
        if not all(self.stop):
            raise ValueError(f"stop is {self.stop!r}; a text to stop at must not be empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < MIN_TEMPERATURE


def as_integer(name: str, value) -> int:
    """Returns an integer of any type as Python's. Raises ValueError with its name for a float or a text."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer") from None


def seed_of_choice(seed: int, choice: int) -> int:
    """Returns the seed of one of several choices: of the first the seed itself, of others a hash of both.

    Sums would give choice 1 of seed 7 the reply of choice 0 of seed 8.
    """
    if choice == 0:
        return seed
    mixed = np.random.SeedSequence([seed, choice]).generate_state(1, np.uint64)[0]
    return int(mixed >> np.uint64(1))


class Row(NamedTuple):
    """The `Sampling`s of a batch as arrays: temperature, top_p, min_p float32[b], top_k int32[b], seed
    uint32[b 2] (key data), position int32[b] of the token that is drawn, bias_ids int32[b m] (-1: none)
    and bias float32[b m]."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    position: jax.Array
    bias_ids: jax.Array
    bias: jax.Array


class Drawn(NamedTuple):
    """tokens int32[b], their logprobs float32[b] in nats, and of the k likeliest tokens top_ids int32[b k]
    and top_logprobs float32[b k]."""

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def rows(
    samplings: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int], num_bias: int = 0
) -> Row:
    """The arrays of a batch, as NumPy's. num_bias: room for logit biases; ValueError if one has more."""
    count = len(samplings)
    ids, bias = np.full((count, num_bias), -1, np.int32), np.zeros((count, num_bias), np.float32)
    for i, sampling in enumerate(samplings):
        if len(sampling.logit_bias) > num_bias:
            raise ValueError(
                f"logit_bias has {len(sampling.logit_bias)} tokens, room is {num_bias}"
            )
        for k, (token, value) in enumerate(sampling.logit_bias.items()):
            ids[i, k], bias[i, k] = token, value
    seeds = np.asarray(seeds, np.uint64)

    def field(name, dtype):
        return np.array([getattr(sampling, name) for sampling in samplings], dtype)

    return Row(
        field("temperature", np.float32),
        field("top_p", np.float32),
        field("min_p", np.float32),
        np.array([min(s.top_k, _MAX_TOP_K) for s in samplings], np.int32),
        np.stack([seeds >> np.uint64(32), seeds & np.uint64(2**32 - 1)], -1).astype(np.uint32),
        np.asarray(positions, np.int32),
        ids,
        bias,
    )


def cuts(samplings: Sequence[Sampling]) -> bool:
    """Whether any of them cuts tokens off, which takes a sort of all logits."""
    return any(not s.is_greedy and (s.top_k or s.top_p < 1 or s.min_p) for s in samplings)


@functools.partial(jax.jit, static_argnames=("cut", "num_top"))
def draw(logits, row: Row, *, cut: bool = True, num_top: int = 0) -> Drawn:
    """One token for each row of logits float32[b v]. cut: whether some row cuts tokens off (`cuts`)."""
    logits, logprobs, kept = _scores(logits, row, cut)
    noise = jax.vmap(functools.partial(_gumbel, logits.shape[-1]))(row.seed, row.position)
    drawn = jnp.where(_greedy(row), logits, kept + noise)
    return _told(logprobs, jnp.argmax(drawn, axis=-1).astype(jnp.int32), num_top)


def probabilities(logits, row: Row, cut: bool):
    """float32[b v]: what `draw` draws from; of greedy rows all of it on the best token."""
    logits, _, kept = _scores(logits, row, cut)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where(_greedy(row), best, jax.nn.softmax(kept, axis=-1))


def told(tokens, logits, row: Row, num_top: int) -> Drawn:
    """What `draw` would say of tokens int32[b], however they were drawn."""
    _, logprobs, _ = _scores(logits, row, False)
    return _told(logprobs, tokens, num_top)


def keys_of(row: Row):
    """A random key for each row, of its seed and position."""
    return jax.vmap(_key)(row.seed, row.position)


def _told(logprobs, tokens, num_top: int) -> Drawn:
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top)
    return Drawn(tokens, own, top_ids.astype(jnp.int32), top_logprobs)


def _scores(logits, row: Row, cut: bool):
    """(logits with their bias, log-probs at the temperature, the same with -inf where tokens are cut off)."""
    logits = jax.vmap(_biased)(logits.astype(jnp.float32), row.bias_ids, row.bias)
    # From the largest one on, or two roundings of a large quotient would differ by more than log-probs are.
    centred = logits - jnp.max(logits, axis=-1, keepdims=True)
    logprobs = jax.nn.log_softmax(centred / jnp.where(_greedy(row), 1, row.temperature[:, None]))
    kept = jax.vmap(_cut)(logprobs, row.top_k, row.top_p, row.min_p) if cut else logprobs
    return logits, logprobs, kept


def _greedy(row: Row):
    return (row.temperature < MIN_TEMPERATURE)[:, None]


def _biased(logits, ids, bias):
    # An id of -1 is none: it goes behind the last token, where it is dropped.
    return logits.at[jnp.where(ids < 0, logits.shape[0], ids)].add(bias, mode="drop")


def _cut(logprobs, top_k, top_p, min_p):
    """logprobs [v] with -inf for what top_k, then top_p of what is left, and min_p cut off."""
    v = logprobs.shape[0]
    order = jnp.argsort(-logprobs, stable=True)
    ranked = logprobs[order]
    rank = jnp.arange(v)
    keep = (top_k == 0) | (rank < top_k)
    left = jnp.where(keep, jnp.exp(ranked), 0)
    left = left / jnp.sum(left)
    # The token that reaches top_p stays; of the likeliest one nothing is before it.
    before = jnp.cumsum(left) - left
    keep &= (before < top_p) | (top_p >= 1)
    keep &= ranked >= ranked[0] + jnp.log(min_p)
    keep |= rank == 0
    return jnp.full(v, -jnp.inf).at[order].set(jnp.where(keep, ranked, -jnp.inf))


def _key(seed, position):
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)


def _gumbel(v: int, seed, position):
    return jax.random.gumbel(_key(seed, position), (v,), jnp.float32)
