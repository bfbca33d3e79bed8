"""Answers of many tokens: they are encoded outside the event loop, and the bytes of a stream do not grow quadratically."""

import threading

import pytest

from glm5_jax.inference import replies
from glm5_jax.inference.protocol import ParsedRequest
from glm5_jax.inference.request import Handle, Request, Token
from glm5_jax.inference.sampling import Sampling
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_server import post

TOKENIZER = Tokenizer.default()
ORIGIN = replies.Origin("m", 0)


def streamed(form, count):
    """Pieces of a reply whose tokens come one by one."""
    handle = Handle(Request([1], Sampling()))
    answer = form(ParsedRequest(requests=(handle.request,)), [handle], ORIGIN, TOKENIZER)
    pieces = []
    for i in range(count):
        handle.append_output([Token(5 + i % 90, -0.5, 0)], "length" if i == count - 1 else None)
        pieces += answer.piece(0)
    return answer, pieces


def test_sends_a_cumulative_reply_in_pieces_that_grow_with_it():
    count = 3000
    _, pieces = streamed(replies.Generated, count)
    sizes = [len(piece["output_ids"]) for piece in pieces]
    assert sizes[:32] == list(range(1, 33))  # the beginning comes token by token
    assert sizes == sorted(set(sizes)) and sizes[-1] == count
    assert max(b / a for a, b in zip(sizes[32:], sizes[33:])) < 1.07
    assert sum(sizes) < 40 * count
    assert [piece["meta_info"]["finish_reason"] is None for piece in pieces[-2:]] == [True, False]


@pytest.mark.parametrize("form", [replies.Chats, replies.Completions, replies.Generated])
def test_tells_the_end_of_a_reply_once(form):
    """A reply may end while a piece is encoded, before the end is reported."""
    answer, pieces = streamed(form, 3)
    assert pieces and answer.piece(0) == []


@pytest.mark.parametrize(
    ("path", "form", "body"),
    [
        ("/v1/completions", replies.Completions, {"prompt": "a", "max_tokens": 2}),
        ("/generate", replies.Generated, {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ],
)
def test_makes_whole_answers_apart_from_the_event_loop(healthy, monkeypatch, path, form, body):
    threads, complete = [], form.complete

    def watched(answer):
        threads.append(threading.current_thread().name)
        return complete(answer)

    monkeypatch.setattr(form, "complete", watched)
    assert post(healthy, path, body)[0] == 200
    assert len(threads) == 1 and threads[0] != "server"
