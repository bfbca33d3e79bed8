"""Tests large replies: they are encoded outside the event loop, and the bytes of a stream do not grow quadratically."""

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


def stream_reply(form, count):
    """Returns (reply, its chunks) of a reply whose tokens arrive one by one."""
    handle = Handle(Request([1], Sampling()))
    answer = form(ParsedRequest(requests=(handle.request,)), [handle], ORIGIN, TOKENIZER)
    chunks = []
    for i in range(count):
        handle.append_output([Token(5 + i % 90, -0.5, 0)], "length" if i == count - 1 else None)
        chunks += answer.piece(0)
    return answer, chunks


def test_cumulative_stream_sends_growing_chunks():
    count = 3000
    _, chunks = stream_reply(replies.Generated, count)
    sizes = [len(chunk["output_ids"]) for chunk in chunks]
    assert sizes[:32] == list(range(1, 33))  # the first tokens are sent one by one
    assert sizes == sorted(set(sizes)) and sizes[-1] == count
    assert max(b / a for a, b in zip(sizes[32:], sizes[33:])) < 1.07
    assert sum(sizes) < 40 * count
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks[-2:]] == [True, False]


@pytest.mark.parametrize("form", [replies.Chats, replies.Completions, replies.Generated])
def test_reports_end_of_reply_once(form):
    """A reply may end while a chunk is encoded, before the end is reported."""
    answer, chunks = stream_reply(form, 3)
    assert chunks and answer.piece(0) == []


@pytest.mark.parametrize(
    ("path", "form", "body"),
    [
        ("/v1/completions", replies.Completions, {"prompt": "a", "max_tokens": 2}),
        ("/generate", replies.Generated, {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ],
)
def test_encodes_complete_replies_outside_event_loop(healthy, monkeypatch, path, form, body):
    threads, complete = [], form.complete

    def record_thread(answer):
        threads.append(threading.current_thread().name)
        return complete(answer)

    monkeypatch.setattr(form, "complete", record_thread)
    assert post(healthy, path, body)[0] == 200
    assert len(threads) == 1 and threads[0] != "server"
