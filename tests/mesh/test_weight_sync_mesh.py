"""Tests of weight pushes from the trainer's mesh to engines in the same process and over the network."""

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
from glm5_jax.checkpoint.engine_dtypes import transfer_dtypes
from glm5_jax.inference import engine_weights
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import table
from glm5_jax.inference.quantize.recipe import QuantizationRecipe, WeightConverter
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.tree import flatten, map_with_path
from glm5_jax.rl.weights import reshard
from glm5_jax.rl.weights.offers import make_offer, num_bytes_of
from glm5_jax.rl.weights.pusher import PushFailed, SyncConfig
from glm5_jax.rl.weights.reshard import ReshardPusher, fingerprint
from glm5_jax.rl.weights.weight_sync import NetworkPusher, SharedStoragePusher
from glm5_jax.text.tokenizer import Tokenizer
from tests.checkpoint.test_hf_export import UNCACHED
from tests.contracts.source_tree import ROOT
from tests.mesh import cases

CFG = cases.small("dense", dtype="bfloat16")
LARGER = cases.config(dtype="bfloat16")
OPTIONS = dict(page_size=8, max_length=32, max_num_seqs=2, num_pages=10, prefill_chunk=32)
TRAINER = {"fsdp": 2, "expert": 2}


def trainer(cfg=CFG):
    """Returns float32 weights on the first four devices."""
    mesh = make_mesh(TRAINER, devices=jax.devices()[:4])
    params = jax.tree.map(lambda x: x * 1.25, cases.params(cfg))
    return jax.device_put(params, glm5.param_shardings(cfg, mesh))


def engine(axes=None, devices=None, params=None, cfg=CFG):
    """Returns an engine on a mesh of these devices, on the first of them, or on the default one."""
    params = cases.params(cfg) if params is None else params
    mesh = axes and make_mesh(axes, devices=devices)
    if mesh:
        params = jax.device_put(params, glm5.param_shardings(cfg, mesh, params))
    elif devices:
        params = jax.device_put(params, devices[0])
    return Engine(
        glm5.Glm5(cfg, params=params, mesh=mesh), Tokenizer.default(), EngineConfig(**OPTIONS)
    )


def assert_same(one, other):
    """Checks that the weights of two engines are bitwise equal and lie on the same devices."""
    got, want = (flatten(engine.computation.params) for engine in (one, other))
    assert got.keys() == want.keys()
    for path in want:
        for a, b in zip(*map(jax.tree.leaves, (got[path], want[path]))):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
            assert a.sharding == b.sharding and a.committed == b.committed, path


