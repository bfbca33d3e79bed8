"""Adapters in PEFT's format: its golden, our files next to its files, and refused adapters."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm5_jax.checkpoint import hf_config
from glm5_jax.checkpoint.peft_adapters import load_adapter, save_adapter, with_adapter
from glm5_jax.config import LoraConfig
from glm5_jax.inference.quantize import table
from glm5_jax.model import glm5, lora
from glm5_jax.parallel.tree import flatten, unflatten
from tests.model import golden
from tests.oracles import glm5 as oracle, lora as lora_oracle

BASE, ADAPTER = golden.FOLDER / "hf_tiny_d", golden.FOLDER / "peft_tiny_d"
WEIGHTS = "adapter_model.safetensors"


@functools.cache
def base():
    return golden.load("hf_tiny_d")


@functools.cache
def expected():
    return dict(np.load(ADAPTER / "expected.npz"))


@functools.cache
def adapted_model():
    """Returns (config, params) of the golden's base with the golden's adapters next to its weights."""
    cfg, leaves = load_adapter(ADAPTER, base().cfg)
    return cfg, unflatten(flatten(base().params) | leaves)


def merged_oracle():
    config, weights = oracle.load(BASE)
    adapters, options = (
        load_file(ADAPTER / WEIGHTS),
        json.loads((ADAPTER / "adapter_config.json").read_text()),
    )
    weights = lora_oracle.merge(weights, adapters, options["lora_alpha"], options["r"])
    return oracle.forward(weights, config, base().tokens)["logits"]


def test_oracle_equals_float64_twin_of_peft():
    np.testing.assert_allclose(merged_oracle(), expected()["logits_f64"], rtol=0, atol=1e-9)


def test_merged_adapters_equal_peft():
    model = with_adapter(glm5.Glm5(base().cfg, params=base().params), ADAPTER)
    assert model.cfg == base().cfg
    np.testing.assert_allclose(model(base().tokens), expected()["logits"], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_float64_adapters_equal_float64_twin_of_peft():
    cfg, params = adapted_model()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        logits = glm5.forward(wide, base().tokens, dataclasses.replace(cfg, dtype="float64")).logits
    np.testing.assert_allclose(logits, expected()["logits_f64"], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_gradients_equal_those_of_peft(tmp_path):
    cfg, params = adapted_model()
    frozen = {path: x for path, x in flatten(params).items() if not lora.is_adapter(path)}
    tokens = base().tokens

    def loss(adapters):
        logits = glm5.forward(unflatten(frozen | adapters), tokens, cfg).logits[:, :-1]
        logp = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    _, leaves = load_adapter(ADAPTER, base().cfg)
    value, gradients = jax.jit(jax.value_and_grad(loss))(leaves)
    np.testing.assert_allclose(value, expected()["loss_f64"], rtol=1e-5)
    # The golden's gradients have the names of the tensors, so they are read like an adapter.
    folder = copy_of_golden(tmp_path)
    named = {n.removeprefix("grad/"): x for n, x in expected().items() if n.startswith("grad/")}
    save_file(named, folder / WEIGHTS)
    _, want = load_adapter(folder, base().cfg)
    assert gradients.keys() == want.keys()
    for path, gradient in want.items():
        np.testing.assert_allclose(
            gradients[path], gradient, rtol=0, atol=1e-4 * np.abs(gradient).max(), err_msg=path
        )


def test_saves_the_files_of_peft(tmp_path):
    cfg, params = adapted_model()
    save_adapter(params, cfg, tmp_path / "out", base="hf_tiny_d")
    ours, theirs = load_file(tmp_path / "out" / WEIGHTS), load_file(ADAPTER / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name, strict=True)
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "out", ADAPTER)
    )
    assert ours == {name: theirs[name] for name in ours}


def test_loads_what_it_saved(tmp_path):
    options = LoraConfig(rank=2, alpha=3.0, targets=("/attn/(k|v)_b$", "/attn/o$"))
    cfg = dataclasses.replace(base().cfg, lora=options)
    params = glm5.init_params(cfg, jax.random.key(0))
    save_adapter(params, cfg, tmp_path / "out")
    loaded_cfg, leaves = load_adapter(tmp_path / "out", base().cfg)
    assert (loaded_cfg.lora.rank, loaded_cfg.lora.alpha) == (2, 3.0)
    saved = {path: x for path, x in flatten(params).items() if lora.is_adapter(path)}
    assert leaves.keys() == saved.keys()
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, saved[path], err_msg=path)


def test_rank_stabilised_adapter_has_scale_of_square_root(tmp_path):
    folder = copy_of_golden(tmp_path, use_rslora=True)
    cfg, _ = load_adapter(folder, base().cfg)
    np.testing.assert_allclose(cfg.lora.scale, 7.5 / np.sqrt(3))


def copy_of_golden(tmp_path, **options):
    folder = shutil.copytree(ADAPTER, tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"rank_pattern": {"q_a_proj": 8}}, "rank_pattern is"),
        ({"r": 0}, "r is 0"),
        ({"r": 10**400}, "r is 1000.*; it must be an integer from 1 to"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000.*; it must be a positive number"),
        ({"use_rslora": "false"}, "use_rslora is 'false'; it must be true or false"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
        ({"r": 4}, "has shape .* the adapter is of another model"),
    ],
)
def test_rejects_other_adapters(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load_adapter(copy_of_golden(tmp_path, **options), base().cfg)


def test_warns_of_options_that_are_not_known(tmp_path, caplog):
    folder = copy_of_golden(tmp_path, use_newlora=True, newlora_config=None)
    load_adapter(folder, base().cfg)
    assert "use_newlora is True, an option that is not known" in caplog.text
    assert "newlora_config" not in caplog.text


def test_rejects_tensor_that_is_stored_twice(tmp_path):
    folder = copy_of_golden(tmp_path)
    tensors = load_file(ADAPTER / WEIGHTS)
    name = sorted(tensors)[0]
    save_file(tensors | {name.removeprefix("base_model.model."): tensors[name]}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="twice, with and without base_model.model."):
        load_adapter(folder, base().cfg)


def test_rejects_missing_and_unknown_tensors(tmp_path):
    folder = copy_of_golden(tmp_path)
    tensors = load_file(ADAPTER / WEIGHTS)
    name = "base_model.model.model.layers.1.self_attn.q_a_proj.lora_A.weight"
    save_file({n: x for n, x in tensors.items() if n != name}, folder / WEIGHTS)
    with pytest.raises(
        ValueError, match="lacks 1 tensors, among them .*layers.1.self_attn.q_a_proj"
    ):
        load_adapter(folder, base().cfg)
    save_file(tensors | {name.replace("layers.1", "layers.7"): tensors[name]}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="1 tensors that no adapter of this model has"):
        load_adapter(folder, base().cfg)


def test_rejects_tensor_that_is_not_finite(tmp_path):
    folder = copy_of_golden(tmp_path)
    tensors = load_file(ADAPTER / WEIGHTS)
    name = next(iter(sorted(tensors)))
    save_file(tensors | {name: np.full_like(tensors[name], np.nan)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        load_adapter(folder, base().cfg)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, bool])
def test_rejects_tensor_without_fractions(tmp_path, dtype):
    """The scale of a quantised adapter is in no file of PEFT."""
    folder = copy_of_golden(tmp_path)
    tensors = load_file(ADAPTER / WEIGHTS)
    name = next(iter(sorted(tensors)))
    save_file(tensors | {name: tensors[name].astype(dtype)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=f"is {np.dtype(dtype).name}, which is no number"):
        load_adapter(folder, base().cfg)


def test_rejects_folder_without_adapter(tmp_path):
    with pytest.raises(ValueError, match="give the folder of a PEFT adapter"):
        load_adapter(tmp_path, base().cfg)


def test_rejects_quantised_target():
    letters, params = flatten(glm5.axis_letters(base().cfg)), flatten(base().params)
    path = "moe_layers/attn/o"
    params[path] = table.quantised(table.W8A8, params[path], letters[path], None, "float32")
    model = glm5.Glm5(base().cfg, params=unflatten(params))
    with pytest.raises(ValueError, match="moe_layers/attn/o, which is quantised"):
        with_adapter(model, ADAPTER)


@pytest.mark.parametrize(
    "targets", [("/attn/k_b$",), ("/experts/down$",), ("/experts/(gate|up)$",)]
)
def test_rejects_saving_part_of_tensor(tmp_path, targets):
    cfg = dataclasses.replace(base().cfg, lora=LoraConfig(rank=2, targets=targets))
    with pytest.raises(ValueError, match="PEFT's form has all of them or none"):
        save_adapter(glm5.init_params(cfg, jax.random.key(0)), cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rejects_saving_into_full_folder(tmp_path):
    cfg, params = adapted_model()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not an empty folder"):
        save_adapter(params, cfg, tmp_path)


def test_rejects_hf_config_with_adapters():
    cfg = dataclasses.replace(base().cfg, lora=LoraConfig(rank=2))
    with pytest.raises(ValueError, match="has no lora"):
        hf_config.to_hf(cfg)
