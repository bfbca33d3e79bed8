"""The weights that are served of a folder, folders that may replace them, and errors of other folders."""

import dataclasses
import functools
import json
import urllib.error
import urllib.request

import jax
import pytest

from experiments import serve
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.server import ServerConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import CFG, model

ENGINE = dict(page_size=16, max_num_seqs=2, prefill_chunk=32, max_length=64)
PROMPT = Tokenizer.default().encode("To be, or")
QUANTISED = "weights in 8 bits, experts as int4 in groups of 32"
KINDS = {
    "plain": lambda params, cfg: (params, cfg),
    "quantised": lambda params, cfg: table.quantise(params, cfg, 32),
    "other groups": lambda params, cfg: table.quantise(params, cfg, 16),
    "rotated": lambda params, cfg: table.quantise(*rotation.rotate(params, cfg), 32),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Returns folder_of(kind, seed), which saves each model once."""
    root = tmp_path_factory.mktemp("folders")

    @functools.cache
    def folder_of(kind, seed=0):
        params, cfg = KINDS[kind](glm5.params_of(model(seed)), CFG)
        save_hf(params, root / f"{kind}-{seed}", cfg=cfg, tokenizer=Tokenizer.default())
        return root / f"{kind}-{seed}"

    return folder_of


def config(folder):
    engine = serve.EngineConfig(**ENGINE)
    server = ServerConfig(port=0, model="tiny")
    return serve.ServeConfig(checkpoint=str(folder), engine=engine, server=server, warm=False)


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def generate(url):
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    return post(url, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})[1]


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(serve, "make_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize("kind", ["plain", pytest.param("quantised", marks=pytest.mark.slow)])
def test_serves_only_folder_of_its_kind(folder_of, one_device, kind):
    """The served weights stay unchanged after a refused folder."""
    want = Engine(models.load_model(folder_of(kind, 1)), config=EngineConfig(**ENGINE))
    [want] = want.generate([PROMPT], Sampling(max_tokens=6, temperature=0, ignore_eos=True))
    with serve.make_server(config(folder_of(kind))).running() as url:
        before = generate(url)
        assert before["output_ids"] != want.ids
        wrong = {"path": str(folder_of("other groups")), "version": 3}
        status, answer = post(url, "/update_weights", wrong)
        assert status == 400 and "experts as int4 in groups of 16, the served model has" in answer
        assert generate(url)["output_ids"] == before["output_ids"]
        update = {"path": str(folder_of(kind, 1)), "version": 3}
        assert post(url, "/update_weights", update) == (200, {"success": True, "version": 3})
        got = generate(url)
    assert got["output_ids"] == want.ids and got["meta_info"]["weight_versions"] == [3] * 6


@pytest.mark.slow
def test_refuses_weights_of_another_kind_or_model(folder_of, tmp_path):
    rope = dataclasses.replace(CFG.rope_parameters, rope_theta=5e5)
    others = {"rope": dict(rope_parameters=rope), "wide": dict(intermediate_size=96)}
    for name, changes in others.items():
        cfg = dataclasses.replace(CFG, **changes)
        params = glm5.init_params(cfg, jax.random.key(0))
        save_hf(params, tmp_path / name, cfg=cfg)
        save_hf(table.quantise(params, cfg, 32)[0], tmp_path / f"quantised-{name}", cfg=cfg)
    cases = {
        "plain": {
            folder_of("quantised"): f"holds {QUANTISED}, the served model has plain weights; give",
            tmp_path / "rope": "rope_parameters.rope_theta 500000.0 (here 10000.0)",
            tmp_path / "wide": "model/dense_layers/mlp/down, (1, 96, 128) there and (1, 384, 128)",
        },
        "quantised": {
            folder_of("plain"): f"holds plain weights, the served model has {QUANTISED}; give",
            folder_of("other groups"): "experts as int4 in groups of 16, the served model has",
            folder_of("rotated"): f"holds {QUANTISED}, rotated ones, the served model has",
            tmp_path / "quantised-rope": "rope_parameters.rope_theta 500000.0 (here 10000.0)",
            tmp_path / "quantised-wide": "(1, 96, 128) there and (1, 384, 128) here",
            tmp_path / "nothing": "nothing does not exist",
        },
    }
    for kind, wrong in cases.items():
        load = models.make_weight_loader(models.load_model(folder_of(kind)))
        for folder, message in wrong.items():
            with pytest.raises(ValueError) as refused:
                load(str(folder))
            answer = str(refused.value)
            assert message in answer, answer
            assert "\n" not in answer and len(answer) < 300 + len(str(folder))
