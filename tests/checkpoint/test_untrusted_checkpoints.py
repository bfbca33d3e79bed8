"""Untrusted checkpoints: absurd sizes, pipes and devices in place of files, fields of fine-tunes."""

import json
import logging
import os
import pathlib
import shutil
import time

import pytest

from glm5_jax import presets
from glm5_jax.checkpoint import hf_import, models
from glm5_jax.checkpoint.hf_config import from_hf, to_hf
from glm5_jax.text.tokenizer import Tokenizer

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
TINY = to_hf(presets.tiny())
PER_LAYER = dict.fromkeys(("mlp_layer_types", "indexer_types", "layer_types"))


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of three shards with a tokenizer."""
    shutil.copytree(GOLDENS / "hf_tiny_c", tmp_path / "model")
    Tokenizer.default().save(tmp_path / "model")
    return tmp_path / "model"


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 10**9} | PER_LAYER, "num_hidden_layers is 1000000000; it can be at most 1000"),
        ({"num_hidden_layers": 10**9, "index_topk_freq": 2} | PER_LAYER, "num_hidden_layers is 1000000000"),
        ({"n_routed_experts": 10**6}, "n_routed_experts is 1000000; it can be at most 8192"),
        ({"num_hidden_layers": 1000, "n_routed_experts": 8192} | PER_LAYER, "8192000 experts; there can be at most"),
        ({"vocab_size": 10**30}, "vocab_size is 1000000000000000000000000000000; it can be at most"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*; it must be finite"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan; it must be finite"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf; it must be finite"),
    ],
    ids=range(9),
)  # fmt: skip
def test_refuses_absurd_sizes_quickly(fields, words):
    began = time.process_time()
    with pytest.raises(ValueError, match=words) as caught:
        from_hf({name: value for name, value in (TINY | fields).items() if value is not None})
    assert time.process_time() - began < 1 and len(str(caught.value)) < 2000


def test_shortens_long_invalid_list():
    with pytest.raises(ValueError, match="mlp_layer_types is") as caught:
        from_hf(TINY | {"mlp_layer_types": ["dense"] * 1_000_000})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 900} | PER_LAYER, "num_hidden_layers 900, and the files hold"),
        ({"n_routed_experts": 8192}, "n_routed_experts 8192, and the files hold"),
    ],
)
def test_refuses_more_layers_or_experts_than_files_hold(folder, fields, words):
    change(folder, **fields)
    began = time.process_time()
    with pytest.raises(ValueError, match=words):
        models.load_model(folder)
    assert time.process_time() - began < 2


SHARD, INDEX = "model-00002-of-00003.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize("name", [SHARD, INDEX, "config.json", "mtp.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_refuses_special_files_quickly(folder, name, kind):
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=rf"{name} is not a regular file; give a file"):
        hf_import.check_params(folder, models.read_config(folder)[0])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_refuses_special_tokenizer_files(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        models.load_tokenizer(folder)


def test_refuses_run_with_special_or_absurd_config(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="holds no config of a run: .* is not a regular file"):
        models.read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    model = {"num_hidden_layers": 10**9, "rope_parameters": {}}
    (tmp_path / "config.json").write_text(json.dumps({"model": model}))
    with pytest.raises(ValueError, match="num_hidden_layers is 1000000000; it can be at most"):
        models.read_config(tmp_path)


def test_reads_config_with_byte_order_mark(folder):
    config = models.read_config(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text, "utf-8-sig")
    assert models.read_config(folder) == config


ADDED = {
    "auto_map": {"AutoConfig": "configuration_x.Config"},
    "unsloth_fixed": True,
    "aux_loss_alpha": 0.001,
    "_attn_implementation_autoset": True,
    "torchscript": False,
    "temperature": 0.6,
    "pruned_heads": {},
    "add_cross_attention": False,
}


def test_keeps_unknown_fields_with_warning(caplog):
    with caplog.at_level(logging.WARNING):
        cfg = from_hf(TINY | ADDED, "x/config.json")
    [warning] = caplog.messages
    assert warning.startswith("x/config.json: ")
    for name in ("auto_map", "unsloth_fixed", "aux_loss_alpha", "temperature"):
        assert name in warning
    plain = from_hf(TINY)
    assert cfg.arithmetic == plain.arithmetic and cfg != plain
    written = to_hf(cfg)
    assert {name: written[name] for name in ADDED} == ADDED and from_hf(written) == cfg


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mhc_streams", 4),
        ("use_sliding_window", True),
        ("attn_logit_softcapping", 50.0),
        ("pruned_heads", {"0": [1]}),
        ("add_cross_attention", True),
    ],
)
def test_refuses_unknown_fields_of_arithmetic(name, value):
    with pytest.raises(ValueError, match=name):
        from_hf(TINY | {name: value})
