"""A gateway whose disk is full, and one that begins from files that are torn: nothing is kept that was not told, and one
session's file costs no other session anything."""

import json
import logging
import urllib.error
import urllib.request

import pytest

from glm5_jax.rl.rollouts.record_codec import decode_records
from glm5_jax.rl.rollouts.session_journal import SessionJournal
from glm5_jax.rl.rollouts.sessions import Session
from glm5_jax.text.tokenizer import Tokenizer
from tests.metrics.test_jsonl import limit_file_size
from tests.rl.fleet import Engine, gateway

QUESTION, MORE = ({"role": "user", "content": text} for text in ("2*3?", "And?"))
WEIGHTS = {"lease": 1, "version": 0, "checksum": None}


class Noting(Engine):
    """seeds: that were asked for."""

    def __init__(self):
        super().__init__(delay=0)
        self.seeds = []

    def reply(self, prompt, draw):
        self.seeds.append(draw.getstate())
        return super().reply(prompt, draw)


@pytest.fixture(scope="module")
def noting():
    made = Noting()
    with made.running() as url:
        made.url = url
        yield made


def asked(url, path, body=None, method=None):
    """(status of HTTP, what is said)."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def chat(url, name, *messages):
    path = f"/sessions/{name}/v1/chat/completions"
    status, said = asked(url, path, {"messages": messages})
    return status, said["choices"][0]["message"] if status == 200 else said["error"]


def records(url, name):
    """The encoded records of a session."""
    with urllib.request.urlopen(f"{url}/sessions/{name}/records", timeout=60) as response:
        return response.read()


def load(url):
    return sum(asked(url, "/server_info")[1]["loads"].values())


def check_error(status, error):
    assert status == 503 and error["type"] == "server_error" and error["code"] == "unavailable"
    assert "journal cannot be written" in error["message"] and "ask again" in error["message"]


def test_a_reply_that_cannot_be_written_is_not_kept(noting, tmp_path):
    path = tmp_path / "s.jsonl"
    with gateway(noting.url, journal=str(tmp_path)) as url:
        asked(url, "/sessions", {"id": "s", "seed": 7})
        _, first = chat(url, "s", QUESTION)
        before, kept = path.read_bytes(), records(url, "s")
        for space in (40, 0):  # the line is torn, or does not begin
            with limit_file_size(len(before) + space):
                check_error(*chat(url, "s", QUESTION, first, MORE))
            assert path.read_bytes() == before and records(url, "s") == kept
        status, second = chat(url, "s", QUESTION, first, MORE)
        assert status == 200
        # Whoever asks again is answered as if nothing had been.
        assert noting.seeds[-3] == noting.seeds[-2] == noting.seeds[-1]
        told = records(url, "s")
        trained, trained_before = (
            decode_records(content)[0].loss_mask.sum() for content in (told, kept)
        )
        assert trained > trained_before
    with gateway(noting.url, journal=str(tmp_path)) as url:
        assert records(url, "s") == told


def test_a_session_that_cannot_be_written_has_not_begun(noting, tmp_path):
    with gateway(noting.url, journal=str(tmp_path)) as url:
        for space in (3, 0):
            with limit_file_size(space):
                status, said = asked(url, "/sessions", {"id": "s", "seed": 7})
            check_error(status, said["error"])
            assert load(url) == 0 and asked(url, "/sessions")[1]["sessions"] == []
        assert asked(url, "/sessions", {"id": "s", "seed": 7})[0] == 200 and load(url) == 1
        chat(url, "s", QUESTION)
        told = records(url, "s")
    with gateway(noting.url, journal=str(tmp_path)) as url:
        assert records(url, "s") == told


def test_a_session_whose_file_stays_has_not_ended(noting, tmp_path):
    path = tmp_path / "s.jsonl"
    with gateway(noting.url, journal=str(tmp_path)) as url:
        asked(url, "/sessions", {"id": "s", "seed": 7})
        path.rename(tmp_path / "aside")
        path.mkdir()  # which no file's end removes
        status, said = asked(url, "/sessions/s", method="DELETE")
        check_error(status, said["error"])
        assert load(url) == 1
        path.rmdir()
        (tmp_path / "aside").rename(path)
        assert chat(url, "s", QUESTION)[0] == 200
        assert asked(url, "/sessions/s", method="DELETE")[0] == 200
        assert load(url) == 0 and not list(tmp_path.glob("*.jsonl"))


def test_weights_that_cannot_be_written_are_not_wanted(noting, tmp_path):
    with gateway(noting.url, journal=str(tmp_path)) as url:
        with limit_file_size(5):
            status, said = asked(url, "/weights", WEIGHTS)
        check_error(status, said["error"])
        assert asked(url, "/server_info")[1]["weights"] is None
        assert asked(url, "/weights", WEIGHTS) == (200, WEIGHTS)
    with gateway(noting.url, journal=str(tmp_path)) as url:
        assert asked(url, "/server_info")[1]["weights"] == WEIGHTS


@pytest.mark.parametrize(
    "content",
    [
        b'{"lease": 1, "ver',
        b"[]",
        b'{"lease": 1, "version": "3"}',
        b'{"lease": 1, "version": null}',
        b'{"lease": 1.5, "version": 3}',
        b'{"lease": 1, "version": 3, "checksum": 5}',
    ],
)
def test_weights_that_cannot_be_read_are_set_aside(noting, tmp_path, caplog, content):
    (tmp_path / "weights.json").write_bytes(content)
    with caplog.at_level(logging.WARNING), gateway(noting.url, journal=str(tmp_path)) as url:
        assert asked(url, "/server_info")[1]["weights"] is None
        assert asked(url, "/weights", WEIGHTS) == (200, WEIGHTS)
    assert "weights.json cannot be read" in caplog.text


def as_file(damage):
    """Of a file's lines, to what the file is then."""
    return lambda path: path.write_bytes(b"".join(damage(path.read_bytes().splitlines(True))))


