"""Requests that bring weights: what they say of other folders, and what they may take of memory."""

import gzip
import pathlib

import pytest

from glm5_jax.checkpoint import models
from glm5_jax.model import glm5
from tests.inference.conftest import serving
from tests.inference.test_engine import CFG, model
from tests.inference.test_server import post
from tests.rl.pushing import begun


@pytest.fixture(scope="module")
def loading():
    """A server that takes weights from folders of this machine."""

    def load(path):
        models.load_model(path)
        return dict(glm5.params_of(model()))

    with serving(load=load, max_part_bytes=1000) as server:
        yield server


def test_says_the_same_of_all_paths_without_a_checkpoint(loading, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "stages" / "sft" / "checkpoints").mkdir(parents=True)
    paths = [tmp_path / name for name in ("file", "nowhere", "stages", "", "file/below")]
    answers = set()
    for path in [*map(str, paths), "/etc/ssh", "/etc/passwd", "\0", "x" * 5000]:
        status, answer = post(loading, "/update_weights", {"path": path, "version": 1})
        message = answer["error"]["message"]
        assert status == 400 and answer["error"]["param"] == "path" and len(message) < 500
        answers.add(message.replace(path[:200], "PATH"))
    assert len(answers) == 1, answers
    assert "no checkpoint that this server can read" in answers.pop()


def test_says_what_is_wrong_with_a_checkpoint(loading, tmp_path):
    pathlib.Path(tmp_path / "config.json").write_text("{}")
    status, answer = post(loading, "/update_weights", {"path": str(tmp_path), "version": 1})
    assert status == 400 and "no checkpoint that this server" not in answer["error"]["message"]


def test_refuses_parts_before_receiving_them(loading):
    """Of a push that was not begun, too long ones, and compressed ones, which could become any size."""
    zipped, coded = gzip.compress(b"\0" * 1_000_000)[:1000], {"Content-Encoding": "gzip"}
    for headers in ({}, coded):
        status, answer = post(loading, "/weights/part?push=p", zipped, headers)
        assert status == 409 and "there is no push 'p'" in answer["error"]["message"]
    assert post(loading, "/weights/begin", begun(1, "p", CFG))[0] == 200
    status, answer = post(loading, "/weights/part?push=p", zipped, coded)
    assert status == 415 and "Content-Encoding gzip" in answer["error"]["message"]
    assert post(loading, "/weights/part?push=p", b"x" * 10_000)[0] == 413
    status, answer = post(loading, "/weights/part?push=p", b"x" * 100)
    assert status == 400 and "no safetensors" in answer["error"]["message"]
    assert post(loading, "/weights/abort", {"push": "p"})[0] == 200


def test_finish_of_a_paused_engine_names_the_policy(loading):
    post(loading, "/pause", {})
    try:
        body = {"path": "nowhere", "version": 1, "policy": "finish"}
        assert post(loading, "/update_weights", body)[0] == 400
    finally:
        assert post(loading, "/resume", {}) == (200, {"paused": False})
