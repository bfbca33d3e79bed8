"""Tests that bits that have changed on disk are found when a checkpoint is read."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.checkpoint.checksums import changed_arrays, checksums
from glm5_jax.checkpoint.store import Store, load_params
from glm5_jax.parallel.mesh import make_mesh

NOISE = np.random.default_rng(0)  # noise is stored as it is, because it cannot be compressed


def noise(*shape):
    return jnp.asarray(NOISE.standard_normal(shape), jnp.float32)


STATE = {
    "params": {"w": noise(64, 64), "b": noise(8).astype(jnp.bfloat16)},
    "optimizer": {"m": noise(64, 64)},
    "step": jnp.asarray(3, jnp.int32),
    "key": jnp.arange(2, dtype=jnp.uint32),
}
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("saved")
    with Store(workdir) as store:
        store.save(STATE, {}, {"counters": {}})
    return workdir


def flip_bit(folder):
    """Changes a bit in the largest file of a folder."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_refuses_changed_array(saved, tmp_path, part):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    folder = workdir / "checkpoints" / "3"
    flip_bit(folder / part)
    message = f"{folder} is damaged .*1 arrays have other bits .*{part}/"
    with Store(workdir) as store, pytest.raises(ValueError, match=message):
        store.restore(ABSTRACT)
    if part == "model":
        with pytest.raises(ValueError, match=message):
            load_params(workdir, ABSTRACT["params"])


def test_restores_unchanged_state_without_checksums_in_meta(saved):
    with Store(saved) as store:
        state, _, meta = store.restore(ABSTRACT)
    assert meta == {"counters": {}, "step": 3}
    assert np.array_equal(state["params"]["w"], STATE["params"]["w"])


def test_loads_parameters_in_another_dtype(saved):
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), ABSTRACT["params"])
    loaded = load_params(saved, wanted)
    assert loaded["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool"])
def test_finds_one_changed_number_and_two_exchanged_ones(dtype):
    values = NOISE.integers(0, 2 if dtype == "bool" else 100, (5, 6)).astype(dtype)
    values[0, 0], values[3, 4] = 0, 1
    before = checksums({"x": values})
    changed, exchanged = values.copy(), values.copy()
    changed[2, 3] = not changed[2, 3] if dtype == "bool" else changed[2, 3] + 1
    exchanged[0, 0], exchanged[3, 4] = values[3, 4], values[0, 0]
    assert changed_arrays({"x": values.copy()}, before) == []
    assert changed_arrays({"x": changed}, before) == ["x"]
    assert changed_arrays({"x": exchanged}, before) == ["x"]
    assert changed_arrays({"y": values}, before) == []


def test_checksums_are_equal_on_a_mesh():
    x = noise(8, 4)
    mesh = make_mesh({"data": 1, "fsdp": -1, "expert": 1, "context": 1, "tensor": 1})
    sharded = jax.device_put(x, NamedSharding(mesh, P("fsdp")))
    assert mesh.size == 8 and checksums({"x": sharded}) == checksums({"x": x})


def test_loads_parameters_of_folder_without_meta(saved, tmp_path):
    shutil.copytree(saved / "checkpoints" / "3", tmp_path / "3")
    shutil.rmtree(tmp_path / "3" / "meta")
    loaded = load_params(tmp_path / "3", ABSTRACT["params"])
    assert np.array_equal(loaded["w"], STATE["params"]["w"])
