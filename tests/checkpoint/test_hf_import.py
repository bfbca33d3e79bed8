"""Reads HuggingFace files into the parameter tree, in every form, and rejects broken ones."""

import dataclasses
import functools
import gc
import json
import logging
import math
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm5_jax import presets
from glm5_jax.checkpoint import hf_config
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_files import open_tensors
from glm5_jax.checkpoint.hf_import import from_tensors, load_hf, load_params, read_config
from glm5_jax.model import glm5
from glm5_jax.model.ablations.convert import convert_config
from glm5_jax.parallel import tree
from glm5_jax.parallel.mesh import make_mesh

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
A, D = GOLDENS / "hf_tiny_a", GOLDENS / "hf_tiny_d"


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """Returns all tensors of a golden checkpoint."""
    return functools.reduce(
        lambda x, file: x | load_file(file), sorted((GOLDENS / name).glob("*.safetensors")), {}
    )


def write(folder, tensors, source=A, **fields) -> pathlib.Path:
    """Writes a checkpoint with these tensors and the config of a golden."""
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def leaves(model) -> dict[str, np.ndarray]:
    params = glm5.params_of(model) if isinstance(model, glm5.Glm5) else model
    return {path: np.asarray(leaf) for path, leaf in tree.flatten(params).items()}


