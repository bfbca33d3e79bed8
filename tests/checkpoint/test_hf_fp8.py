"""Checkpoints in FP8: numbers of an independent dequantiser, written files and refused files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from glm5_jax.checkpoint import hf_fp8
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_import import check_params, load_hf, load_params, read_config
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten
from tests.mesh import cases

CFG = dataclasses.replace(cases.pair(num_nextn_predict_layers=1), dtype="bfloat16")
BLOCK = (16, 8)
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


def read_tensors(file) -> dict[str, np.ndarray]:
    """Returns the tensors of a .safetensors file, read by the format's description."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    kinds = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + n for n in entry["data_offsets"])
            tensors[name] = np.frombuffer(content[begin:end], kinds[entry["dtype"]]).reshape(
                entry["shape"]
            )
    return tensors


def e4m3(byte: int) -> float:
    """Returns the value of a float8_e4m3fn by its definition: sign, 4 bits of exponent, 3 of fraction."""
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([e4m3(byte) for byte in range(256)], np.float32)


def dequantise_blocks(values, scale, block=BLOCK) -> np.ndarray:
    """Returns the bfloat16 weight of FP8 numbers and scales, one block at a time."""
    numbers = E4M3[values.view(np.uint8)]
    weight = np.empty(values.shape, np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            weight[part] = numbers[part] * scale[i, j]
    return weight.astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("fp8") / "out"
    save_hf(cases.params(CFG), out, cfg=CFG, dtype="bfloat16", fp8_block=BLOCK)
    return out


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """A folder of the same weights in bfloat16, by the dequantiser above."""
    out = tmp_path_factory.mktemp("plain") / "out"
    out.mkdir()
    tensors = read_tensors(folder / "model.safetensors")
    scales = {n: x for n, x in tensors.items() if n.endswith(hf_fp8.SCALE)}
    weights = {n: x for n, x in tensors.items() if n not in scales}
    weights |= {n[:-10]: dequantise_blocks(weights[n[:-10]], scale) for n, scale in scales.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def assert_same(got, want):
    got, want = flatten(got), flatten(want)
    assert got.keys() == want.keys()
    for path in want:
        assert got[path].dtype == want[path].dtype, path
        assert np.asarray(got[path]).tobytes() == np.asarray(want[path]).tobytes(), path


def test_loads_numbers_of_another_dequantiser(folder, plain):
    model = load_hf(folder)
    assert model.cfg.dtype == "bfloat16" and model.cfg.int4_group is None
    assert_same(glm5.params_of(model), glm5.params_of(load_hf(plain)))


def test_loads_parts_of_blocks_on_a_mesh(folder, plain):
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    cfg = read_config(folder)
    where = glm5.param_shardings(cfg, mesh)
    got = load_params(folder, cfg, shardings=where)
    assert_same(got, load_params(plain, cfg))
    assert [x.sharding for x in jax.tree.leaves(got)] == jax.tree.leaves(where)


def test_writes_linear_weights_in_fp8_as_released(folder):
    tensors = read_tensors(folder / "model.safetensors")
    fp8 = {n for n, x in tensors.items() if x.dtype == ml_dtypes.float8_e4m3fn}
    assert {n + hf_fp8.SCALE for n in fp8} == {n for n in tensors if n.endswith(hf_fp8.SCALE)}
    assert {DOWN, "model.layers.0.self_attn.indexer.wq_b.weight"} < fp8
    unquantised = (
        "embed_tokens",
        "norm",
        "mlp.gate.",
        "weights_proj",
        "eh_proj",
        "lm_head",
        "correction",
    )
    assert all(
        any(part in n for part in unquantised) for n in tensors.keys() - fp8 if "_scale" not in n
    )
    assert not any(part in n for n in fp8 for part in unquantised)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == list(BLOCK)
    assert "model.layers.1.mlp.gate" in config["modules_to_not_convert"]
    assert "model.layers.1.input_layernorm" not in config["modules_to_not_convert"]


def test_rounding_error_is_at_most_a_sixteenth(folder):
    want = flatten(cases.params(CFG))["moe_layers/experts/down"][0, 3]
    got = flatten(glm5.params_of(load_hf(folder)))["moe_layers/experts/down"][0, 3]
    error = np.abs(np.asarray(got, np.float32) - want)
    # Half a step of 3 bits, and what is below the smallest normal number of the block.
    assert (error <= np.abs(want) / 16 + np.abs(want).max() * 2.0**-16).all() and error.max() > 0


def test_quantises_zeros_and_partial_blocks():
    weight = np.zeros((5, 7), np.float32)
    weight[4, 6] = -3.0
    values, scale = hf_fp8.quantise(weight, (4, 4))
    assert scale.tolist() == [[1.0, 1.0], [1.0, np.float32(3.0 / 448)]]
    want = np.zeros((5, 7))
    want[4, 6] = -448.0
    np.testing.assert_array_equal(values.astype(np.float32), want)


def changed_copy(folder, tmp_path, tensors=lambda x: x, config=lambda x: x):
    """Copies a folder; its tensors and its quantization_config are those that the functions return."""
    out = tmp_path / "changed"
    out.mkdir()
    tensors_by_name = tensors(read_tensors(folder / "model.safetensors"))
    save_file(tensors_by_name, out / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    text["quantization_config"] = config(text["quantization_config"])
    (out / "config.json").write_text(json.dumps(text))
    return out


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"weight_block_size": [128]}, "weight_block_size is [128]"),
        ({"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"weight_block": 3}, "weight_block is unknown"),
        ({"quant_method": "awq"}, "quant_method"),
    ],
)
def test_refuses_other_quantisations(folder, tmp_path, change, why):
    with pytest.raises(ValueError) as refused:
        read_config(changed_copy(folder, tmp_path, config=lambda config: config | change))
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (DOWN + hf_fp8.SCALE, None, f"{DOWN} without {DOWN}{hf_fp8.SCALE}"),
        (DOWN, None, f"{DOWN}{hf_fp8.SCALE} without {DOWN}"),
        (DOWN + hf_fp8.SCALE, np.ones((1, 1), np.float32), "in blocks of 16 x 8 needs F32[2, 1]"),
    ],
)
def test_names_invalid_scales(folder, tmp_path, name, value, why):
    def change(tensors):
        others = {n: x for n, x in tensors.items() if n != name}
        return others | ({} if value is None else {name: value})

    with pytest.raises(ValueError) as refused:
        check_params(changed_copy(folder, tmp_path, change), CFG)
    assert why in str(refused.value)


