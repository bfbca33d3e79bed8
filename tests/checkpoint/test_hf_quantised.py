"""Quantised models in files: tensor names, config, and the same bits after loading."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm5_jax.checkpoint import hf_names, hf_quantised, models
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_import import load_hf, load_quantised
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.model import glm5
from glm5_jax.model.rotated_norm import RotatedNorm
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten, map_with_path
from pallas_kernels.quantized_weights import Int4, Int8
from pallas_kernels.w4a8_matmul.quantize import unpack_int4
from tests.mesh import cases

GROUP = 4
CFG = cases.pair(first_k_dense_replace=0, num_nextn_predict_layers=1, attention_bias=True)
LAYER = "model.layers.0."
EXPERT = LAYER + "mlp.experts.3.down_proj.weight"
O = LAYER + "self_attn.o_proj.weight"


@functools.cache
def quantised_model(dtype="float32"):
    cfg = dataclasses.replace(CFG, dtype=dtype)

    def stored(path, x):
        return jnp.asarray(x, jnp.float32 if path.endswith("router/bias") else dtype)

    params = map_with_path(stored, cases.params(CFG))
    params, cfg = rotation.rotate(params, cfg)
    return table.quantise(params, cfg, GROUP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantised") / "out"
    save_hf(quantised_model()[0], out, cfg=CFG)
    return out


def same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_round_trip_is_bitwise(dtype, tmp_path):
    params, cfg = quantised_model(dtype)
    save_hf(params, tmp_path / "out", cfg=cfg, max_shard_bytes=2e4)
    files = {f.name: set(load_file(f)) for f in (tmp_path / "out").glob("*.safetensors")}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and index["weight_map"] == {
        n: f for f, names in files.items() for n in names
    }
    model = load_quantised(tmp_path / "out")
    assert model.cfg == cfg
    same_bits(glm5.params_of(model), params)
    sizes = [
        x.nbytes for f in (tmp_path / "out").glob("*.safetensors") for x in load_file(f).values()
    ]
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize(
    "axes", [{"fsdp": 4, "expert": 2}, {"tensor": 2, "expert": 2, "context": 2}], ids=str
)
def test_each_device_reads_its_part(folder, axes):
    """The same bits, sharded as the weights of an engine are."""
    mesh, (params, cfg) = make_mesh(axes), quantised_model()
    got = glm5.params_of(load_quantised(folder, mesh))
    same_bits(got, params)
    where = glm5.param_shardings(cfg, mesh, params)
    assert [x.sharding for x in jax.tree.leaves(got)] == jax.tree.leaves(where)
    down = got["moe_layers"]["experts"]["down"]
    assert down.packed.addressable_shards[0].data.size < down.packed.size / 3


def test_reads_config_of_quantised_folder(folder):
    model = load_quantised(folder)
    assert models.read_config(folder) == (model.cfg, True)
    same_bits(glm5.params_of(models.load_model(folder, trained=model.cfg)), glm5.params_of(model))


def test_writes_names_of_compressed_tensors(folder):
    held, flat = load_file(folder / "model.safetensors"), flatten(quantised_model()[0])
    o = flat["moe_layers/attn/o"]
    assert held[O].dtype == np.int8 and held[O + "_scale"].dtype == np.float32
    np.testing.assert_array_equal(held[O], o.q[0].reshape(-1, CFG.hidden_size).T)
    np.testing.assert_array_equal(held[O + "_scale"], o.scale[0][:, None])
    q_b = flat["moe_layers/attn/q_b"]
    name = LAYER + "self_attn.q_b_proj.weight"
    np.testing.assert_array_equal(held[name], q_b.q[0].reshape(CFG.q_lora_rank, -1).T)
    np.testing.assert_array_equal(held[name + "_scale"], q_b.scale[0].reshape(-1, 1))
    down = flat["moe_layers/experts/down"]
    integers = np.asarray(unpack_int4(down.packed[0, 3], GROUP)).T
    entries = sum((integers[:, i::8].astype(np.int64) + 8) << 4 * i for i in range(8))
    np.testing.assert_array_equal(held[EXPERT + "_packed"].view(np.uint32), entries)
    np.testing.assert_array_equal(held[EXPERT + "_scale"], down.scale[0, 3].T)
    assert held[EXPERT + "_shape"].tolist() == [CFG.hidden_size, CFG.moe_intermediate_size]
    np.testing.assert_array_equal(held["model.norm.weight"], flat["final_norm"].weight)
    np.testing.assert_array_equal(held["model.norm.rotation"], flat["final_norm"].back)
    assert f"model.layers.{CFG.num_hidden_layers}.shared_head.norm.rotation" in held


def test_config_names_layers_of_each_format(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    int8, int4 = config["config_groups"].values()
    assert int8["weights"]["num_bits"] == 8 and int4["weights"]["group_size"] == GROUP
    flat = flatten(quantised_model()[0])
    pieces = hf_names.pieces(CFG, glm5.axis_letters(CFG), glm5.abstract_params(CFG))
    for piece in pieces:
        for kind, part in ((Int8, int8), (Int4, int4)):
            module = piece.name.removesuffix(".weight")
            hit = any(re.match(t.removeprefix("re:"), module) for t in part["targets"])
            assert hit == isinstance(flat[piece.path], kind), piece.name


def test_plain_weights_have_no_quantization_config(tmp_path):
    pieces = hf_names.pieces(CFG, glm5.axis_letters(CFG), glm5.abstract_params(CFG))
    assert hf_quantised.config_of(flatten(cases.params(CFG)), pieces) is None
    save_hf(cases.params(CFG), tmp_path / "plain", cfg=CFG)
    with pytest.raises(ValueError, match="holds no quantised model; use load_hf"):
        load_quantised(tmp_path / "plain")


def test_int4_model_is_served_with_trained_integers(tmp_path):
    cfg = dataclasses.replace(CFG, int4_group=GROUP)
    params, plain = table.quantise(cases.params(CFG), cfg)
    assert plain == CFG
    save_hf(cases.params(CFG), tmp_path / "trained", cfg=cfg)
    save_hf(params, tmp_path / "served", cfg=plain)
    trained, served = (load_file(tmp_path / n / "model.safetensors") for n in ("trained", "served"))
    experts = [n for n in trained if ".mlp.experts." in n]
    assert len(experts) == 3 * 3 * 3 * CFG.n_routed_experts
    assert all(trained[n].tobytes() == served[n].tobytes() for n in experts)


def change(folder, tmp_path, tensors, config):
    held = load_file(folder / "model.safetensors")
    tensors(held)
    out = tmp_path / "changed"
    out.mkdir(parents=True)
    save_file(held, out / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    config(content["quantization_config"])
    (out / "config.json").write_text(json.dumps(content))
    return out


def nothing(_):
    pass


# (tensor, its new value; None: the tensor is missing, message)
BROKEN = [
    (O + "_scale", None, r"missing: .*o_proj.weight_scale \[32, 1\]"),
    (EXPERT + "_packed", None, "missing: .*down_proj.weight_packed"),
    (EXPERT + "_zero_point", np.zeros((4, 2), np.int32), "unexpected: .*weight_zero_point"),
    (O, np.ones((32, 80), np.float32), r"F32\[32, 80\], expected int8 \[32, 80\]"),
    (O, np.ones((32, 80), np.uint8), r"wrong: .*o_proj.weight is U8\[32, 80\], expected int8"),
    (O + "_scale", np.ones((32, 1), ml_dtypes.bfloat16), r"is BF16\[32, 1\], expected float32"),
    (EXPERT + "_scale", np.ones((32, 1), np.float32), r"F32\[32, 1\], expected float32 \[32, 2\]"),
]


@pytest.mark.parametrize(("name", "value", "message"), BROKEN, ids=lambda x: str(x)[:40])
def test_refuses_inconsistent_files(folder, tmp_path, name, value, message):
    def tensors(held):
        held.pop(name, None)
        held.update({} if value is None else {name: value})

    with pytest.raises(ValueError, match=message):
        load_quantised(change(folder, tmp_path, tensors, nothing))


@pytest.mark.parametrize("name", [O + "_scale", EXPERT + "_scale"])
def test_refuses_to_load_scale_that_is_nan(folder, tmp_path, name):
    def tensors(held):
        held[name][0, 0] = np.nan

    with pytest.raises(ValueError, match=f"{name} has scales that are negative or not finite"):
        load_quantised(change(folder, tmp_path, tensors, nothing))


def test_refuses_other_schemes(folder, tmp_path):
    for i, other in enumerate(
        (
            lambda x: x.update(format="int-quantized"),
            lambda x: x.pop("config_groups"),
            lambda x: x["config_groups"]["group_0"]["weights"].update(symmetric=False),
            lambda x: x["config_groups"]["group_1"].update(input_activations=None),
            lambda x: x.update(transform_config={}),
            lambda x: x.update(config_groups=[1]),
        )
    ):
        out = change(folder, tmp_path / str(i), nothing, other)
        with pytest.raises(
            ValueError, match="quantization_config is .* but save_hf writes another one"
        ):
            load_quantised(out)


def test_training_refuses_quantised_file(folder):
    with pytest.raises(ValueError, match="quantization_config.*'mixed-precision'"):
        load_hf(folder)


def test_refuses_experts_of_two_group_sizes(tmp_path):
    params, cfg = quantised_model()
    other = table.quantise(cases.params(CFG), CFG, 2)[0]
    params = params | {"mtp": other["mtp"]}
    with pytest.raises(ValueError, match=r"experts in groups of \[2, 4\]"):
        save_hf(params, tmp_path / "out", cfg=cfg)
    assert isinstance(params["final_norm"], RotatedNorm) and not (tmp_path / "out").exists()
