"""Tests that bits that have changed on disk are found when a checkpoint is read."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.checksums import changed_arrays, checksums
from glm5_jax.checkpoint.store import Store, load_params, open_arrays
from glm5_jax.model import glm5
from glm5_jax.parallel.fingerprint import box_fingerprint, read_fingerprint
from glm5_jax.parallel.mesh import make_mesh
from tests.inference.test_engine import light_model

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


def read_in_parts(arrays):
    """Reads w in four boxes, one of them twice and one in two parts, and b in full, as two devices would."""
    top, bottom = slice(0, 32), slice(32, 64)
    for rows in (top, bottom, top):
        for columns in (slice(0, 40), slice(40, 64)):
            arrays["w"][rows, columns]
    arrays["b"][(slice(None),)]


@pytest.mark.parametrize("is_changed", [False, True])
def test_compares_arrays_as_they_are_read(saved, tmp_path, is_changed):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    folder = workdir / "checkpoints" / "3"
    if is_changed:
        flip_bit(folder / "model")
    arrays = open_arrays(folder, ABSTRACT["params"])

    read_in_parts(arrays)

    if is_changed:
        with pytest.raises(
            ValueError, match=f"{folder} is damaged .*1 arrays have other bits .*/w"
        ):
            arrays.check_bits()
    else:
        arrays.check_bits()


def test_leaves_arrays_out_that_are_read_in_part(saved, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    flip_bit(workdir / "checkpoints" / "3" / "model")
    arrays = open_arrays(workdir, ABSTRACT["params"])

    arrays["w"][0], arrays["w"][1, 2:4], arrays["w"][63]
    arrays.check_bits()
    arrays = open_arrays(workdir, ABSTRACT["params"])
    for row in range(64):  # row by row, as the programs that quantise read
        arrays["w"][row]
    with pytest.raises(ValueError, match="other bits"):
        arrays.check_bits()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 40), ("bfloat16", 40), ("int8", 300)])
def test_sums_fingerprints_of_boxes(dtype, size):
    values = NOISE.standard_normal((size, 6, size)).astype(jnp.dtype(dtype))
    expected = read_fingerprint(jnp.asarray(values))

    boxes = [(0, 0, 0, size // 2, 6, size), (size // 2, 0, 0, size, 6, 7), (size // 2, 0, 7, size, 6, size)]  # fmt: skip
    parts = [
        box_fingerprint(values[a:d, b:e, c:f], (a, b, c), values.shape)
        for a, b, c, d, e, f in boxes
    ]

    assert tuple(sum(part) % 2**32 for part in zip(*parts)) == expected
    assert box_fingerprint(np.ones((), dtype), (), ()) == read_fingerprint(jnp.ones((), dtype))


def test_serves_no_weights_with_a_changed_bit(tmp_path):
    model = light_model()
    with Store(tmp_path) as store:
        step = jnp.asarray(3, jnp.int32)
        state = STATE | {"params": glm5.params_of(model), "step": step}
        store.save(state, {}, {"counters": {}})
    config = {"model": dataclasses.asdict(model.cfg)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    models.load_served_model(tmp_path)
    flip_bit(tmp_path / "checkpoints" / "3" / "model")

    with pytest.raises(ValueError, match="is damaged .*other bits than when they were saved"):
        models.load_served_model(tmp_path)
