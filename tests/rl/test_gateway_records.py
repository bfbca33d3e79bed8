"""Finished sessions of the gateway: it stores their records until they are deleted, also over restarts."""

import pytest

from glm5_jax.rl.rollouts.client import RecordClient
from glm5_jax.rl.rollouts.record_codec import decode_records, digest_of
from glm5_jax.rl.trajectory import summarize_records, summary_from_json
from tests.metrics.test_jsonl import limit_file_size
from tests.rl.fleet import Engine, gateway, server_info
from tests.rl.test_gateway_journal import (
    MORE,
    QUESTION,
    chat,
    check_error,
    load,
    records,
    send_request,
)


@pytest.fixture(scope="module")
def engine_url():
    with Engine(delay=0).running() as url:
        yield url


def begin(url, name="s"):
    """Opens a session with two turns, and returns its encoded records."""
    assert send_request(url, "/sessions", {"id": name, "seed": 7})[0] == 200
    _, first = chat(url, name, QUESTION)
    assert chat(url, name, QUESTION, first, MORE)[0] == 200
    return records(url, name)


def finish(url, name="s"):
    """Finishes a session, and returns its summary."""
    status, body = send_request(url, f"/sessions/{name}/finish", {})
    assert status == 200, body
    return summary_from_json(body)


@pytest.mark.parametrize("has_journal", [False, True])
def test_keeps_records_of_finished_session(engine_url, tmp_path, has_journal):
    options = {"journal": str(tmp_path)} if has_journal else {}
    with gateway(engine_url, **options) as url:
        content = begin(url)
        summary = finish(url)
        assert summary == summarize_records(decode_records(content), digest_of(content))
        assert records(url, "s") == content and load(url) == 0
        assert send_request(url, "/sessions")[1] == {"sessions": [], "finished": ["s"]}
        status = server_info(url)
        assert (status["sessions"], status["finished"]) == (0, 1)
        # The session is closed, and its name is still in use.
        assert chat(url, "s", QUESTION)[0] == send_request(url, "/sessions/s/finish", {})[0] == 404
        assert send_request(url, "/sessions", {"id": "s"})[0] == 409
        assert send_request(url, "/sessions/s", method="DELETE")[0] == 200
        assert send_request(url, "/sessions/s", method="DELETE")[0] == 404
        assert send_request(url, "/sessions/s/records")[0] == 404
        assert send_request(url, "/sessions")[1] == {"sessions": [], "finished": []}
        assert not list(tmp_path.glob("s.*"))


def test_finishes_session_without_replies(engine_url):
    with gateway(engine_url) as url:
        send_request(url, "/sessions", {"id": "s"})
        summary = finish(url)
        assert summary.lengths == summary.versions == () and decode_records(records(url, "s")) == ()


def test_restarted_gateway_has_records(engine_url, tmp_path):
    with gateway(engine_url, journal=str(tmp_path)) as url:
        content = begin(url)
        digest = finish(url).digest
        other = begin(url, "open")
    with gateway(engine_url, journal=str(tmp_path)) as url:
        assert send_request(url, "/sessions")[1] == {"sessions": ["open"], "finished": ["s"]}
        assert records(url, "s") == content and records(url, "open") == other
        assert RecordClient(url).fetch({"s": digest}) == {"s": content}
    with gateway(engine_url, journal=str(tmp_path), record_retention_s=1e-9) as url:
        assert send_request(url, "/sessions")[1] == {"sessions": ["open"], "finished": []}


def test_gateway_killed_while_finishing_has_session_once(engine_url, tmp_path):
    with gateway(engine_url, journal=str(tmp_path)) as url:
        content = begin(url)
        journal = (tmp_path / "s.jsonl").read_bytes()
        finish(url)
    (tmp_path / "s.jsonl").write_bytes(journal)
    with gateway(engine_url, journal=str(tmp_path)) as url:
        assert send_request(url, "/sessions")[1] == {"sessions": [], "finished": ["s"]}
        assert records(url, "s") == content and not (tmp_path / "s.jsonl").exists()


def test_session_stays_open_if_its_records_cannot_be_written(engine_url, tmp_path):
    with gateway(engine_url, journal=str(tmp_path)) as url:
        content = begin(url)
        with limit_file_size(20):
            status, body = send_request(url, "/sessions/s/finish", {})
        check_error(status, body["error"])
        assert send_request(url, "/sessions")[1] == {"sessions": ["s"], "finished": []}
        assert not list(tmp_path.glob("*.records*")) and load(url) == 1
        assert finish(url).digest == digest_of(content)


def test_leaves_out_lost_and_changed_records(engine_url, tmp_path):
    with gateway(engine_url, journal=str(tmp_path)) as url:
        contents, digests = {}, {"never": "0" * 32}
        for name in ("intact", "changed", "gone"):
            contents[name] = begin(url, name)
            digests[name] = finish(url, name).digest
        (tmp_path / "changed.records").write_bytes(contents["changed"][:-1])
        (tmp_path / "gone.records").unlink()
        assert RecordClient(url).fetch(digests) == {"intact": contents["intact"]}
