"""Routed experts as int4 in files: the numbers of compressed-tensors, and our round trips."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm5_jax.checkpoint import hf_int4
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_import import check_params, load_hf, load_params, read_config
from glm5_jax.model import glm5, quant
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten
from tests.mesh import cases

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "int4.json").read_text())
GROUP = 4
PLAIN = cases.pair(num_nextn_predict_layers=1)
CFG = dataclasses.replace(PLAIN, int4_group=GROUP)
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
PARTS = ("_packed", "_scale", "_shape")


def tensors(folder):
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    return functools.reduce(lambda x, file: x | load_file(file), files, {})


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("int4") / "out"
    save_hf(cases.params(CFG), out, cfg=CFG)
    return out


def changed_copy(folder, tmp_path, change, config=lambda x: x):
    """Copies the folder, with tensors and config.json changed by these functions."""
    out = tmp_path / "changed"
    out.mkdir()
    held = tensors(folder)
    change(held)
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config(text)))
    return out


@pytest.mark.parametrize("case", GOLDEN["weights"], ids=lambda c: f"{c['weight_shape'][1]} inputs")
def test_packs_and_reads_like_compressed_tensors(case):
    weight = np.array(case["weight"], np.float32)
    arrays = hf_int4.pack("w", weight, 4)
    want = {
        "w_packed": np.array(case["weight_packed"], np.int32),
        "w_scale": np.array(case["weight_scale"], np.float32),
        "w_shape": np.array(case["weight_shape"], np.int64),
    }
    same(arrays, want)
    assert [(x.shape, x.dtype) for x in arrays.values()] == hf_int4.layout(weight.shape, 4)
    packed = hf_int4.PackedWeight(
        name="w", packed=arrays["w_packed"], scale=arrays["w_scale"], shape=weight.shape
    )
    back = np.array(case["back"], np.float32)
    for rows in ((0, 3), (1, 2)):
        for first in range(weight.shape[1]):
            for last in range(first + 1, weight.shape[1] + 1):
                index = (slice(*rows), slice(first, last))
                assert packed[index].tobytes() == back[index].tobytes()


def test_packs_only_routed_experts(folder, tmp_path):
    save_hf(cases.params(PLAIN), tmp_path / "plain", cfg=PLAIN)
    plain, quantised = tensors(tmp_path / "plain"), tensors(folder)
    experts = {n for n in plain if ".mlp.experts." in n}
    assert len(experts) == 3 * PLAIN.n_routed_experts * 2  # one MoE layer and the MTP block
    assert experts == {n.removesuffix("_packed") for n in quantised if n.endswith("_packed")}
    for name in experts:
        parts = [quantised.pop(name + part) for part in PARTS]
        out, inputs = plain.pop(name).shape
        assert [(x.dtype, x.shape) for x in parts] == [
            (np.int32, (out, inputs // 8)), (np.float32, (out, inputs // GROUP)), (np.int64, (2,))
        ]  # fmt: skip
        assert parts[2].tolist() == [out, inputs]
    same(quantised, plain)


def test_round_trip_is_bitwise(folder, tmp_path):
    model = load_hf(folder)
    assert model.cfg == CFG == read_config(folder)
    for path, w in flatten(cases.params(CFG)).items():
        want = np.asarray(quant.fake_quantize(jnp.asarray(w), path, GROUP))
        got = np.asarray(flatten(glm5.params_of(model))[path])
        assert got.dtype == np.float32 and got.tobytes() == want.tobytes(), path
    save_hf(model, tmp_path / "again")
    same(tensors(tmp_path / "again"), tensors(folder))
    assert (tmp_path / "again" / "config.json").read_text() == (folder / "config.json").read_text()


def test_file_and_device_shards_hold_same_values(folder, tmp_path):
    mesh = make_mesh(fsdp=2, expert=2, context=2)
    small = dataclasses.replace(CFG, int4_group=2)
    original = tmp_path / "whole"
    save_hf(cases.params(CFG), original, cfg=small)
    model = load_hf(original, mesh=mesh)
    save_hf(model, tmp_path / "out", max_shard_bytes=1e5)
    same(tensors(tmp_path / "out"), tensors(original))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held = {n: f.name for f in (tmp_path / "out").glob("*.safetensors") for n in load_file(f)}
    assert len(set(held.values())) > 1 and index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors(original).values())
    for path, w in flatten(glm5.params_of(load_hf(original))).items():
        np.testing.assert_array_equal(flatten(glm5.params_of(model))[path], w, err_msg=path)


def test_half_precision_keeps_integers_and_scales(folder, tmp_path):
    save_hf(cases.params(CFG), tmp_path / "half", cfg=CFG, dtype="bfloat16")
    half, exact = tensors(tmp_path / "half"), tensors(folder)
    for name in (EXPERT + part for part in PARTS):
        assert half[name].tobytes() == exact[name].tobytes()
    assert half["lm_head.weight"].dtype == ml_dtypes.bfloat16


def test_half_precision_model_computes_like_exact_one(tmp_path):
    cfg = cases.small("dense", int4_group=GROUP, dtype="bfloat16")
    params = jax.tree.map(lambda x: np.asarray(x, ml_dtypes.bfloat16), cases.params(cfg))
    save_hf(params, tmp_path / "out", cfg=cfg)
    exact, half = load_hf(tmp_path / "out"), load_hf(tmp_path / "out", dtype="bfloat16")
    assert exact.cfg == cfg and half.cfg.int4_group is None
    assert flatten(glm5.params_of(exact))["moe_layers/experts/up"].dtype == jnp.float32
    assert flatten(glm5.params_of(half))["moe_layers/experts/up"].dtype == jnp.bfloat16
    tokens = cases.batch()["token_ids"][:1]
    logits = [
        jax.jit(lambda p, m=m: glm5.forward(p, tokens, m.cfg).logits)(glm5.params_of(m))
        for m in (exact, half)
    ]
    assert np.asarray(logits[0]).tobytes() == np.asarray(logits[1]).tobytes()


def test_loads_int4_of_other_writers_without_requantising(folder, tmp_path):
    """Other writers use -8 and scales that are no max / 7, so quantising their weights again would change them."""

    def change(held):
        held[EXPERT + "_packed"][:] = 0  # all -8
        held[EXPERT + "_scale"] = held[EXPERT + "_scale"].astype(ml_dtypes.bfloat16)
        held[EXPERT + "_shape"] = held[EXPERT + "_shape"].astype(np.int32)

    def config(x):
        del x["glm5_jax"]["int4_group"]
        return x | {"quantization_config": GOLDEN["quantization_config"]}

    out = changed_copy(folder, tmp_path, change, config)
    model = load_hf(out)
    assert model.cfg == PLAIN
    got = np.asarray(flatten(glm5.params_of(model))["moe_layers/experts/down"])[0, 3]
    scale = tensors(out)[EXPERT + "_scale"].astype(np.float32)
    np.testing.assert_array_equal(got, -8 * np.repeat(scale, GROUP, axis=1).T)


@pytest.mark.parametrize("number", [np.nan, -1.0])
def test_refuses_to_load_scale_that_cannot_be_meant(folder, tmp_path, number):
    def change(held):
        held[f"{EXPERT}_scale"][0, 0] = number

    with pytest.raises(ValueError, match=f"{EXPERT}_scale has scales that are negative or not"):
        load_hf(changed_copy(folder, tmp_path, change))


def test_int4_training_starts_from_plain_weights(tmp_path):
    save_hf(cases.params(PLAIN), tmp_path / "plain", cfg=PLAIN)
    check_params(tmp_path / "plain", CFG)
    for path, w in flatten(load_params(tmp_path / "plain", CFG)).items():
        np.testing.assert_array_equal(w, flatten(cases.params(PLAIN))[path], err_msg=path)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("config_groups.weights.", "group_size", -1),
        ("config_groups.weights.", "group_size", "x"),
        ("", "format", "int-quantized"),
        ("", "quant_method", "gptq"),
        ("", "quantization_status", "frozen"),
        ("", "kv_cache_scheme", {"num_bits": 8}),
        ("", "transform_config", {"config_groups": {}}),
        ("config_groups.", "input_activations", {"num_bits": 8}),
        ("config_groups.weights.", "num_bits", 8),
        ("config_groups.weights.", "symmetric", False),
        ("config_groups.weights.", "strategy", "channel"),
        ("config_groups.weights.", "type", "float"),
        ("config_groups.weights.", "actorder", "group"),
        ("config_groups.weights.", "dynamic", True),
        ("config_groups.weights.", "block_structure", [128, 128]),
    ],
)
def test_names_unsupported_scheme(part, field, value):
    config = json.loads(json.dumps(GOLDEN["quantization_config"]))
    group = config["config_groups"]["group_0"]
    {"": config, "config_groups.": group}.get(part, group["weights"])[field] = value
    problem = hf_int4.problem_of(config)
    assert problem.startswith(f"quantization_config.{part}{field} is ") and "\n" not in problem
    assert "dequantise others to bfloat16 first" in problem


def test_refuses_invalid_scheme():
    for config in ({}, [], "int4", {"config_groups": {}}, {"config_groups": {"a": 1}}):
        assert hf_int4.problem_of(config).startswith("quantization_config is "), config
    assert hf_int4.problem_of(GOLDEN["quantization_config"]) is None
    assert hf_int4.problem_of(json.loads(json.dumps(hf_int4.config_of(128)))) is None
    two = dict.fromkeys("ab", GOLDEN["quantization_config"]["config_groups"]["group_0"])
    assert "is {" in hf_int4.problem_of({"config_groups": two})


BROKEN = {
    "no scale": (lambda x: x.pop(EXPERT + "_scale"), "_packed without .*down_proj.weight_scale"),
    "both": (lambda x: x.update({EXPERT: np.zeros((32, 8), np.float32)}), "_packed beside "),
    "zero points": (
        lambda x: x.update({EXPERT + "_zero_point": np.zeros((4, 2), np.int32)}),
        "unexpected: .*weight_zero_point",
    ),
    "attention too": (
        lambda x: x.update(
            {"model.layers.1.self_attn.o_proj.weight_packed": np.zeros((32, 10), np.int32)}
        ),
        "unexpected: model.layers.1.self_attn.o_proj.weight_packed",
    ),
    "another shape": (
        lambda x: x.update({EXPERT + "_shape": np.array([32, 24])}),
        r"_packed I32\[32, 1\], .*_scale F32\[32, 2\], .* are no weight of \[32, 24\]",
    ),
    "of another size": (
        lambda x: x.update(hf_int4.pack(EXPERT, np.ones((32, 16), np.float32), 4)),
        r"wrong shape: .*down_proj.weight is \[32, 16\], expected \[32, 8\]",
    ),
    "bytes": (
        lambda x: x.update({EXPERT + "_packed": x[EXPERT + "_packed"].view(np.uint8)}),
        r"_packed U8\[32, 4\]",
    ),
    "uneven groups": (
        lambda x: x.update({EXPERT + "_scale": np.ones((32, 3), np.float32)}),
        r"_scale F32\[32, 3\]",
    ),
    "no groups": (
        lambda x: x.update({EXPERT + "_scale": np.ones((32, 0), np.float32)}),
        r"_scale F32\[32, 0\]",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_refuses_inconsistent_files(folder, tmp_path, what):
    change, message = BROKEN[what]
    out = changed_copy(folder, tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_hf(out)
