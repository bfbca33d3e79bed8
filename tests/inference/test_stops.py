"""What ends a reply, and what does not."""

import pytest

from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.stop_checker import StopChecker
from glm5_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load("bytes")
A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")
END = TOKENIZER.eos_ids[0]


def ended(tokens, most=9, **sampling):
    """(tokens up to the end, what `feed` says of the last)."""
    stops = StopChecker(Sampling(**sampling), most, TOKENIZER.eos_ids, TOKENIZER)
    for count, token in enumerate(tokens, 1):
        if end := stops.feed(token):
            return count, end
    return len(tokens), None


@pytest.mark.parametrize(
    "tokens, sampling, want",
    [
        ([A, B, END, A], {}, (3, ("stop", END))),
        ([A, B, END, A], {"ignore_eos": True}, (4, None)),
        ([A, END, B], {"ignore_eos": True, "stop_ids": (B,)}, (3, ("stop", B))),
        # A text may come in pieces, and of two the one that stands first counts.
        ([A, A, B, C], {"stop": ("ab",)}, (3, ("stop", "ab"))),
        ([A, A, B, C], {"stop": ("c", "abc")}, (4, ("stop", "abc"))),
        ([A, C, B], {"stop": ("ab",)}, (3, None)),
        ([B, A, B], {"stop": ("ab",), "stop_ids": (B,)}, (1, ("stop", B))),
    ],
)
def test_tokens_and_texts_end_a_reply(tokens, sampling, want):
    assert ended(tokens, **sampling) == want


def test_a_length_ends_it_and_a_stop_in_its_last_place_goes_before():
    assert ended([A, B, C], most=2) == (2, ("length", None))
    assert ended([A, END], most=2) == (2, ("stop", END))
    assert ended([A, B], most=2, stop=("ab",)) == (2, ("stop", "ab"))


def test_ends_at_late_tokens_only_after_the_token_before_them():
    late = {"late_stop_ids": (B,)}
    assert ended([A, B, A], **late) == (2, ("stop", B))
    assert ended([B, B, C, A, B, A], stop_after=C, **late) == (5, ("stop", B))
    assert ended([C, A, B, B], stop_after=C, stop=("ab",), **late) == (3, ("stop", B))
    assert ended([B, END], stop_after=C, **late) == (2, ("stop", END))
