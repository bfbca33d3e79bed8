"""Exports of the parameter tree as HuggingFace checkpoints: bitwise equal to the import, complete or absent."""

import dataclasses
import functools
import gc
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from glm5_jax import presets
from glm5_jax.checkpoint import hf_export
from glm5_jax.checkpoint.hf_export import save_hf
from glm5_jax.checkpoint.hf_import import load_hf, load_params, read_config
from glm5_jax.model import glm5
from glm5_jax.parallel import tree
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.text.tokenizer import Tokenizer
from tests.contracts.source_tree import ROOT
from tests.mesh import cases

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
A = GOLDENS / "hf_tiny_a"
NAMES = sorted(p.name for p in GOLDENS.glob("hf_*"))
COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")


def tensors(folder) -> dict[str, np.ndarray]:
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    return functools.reduce(lambda x, file: x | load_file(file), files, {})


def assert_bitwise(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    ("name", "max_shard_bytes"), [("hf_tiny_a", 5e9), *((name, 2e5) for name in NAMES)]
)
def test_export_equals_imported_files_bitwise(tmp_path, name, max_shard_bytes):
    model = load_hf(GOLDENS / name)
    save_hf(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    original = tensors(GOLDENS / name)
    if name == "hf_tiny_d":  # repeats embedding and head in the MTP layer
        original = {n: x for n, x in original.items() if n not in COPIES}
    assert_bitwise(tensors(tmp_path / "out"), original)
    assert read_config(tmp_path / "out") == model.cfg


def test_writes_released_names_of_fused_tensors(tmp_path):
    d = GOLDENS / "hf_tiny_d"
    assert set(COPIES) <= set(tensors(d))
    save_hf(load_hf(d), tmp_path / "out")
    assert not set(COPIES) & set(tensors(tmp_path / "out"))
    assert "model.layers.2.mlp.experts.5.up_proj.weight" in tensors(tmp_path / "out")


def test_limits_shard_sizes_and_indexes_each_tensor_once(tmp_path):
    save_hf(load_hf(A), tmp_path / "out", max_shard_bytes=1e5)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held = {}
    for file in files:
        inside = load_file(tmp_path / "out" / file)
        held |= dict.fromkeys(inside, file)
        assert len(inside) == 1 or sum(x.nbytes for x in inside.values()) <= 1e5
        with safetensors.safe_open(tmp_path / "out" / file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers requires it
    total = sum(x.nbytes for x in tensors(A).values())
    assert total / 1e5 < len(files) < 2 * total / 1e5  # and no smaller than they need be
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == total


def test_writes_one_file_per_tensor_at_tiny_limit(tmp_path):
    save_hf(load_hf(GOLDENS / "hf_tiny_b"), tmp_path / "out", max_shard_bytes=1)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert [len(load_file(file)) for file in files] == [1] * len(tensors(GOLDENS / "hf_tiny_b"))


@pytest.mark.parametrize("axes", [dict(fsdp=8), dict(data=2, fsdp=2, expert=2)], ids=str)
def test_sharded_model_writes_same_bytes(tmp_path, axes):
    save_hf(load_hf(A, mesh=make_mesh(axes)), tmp_path / "out")
    assert_bitwise(tensors(tmp_path / "out"), tensors(A))


def test_half_precision_keeps_router_bias_in_float32(tmp_path):
    save_hf(load_hf(A), tmp_path / "half", dtype="bfloat16")
    for name, x in tensors(tmp_path / "half").items():
        exact = tensors(A)[name]
        if name.endswith("e_score_correction_bias"):
            assert x.tobytes() == exact.tobytes()
        else:
            np.testing.assert_array_equal(x, exact.astype(jnp.bfloat16))
    assert read_config(tmp_path / "half").dtype == "bfloat16"
    save_hf(load_hf(tmp_path / "half"), tmp_path / "again")
    assert_bitwise(tensors(tmp_path / "again"), tensors(tmp_path / "half"))


def test_round_trip_restores_random_model(tmp_path):
    cfg = presets.tiny()
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), glm5.abstract_params(cfg)
    )
    save_hf(params, tmp_path / "out", cfg=cfg)
    model = load_hf(tmp_path / "out")
    assert model.cfg == cfg
    jax.tree.map(np.testing.assert_array_equal, glm5.params_of(model), params)


def test_warns_of_model_that_transformers_computes_otherwise(tmp_path, caplog):
    model = load_hf(A)
    save_hf(model, tmp_path / "same")
    assert not caplog.records
    cfg = dataclasses.replace(model.cfg, latent_norm_eps=1e-5)
    save_hf(glm5.params_of(model), tmp_path / "other", cfg=cfg)
    assert "latent_norm_eps 1e-05" in caplog.text
    assert read_config(tmp_path / "other") == cfg


