"""Weights from the trainer's mesh to engines on other devices of the same process, and from it to the network."""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.manifest import transfer_dtypes
from glm5_jax.inference import runner
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import table
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.rl.weights import reshard
from glm5_jax.rl.weights.pusher import NotPushed, SyncConfig
from glm5_jax.rl.weights.reshard import Reshard, fingerprint
from glm5_jax.rl.weights.weight_sync import Network, SharedStorage
from glm5_jax.text.tokenizer import Tokenizer
from tests.checkpoint.test_hf_export import UNCACHED
from tests.contracts.source_tree import ROOT
from tests.mesh import cases

CFG = cases.small("dense", dtype="bfloat16")
LARGER = cases.config(dtype="bfloat16")
OPTIONS = dict(page_size=8, max_length=32, max_num_seqs=2, num_pages=10, prefill_chunk=32)
TRAINER = {"fsdp": 2, "expert": 2}


def trainer(cfg=CFG):
    """Float32 weights on the first four devices."""
    mesh = make_mesh(TRAINER, devices=jax.devices()[:4])
    params = jax.tree.map(lambda x: x * 1.25, cases.params(cfg))
    return jax.device_put(params, glm5.param_shardings(cfg, mesh))


def engine(axes=None, devices=None, held=None, cfg=CFG):
    """On a mesh of other devices, on one of them, or on the default one."""
    held = cases.params(cfg) if held is None else held
    mesh = axes and make_mesh(axes, devices=devices)
    if mesh:
        held = jax.device_put(held, glm5.param_shardings(cfg, mesh, held))
    elif devices:
        held = jax.device_put(held, devices[0])
    return Engine(glm5.Glm5(cfg, params=held, mesh=mesh), Tokenizer.default(), **OPTIONS)


def assert_same(one, other):
    """Bit by bit, in the same places."""
    got, want = (flatten(own.computation.params) for own in (one, other))
    assert got.keys() == want.keys()
    for path in want:
        for a, b in zip(*map(jax.tree.leaves, (got[path], want[path]))):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
            assert a.sharding == b.sharding and a.committed == b.committed, path