def assert_same(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for path in one:
        assert one[path].dtype == other[path].dtype, path
        np.testing.assert_array_equal(one[path], other[path], err_msg=path)


def error_of(path) -> str:
    with pytest.raises(ValueError) as error:
        load_hf(path)
    return str(error.value)


def test_leaves_equal_tensors_of_files():
    x, w = golden("hf_tiny_a"), leaves(load_hf(A))
    cfg = load_hf(A).cfg
    n, h, u = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.v_head_dim
    for i in range(3):
        name = f"model.layers.{i + 1}."
        kv = x[name + "self_attn.kv_b_proj.weight"].reshape(n, h + u, -1)
        np.testing.assert_array_equal(w["moe_layers/attn/k_b"][i], kv[:, :h].transpose(2, 0, 1))
        np.testing.assert_array_equal(w["moe_layers/attn/v_b"][i], kv[:, h:].transpose(2, 0, 1))
        for e in range(8):
            gate = x[f"{name}mlp.experts.{e}.gate_proj.weight"]
            np.testing.assert_array_equal(w["moe_layers/experts/gate"][i, e], gate.T)
        bias = x[name + "mlp.gate.e_score_correction_bias"]
        np.testing.assert_array_equal(w["moe_layers/router/bias"][i], bias)
    np.testing.assert_array_equal(w["mtp/norm"], x["model.layers.4.shared_head.norm.weight"])


def fuse(tensors: dict, layers) -> dict:
    """Returns the tensors with the experts of some layers stacked, gate rows before up rows."""
    out = dict(tensors)
    for layer in layers:
        name = f"model.layers.{layer}.mlp.experts."
        count = len({n for n in out if n.startswith(name) and n.endswith("down_proj.weight")})
        gate, up, down = (
            np.stack([out.pop(f"{name}{e}.{kind}_proj.weight") for e in range(count)])
            for kind in ("gate", "up", "down")
        )
        out |= {name + "gate_up_proj": np.concatenate([gate, up], 1), name + "down_proj": down}
    return out


@pytest.mark.parametrize("layers", [(1, 2, 3, 4), (2,)], ids=["every layer", "one layer"])
def test_fused_experts_give_same_model(tmp_path, layers):
    assert_same(load_hf(write(tmp_path / "x", fuse(golden("hf_tiny_a"), layers))), load_hf(A))


def test_file_and_shards_give_same_model(tmp_path):
    one = write(tmp_path / "one", golden("hf_tiny_a"))
    assert_same(load_hf(one), load_hf(A))
    assert_same(load_hf(one / "model.safetensors"), load_hf(A))
    save_hf(load_hf(A), tmp_path / "shards", max_shard_bytes=1e5)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 10
    assert_same(load_hf(str(tmp_path / "shards")), load_hf(A))


def test_files_decide_about_mtp_layer(tmp_path, caplog):
    assert load_hf(A).cfg.num_nextn_predict_layers == 1  # mtp.safetensors next to the model
    without = {n: x for n, x in golden("hf_tiny_a").items() if not n.startswith("model.layers.4.")}
    folder = write(tmp_path / "without", without, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO):
        model = load_hf(folder)
    assert model.cfg.num_nextn_predict_layers == 0 and "mtp" not in glm5.params_of(model)
    assert len(caplog.records) == 1 and "no MTP layer" in caplog.text
    within = write(tmp_path / "within", golden("hf_tiny_a"), num_nextn_predict_layers=0)
    assert read_config(within).num_nextn_predict_layers == 1
    # A model without MTP loads from files that have it.
    cfg = dataclasses.replace(read_config(A), num_nextn_predict_layers=0)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert_same(load_params(A, cfg), model)
    assert len(caplog.records) == 1 and "not loaded" in caplog.text


def test_loads_dense_weights_for_model_with_indexers():
    """The sparse adaptation of GLM-4.7-Flash starts this way."""
    sparse = dataclasses.replace(read_config(D), index_topk=8, model_type="glm_moe_dsa")
    cut = glm5.param_shardings(sparse, make_mesh(fsdp=4, expert=2))
    for shardings in (None, cut):
        loaded = load_params(D, sparse, may_differ=("indexer",), shardings=shardings)
        assert_same(loaded, load_hf(D))
    with pytest.raises(ValueError, match="missing: model.layers.0.self_attn.indexer.k_norm.bias"):
        load_params(D, sparse, may_differ=("embed",))
    without = dataclasses.replace(
        read_config(A), attention="dense", index_topk=None, indexer_types=None
    )
    rest = {p: x for p, x in leaves(load_hf(A)).items() if "indexer" not in p}
    assert_same(load_params(A, without, may_differ=("indexer",)), tree.unflatten(rest))
    with pytest.raises(ValueError, match="unexpected: model.layers.0.self_attn.indexer"):
        load_params(A, without)


def test_loads_full_attention_weights_for_gated_deltanet():
    """HF's files have no names for its gates, so these must be initialised."""
    mixed = convert_config(read_config(D), ("gdn",) * read_config(D).num_hidden_layers)
    assert_same(load_params(D, mixed, may_differ=("/gdn/",)), load_hf(D))
    with pytest.raises(ValueError, match=r"no HF name for .*/gdn/a, .*; initialise them"):
        load_params(D, mixed)


def test_accepts_only_equal_copies_in_mtp_layer(tmp_path):
    x = golden("hf_tiny_a")
    copies = {
        "model.layers.4.embed_tokens.weight": x["model.embed_tokens.weight"],
        "model.layers.4.shared_head.head.weight": x["lm_head.weight"],
    }
    assert_same(load_hf(write(tmp_path / "same", x | copies)), load_hf(A))
    copies["model.layers.4.shared_head.head.weight"] = x["lm_head.weight"] + 1
    message = error_of(write(tmp_path / "other", x | copies))
    assert "model.layers.4.shared_head.head.weight should repeat lm_head.weight" in message
    assert "embed_tokens" not in message
    without_head = {n: t for n, t in (x | copies).items() if n != "lm_head.weight"}
    assert "missing: lm_head.weight" in error_of(write(tmp_path / "alone", without_head))


def test_accepts_tied_head_equal_to_embedding(tmp_path):
    x = {n: t for n, t in golden("hf_tiny_a").items() if n != "lm_head.weight"}
    tied = write(tmp_path / "tied", x, tie_word_embeddings=True)
    assert "lm_head" not in glm5.params_of(load_hf(tied))
    embed = x["model.embed_tokens.weight"]
    again = write(tmp_path / "again", x | {"lm_head.weight": embed}, tie_word_embeddings=True)
    assert_same(load_hf(again), load_hf(tied))
    other = write(tmp_path / "other", x | {"lm_head.weight": -embed}, tie_word_embeddings=True)
    assert "lm_head.weight should repeat model.embed_tokens.weight" in error_of(other)
    mtp = {"model.layers.4.shared_head.head.weight": embed}
    assert_same(load_hf(write(tmp_path / "mtp", x | mtp, tie_word_embeddings=True)), load_hf(tied))
    mtp = {"model.layers.4.shared_head.head.weight": -embed}
    message = error_of(write(tmp_path / "bad", x | mtp, tie_word_embeddings=True))
    assert "shared_head.head.weight should repeat model.embed_tokens.weight" in message


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_loads_half_precision_files(tmp_path, dtype):
    name = jnp.dtype(dtype).name
    x = {
        n: t if n.endswith("e_score_correction_bias") else t.astype(dtype)
        for n, t in golden("hf_tiny_a").items()
    }
    model = load_hf(write(tmp_path / "half", x, dtype=name))
    assert model.cfg.dtype == name
    for path, leaf in leaves(model).items():
        assert leaf.dtype == (np.float32 if path.endswith("router/bias") else dtype), path
    np.testing.assert_array_equal(
        leaves(model)["moe_layers/attn/q_a"][0], x["model.layers.1.self_attn.q_a_proj.weight"].T
    )
    wide = load_hf(tmp_path / "half", dtype=jnp.float32)
    assert wide.cfg.dtype == "float32"
    for path, leaf in leaves(wide).items():
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf, leaves(model)[path].astype(np.float32))


