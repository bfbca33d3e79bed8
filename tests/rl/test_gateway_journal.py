"""A gateway with a full disk or with damaged files: it stores only what it confirmed, and a damaged file affects one
session."""

import json
import logging
import urllib.error
import urllib.request

import pytest

from glm5_jax.rl.rollouts.record_codec import decode_records
from glm5_jax.rl.rollouts.session_journal import SessionJournal
from glm5_jax.rl.rollouts.sessions import Session, SessionStart
from glm5_jax.text.tokenizer import Tokenizer
from tests.metrics.test_jsonl import limit_file_size
from tests.rl.fleet import Engine, gateway

QUESTION, MORE = ({"role": "user", "content": text} for text in ("2*3?", "And?"))
WEIGHTS = {"lease": 1, "version": 0, "checksum": None}


class SeedRecordingEngine(Engine):
    """Engine that records the states of its random generators.

    Attributes:
      seeds: state of the generator of each reply.
    """

    def __init__(self):
        super().__init__(delay=0)
        self.seeds = []

    def reply(self, prompt, rng):
        self.seeds.append(rng.getstate())
        return super().reply(prompt, rng)


@pytest.fixture(scope="module")
def engine():
    server = SeedRecordingEngine()
    with server.running() as url:
        server.url = url
        yield server