PLACES = {
    "other devices": ({"expert": 2, "tensor": 2}, slice(4, 8)),
    "the trainer's devices, cut otherwise": ({"expert": 4}, slice(0, 4)),
    "all devices": ({"data": 2, "fsdp": 2, "expert": 2}, slice(0, 8)),
    "one other device": (None, slice(7, 8)),
    "the default device": (None, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_engines_get_the_trainer_s_bits_where_theirs_lie(place):
    axes, where = PLACES[place]
    devices = where and jax.devices()[where]
    held, params = engine(axes, devices), trainer()
    pushed = Reshard([held]).push(params, 3)
    want = engine(axes, devices)
    want.update_weights(jax.tree.map(np.asarray, params), 3)
    assert_same(held, want)
    assert pushed.bytes == sum(
        x.size * (4 if "router/" in path else 2) for path, x in flatten(params).items()
    )
    for leaf in jax.tree.leaves(params):
        leaf.delete()  # as the next step does, which writes over them
    assert_same(held, want)


@pytest.mark.slow
def test_several_engines_tell_one_checksum():
    held = [engine({"expert": 2}, jax.devices()[4:6]), engine(None, jax.devices()[6:7])]
    pusher, params = Reshard(held), trainer()
    pushed = pusher.push(params, 3)
    assert [own.how for own in pushed.engines] == ["whole"] * 2
    assert pusher.push(params, 3).checksum == pushed.checksum
    assert pusher.push(jax.tree.map(lambda x: x * 2, params), 4).checksum != pushed.checksum


@pytest.mark.slow
def test_quantised_engines_quantise_what_arrives_and_leave_it_where_theirs_lies():
    quantised, cfg = table.quantise(cases.params(CFG), CFG, 4)
    axes, devices = {"expert": 2, "tensor": 2}, jax.devices()[4:]
    held, params = engine(axes, devices, quantised, cfg), trainer()
    Reshard([held]).push(params, 1)
    kinds = transfer_dtypes(cfg)
    narrow = map_with_path(lambda path, x: jnp.asarray(np.asarray(x), kinds[path]), params)
    assert_same(held, engine(axes, devices, table.quantise(narrow, CFG, 4)[0], cfg))


@pytest.mark.slow
def test_no_second_copy_of_the_model_is_made(monkeypatch):
    """Neither where it comes from nor where it goes, at any time."""
    devices = jax.devices()[4:]
    held, params = engine({"expert": 4}, devices, cfg=LARGER), trainer(LARGER)
    size = {path: x.size * 2 for path, x in flatten(params).items()}
    limit = sorted(size.values())[-2]
    monkeypatch.setattr(runner, "MAX_LOAD_BYTES", limit)
    original, most = reshard.fingerprint, {"there": [], "here": []}

    def on(where):
        # By their place: a shard that was looked at is an array of its own, too.
        found = {
            shard.data.unsafe_buffer_pointer(): shard.data.nbytes
            for x in jax.live_arrays()
            for shard in x.addressable_shards
            if shard.device in where
        }
        return sum(found.values())

    def watched(x):
        """Called of each weight that was cast, and of each that has arrived."""
        most["there"].append(on(set(devices)))
        most["here"].append(on(set(jax.devices()[:4])))
        return original(x)

    monkeypatch.setattr(reshard, "fingerprint", watched)
    before = on(set(devices)), on(set(jax.devices()[:4]))
    Reshard([held]).push(params, 3)
    # On a device there may be copies: what is counted is of all four.
    spare = 4 * 2 * max(max(size.values()), limit) / 4 + 2**16
    whole = sum(size.values())
    assert whole > 2 * spare
    for name, start in zip(("there", "here"), before):
        assert max(most[name]) - start < spare, name


def test_fingerprints_do_not_depend_on_how_an_array_is_cut():
    params = trainer()
    for path in ("embed/weight", "final_norm", "moe_layers/attn/q_b", "moe_layers/experts/down"):
        x = flatten(params)[path]
        np.testing.assert_array_equal(fingerprint(x), fingerprint(np.asarray(x)), err_msg=path)


def test_a_mesh_pushes_over_the_network_and_through_a_folder(tmp_path):
    params, want = trainer(), engine({"expert": 4}, jax.devices()[4:])
    want.update_weights(jax.tree.map(np.asarray, params), 1)
    held = engine({"expert": 4}, jax.devices()[4:])
    loader = models.make_weight_loader(glm5.Glm5(CFG, params=cases.params(CFG)))
    config = SyncConfig(bucket_bytes=2**14)
    with Server(held, Tokenizer.default(), ServerConfig(port=0), loader).running() as url:
        one = Network(CFG, [url], config).push(params, 1)
        assert_same(held, want)
        held.update_weights(cases.params(CFG), 0)
        other = SharedStorage(CFG, tmp_path, [url], config).push(params, 1)
        assert_same(held, want)
    assert one.checksum == other.checksum


def pushes_of_one_process(url: str, folder: str) -> None:
    """What each process of a pod of four devices does, in the test below."""
    mesh = make_mesh(TRAINER)

    def place(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: 1.25 * x[index])

    params = jax.tree.map(place, cases.params(CFG), glm5.param_shardings(CFG, mesh))
    assert not params["moe_layers"]["experts"]["down"].is_fully_addressable
    pusher = Network(CFG, [url], SyncConfig(bucket_bytes=2**14, delta=True))
    found = [pusher.push(params, 1), pusher.push(params, 1), pusher.push(params, 2)]
    for version in (1, 2):  # older than what is held, then as it is
        storage = SharedStorage(CFG, folder, [url])
        try:
            found.append(storage.push(params, version))
        except NotPushed as refused:
            print("told", json.dumps(str(refused)))
    with pytest.raises(ValueError, match="this pod has 2 processes"):
        Reshard([None])
    for own in found:
        hows = [told.how for told in own.engines]
        print("told", json.dumps([own.version, own.checksum, own.bytes, hows]))


@pytest.mark.slow
def test_a_pod_pushes_what_its_processes_have_together(tmp_path):
    held = engine({"expert": 4}, jax.devices()[4:])
    want = engine({"expert": 4}, jax.devices()[4:])
    want.update_weights(jax.tree.map(np.asarray, trainer()), 1)
    loader = models.make_weight_loader(glm5.Glm5(CFG, params=cases.params(CFG)))
    with Server(held, Tokenizer.default(), ServerConfig(port=0), loader).running() as url:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
        code = f"""
import jax, sys
jax.distributed.initialize("localhost:{port}", 2, int(sys.argv[1]))
from tests.mesh.test_weight_sync_mesh import pushes_of_one_process
pushes_of_one_process("{url}", "{tmp_path}")
"""
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(i)],
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": flags} | UNCACHED,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        said = [process.communicate(timeout=300)[0].splitlines() for process in started]
        assert [process.returncode for process in started] == [0, 0]
    said = [[line[5:] for line in own if line.startswith("told ")] for own in said]
    assert said[0] == said[1]
    refused, *found = map(json.loads, said[0])
    assert "version 2 is held, 1 is older" in refused
    assert [own[0] for own in found] == [1, 1, 2, 2]
    assert [own[3] for own in found] == [["whole"], ["held"], ["changes"], ["whole"]]
    assert len({own[1] for own in found}) == 1 and found[1][2] == found[2][2] == 0
    assert_same(held, want)
    assert held.version == 2
