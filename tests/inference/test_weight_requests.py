"""Tests requests that update weights: errors reveal nothing about other folders."""

import pathlib

import pytest

from glm5_jax.checkpoint import models
from glm5_jax.model import glm5
from tests.inference.conftest import serving
from tests.inference.test_engine import model
from tests.inference.test_server import post


@pytest.fixture(scope="module")
def loading_server():
    """Runs a server that loads weights from folders of this machine."""

    def load(path):
        models.load_model(path)
        return dict(glm5.params_of(model()))

    with serving(load=load) as server:
        yield server


def test_error_is_equal_for_all_paths_without_checkpoint(loading_server, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "stages" / "sft" / "checkpoints").mkdir(parents=True)
    paths = [tmp_path / name for name in ("file", "nowhere", "stages", "", "file/below")]
    answers = set()
    for path in [*map(str, paths), "/etc/ssh", "/etc/passwd", "\0", "x" * 5000]:
        status, answer = post(loading_server, "/update_weights", {"path": path, "version": 1})
        message = answer["error"]["message"]
        assert status == 400 and answer["error"]["param"] == "path" and len(message) < 500
        answers.add(message.replace(path[:200], "PATH"))
    assert len(answers) == 1, answers
    assert "no checkpoint that this server can read" in answers.pop()


def test_explains_invalid_checkpoint(loading_server, tmp_path):
    pathlib.Path(tmp_path / "config.json").write_text("{}")
    status, answer = post(loading_server, "/update_weights", {"path": str(tmp_path), "version": 1})
    assert status == 400 and "no checkpoint that this server" not in answer["error"]["message"]


def test_rejects_finish_policy_while_paused(loading_server):
    post(loading_server, "/pause", {})
    try:
        body = {"path": "nowhere", "version": 1, "policy": "finish"}
        assert post(loading_server, "/update_weights", body)[0] == 400
    finally:
        assert post(loading_server, "/resume", {}) == (200, {"paused": False})