def send_request(url, path, body=None, method=None):
    """Returns (HTTP status, JSON) of a request."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(url, name, *messages):
    """Returns (HTTP status, message or error) of a chat."""
    path = f"/sessions/{name}/v1/chat/completions"
    status, body = send_request(url, path, {"messages": messages})
    return status, body["choices"][0]["message"] if status == 200 else body["error"]


def records(url, name):
    """Returns the encoded records of a session."""
    with urllib.request.urlopen(f"{url}/sessions/{name}/records", timeout=60) as response:
        return response.read()


def load(url):
    """Returns the number of sessions of all ranks."""
    return sum(send_request(url, "/server_info")[1]["loads"].values())


def check_error(status, error):
    assert status == 503 and error["type"] == "server_error" and error["code"] == "unavailable"
    assert "journal cannot be written" in error["message"] and "ask again" in error["message"]


def test_discards_reply_that_cannot_be_written(engine, tmp_path):
    path = tmp_path / "s.jsonl"
    with gateway(engine.url, journal=str(tmp_path)) as url:
        send_request(url, "/sessions", {"id": "s", "seed": 7})
        _, first = chat(url, "s", QUESTION)
        before, records_before = path.read_bytes(), records(url, "s")
        for space in (40, 0):  # part of the line is written, or none
            with limit_file_size(len(before) + space):
                check_error(*chat(url, "s", QUESTION, first, MORE))
            assert path.read_bytes() == before and records(url, "s") == records_before
        status, second = chat(url, "s", QUESTION, first, MORE)
        assert status == 200
        # A repeated request is sampled with the same seed.
        assert engine.seeds[-3] == engine.seeds[-2] == engine.seeds[-1]
        records_after = records(url, "s")
        trained, trained_before = (
            decode_records(content)[0].loss_mask.sum()
            for content in (records_after, records_before)
        )
        assert trained > trained_before
    with gateway(engine.url, journal=str(tmp_path)) as url:
        assert records(url, "s") == records_after


def test_does_not_open_session_that_cannot_be_written(engine, tmp_path):
    with gateway(engine.url, journal=str(tmp_path)) as url:
        for space in (3, 0):
            with limit_file_size(space):
                status, body = send_request(url, "/sessions", {"id": "s", "seed": 7})
            check_error(status, body["error"])
            assert load(url) == 0 and send_request(url, "/sessions")[1]["sessions"] == []
        assert send_request(url, "/sessions", {"id": "s", "seed": 7})[0] == 200 and load(url) == 1
        chat(url, "s", QUESTION)
        content = records(url, "s")
    with gateway(engine.url, journal=str(tmp_path)) as url:
        assert records(url, "s") == content


def test_does_not_end_session_whose_file_stays(engine, tmp_path):
    path = tmp_path / "s.jsonl"
    with gateway(engine.url, journal=str(tmp_path)) as url:
        send_request(url, "/sessions", {"id": "s", "seed": 7})
        path.rename(tmp_path / "aside")
        path.mkdir()  # unlink() does not remove a folder
        status, body = send_request(url, "/sessions/s", method="DELETE")
        check_error(status, body["error"])
        assert load(url) == 1
        path.rmdir()
        (tmp_path / "aside").rename(path)
        assert chat(url, "s", QUESTION)[0] == 200
        assert send_request(url, "/sessions/s", method="DELETE")[0] == 200
        assert load(url) == 0 and not list(tmp_path.glob("*.jsonl"))


def test_does_not_require_weights_that_cannot_be_written(engine, tmp_path):
    with gateway(engine.url, journal=str(tmp_path)) as url:
        with limit_file_size(5):
            status, body = send_request(url, "/weights", WEIGHTS)
        check_error(status, body["error"])
        assert send_request(url, "/server_info")[1]["weights"] is None
        assert send_request(url, "/weights", WEIGHTS) == (200, WEIGHTS)
    with gateway(engine.url, journal=str(tmp_path)) as url:
        assert send_request(url, "/server_info")[1]["weights"] == WEIGHTS


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
def test_sets_aside_unreadable_weights_file(engine, tmp_path, caplog, content):
    (tmp_path / "weights.json").write_bytes(content)
    with caplog.at_level(logging.WARNING), gateway(engine.url, journal=str(tmp_path)) as url:
        assert send_request(url, "/server_info")[1]["weights"] is None
        assert send_request(url, "/weights", WEIGHTS) == (200, WEIGHTS)
    assert "weights.json cannot be read" in caplog.text


def change_lines(damage):
    """Returns a function of a path that changes the lines of its file."""
    return lambda path: path.write_bytes(b"".join(damage(path.read_bytes().splitlines(True))))


def change_last_turn(**fields):
    """Returns a function of a path that changes fields of the last turn in its file."""
    return change_lines(
        lambda lines: [*lines[:-1], json.dumps(json.loads(lines[-1]) | fields).encode() + b"\n"]
    )


def replace_by_folder(path):
    """Replaces a file by a folder."""
    path.unlink()
    path.mkdir()


DAMAGES = {
    "glued": change_lines(lambda lines: [*lines[:2], lines[2][:50], *lines[2:]]),
    "no seed": change_lines(lambda lines: lines[1:]),
    "a turn is missing": change_lines(lambda lines: [lines[0], *lines[2:]]),
    "zeros": change_lines(lambda lines: [lines[0], b"\0" * len(lines[1]) + b"\n", *lines[2:]]),
    "no text": change_lines(lambda lines: [lines[0], b'"\xff"\n', *lines[2:]]),
    "no turn": change_lines(lambda lines: [*lines, b"[]\n"]),
    "no reply": change_lines(lambda lines: [*lines, b'{"parent": 0, "rank": null}\n']),
    "no file": replace_by_folder,
    "odd rank": change_last_turn(rank=["http://h"]),
    "odd tokens": change_last_turn(num_dropped=10**6),
    "odd ids": change_last_turn(context=5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unreadable_file_affects_only_its_session(engine, tmp_path, caplog, damage):
    names = ("a", "b", "c")
    with gateway(engine.url, journal=str(tmp_path)) as url:
        for name in names:
            send_request(url, "/sessions", {"id": name, "seed": ord(name)})
            _, first = chat(url, name, QUESTION)
            chat(url, name, QUESTION, first, MORE)
        contents = {name: records(url, name) for name in names}
    DAMAGES[damage](tmp_path / "b.jsonl")
    with caplog.at_level(logging.WARNING), gateway(engine.url, journal=str(tmp_path)) as url:
        assert send_request(url, "/sessions")[1]["sessions"] == ["a", "c"] and load(url) == 2
        assert {name: records(url, name) for name in "ac"} == {
            name: contents[name] for name in "ac"
        }
        assert str(tmp_path / "b.jsonl") in caplog.text and "cannot be read" in caplog.text
        # The damaged file is set aside, and its name is free.
        assert send_request(url, "/sessions", {"id": "b", "seed": 1})[0] == 200
        assert chat(url, "b", QUESTION)[0] == 200
        contents["b"] = records(url, "b")
    with gateway(engine.url, journal=str(tmp_path)) as url:
        assert {name: records(url, name) for name in names} == contents


@pytest.mark.parametrize("cut", [1, 200, None])
def test_incomplete_last_line_loses_one_turn(engine, tmp_path, caplog, cut):
    """cut: number of bytes that are missing at the end; None: all but one byte of the last line."""
    with gateway(engine.url, journal=str(tmp_path)) as url:
        send_request(url, "/sessions", {"id": "s", "seed": 7})
        _, first = chat(url, "s", QUESTION)
        records_before = records(url, "s")
        chat(url, "s", QUESTION, first, MORE)
        records_after = records(url, "s")
    path = tmp_path / "s.jsonl"
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(b"".join(lines)[: -(cut or len(lines[-1]) - 1)])
    with caplog.at_level(logging.WARNING), gateway(engine.url, journal=str(tmp_path)) as url:
        assert f"{path} ends in an incomplete line" in caplog.text
        assert records(url, "s") == records_before and path.read_bytes() == b"".join(lines[:-1])
        chat(url, "s", QUESTION, first, MORE)
        assert records(url, "s") == records_after


def test_journal_stores_sample_index_of_turn(tmp_path):
    """Otherwise the next gateway would sample the same reply twice."""
    tokenizer, journal = Tokenizer.load("bytes"), SessionJournal(tmp_path)
    session = Session(tokenizer, seed=3)
    lost = session.plan([QUESTION])
    other = session.plan([QUESTION], pending=[lost])
    start = SessionStart(seed=3, temperature=0.0, top_p=0.95)
    journal.begin("s", start)
    turn = session.make_turn(other, [1, 2], [0.0, 0.0], [0, 0], "stop", {"role": "assistant"})
    journal.add("s", turn, None)
    [(_, read, restored, _)] = journal.read(lambda start: Session(tokenizer, seed=start.seed))
    assert read == start
    assert restored.turns[0].sample_index == 1 and restored.plan([QUESTION]) == lost