def last_turn(**fields):
    """A file whose last turn has other values in these fields."""
    return as_file(
        lambda lines: [*lines[:-1], json.dumps(json.loads(lines[-1]) | fields).encode() + b"\n"]
    )


def as_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "glued": as_file(lambda lines: [*lines[:2], lines[2][:50], *lines[2:]]),
    "no seed": as_file(lambda lines: lines[1:]),
    "a turn is missing": as_file(lambda lines: [lines[0], *lines[2:]]),
    "zeros": as_file(lambda lines: [lines[0], b"\0" * len(lines[1]) + b"\n", *lines[2:]]),
    "no text": as_file(lambda lines: [lines[0], b'"\xff"\n', *lines[2:]]),
    "no turn": as_file(lambda lines: [*lines, b"[]\n"]),
    "no reply": as_file(lambda lines: [*lines, b'{"parent": 0, "rank": null}\n']),
    "no file": as_folder,
    "odd rank": last_turn(rank=["http://h"]),
    "odd tokens": last_turn(num_dropped=10**6),
    "odd ids": last_turn(context=5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_read_costs_its_own_session_alone(noting, tmp_path, caplog, damage):
    names = ("a", "b", "c")
    with gateway(noting.url, journal=str(tmp_path)) as url:
        for name in names:
            asked(url, "/sessions", {"id": name, "seed": ord(name)})
            _, first = chat(url, name, QUESTION)
            chat(url, name, QUESTION, first, MORE)
        told = {name: records(url, name) for name in names}
    DAMAGES[damage](tmp_path / "b.jsonl")
    with caplog.at_level(logging.WARNING), gateway(noting.url, journal=str(tmp_path)) as url:
        assert asked(url, "/sessions")[1]["sessions"] == ["a", "c"] and load(url) == 2
        assert {name: records(url, name) for name in "ac"} == {name: told[name] for name in "ac"}
        assert str(tmp_path / "b.jsonl") in caplog.text and "cannot be read" in caplog.text
        # What is set aside is in nobody's way.
        assert asked(url, "/sessions", {"id": "b", "seed": 1})[0] == 200
        assert chat(url, "b", QUESTION)[0] == 200
        told["b"] = records(url, "b")
    with gateway(noting.url, journal=str(tmp_path)) as url:
        assert {name: records(url, name) for name in names} == told


@pytest.mark.parametrize("cut", [1, 200, None])
def test_a_line_that_was_cut_off_costs_itself_alone(noting, tmp_path, caplog, cut):
    """cut: of the last turn's bytes, its end included; None: but for one."""
    with gateway(noting.url, journal=str(tmp_path)) as url:
        asked(url, "/sessions", {"id": "s", "seed": 7})
        _, first = chat(url, "s", QUESTION)
        kept = records(url, "s")
        chat(url, "s", QUESTION, first, MORE)
        told = records(url, "s")
    path = tmp_path / "s.jsonl"
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(b"".join(lines)[: -(cut or len(lines[-1]) - 1)])
    with caplog.at_level(logging.WARNING), gateway(noting.url, journal=str(tmp_path)) as url:
        assert f"{path} ends in an incomplete line" in caplog.text
        assert records(url, "s") == kept and path.read_bytes() == b"".join(lines[:-1])
        chat(url, "s", QUESTION, first, MORE)
        assert records(url, "s") == told


def test_which_reply_to_its_prompt_it_is_is_kept(tmp_path):
    """Or a gateway after this one would draw one twice."""
    tokenizer, journal = Tokenizer.load("bytes"), SessionJournal(tmp_path)
    session = Session(tokenizer, seed=3)
    lost = session.plan([QUESTION])
    other = session.plan([QUESTION], pending=[lost])
    journal.begin("s", 3)
    turn = session.make_turn(other, [1, 2], [0.0, 0.0], [0, 0], "stop", {"role": "assistant"})
    journal.add("s", turn, None)
    [(_, again, _)] = journal.read(lambda seed: Session(tokenizer, seed=seed))
    assert again.turns[0].sample_index == 1 and again.plan([QUESTION]) == lost
