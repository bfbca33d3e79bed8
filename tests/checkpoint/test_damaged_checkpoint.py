"""Damaged checkpoints: one error that names the remedy, and the checkpoint before stays unchanged."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.checkpoint.store import Store, latest_step, load_data
from glm5_jax.training.loop import resume
from glm5_jax.training.metrics import TrainingStopped


def state(step):
    return {
        "params": {"w": jnp.full((64, 64), step, jnp.float32)},
        "optimizer": {"m": jnp.zeros(64)},
        "step": jnp.asarray(step, jnp.int32),
        "key": jnp.zeros(2, jnp.uint32),
    }


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state(0))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A workdir with checkpoints of steps 10 and 20."""
    workdir = tmp_path_factory.mktemp("two")
    with Store(workdir) as store:
        for step in (10, 20):
            store.save(state(step), {"position": step}, {"counters": {}})
    return workdir


def remove(*names):
    def damage(folder):
        for name in names:
            shutil.rmtree(folder / name)

    return damage


def cut(pattern):
    def damage(folder):
        for path in folder.glob(pattern):
            if path.is_file():
                os.truncate(path, 4)

    return damage


def garble(pattern):
    def damage(folder):
        for path in folder.glob(pattern):
            if path.is_file():
                path.write_bytes(bytes(byte ^ 0x55 for byte in path.read_bytes()))

    return damage


DAMAGES = {
    "no data": remove("data"),
    "no meta": remove("meta"),
    "no model": remove("model"),
    "no optimizer": remove("optimizer"),
    "no random key": remove("rng"),
    "nothing": remove("data", "meta", "model", "optimizer", "rng"),
    "cut data": cut("data/*.json"),
    "cut meta": cut("meta/*.json"),
    "cut metadata": cut("model/_METADATA"),
    "cut arrays": cut("model/**/d/*"),
    "garbled arrays": garble("model/**/d/*"),
    "garbled moments": garble("optimizer/**/*"),
}


# When one part fails, Orbax never awaits the readers of the other parts.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("kind", DAMAGES)
def test_names_damaged_checkpoint_and_previous_one(two, tmp_path, kind):
    workdir = tmp_path / "run"
    shutil.copytree(two, workdir)
    damaged = workdir / "checkpoints" / "20"
    DAMAGES[kind](damaged)
    with Store(workdir) as store:
        with pytest.raises(
            ValueError, match=f"{damaged} is damaged .*resumes from step 10"
        ) as raised:
            store.restore(ABSTRACT)
        assert len(str(raised.value)) < 1000
        with pytest.raises(TrainingStopped, match="is damaged"):
            resume(store, ABSTRACT, lambda: state(0), None)
    damaged.rename(tmp_path / "aside")
    with Store(workdir) as store:
        restored, data, _ = store.restore(ABSTRACT)
    assert np.all(restored["params"]["w"] == 10) and data == {"position": 10}


def test_names_damaged_data_position(two, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(two, workdir)
    cut("data/*.json")(workdir / "checkpoints" / "20")
    with pytest.raises(ValueError, match="20 is damaged .*; move it to another folder"):
        load_data(workdir, 20)


@pytest.mark.parametrize(
    ("file", "saved", "flipped"),
    [("data", '"position": 20', '"position": 21'), ("meta", '"tokens": 64', '"tokens": 65')],
)
def test_notices_flipped_bit_of_position_and_counters(tmp_path, file, saved, flipped):
    position = {"position": 20, "rows": {"0": {"last": [66.51657752480632, 1]}}, "none": None}
    with Store(tmp_path) as store:
        store.save(state(10), position, {"counters": {"tokens": 64}, "list": (1, 2.5)})
        store.wait()
        assert store.restore(ABSTRACT)[1:] == (
            position,
            {"counters": {"tokens": 64}, "list": [1, 2.5], "step": 10},
        )
    assert load_data(tmp_path, 10) == position
    [path] = (tmp_path / "checkpoints" / "10" / file).glob("*.json")
    text = path.read_text()
    assert saved in text
    path.write_text(text.replace(saved, flipped))
    with Store(tmp_path) as store, pytest.raises(ValueError, match="10 is damaged .*counters"):
        store.restore(ABSTRACT)
    with pytest.raises(ValueError, match="10 is damaged .*counters"):
        load_data(tmp_path, 10)


@pytest.mark.parametrize("name", ["30", "0030", "٣٠", "3²", "30.orbax-checkpoint-tmp"])
def test_ignores_folders_that_are_no_checkpoint(two, tmp_path, name):
    workdir = tmp_path / "run"
    shutil.copytree(two, workdir)
    if name == "30":
        (workdir / "checkpoints" / name).write_text("a file")
    else:
        (workdir / "checkpoints" / name).mkdir()
    assert latest_step(workdir) == 20
    assert load_data(workdir, latest_step(workdir)) == {"position": 20}
    with Store(workdir) as store:
        assert store.latest == 20