def test_requested_dtype_rounds_all_but_router_bias():
    exact, rounded = leaves(load_hf(A)), leaves(load_hf(A, dtype="bfloat16"))
    for path in exact:
        if path.endswith("router/bias"):
            np.testing.assert_array_equal(rounded[path], exact[path])
        else:
            np.testing.assert_array_equal(rounded[path], exact[path].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="float64 needs jax_enable_x64"):
        load_hf(A, dtype="float64")


def test_warns_of_stacked_tensors_of_different_dtypes(tmp_path, caplog):
    layer = "model.layers.{}."
    up = layer + "mlp.experts.{}.up_proj.weight"
    kv_b, bias = layer + "self_attn.kv_b_proj.weight", layer + "mlp.gate.e_score_correction_bias"
    x = golden("hf_tiny_a")
    stored = {n: np.float32 if n.endswith("bias") else jnp.bfloat16 for n in x}
    stored |= {up.format(2, 5): np.float32, kv_b.format(1): np.float16, bias.format(3): np.float16}
    x = {n: t.astype(stored[n]) for n, t in x.items()}
    folder = write(tmp_path / "mixed", x, dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        model = load_hf(folder)
    (message,) = [record.getMessage() for record in caplog.records]
    first, *rest = message.splitlines()
    assert str(folder) in first and "loaded, and will be exported, in a wider dtype" in first
    assert sorted(line.strip() for line in rest) == [
        "moe_layers/attn/k_b: float32 from 2 bfloat16, 1 float16",
        "moe_layers/attn/v_b: float32 from 2 bfloat16, 1 float16",
        "moe_layers/experts/up: float32 from 23 bfloat16, 1 float32",
        "moe_layers/router/bias: float32 from 2 float32, 1 float16",
    ]
    save_hf(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    promoted = {name.format(i, e) for name in (up, kv_b, bias) for i in (1, 2, 3) for e in range(8)}
    assert written.keys() == x.keys() > promoted
    for name, tensor in x.items():
        wanted = tensor.astype(np.float32) if name in promoted else tensor
        assert written[name].dtype == wanted.dtype, name
        assert written[name].tobytes() == wanted.tobytes(), name
    # A requested dtype needs no warning.
    caplog.clear()
    load_hf(folder, dtype="bfloat16")
    assert not caplog.records


def test_reports_all_tensor_problems_in_one_error(tmp_path):
    x = dict(golden("hf_tiny_a"))
    del x["model.norm.weight"], x["model.layers.3.mlp.experts.7.up_proj.weight"]
    x["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    x["model.layers.0.self_attn.o_proj.weight"] = np.zeros((96, 64), np.float32)
    x["lm_head.weight"] = np.zeros((256, 64), np.int8)
    message = error_of(write(tmp_path / "bad", x))
    for line in (
        "missing: model.norm.weight [64]",
        "missing: model.layers.3.mlp.experts.7.up_proj.weight [32, 64]",
        "unexpected: model.layers.0.self_attn.rotary_emb.inv_freq [4]",
        "wrong shape: model.layers.0.self_attn.o_proj.weight is [96, 64], expected [64, 96]",
        "dtype I8: lm_head.weight",
    ):
        assert line in message
    assert len(message.splitlines()) == 6


def test_rejects_incomplete_or_repeated_fused_experts(tmp_path):
    fused = fuse(golden("hf_tiny_a"), [2])
    down = fused.pop("model.layers.2.mlp.experts.down_proj")
    assert "missing: model.layers.2.mlp.experts.down_proj" in error_of(
        write(tmp_path / "half", fused)
    )
    both = golden("hf_tiny_a") | fused | {"model.layers.2.mlp.experts.down_proj": down}
    message = error_of(write(tmp_path / "both", both))
    assert "unexpected: model.layers.2.mlp.experts.0.gate_proj.weight" in message


def test_rejects_indexer_weights_of_shared_layer(tmp_path):
    kinds = ["full", "full", "shared", "full"]
    message = error_of(write(tmp_path / "x", golden("hf_tiny_a"), indexer_types=kinds))
    assert message.count("unexpected: model.layers.2.self_attn.indexer.") == 5


def test_shortens_long_list_of_problems(tmp_path):
    x = {n: t for n, t in golden("hf_tiny_a").items() if ".experts." not in n}
    message = error_of(write(tmp_path / "x", x))
    assert message.count("missing: ") == 5 and "and 91 more" in message


@pytest.mark.parametrize(
    "keep", [0, 3, 200, -1], ids=["nothing", "3 bytes", "header", "a byte short"]
)
def test_names_truncated_file(tmp_path, keep):
    folder = write(tmp_path / "x", golden("hf_tiny_a"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = error_of(folder)
    assert "model.safetensors cannot be read" in message and "fetch it again" in message


def test_names_all_missing_and_broken_shards(tmp_path):
    save_hf(load_hf(A), tmp_path / "x", max_shard_bytes=1e5)
    first, second, third, *_ = sorted((tmp_path / "x").glob("*.safetensors"))
    first.unlink()
    second.write_bytes(b"not safetensors")
    message = error_of(tmp_path / "x")
    assert f"{first.name} cannot be read" in message and f"{second.name} cannot be read" in message
    assert third.name not in message


def test_rejects_index_with_missing_tensor(tmp_path):
    save_hf(load_hf(A), tmp_path / "x", max_shard_bytes=1e5)
    index = tmp_path / "x" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.norm"] = content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    assert "model.layers.9.norm is in the index but in no file" in error_of(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON ('utf-8' codec"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "it holds [], without a weight_map"),
        (b"{}", "it holds {}, without a weight_map"),
        (b'{"weight_map": null}', "it holds {'weight_map': None}, without a weight_map"),
        (b'{"weight_map": ["a"]}', "without a weight_map"),
        (b'{"weight_map": {}}', "without a weight_map"),
        (b'{"weight_map": {"a": 1}}', "weight_map: 1 is no .safetensors file in this folder"),
        (b'{"weight_map": {"a": ["b"]}}', "weight_map: ['b'] is no .safetensors file"),
        (b'{"weight_map": {"a": "config.json"}}', "'config.json' is no .safetensors file"),
    ],
    ids=lambda x: x[:24] if isinstance(x, bytes) else None,
)
def test_names_broken_index(tmp_path, content, words):
    shutil.copy(A / "config.json", tmp_path / "config.json")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    message = error_of(tmp_path)
    assert str(index) in message and words in message and "fetch" in message


@pytest.mark.parametrize("absolute", [True, False])
def test_rejects_index_that_leaves_folder(tmp_path, absolute):
    outside = write(tmp_path / "outside", golden("hf_tiny_a")) / "model.safetensors"
    (tmp_path / "x").mkdir()
    shutil.copy(A / "config.json", tmp_path / "x" / "config.json")
    name = str(outside) if absolute else "../outside/model.safetensors"
    index = {"weight_map": {n: name for n in golden("hf_tiny_a")}}
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    message = error_of(tmp_path / "x")
    assert f"'{name}' is no .safetensors file in this folder" in message
    assert len(message.splitlines()) == 2
    # A hub's cache holds links to where the files are.
    index = {"weight_map": dict.fromkeys(index["weight_map"], "shard.safetensors")}
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "x" / "shard.safetensors").symlink_to(outside)
    assert_same(load_hf(tmp_path / "x"), load_hf(A))


def test_rejects_tensor_in_two_files(tmp_path):
    folder = write(tmp_path / "x", golden("hf_tiny_a"))
    shutil.copy(A / "mtp.safetensors", folder / "mtp.safetensors")
    assert "model.layers.4.enorm.weight is both in model.safetensors and in" in error_of(folder)


def test_names_path_that_is_no_checkpoint(tmp_path):
    assert "config.json does not exist" in error_of(tmp_path / "nowhere")
    assert "config.json does not exist; give the folder" in error_of(A / "config.json")
    shutil.copy(A / "config.json", tmp_path / "config.json")
    assert "holds neither model.safetensors nor" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON ('utf-8' codec"),
        (b"[]", "holds [], not an object"),
        (b"null", "holds None, not an object"),
        (b"{}", "model_type is None"),
        (b'{"model_type": "glm_moe_dsa", "hidden_act": "gelu"}', "hidden_act is 'gelu'"),
        (b'{"model_type": "glm_moe_dsa", "hidden_size": 0}', "hidden_size is 0"),
    ],
    ids=lambda x: x[-24:] if isinstance(x, bytes) else None,
)
def test_names_broken_config(tmp_path, content, words):
    folder = write(tmp_path / "x", golden("hf_tiny_a"))
    (folder / "config.json").write_bytes(content)
    message = error_of(folder)
    assert str(folder / "config.json") in message and words in message


