"""Rules that a reply must follow token by token: a grammar after its thinking, and a budget of thinking.

`ReplyRules` are the rules of a request, and `ReplyConstraint` is their state in one reply.

The mask of a token depends on the token before it, and the engine launches a step before the tokens of the last step
have arrived:

1. A reply whose next token needs a mask waits for its tokens in flight (`must_wait`) and misses that step. Other replies
   of the batch do not wait.
2. A reply that thinks needs no mask and does not wait. If its token in flight ends the thinking, the device holds the
   reply in the step that was launched meanwhile (`last_token`), which then gives it no token.

With drafts, a verification that needs a mask gives one token, and one within thinking ends with `</think>`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt32

from glm5_jax.inference.grammars import Grammar

_WORD_BITS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplyRules:
    """Rules of a reply. Raises ValueError for a budget without thinking.

    Attributes:
      grammar: grammar of the tokens after the thinking; None: any tokens.
      thinking_budget: maximum tokens of the thinking without its end; None: no limit.
      thinking_end: token that ends the thinking with which the reply begins; None: it begins without thinking.
    """

    grammar: Grammar | None = None
    thinking_budget: int | None = None
    thinking_end: int | None = None

    def __post_init__(self):
        if self.thinking_budget is None:
            return
        if self.thinking_budget < 0:
            raise ValueError(f"thinking_budget is {self.thinking_budget}; it must be at least 0")
        if self.thinking_end is None:
            raise ValueError("thinking_budget needs a reply that begins with thinking")


class ReplyConstraint:
    """State of the rules in one reply.

    Attributes:
      mask: bits of the tokens that may come next, the lowest bit first; None: all may come.
    """

    def __init__(self, rules: ReplyRules, vocab_size: int):
        self._rules, self._num_words = rules, num_mask_words(vocab_size)
        self._is_thinking = rules.thinking_end is not None
        self._num_thinking = 0
        self._matcher = rules.grammar.matcher() if rules.grammar else None
        self.mask: UInt32[np.ndarray, " w"] | None = None
        self._update_mask()

    def accept(self, tokens: Iterable[int]) -> None:
        """Reads the next tokens of the reply. Raises ValueError if the grammar does not allow one."""
        for token in tokens:
            if self._is_thinking:
                self._is_thinking = token != self._rules.thinking_end
                self._num_thinking += self._is_thinking
            elif self._matcher is not None and not self._matcher.consume_token(token):
                raise ValueError(f"the grammar does not allow the token {token}")
        self._update_mask()

    def must_wait(self, num_in_flight: int) -> bool:
        """Returns whether the next token may need a mask that tokens in flight decide."""
        if not num_in_flight:
            return False
        if self._is_thinking:
            return self._num_left(num_in_flight) == 0
        return self._matcher is not None

    def max_tokens(self, num_in_flight: int) -> int | None:
        """Returns the maximum tokens of the next step; None: no limit."""
        if self.mask is not None:
            return 1
        if self._is_thinking and self._rules.thinking_budget is not None:
            return self._num_left(num_in_flight)
        return None

    def applies(self, num_in_flight: int, step_tokens: int) -> bool:
        """Returns whether a rule changes a step that gives at most `step_tokens` tokens."""
        limit = self.max_tokens(num_in_flight)
        is_limited = limit is not None and limit < step_tokens
        return self.mask is not None or is_limited or self.last_token is not None

    @property
    def last_token(self) -> int | None:
        """Token after which no step gives more tokens until the host has read it, because the grammar begins.

        None: there is no such token.
        """
        return self._rules.thinking_end if self._is_thinking and self._matcher else None

    def _num_left(self, num_in_flight: int) -> int | None:
        """Returns the tokens of thinking that are left; None: no limit."""
        budget = self._rules.thinking_budget
        return None if budget is None else max(0, budget - self._num_thinking - num_in_flight)

    def _update_mask(self) -> None:
        self.mask, end = None, self._rules.thinking_end
        if self._is_thinking:
            if end is not None and self._num_left(0) == 0:
                self.mask = np.zeros(self._num_words, np.uint32)
                self.mask[end // _WORD_BITS] = 1 << (end % _WORD_BITS)
        elif self._matcher is not None:
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            if self._matcher.is_error():
                raise ValueError(f"the grammar failed: {self._matcher.get_error()[:200]}")
            # The model may have more ids than the tokenizer, and llguidance adds a word.
            count = min(len(words), self._num_words)
            self.mask = np.zeros(self._num_words, np.uint32)
            self.mask[:count] = words[:count]


class TokenRules(NamedTuple):
    """Rules of the next tokens of b sequences on each data-parallel rank.

    Attributes:
      mask: bits of the tokens that may come next.
      max_tokens: maximum tokens of the step.
      last_token: token after which the step gives no more, not even if it is the newest before the step; -1: none.
    """

    mask: UInt32[np.ndarray, "x b w"]
    max_tokens: Int32[np.ndarray, "x b"]
    last_token: Int32[np.ndarray, "x b"]


def token_rules(
    constraints: Sequence[Sequence[tuple[ReplyConstraint | None, int]]],
    num_rows: int,
    vocab_size: int,
    step_tokens: int = 1,
) -> TokenRules | None:
    """Returns the rules of a step; None: no rule applies to it.

    Args:
      constraints: constraint of each sequence of each rank, and its tokens in flight before the step.
      num_rows: rows of each rank.
      vocab_size: number of ids of the model.
      step_tokens: maximum tokens that the step gives to a sequence.
    """
    flat = [pair for of_rank in constraints for pair in of_rank]
    if not any(one and one.applies(num_in_flight, step_tokens) for one, num_in_flight in flat):
        return None
    rules = free_rules((len(constraints), num_rows), vocab_size)
    for dp_rank, of_rank in enumerate(constraints):
        for row, (constraint, num_in_flight) in enumerate(of_rank):
            if constraint is None:
                continue
            if constraint.mask is not None:
                rules.mask[dp_rank, row] = constraint.mask
            if (limit := constraint.max_tokens(num_in_flight)) is not None:
                rules.max_tokens[dp_rank, row] = limit
            if constraint.last_token is not None:
                rules.last_token[dp_rank, row] = constraint.last_token
    return rules


def free_rules(size: tuple[int, int], vocab_size: int) -> TokenRules:
    """Returns rules that allow all tokens. size: data-parallel ranks, and rows of each."""
    return TokenRules(
        mask=np.full((*size, num_mask_words(vocab_size)), 2**_WORD_BITS - 1, np.uint32),
        max_tokens=np.full(size, np.iinfo(np.int32).max, np.int32),
        last_token=np.full(size, -1, np.int32),
    )


def num_mask_words(vocab_size: int) -> int:
    """Returns the words of a mask."""
    return -(-vocab_size // _WORD_BITS)
