"""Tests checkpoints of the HuggingFace hub with a stand-in of its server on this machine, and offline from the cache."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import sys
import threading

import numpy as np
import pytest
from huggingface_hub import constants

from experiments import check_checkpoint
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_import import load_hf
from glm5_jax.checkpoint.hub import download_snapshot, fetch_checkpoint
from glm5_jax.model import glm5
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import model

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class HubHandler(http.server.BaseHTTPRequestHandler):
    """Answers what huggingface_hub requests of one repository, `org/tiny`, whose revisions are folders."""

    folders: dict[str, pathlib.Path]
    requests: list[str]

    def do_GET(self):
        self._answer(with_body=True)

    def do_HEAD(self):
        self._answer(with_body=False)

    def log_message(self, *args):
        del args

    def _answer(self, with_body: bool):
        path = self.path.partition("?")[0]
        self.requests.append(path)
        parts = path.strip("/").split("/")
        match parts:
            case ["api", "models", "org", "tiny", *rest] if self._revision(rest[1:2]):
                body = json.dumps(self._listing(rest[0], self._revision(rest[1:2]))).encode()
                self._send(200, body, with_body, {"Content-Type": "application/json"})
            case ["org", "tiny", "resolve", revision, name] if self._revision([revision]):
                revision = self._revision([revision])
                file = self.folders[revision] / name
                body = file.read_bytes()
                etag = hashlib.sha256(body).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMITS[revision]}
                self._send(200, body, with_body, headers)
            case _:
                is_repository = parts[-3:-2] == ["tiny"] or "tiny" in parts
                code = "RevisionNotFound" if is_repository else "RepoNotFound"
                self._send(404, b"{}", with_body, {"X-Error-Code": code})

    def _revision(self, names: list[str]) -> str | None:
        """Returns the branch of a revision, which may be a commit."""
        by_name = {name: branch for branch, commit in COMMITS.items() for name in (branch, commit)}
        return by_name.get(names[0] if names else "main")

    def _listing(self, kind: str, revision: str):
        names = sorted(file.name for file in self.folders[revision].iterdir())
        if kind == "tree":
            sizes = {name: (self.folders[revision] / name).stat().st_size for name in names}
            return [{"type": "file", "path": n, "size": sizes[n], "oid": "0"} for n in names]
        siblings = [{"rfilename": name} for name in names]
        return {"id": "org/tiny", "sha": COMMITS[revision], "siblings": siblings}

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str]):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextlib.contextmanager
def serving_hub(folders):
    """Yields the handler's class of a running stand-in, with `url`."""
    handler = type("Handler", (HubHandler,), {"folders": folders, "requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        handler.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield handler
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Runs a stand-in with two revisions of a model; the hub's cache is empty."""
    folders = {}
    for seed, revision in enumerate(COMMITS):
        folders[revision] = tmp_path / revision
        save_hf(model(seed), folders[revision], tokenizer=Tokenizer.default())
        (folders[revision] / "modeling.py").write_text("raise SystemExit")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with serving_hub(folders) as handler:
        # Read from HF_ENDPOINT when the package is imported.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, handler.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", handler.url)
        yield handler
    download_snapshot.cache_clear()


def embedding(loaded) -> np.ndarray:
    """Returns the input embedding of a model."""
    return np.asarray(glm5.params_of(loaded)["embed"]["weight"])


def test_loads_revision_of_hub(hub):
    first, second = (embedding(model(seed)) for seed in range(2))
    np.testing.assert_array_equal(embedding(load_hf("org/tiny")), first)
    np.testing.assert_array_equal(embedding(load_hf("org/tiny", revision="v2")), second)
    np.testing.assert_array_equal(embedding(models.load_model("org/tiny@v2")), second)
    commit = COMMITS["v2"]
    np.testing.assert_array_equal(embedding(load_hf("org/tiny", revision=commit)), second)
    assert models.load_tokenizer("org/tiny").vocab_size == Tokenizer.default().vocab_size
    assert not any("modeling.py" in path for path in hub.requests)


def test_downloads_once_and_loads_offline(hub, monkeypatch):
    folder = fetch_checkpoint("org/tiny@v2")
    num_requests = len(hub.requests)
    assert fetch_checkpoint("org/tiny", revision="v2") == folder
    assert len(hub.requests) == num_requests
    download_snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_checkpoint("org/tiny@v2") == folder
    assert len(hub.requests) == num_requests
    with pytest.raises(ValueError, match="org/other does not exist here, and the HuggingFace hub"):
        fetch_checkpoint("org/other")


def test_describes_checkpoint_of_hub(hub, capsys):
    assert check_checkpoint.main(["org/tiny@v2"]) == 0
    assert "loads" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["org/other", "org/tiny@v3", "nobody/tiny"])
def test_names_checkpoint_that_hub_lacks(hub, name):
    with pytest.raises(ValueError, match=f"checkpoint {name} does not exist here, and the Hugging"):
        models.read_config(name)


def test_keeps_local_paths(hub, tmp_path):
    (tmp_path / "runs").mkdir()
    for path in ("runs/sft", "main", str(tmp_path / "main"), "a/b/c", "./org/tiny"):
        assert fetch_checkpoint(path) == pathlib.Path(path)
    assert not hub.requests
    with pytest.raises(ValueError, match="revision is 'v2', but main is a local path"):
        load_hf("main", revision="v2")
    with pytest.raises(ValueError, match="org/tiny@main has another revision than 'v2'"):
        load_hf("org/tiny@main", revision="v2")


def test_does_not_download_weights_for_client(hub):
    load = models.make_weight_loader(model())
    with pytest.raises(ValueError, match="checkpoint org/tiny does not exist"):
        load("org/tiny")
    assert not models.is_checkpoint("org/tiny")
    assert not hub.requests


def test_names_missing_package(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[hub\]'"):
        fetch_checkpoint("org/tiny")
