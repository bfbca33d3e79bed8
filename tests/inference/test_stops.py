"""Tests which tokens, texts and lengths end a reply."""

import pytest

from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.stop_checker import StopChecker
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load("bytes")
A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")
END = TOKENIZER.eos_ids[0]


def feed_tokens(tokens, max_tokens=9, **sampling):
    """Returns (number of tokens up to the end, result of `feed` for the last token)."""
    stops = StopChecker(Sampling(**sampling), max_tokens, TOKENIZER.eos_ids, TOKENIZER)
    for count, token in enumerate(tokens, 1):
        if end := stops.feed(token):
            return count, end
    return len(tokens), None


@pytest.mark.parametrize(
    "tokens, sampling, expected",
    [
        ([A, B, END, A], {}, (3, ("stop", END))),
        ([A, B, END, A], {"ignore_eos": True}, (4, None)),
        ([A, END, B], {"ignore_eos": True, "stop_ids": (B,)}, (3, ("stop", B))),
        # A stop text may span tokens, and the first of two stop texts counts.
        ([A, A, B, C], {"stop": ("ab",)}, (3, ("stop", "ab"))),
        ([A, A, B, C], {"stop": ("c", "abc")}, (4, ("stop", "abc"))),
        ([A, C, B], {"stop": ("ab",)}, (3, None)),
        ([B, A, B], {"stop": ("ab",), "stop_ids": (B,)}, (1, ("stop", B))),
    ],
)
def test_ends_reply_at_stop_tokens_and_texts(tokens, sampling, expected):
    assert feed_tokens(tokens, **sampling) == expected


def test_prefers_stop_to_length_at_last_token():
    assert feed_tokens([A, B, C], max_tokens=2) == (2, ("length", None))
    assert feed_tokens([A, END], max_tokens=2) == (2, ("stop", END))
    assert feed_tokens([A, B], max_tokens=2, stop=("ab",)) == (2, ("stop", "ab"))


def test_ends_at_late_stop_only_after_start_token():
    late = {"late_stop_ids": (B,)}
    assert feed_tokens([A, B, A], **late) == (2, ("stop", B))
    assert feed_tokens([B, B, C, A, B, A], stop_after=C, **late) == (5, ("stop", B))
    assert feed_tokens([C, A, B, B], stop_after=C, stop=("ab",), **late) == (3, ("stop", B))
    assert feed_tokens([B, END], stop_after=C, **late) == (2, ("stop", END))