def test_json_files_hold_fields_for_transformers(tmp_path):
    class Words:
        """Tokenizer that saves itself."""

        def save(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    save_hf(load_hf(A), tmp_path / "out", tokenizer=Words())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {
        "do_sample": True, "temperature": 1.0, "top_p": 0.95, "eos_token_id": [1, 2], "pad_token_id": 0
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_umask_sets_file_modes(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_hf(load_hf(A), tmp_path / "out", tokenizer=Tokenizer.default(), max_shard_bytes=2e5)
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(files.values()) == {mode} and len(files) > 5


def test_refuses_folder_that_is_not_empty(tmp_path):
    model = load_hf(A)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="full is not an empty folder"):
        save_hf(model, tmp_path / "full")
    with pytest.raises(ValueError, match="notes.txt is not an empty folder"):
        save_hf(model, tmp_path / "full" / "notes.txt")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save_hf(model, tmp_path / "empty")
    save_hf(model, tmp_path / "deep" / "er")
    assert_bitwise(tensors(tmp_path / "empty"), tensors(tmp_path / "deep" / "er"))


def test_refuses_small_disk_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    needed = sum(x.nbytes for x in tensors(A).values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    with pytest.raises(ValueError, match=r"needs 0\.003 GB .* has 0\.002 GB free"):
        save_hf(load_hf(A), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_failed_write_leaves_no_files(tmp_path, monkeypatch):
    written = []

    def filling(arrays, file, metadata):
        if written:
            raise OSError(28, "No space left on device")
        written.append(file)
        original(arrays, file, metadata)

    original = hf_export.save_file
    monkeypatch.setattr(hf_export, "save_file", filling)
    with pytest.raises(OSError, match="No space left on device.*nothing was left there"):
        save_hf(load_hf(A), tmp_path / "out", max_shard_bytes=1e5)
    assert written and not list(tmp_path.iterdir())


def test_refuses_tree_of_another_config(tmp_path):
    cfg = read_config(A)
    flat = tree.flatten(load_params(A, cfg))
    flat["extra/weight"] = flat["final_norm"]
    flat["lm_head/weight"] = flat["lm_head/weight"].T
    del flat["moe_layers/router/bias"]
    with pytest.raises(ValueError) as error:
        save_hf(tree.unflatten(flat), tmp_path / "out", cfg=cfg)
    for line in (
        "missing: moe_layers/router/bias [3, 8]",
        "unexpected: extra/weight [64]",
        "wrong shape: lm_head/weight is [256, 64], expected [64, 256]",
    ):
        assert line in str(error.value)
    with pytest.raises(ValueError, match="pass cfg="):
        save_hf(load_params(A, cfg), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_overwrites_model_if_asked(tmp_path):
    model, out = load_hf(A), tmp_path / "out"
    save_hf(model, out, tokenizer=Tokenizer.default(), max_shard_bytes=2e5)
    save_hf(model, out, overwrite=True)
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert_bitwise(tensors(out), tensors(A))
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", ["notes", "out/data/notes", "link"])
def test_overwrites_nothing_but_models(tmp_path, name):
    model, out = load_hf(A), tmp_path / "out"
    save_hf(model, out)
    if name == "link":
        (tmp_path / name).symlink_to(out)
        target = tmp_path / name
    else:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
        target = file if name == "notes" else out
    with pytest.raises(ValueError, match="has other contents than a model's files"):
        save_hf(model, target, overwrite=True)
    assert_bitwise(tensors(out), tensors(A))


def export_of_one_process(out: str) -> None:
    """Runs in each process of a pod of four devices in the test below."""
    mesh, cfg = make_mesh(fsdp=2, expert=2), cases.config()

    def place(x, sharding):
        # Negative zeros would not survive a sum over the owners.
        x = np.where(x < 0, np.float32(-0.0), x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    params = jax.tree.map(place, cases.params(cfg), glm5.param_shardings(cfg, mesh))
    down = params["moe_layers"]["experts"]["down"]
    assert down.is_fully_addressable == (jax.process_count() == 1)
    save_hf(params, out, cfg=cfg, max_shard_bytes=1e5)
    with pytest.raises(ValueError, match="is not an empty folder"):
        save_hf(params, out, cfg=cfg)


UNCACHED = {
    "JAX_ENABLE_COMPILATION_CACHE": "false"
}  # reason: pallas_kernels.compat.disable_mesh_program_cache
PROCESS = """
import jax
if {count} > 1:
    jax.distributed.initialize("localhost:{port}", {count}, {index})
from tests.checkpoint.test_hf_export import export_of_one_process
export_of_one_process("{out}")
"""


@pytest.mark.slow
def test_two_processes_write_same_files_as_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    devices = "--xla_force_host_platform_device_count="
    for count in (1, 2):
        out = tmp_path / str(count)
        env = (
            os.environ
            | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}{4 // count}"}
            | UNCACHED
        )
        codes = [PROCESS.format(count=count, port=port, index=i, out=out) for i in range(count)]
        started = [
            subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env) for code in codes
        ]
        assert [process.wait(timeout=300) for process in started] == [0] * count
    one, two = (sorted((tmp_path / str(n)).iterdir()) for n in (1, 2))
    assert [file.name for file in one] == [file.name for file in two] and len(one) > 4
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
    assert any(np.signbit(x[x == 0]).any() for x in tensors(tmp_path / "2").values())


def test_host_memory_peaks_at_one_shard_file(tmp_path):
    cfg = dataclasses.replace(presets.tiny(), hidden_size=256, moe_intermediate_size=256)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), glm5.abstract_params(cfg))
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    save_hf(params, tmp_path / "first", cfg=cfg, max_shard_bytes=4e6)
    gc.collect()
    tracemalloc.start()
    try:
        save_hf(params, tmp_path / "out", cfg=cfg, max_shard_bytes=4e6)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tensor = 4 * cfg.vocab_size * cfg.hidden_size
    assert peak < 4e6 + tensor + 5e5 < size / 3
