"""Checkpoints: round trips onto any mesh, and no partial checkpoint."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from glm5_jax.checkpoint import store as stores
from glm5_jax.checkpoint.store import Store, check_space, latest_step, load_params
from glm5_jax.parallel.mesh import make_mesh

DATA = {"position": [3, {"shard": None}], "text": "é"}


def state_of(step: int = 7) -> dict:
    params = {
        "embed": {"weight": jax.random.normal(jax.random.key(step), (16, 8))},
        "norm": jnp.ones(8, jnp.bfloat16),
    }
    labels = {"embed": {"weight": "adam"}, "norm": "sgd"}
    rules = {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-2, momentum=0.9)}
    return {
        "params": params,
        "optimizer": optax.partition(rules, labels).init(params),
        "step": jnp.asarray(step, jnp.int32),
        "tokens": jnp.asarray(step * 100.0),
        "rng": jax.random.key_data(jax.random.key(step)),
    }


def spec(x) -> P:
    return P("fsdp", "expert") if x.ndim == 2 else P()


def on(mesh, state):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), state)


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def workdir(tmp_path):
    with Store(tmp_path) as store:
        store.save(on(make_mesh(fsdp=4, expert=2), state_of()), DATA, {"tokens": 5})
    return tmp_path


def test_restores_state_on_another_mesh(workdir):
    other = on(make_mesh(fsdp=2, expert=4), state_of(0))
    with Store(workdir) as store:
        state, data, meta = store.restore(abstract(other))
    same(state, state_of())
    assert data == DATA
    assert meta == {"tokens": 5, "step": 7}
    assert (
        state["params"]["embed"]["weight"].sharding == other["params"]["embed"]["weight"].sharding
    )
    assert state["params"]["embed"]["weight"].addressable_shards[0].data.shape == (8, 2)


def test_merges_data_positions_of_processes(tmp_path, monkeypatch):
    """Each process has its rows of the data; the sources are common to all."""
    parts = [{"sources": {"a": 1}, "rows": {str(i): {"at": [i]}}, "first": i} for i in range(3)]
    monkeypatch.setattr(stores, "all_gather_objects", lambda data: parts)
    with Store(tmp_path) as store:
        store.save(state_of(), parts[0], {})
    merged = {
        "sources": {"a": 1},
        "rows": {"0": {"at": [0]}, "1": {"at": [1]}, "2": {"at": [2]}},
        "first": 0,
    }
    with Store(tmp_path) as store:
        assert store.restore(abstract(state_of()))[1] == merged == stores.load_data(tmp_path, 7)


def test_writes_documented_layout(workdir):
    folder = workdir / "checkpoints" / "7"
    parts = {p.name for p in folder.iterdir() if p.is_dir()}
    assert parts == {"model", "optimizer", "data", "rng", "meta"}
    assert latest_step(workdir) == 7


def test_restores_to_first_device_without_shardings(workdir):
    with Store(workdir) as store:
        state, _, _ = store.restore(jax.eval_shape(state_of))
    same(state, state_of())
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {jax.devices()[0]}


def test_loads_parameters_of_workdir_or_step(workdir):
    wanted = abstract(on(make_mesh(fsdp=8), state_of(0)))["params"]
    for path in (workdir, workdir / "checkpoints" / "7"):
        same(load_params(path, wanted), state_of()["params"])
    with pytest.raises(ValueError, match="holds no checkpoint"):
        load_params(workdir / "nowhere", wanted)


def test_names_arrays_of_other_shapes(workdir):
    wanted = abstract(state_of(0))
    wanted["params"]["norm"] = jax.ShapeDtypeStruct((9,), jnp.bfloat16)
    with Store(workdir) as store, pytest.raises(ValueError, match="among them model/norm"):
        store.restore(wanted)
    with pytest.raises(ValueError, match="1 arrays differ, among them model/norm"):
        load_params(workdir, wanted["params"])
    del wanted["params"]["norm"]
    with pytest.raises(ValueError, match="among them model/norm"):
        load_params(workdir, wanted["params"])


def test_only_listed_paths_may_differ(workdir):
    wanted = abstract(on(make_mesh(fsdp=8), state_of(0)))["params"]
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    more = wanted | {"indexer": {"k": shape}}
    same(load_params(workdir, more, ("indexer/",)), state_of()["params"])
    del more["norm"]
    same(
        load_params(workdir, more, ("indexer/", "norm$")), {"embed": state_of()["params"]["embed"]}
    )
    with pytest.raises(ValueError, match="1 arrays differ, among them model/norm"):
        load_params(workdir, more, ("indexer/",))
    misshapen = wanted | {"norm": shape}
    with pytest.raises(ValueError, match="among them model/norm"):
        load_params(workdir, misshapen, ("norm",))
    with pytest.raises(ValueError, match=r"pattern '\(' is not a regular expression"):
        load_params(workdir, more, ("(",))


def test_keeps_newest_and_saves_step_once(tmp_path):
    with Store(tmp_path, keep=2) as store:
        for step in (1, 2, 3, 3):
            store.save(state_of(step), {}, {})
        store.wait()
        assert store.steps == [2, 3]
        assert store.latest == 3
        assert store.restore(abstract(state_of()), 2)[2] == {"step": 2}
        with pytest.raises(ValueError, match=r"no checkpoint 1 in .*; there are \[2, 3\]"):
            store.restore(abstract(state_of()), 1)


def test_ignores_and_removes_partial_checkpoint(workdir):
    half = workdir / "checkpoints" / "9.orbax-checkpoint-tmp"
    (half / "model").mkdir(parents=True)
    assert latest_step(workdir) == 7
    with Store(workdir) as store:
        assert store.latest == 7
    assert not half.exists()


def test_arrays_may_be_donated_after_save(tmp_path):
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    with Store(tmp_path) as store:
        state = state_of(3)
        store.save(state, {}, {})
        spoil(state)
        store.wait()
        got, _, _ = store.restore(abstract(state_of()))
    same(got, state_of(3))


def test_refuses_small_disk_before_training(tmp_path):
    huge = {"params": {"w": jax.ShapeDtypeStruct((2**40,), jnp.float32)}}
    each = 4 * 2**40 + 2**20
    with pytest.raises(ValueError, match=f"4 checkpoints of {each:,} bytes need {4 * each:,}"):
        check_space(tmp_path / "new" / "workdir", huge, keep=3)
    check_space(tmp_path / "new" / "workdir", abstract(state_of()), keep=3)


def test_counts_space_of_existing_checkpoints_as_free(workdir, monkeypatch):
    state = abstract(state_of())
    num_bytes = sum(f.stat().st_size for f in workdir.rglob("*") if f.is_file())
    usage, free = stores.shutil.disk_usage(workdir), [0]
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    with pytest.raises(ValueError, match="smaller --experiment.train.keep") as refused:
        check_space(workdir / "sub", state, keep=2)
    needed = int(re.search(r"need ([\d,]+)", str(refused.value))[1].replace(",", ""))
    free[0] = needed - num_bytes
    check_space(workdir, state, keep=2)
    free[0] -= 1
    with pytest.raises(ValueError, match="smaller --experiment.train.keep"):
        check_space(workdir, state, keep=2)


def test_refuses_keeping_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="keep is 0"):
        Store(tmp_path, keep=0)


def test_failed_save_reports_its_error(monkeypatch, tmp_path):
    """Orbax's threads raise a second error when joined."""

    class Failing(threading.Thread):
        def join(self, timeout=None):
            super().join(timeout)
            raise ValueError("NOT_FOUND: Failed to create directory")

    monkeypatch.setattr(Failing, "__module__", "orbax.futures")
    ended = threading.Event()
    thread = Failing(target=ended.wait)
    thread.start()
    threading.Timer(0.05, ended.set).start()
    Store(tmp_path).close()
    assert not thread.is_alive()