MESHES = [dict(fsdp=8), dict(data=2, expert=4), dict(fsdp=2, expert=2, context=2), dict(tensor=8)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_loads_shard_of_each_device(axes):
    mesh = make_mesh(axes)
    cfg = read_config(A)
    shardings = glm5.param_shardings(cfg, mesh)
    params = load_params(A, cfg, shardings=shardings)
    assert_same(params, load_hf(A))
    flat, wanted = tree.flatten(params), tree.flatten(shardings)
    divided = 0
    for path, leaf in flat.items():
        assert leaf.sharding == wanted[path], path
        parts = math.prod(
            mesh.shape[a] for entry in wanted[path].spec if entry for a in np.atleast_1d(entry)
        )
        divided += parts > 1
        for shard in leaf.addressable_shards:
            assert shard.data.size == leaf.size // parts, path
    assert divided > 10


def test_loads_model_onto_mesh():
    mesh = make_mesh(fsdp=4, expert=2)
    model = load_hf(D, mesh=mesh)
    assert model.mesh is mesh
    assert_same(model, load_hf(D))


@functools.cache
def _large() -> tuple[glm5.Glm5, int]:
    """Returns a model with 9 MB of experts in a leaf, and the size of its largest HF tensor."""
    cfg = dataclasses.replace(
        presets.tiny(), num_hidden_layers=3, hidden_size=256, moe_intermediate_size=256,
        n_routed_experts=16, vocab_size=512, num_nextn_predict_layers=0,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def random(leaf):
        return rng.normal(size=leaf.shape).astype(leaf.dtype)

    params = jax.tree.map(random, glm5.abstract_params(cfg))
    return params, cfg


@pytest.mark.parametrize(
    "axes",
    [dict(fsdp=2, expert=4), pytest.param(dict(expert=8), marks=pytest.mark.slow)],
    ids=str,
)
def test_host_memory_peaks_at_one_shard_and_one_tensor(tmp_path, axes):
    params, cfg = _large()
    save_hf(params, tmp_path / "x", cfg=cfg)
    mesh = make_mesh(axes)
    shardings = glm5.param_shardings(cfg, mesh)
    largest_leaf = max(leaf.nbytes for leaf in leaves(params).values())
    largest_tensor = 4 * cfg.vocab_size * cfg.hidden_size
    shard = max(
        4 * math.prod(s.shard_shape(leaf.shape))
        for s, leaf in zip(jax.tree.leaves(shardings), jax.tree.leaves(params), strict=True)
    )
    load_params(tmp_path / "x", cfg, shardings=shardings)  # imports and caches
    gc.collect()
    tracemalloc.start()
    try:
        loaded = load_params(tmp_path / "x", cfg, shardings=shardings)
        arrays, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Arrays on CPU may be the very memory that was filled: what counts is what came and went.
    overhead = 3e5  # the table of names
    assert peak - arrays < shard + largest_tensor + overhead < largest_leaf / 2
    assert_same(loaded, params)


def test_reads_only_numbers_that_shards_hold(tmp_path):
    params, cfg = _large()
    save_hf(params, tmp_path / "x", cfg=cfg)
    shardings = glm5.param_shardings(cfg, make_mesh(data=2, fsdp=2, expert=2))
    read = 0

    class Counted:
        """Tensor of the files that counts the numbers read from it."""

        def __init__(self, stored):
            self.stored, self.shape, self.dtype = stored, stored.shape, stored.dtype

        def __getitem__(self, index):
            nonlocal read
            block = self.stored[index]
            read += block.size
            return block

    stored = {name: Counted(x) for name, x in open_tensors(tmp_path / "x").items()}
    loaded = jax.tree.map(lambda x: x.make(), from_tensors(stored, cfg, shardings))
    assert_same(loaded, params)
    # Two copies along `data`, read once; the parts of kv_b that another leaf needs are read twice.
    twice = cfg.num_hidden_layers * cfg.num_attention_heads * cfg.kv_lora_rank
    twice *= cfg.qk_nope_head_dim + cfg.v_head_dim
    assert read <= sum(leaf.size for leaf in leaves(params).values()) + twice


def test_model_has_config_of_folder(tmp_path):
    assert load_hf(D).cfg == read_config(D)
    source = json.loads((D / "config.json").read_text())
    assert dataclasses.replace(read_config(D), num_nextn_predict_layers=1) == dataclasses.replace(
        hf_config.from_hf(source), num_nextn_predict_layers=1
    )