TARGETS = {
    "other devices": ({"expert": 2, "tensor": 2}, slice(4, 8)),
    "the trainer's devices, other sharding": ({"expert": 4}, slice(0, 4)),
    "all devices": ({"data": 2, "fsdp": 2, "expert": 2}, slice(0, 8)),
    "one other device": (None, slice(7, 8)),
    "the default device": (None, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", TARGETS)
def test_reshard_preserves_bits_and_engine_sharding(place):
    axes, where = TARGETS[place]
    devices = where and jax.devices()[where]
    receiver, params = engine(axes, devices), trainer()
    pushed = ReshardPusher([receiver]).push(params, 3)
    want = engine(axes, devices)
    want.update_weights(jax.tree.map(np.asarray, params), 3)
    assert_same(receiver, want)
    assert pushed.sent_bytes == sum(
        x.size * (4 if "router/" in path else 2) for path, x in flatten(params).items()
    )
    for leaf in jax.tree.leaves(params):
        leaf.delete()  # the next step donates them
    assert_same(receiver, want)


@pytest.mark.slow
def test_engines_report_one_checksum():
    engines = [engine({"expert": 2}, jax.devices()[4:6]), engine(None, jax.devices()[6:7])]
    pusher, params = ReshardPusher(engines), trainer()
    pushed = pusher.push(params, 3)
    assert [ack.mode for ack in pushed.acks] == ["full"] * 2
    assert pusher.push(params, 3).checksum == pushed.checksum
    assert pusher.push(jax.tree.map(lambda x: x * 2, params), 4).checksum != pushed.checksum


@pytest.mark.slow
def test_quantized_engine_quantizes_received_weights():
    quantised, cfg = table.quantise(cases.params(CFG), CFG, 4)
    axes, devices = {"expert": 2, "tensor": 2}, jax.devices()[4:]
    receiver, params = engine(axes, devices, quantised, cfg), trainer()
    ReshardPusher([receiver]).push(params, 1)
    kinds = transfer_dtypes(cfg)
    narrow = map_with_path(lambda path, x: jnp.asarray(np.asarray(x), kinds[path]), params)
    assert_same(receiver, engine(axes, devices, table.quantise(narrow, CFG, 4)[0], cfg))


@pytest.mark.slow
def test_reshard_makes_no_second_model_copy(monkeypatch):
    devices = jax.devices()[4:]
    receiver, params = engine({"expert": 4}, devices, cfg=LARGER), trainer(LARGER)
    size = {path: x.size * 2 for path, x in flatten(params).items()}
    limit = sorted(size.values())[-2]
    monkeypatch.setattr(engine_weights, "MAX_LOAD_BYTES", limit)
    sides = {"engine": set(devices), "trainer": set(jax.devices()[:4])}

    def live_bytes(side):
        # By address, because an accessed shard is also an array.
        buffers = {
            shard.data.unsafe_buffer_pointer(): shard.data.nbytes
            for x in jax.live_arrays()
            for shard in x.addressable_shards
            if shard.device in sides[side]
        }
        return sum(buffers.values())

    original, peaks = reshard.fingerprint, {side: [] for side in sides}

    def recording(x):
        """Is called for each weight after its cast and after its transfer."""
        for side in sides:
            peaks[side].append(live_bytes(side))
        return original(x)

    monkeypatch.setattr(reshard, "fingerprint", recording)
    before = {side: live_bytes(side) for side in sides}
    ReshardPusher([receiver]).push(params, 3)
    # Each of a side's four devices may hold two copies of the largest weight.
    spare = 4 * 2 * max(max(size.values()), limit) / 4 + 2**16
    assert sum(size.values()) > 2 * spare
    for side in sides:
        assert max(peaks[side]) - before[side] < spare, side


def test_fingerprint_does_not_depend_on_sharding():
    params = trainer()
    for path in ("embed/weight", "final_norm", "moe_layers/attn/q_b", "moe_layers/experts/down"):
        x = flatten(params)[path]
        np.testing.assert_array_equal(fingerprint(x), fingerprint(np.asarray(x)), err_msg=path)


def test_mesh_pushes_over_network_and_shared_storage(tmp_path):
    params, want = trainer(), engine({"expert": 4}, jax.devices()[4:])
    want.update_weights(jax.tree.map(np.asarray, params), 1)
    receiver = engine({"expert": 4}, jax.devices()[4:])
    loader = models.make_weight_loader(glm5.Glm5(CFG, params=cases.params(CFG)))
    config = SyncConfig(bucket_bytes=2**14)
    with Server(receiver, Tokenizer.default(), ServerConfig(port=0), loader).running() as url:
        one = NetworkPusher(CFG, [url], config).push(params, 1)
        assert_same(receiver, want)
        receiver.update_weights(cases.params(CFG), 0)
        other = SharedStoragePusher(CFG, tmp_path, [url], config).push(params, 1)
        assert_same(receiver, want)
    assert one.sent_bytes == other.sent_bytes


def pushes_of_one_process(url: str, folder: str) -> None:
    """Pushes weights from one process of a pod, for the test below."""
    mesh = make_mesh(TRAINER)

    def place(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: 1.25 * x[index])

    params = jax.tree.map(place, cases.params(CFG), glm5.param_shardings(CFG, mesh))
    assert not params["moe_layers"]["experts"]["down"].is_fully_addressable
    pusher = NetworkPusher(CFG, [url], SyncConfig(bucket_bytes=2**14, delta=True))
    results = [pusher.push(params, 1), pusher.push(params, 1), pusher.push(params, 2)]
    # Each process has sent its shards, and none has held all weights.
    _, shards = make_offer(params, CFG, 1)
    print("held", shards.num_bytes)
    for version in (1, 3):  # an older version than the engine's, then a newer one
        storage = SharedStoragePusher(CFG, folder, [url])
        try:
            results.append(storage.push(params, version))
        except PushFailed as error:
            print("result", json.dumps(str(error)))
    with pytest.raises(ValueError, match="this pod has 2 processes"):
        ReshardPusher([None])
    for push in results:
        modes = [ack.mode for ack in push.acks]
        print("result", json.dumps([push.version, push.checksum, push.sent_bytes, modes]))


@pytest.mark.slow
def test_processes_of_pod_push_weights_together(tmp_path):
    receiver = engine({"expert": 4}, jax.devices()[4:])
    want = engine({"expert": 4}, jax.devices()[4:])
    want.update_weights(jax.tree.map(np.asarray, trainer()), 1)
    loader = models.make_weight_loader(glm5.Glm5(CFG, params=cases.params(CFG)))
    with Server(receiver, Tokenizer.default(), ServerConfig(port=0), loader).running() as url:
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
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(i)],
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": flags} | UNCACHED,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        outputs = [process.communicate(timeout=300)[0].splitlines() for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    held = max(int(line.split()[1]) for o in outputs for line in o if line.startswith("held "))
    first, second = (
        [line.removeprefix("result ") for line in output if line.startswith("result ")]
        for output in outputs
    )
    assert first == second
    error, *pushes = map(json.loads, first)
    assert "version 2 is held, 1 is older" in error
    versions, checksums, sent_bytes, modes = zip(*pushes)
    assert versions == (1, 1, 2, 3) and len(set(checksums[:3])) == 1
    size = sum(x.nbytes for x in jax.tree.leaves(receiver.computation.params))
    assert sent_bytes[0] == size and 0.5 * size <= held < 0.6 * size
    assert modes == (["full"], ["current"], ["delta"], ["full"])
    assert sent_bytes[1] == sent_bytes[2] == 0
    assert_same(receiver, want)
    assert receiver.version == 3


@pytest.mark.slow
def test_converted_offer_does_not_depend_on_sharding():
    """Fingerprints of rotated and quantised weights of a trainer on eight devices equal those of one device."""
    cfg = cases.config(
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        hidden_size=24,
        q_lora_rank=12,
        kv_lora_rank=16,
        v_head_dim=20,
    )
    params = jax.tree.map(jnp.asarray, cases.params(cfg))
    converter = WeightConverter(cfg, QuantizationRecipe(group=4, rotation_seed=1))
    one, _ = make_offer(params, cfg, 1, converter=converter)
    mesh = make_mesh({"fsdp": 2, "expert": 2, "context": 2})
    sharded = jax.device_put(params, glm5.param_shardings(cfg, mesh))
    many, shards = make_offer(sharded, cfg, 1, converter=converter)
    assert one.arrays.keys() == many.arrays.keys()
    for name, array in one.arrays.items():
        assert many.arrays[name].fingerprint == array.fingerprint, name
    assert one.checksum == many.checksum
    # Experts are divided over all devices.
    assert len(many.arrays["moe_layers/experts/gate.packed"].boxes) == 8
    assert shards.num_bytes == num_bytes_of(many)
