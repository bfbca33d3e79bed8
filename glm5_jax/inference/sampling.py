"""Samples the next token of each row: temperature, top-k, top-p, min-p, logit bias and a seed per row.

A row's token depends only on its logits, `Sampling`, seed and position, never on the rest of the batch. Log-probs are
log_softmax(logits / temperature), before truncation. Greedy rows (temperature below `MIN_TEMPERATURE`) report
log-probs at temperature 1.
"""

import dataclasses
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped, UInt32

MAX_TOP_LOGPROBS = 20  # as OpenAI's API allows
MIN_TEMPERATURE = (
    1e-5  # below it sampling is greedy, as in vLLM, because quotients by it would overflow
)
AnyArray = Array | np.ndarray  # of a step's inputs: NumPy's on the host, JAX's in a program
_MAX_TOP_K = 2**31 - 1  # of an int32; no vocabulary is larger
_MAX_BIAS = 1e30  # sums with logits stay finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request. Raises ValueError for values out of range.

    Attributes:
      max_tokens: maximum new tokens; 0: none, the prompt is only computed; None: as many as the model's positions hold.
      temperature: divisor of the logits; below `MIN_TEMPERATURE`: greedy.
      top_p: cumulative probability of the most likely tokens that are kept, after top_k.
      top_k: number of the most likely tokens that are kept; 0: all. Ties go to the lower ids.
      min_p: minimum probability of a token, as a share of the most likely token's.
      stop: texts that end the reply; they are not part of it.
      stop_after: token after which `stop` and `late_stop_ids` count, such as `</think>` of a reply that begins in
        thinking; None: they count from the start.
      stop_skips_blanks: whether `stop` counts only from the first character that is not blank, where a chat's content
        begins.
      stop_ids: tokens that end the reply, in addition to the model's.
      late_stop_ids: tokens that end the reply after `stop_after`.
      ignore_eos: whether the model's end tokens are ignored.
      seed: seed of the random numbers; None: a random one.
      logit_bias: {token id: number added to its logit}.
      top_logprobs: number of the most likely tokens whose log-probs are reported at each position.
      prompt_logprobs: whether log-probs of the prompt are reported too, at temperature 1.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_after: int | None = None
    stop_skips_blanks: bool = False
    stop_ids: tuple[int, ...] = ()
    late_stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self):
        for name in ("max_tokens", "top_k", "seed", "top_logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        ids = (as_integer("stop_ids", token) for token in self.stop_ids)
        object.__setattr__(self, "stop_ids", tuple(ids))
        bias = {as_integer("logit_bias", token): x for token, x in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        for token, value in bias.items():
            if not abs(value) <= _MAX_BIAS:
                raise ValueError(
                    f"logit_bias of {token} is {value}; its size must be at most {_MAX_BIAS}"
                )
        ranges = {
            "max_tokens": (0, None),
            "temperature": (0, None),
            "top_p": (0, 1),
            "top_k": (0, None),
            "min_p": (0, 1),
            "seed": (0, 2**63 - 1),
            "top_logprobs": (0, MAX_TOP_LOGPROBS),
        }
        for name, (minimum, maximum) in ranges.items():
            value: float = getattr(self, name)
            if value is None and name in ("max_tokens", "seed"):
                continue
            is_low = not value >= minimum  # also True for NaN
            if is_low or value > (sys.float_info.max if maximum is None else maximum):
                upper = "" if maximum is None else f" to {maximum}"
                raise ValueError(f"{name} is {value}; it must be from {minimum}{upper}")
        if self.top_p == 0:
            raise ValueError("top_p is 0, which leaves no token; use top_k=1 or temperature=0")
        if not all(self.stop):
            raise ValueError(f"stop is {self.stop!r}; a text to stop at must not be empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE


def as_integer(name: str, value: Any) -> int:
    """Converts an integer of any type to int. Raises ValueError with its name for a float or a text."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer") from None


def seed_of_choice(seed: int, choice: int) -> int:
    """Returns the seed of one of several choices: `seed` for the first, a hash of both numbers for the others.

    A sum would give choice 1 of seed 7 the reply of choice 0 of seed 8.
    """
    if choice == 0:
        return seed
    mixed = np.random.SeedSequence([seed, choice]).generate_state(1, np.uint64)[0]
    return int(mixed >> np.uint64(1))


class SamplingParamsRow(NamedTuple):
    """Sampling parameters of a batch as arrays.

    Attributes:
      temperature, top_p, min_p, top_k: see `Sampling`.
      seed: key data of the seed.
      position: position of the token to draw.
      bias_ids: tokens with a logit bias; -1: none.
      bias: numbers added to their logits.
    """

    temperature: Float[AnyArray, " b"]
    top_p: Float[AnyArray, " b"]
    min_p: Float[AnyArray, " b"]
    top_k: Int32[AnyArray, " b"]
    seed: UInt32[AnyArray, "b 2"]
    position: Int32[AnyArray, " b"]
    bias_ids: Int32[AnyArray, "b m"]
    bias: Float[AnyArray, "b m"]


class SampledTokens(NamedTuple):
    """Sampled tokens, their log-probs in nats, and the k most likely tokens with theirs."""

    tokens: Int32[Array, " b"]
    logprobs: Float[Array, " b"]
    top_ids: Int32[Array, "b k"]
    top_logprobs: Float[Array, "b k"]

    def top_at(self, row: int, i: int, count: int) -> tuple[tuple[int, float], ...]:
        """Returns the `count` most likely tokens at position i of a row of a batch, with their log-probs."""
        if not count:
            return ()
        ids, values = (a[row, i].tolist() for a in (self.top_ids, self.top_logprobs))
        return tuple(zip(ids, values))[:count]


def param_rows(
    samplings: Sequence[Sampling],
    seeds: Sequence[int] | np.ndarray,
    positions: Sequence[int] | np.ndarray,
    num_bias: int = 0,
) -> SamplingParamsRow:
    """Returns the sampling parameters of a batch as NumPy arrays.

    num_bias: maximum logit biases of a request. Raises ValueError if one has more.
    """
    count = len(samplings)
    ids, bias = np.full((count, num_bias), -1, np.int32), np.zeros((count, num_bias), np.float32)
    for i, sampling in enumerate(samplings):
        if len(sampling.logit_bias) > num_bias:
            raise ValueError(
                f"logit_bias has {len(sampling.logit_bias)} tokens, room is {num_bias}"
            )
        for k, (token, value) in enumerate(sampling.logit_bias.items()):
            ids[i, k], bias[i, k] = token, value
    words = np.asarray(seeds, np.uint64)

    def field(name, dtype):
        return np.array([getattr(sampling, name) for sampling in samplings], dtype)

    return SamplingParamsRow(
        temperature=field("temperature", np.float32),
        top_p=field("top_p", np.float32),
        min_p=field("min_p", np.float32),
        top_k=np.array([min(s.top_k, _MAX_TOP_K) for s in samplings], np.int32),
        seed=np.stack([words >> np.uint64(32), words & np.uint64(2**32 - 1)], -1).astype(np.uint32),
        position=np.asarray(positions, np.int32),
        bias_ids=ids,
        bias=bias,
    )


def needs_truncation(samplings: Sequence[Sampling]) -> bool:
    """Returns whether a request uses top_k, top_p or min_p, which takes a sort of all logits."""
    return any(not s.is_greedy and (s.top_k or s.top_p < 1 or s.min_p) for s in samplings)


@functools.partial(jax.jit, static_argnames=("truncate", "num_top"))
def draw(
    logits: Float[Array, "b v"],
    row: SamplingParamsRow,
    *,
    truncate: bool = True,
    num_top: int = 0,
    mask: UInt32[Array, "b w"] | None = None,
) -> SampledTokens:
    """Draws one token for each row.

    Args:
      logits: logits of the next token.
      row: sampling parameters.
      truncate: whether a row may need truncation (`needs_truncation`).
      num_top: most likely tokens to report.
      mask: bits of the tokens that may be drawn, the lowest first; None: all may. Log-probs do not depend on it.
    """
    logits, logprobs, truncated = _scores(logits, row, truncate, mask)
    noise = jax.vmap(functools.partial(_gumbel, logits.shape[-1]))(row.seed, row.position)
    noisy = jnp.where(_greedy(row), logits, truncated + noise)
    return _sampled_tokens(logprobs, jnp.argmax(noisy, axis=-1).astype(jnp.int32), num_top)


def probabilities(
    logits: Float[Array, "b v"],
    row: SamplingParamsRow,
    truncate: bool,
    mask: UInt32[Array, "b w"] | None = None,
) -> Float[Array, "b v"]:
    """Returns the distribution that `draw` samples from; that of a greedy row is one-hot."""
    logits, _, truncated = _scores(logits, row, truncate, mask)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where(_greedy(row), best, jax.nn.softmax(truncated, axis=-1))


def logprobs_of(
    tokens: Int32[Array, " b"], logits: Float[Array, "b v"], row: SamplingParamsRow, num_top: int
) -> SampledTokens:
    """Returns `draw`'s result for tokens that were drawn elsewhere."""
    _, logprobs, _ = _scores(logits, row, False)
    return _sampled_tokens(logprobs, tokens, num_top)


def score_prompt(
    tokens: Int32[Array, "b t"], logits: Float[Array, "b t v"], num_top: int
) -> SampledTokens:
    """Returns the log-probs at temperature 1 of the token after each position, and the most likely tokens there."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    flat = _sampled_tokens(logprobs.reshape(-1, logits.shape[-1]), tokens.reshape(-1), num_top)
    return jax.tree.map(lambda a: a.reshape(*tokens.shape, *a.shape[1:]), flat)


def row_keys(row: SamplingParamsRow) -> Shaped[Array, " b"]:
    """Returns a random key for each row, from its seed and position."""
    return jax.vmap(_key)(row.seed, row.position)


def _sampled_tokens(logprobs, tokens, num_top: int) -> SampledTokens:
    of_tokens = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    num_top = min(num_top, logprobs.shape[-1])  # small vocabularies have fewer tokens
    top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top)
    return SampledTokens(
        tokens=tokens,
        logprobs=of_tokens,
        top_ids=top_ids.astype(jnp.int32),
        top_logprobs=top_logprobs,
    )


def _scores(logits, row: SamplingParamsRow, truncate: bool, mask=None):
    """Returns (biased logits, log-probs at the temperature, these with -inf for tokens that are cut off).

    Tokens that a mask excludes have -inf in the first and the last.
    """
    logits = jax.vmap(_biased)(logits.astype(jnp.float32), row.bias_ids, row.bias)
    # Subtract the maximum first: the rounding of large quotients would exceed the log-probs themselves.
    centred = logits - jnp.max(logits, axis=-1, keepdims=True)
    logprobs = jax.nn.log_softmax(centred / jnp.where(_greedy(row), 1, row.temperature[:, None]))
    allowed = logprobs
    if mask is not None:
        bits = jnp.arange(32, dtype=jnp.uint32)
        is_allowed = ((mask[..., None] >> bits) & 1).reshape(len(mask), -1)[:, : logits.shape[-1]]
        logits, allowed = (jnp.where(is_allowed, x, -jnp.inf) for x in (logits, logprobs))
    if truncate:
        allowed = jax.vmap(_truncated)(allowed, row.top_k, row.top_p, row.min_p)
    return logits, logprobs, allowed


def _greedy(row: SamplingParamsRow):
    return (row.temperature < MIN_TEMPERATURE)[:, None]


def _biased(logits, ids, bias):
    # An id of -1 means none: it is moved past the last token, where it is dropped.
    return logits.at[jnp.where(ids < 0, logits.shape[0], ids)].add(bias, mode="drop")


def _truncated(logprobs, top_k, top_p, min_p):
    """Returns logprobs [v] with -inf for tokens that top_k, then top_p of the rest, and min_p cut off."""
    v = logprobs.shape[0]
    order = jnp.argsort(-logprobs, stable=True)
    ranked = logprobs[order]
    rank = jnp.arange(v)
    keep = (top_k == 0) | (rank < top_k)
    left = jnp.where(keep, jnp.exp(ranked), 0)
    left = left / jnp.sum(left)
    # The token that reaches top_p stays. Nothing comes before the most likely one.
    before = jnp.cumsum(left) - left
    keep &= (before < top_p) | (top_p >= 1)
    keep &= ranked >= ranked[0] + jnp.log(min_p)
    keep |= rank == 0
    return jnp.full(v, -jnp.inf).at[order].set(jnp.where(keep, ranked, -jnp.inf))


def _key(seed, position):
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)


def _gumbel(v: int, seed, position):
    return jax.random.gumbel(_key(seed, position), (v,), jnp.float32)
