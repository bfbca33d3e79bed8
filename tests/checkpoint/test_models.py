"""Models by their path: a run's workdir, one of its checkpoints, or a HuggingFace folder."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from glm5_jax import presets
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.store import Store
from glm5_jax.inference.quantize import table
from glm5_jax.model import glm5
from glm5_jax.parallel.tree import flatten
from glm5_jax.text.tokenizer import Tokenizer

CFG = dataclasses.replace(presets.tiny(), num_hidden_layers=2, int4_group=32)


@pytest.fixture(scope="module")
def params():
    return glm5.init_params(CFG, jax.random.key(0))


@pytest.fixture(scope="module")
def workdir(params, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    state = {
        "params": params,
        "optimizer": {"m": np.zeros(2)},
        "step": np.int32(7),
        "key": np.zeros(2),
    }
    with Store(folder) as store:
        store.save(state, {"next": 1}, {"name": "x"})
    config = {"name": "x", "model": dataclasses.asdict(CFG)}
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer.default().save(folder / "tokenizer")
    return folder


def same(got, want):
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("step", [None, 7])
def test_loads_model_of_run(workdir, params, step):
    path = workdir if step is None else workdir / "checkpoints" / str(step)
    model = models.load_model(path)
    assert model.cfg == CFG
    same(glm5.params_of(model), params)
    assert models.load_tokenizer(path).fingerprint == Tokenizer.default().fingerprint
    same(models.open_weights(path, CFG)(), params)


def test_loads_model_of_huggingface_folder(params, tmp_path):
    cfg = dataclasses.replace(CFG, int4_group=None)
    save_hf(glm5.Glm5(cfg, params=params), tmp_path, tokenizer=Tokenizer.default())
    same(glm5.params_of(models.load_model(tmp_path)), params)
    assert models.load_tokenizer(tmp_path).vocab_size == Tokenizer.default().vocab_size
    same(models.open_weights(tmp_path, cfg)(), params)


def test_engine_computes_with_fields_of_trained_model(workdir, params, tmp_path):
    """RL trains without the int4 experts of SFT, so that the engines' model must be without them before a push."""
    trained = dataclasses.replace(CFG, int4_group=None, dtype="bfloat16")
    model = models.load_model(workdir, trained=trained)
    assert model.cfg == dataclasses.replace(CFG, int4_group=None)
    same(glm5.params_of(model), params)
    assert models.load_model(workdir, trained=CFG).cfg == CFG
    save_hf(glm5.Glm5(CFG, params=params), tmp_path / "hf")
    model = models.load_model(tmp_path / "hf", trained=trained)
    assert model.cfg.int4_group is None


def test_names_fields_of_other_arithmetic(workdir, params, tmp_path):
    rope = dataclasses.replace(CFG.rope_parameters, rope_theta=5e5)
    other = dataclasses.replace(CFG, rope_parameters=rope, num_experts_per_tok=3)
    message = (
        "of a model with num_experts_per_tok 2 (here 3), rope_parameters.rope_theta 10000.0 (here 500000.0); set "
        "--experiment.model.num_experts_per_tok=2 --experiment.model.rope_parameters.rope_theta=10000.0, or"
    )
    save_hf(params, tmp_path / "hf", cfg=dataclasses.replace(CFG, int4_group=None))
    for path in (workdir, tmp_path / "hf"):
        with pytest.raises(ValueError, match=re.escape(message)):
            models.open_weights(path, other)
        same(
            models.open_weights(path, other, may_differ=("rope_theta", "experts_per_tok"))(), params
        )
        # Stages may change sparsity, integers of experts and the maximum length.
        stage = dict(attention="dense", index_topk=8, int4_group=None, max_position_embeddings=64)
        same(models.open_weights(path, dataclasses.replace(CFG, **stage))(), params)


def test_names_sizes_of_other_model(workdir, params, tmp_path):
    save_hf(params, tmp_path / "hf", cfg=dataclasses.replace(CFG, int4_group=None))
    other = dataclasses.replace(CFG, vocab_size=512, n_routed_experts=8)
    message = (
        f"is of another model, with n_routed_experts {CFG.n_routed_experts} (here 8), vocab_size {CFG.vocab_size} (here "
        "512); to train that model, set --experiment.model_of_checkpoint=True"
    )
    for path in (workdir, tmp_path / "hf"):
        with pytest.raises(ValueError, match=re.escape(message)):
            models.open_weights(path, other)


def test_training_refuses_quantised_folder(params, tmp_path):
    quantised, cfg = table.quantise(params, CFG)
    save_hf(quantised, tmp_path, cfg=cfg)
    with pytest.raises(ValueError, match="holds a quantised model, which cannot be trained"):
        models.open_weights(tmp_path, CFG)


def test_names_problem_of_path(workdir, tmp_path):
    with pytest.raises(ValueError, match="checkpoint /nowhere does not exist"):
        models.load_model("/nowhere")
    with pytest.raises(ValueError, match="is not a checkpoint; give a run's workdir"):
        models.load_model(tmp_path)
    with pytest.raises(ValueError, match=f"holds the stages .*{workdir.name}"):
        models.load_tokenizer(workdir.parent)
    wider = dataclasses.replace(CFG, vocab_size=CFG.vocab_size + 8)
    with pytest.raises(ValueError, match="another model, with vocab_size"):
        models.open_weights(workdir, wider)
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (other / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json holds no config of a run"):
        models.load_model(other)