@pytest.mark.parametrize("number", [np.nan, np.inf, -1.0, 3e38])
def test_refuses_to_load_scale_that_cannot_be_meant(folder, tmp_path, number):
    def change(tensors):
        scale = tensors[DOWN + hf_fp8.SCALE].copy()
        scale[0, 0] = number
        return tensors | {DOWN + hf_fp8.SCALE: scale}

    with pytest.raises(ValueError, match=f"{DOWN}.*(not finite|NaN or infinity)"):
        load_hf(changed_copy(folder, tmp_path, change))


def test_refuses_to_load_fp8_number_that_is_nan(folder, tmp_path):
    def change(tensors):
        values = tensors[DOWN].copy()
        values[0, 0] = np.nan
        return tensors | {DOWN: values}

    with pytest.raises(ValueError, match=f"{DOWN} holds NaN or infinity"):
        load_hf(changed_copy(folder, tmp_path, change))


def test_refuses_fp8_files_without_config_entry(folder, tmp_path):
    out = changed_copy(folder, tmp_path)
    text = json.loads((out / "config.json").read_text())
    del text["quantization_config"]
    (out / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="FP8 weights and config.json has no quantization_config"):
        load_hf(out)


def test_refuses_to_write_int4_as_fp8(tmp_path):
    cfg = dataclasses.replace(CFG, int4_group=4, dtype="float32")
    with pytest.raises(ValueError, match="fp8_block is for plain weights"):
        save_hf(cases.params(cfg), tmp_path / "out", cfg=cfg, fp8_block=BLOCK)


def test_float8_numbers_match_format():
    every = np.arange(256, dtype=np.uint8)
    finite = (every & 127) != 127
    np.testing.assert_array_equal(
        every.view(jnp.float8_e4m3fn)[finite].astype(np.float32), E4M3[finite]
    )
