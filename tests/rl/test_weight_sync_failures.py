"""Failed pushes of weights leave the weights of engines unchanged."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import shutil
import socket
import threading

import aiohttp
import jax
import numpy as np
import pytest

from experiments import serve
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.inference.shards import server as shard_server
from glm5_jax.inference.shards.server import ShardLibrary, ShardServer
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.weights import reshard
from glm5_jax.rl.weights.offers import make_offer
from glm5_jax.rl.weights.pusher import PushFailed
from glm5_jax.rl.weights.reshard import ReshardPusher
from glm5_jax.rl.weights.weight_sync import NetworkPusher, SharedStoragePusher
from glm5_jax.runtime.http_server import ListenConfig, json_response
from tests.rl.pushing import (
    CFG,
    SMALL,
    TOKENIZER,
    ServedEngine,
    bits,
    bits_after_update,
    make_engine,
    offering,
    params,
    pull_message,
    serving,
)


def swap_halves(data):
    """Returns bytes with exchanged halves."""
    return bytes(data[len(data) // 2 :]) + bytes(data[: len(data) // 2])


def test_rejects_part_that_changed_on_its_way(served_engine, monkeypatch):
    before, encode = served_engine.bits, shard_server.encode
    with monkeypatch.context() as patch:
        patch.setattr(
            shard_server,
            "encode",
            lambda *parts: (full := encode(*parts))._replace(data=swap_halves(full.data)),
        )
        message = "did not arrive: .*the bytes have another checksum than was sent"
        with pytest.raises(PushFailed, match=message) as raised:
            NetworkPusher(CFG, [served_engine.url], SMALL).push(params(), 1)
        assert not raised.value.is_refused
    assert served_engine.bits == before and served_engine.version_and_checksum == (0, None)
    assert NetworkPusher(CFG, [served_engine.url], SMALL).push(params(), 1).failed_engines == ()
    assert served_engine.bits == bits_after_update(params())


def test_rejects_weights_with_wrong_fingerprint(served_engine, monkeypatch):
    """The sender reads other numbers than it has offered, so that each reply has the right checksum."""
    before, encode = served_engine.bits, shard_server.encode
    monkeypatch.setattr(shard_server, "encode", lambda part, base: encode(part[::-1], base))
    with pytest.raises(PushFailed, match="has arrived with other numbers than it was sent with"):
        NetworkPusher(CFG, [served_engine.url], SMALL).push(params(), 1)
    assert served_engine.bits == before and served_engine.version_and_checksum == (0, None)


def test_repeated_messages_change_nothing(served_engine):
    with offering(params(), 1) as source:
        first, repeated = (
            served_engine.request("/weights/pull", pull_message(source)) for _ in range(2)
        )
    assert first == repeated and first[0] == 200 and first[1]["from_trainer"] > 0
    commits = [served_engine.request("/weights/commit", {"push": "a"}) for _ in range(2)]
    assert commits[0] == commits[1] and commits[0][0] == 200
    assert served_engine.version_and_checksum == (1, first[1]["checksum"])
    assert served_engine.bits == bits_after_update(params())


def test_loads_complete_push_after_sender_timed_out(served_engine):
    """The engine is busy and the trainer times out: the engine must not stay between two versions."""
    may_continue, commit = threading.Event(), {"push": "a"}
    with offering(params(), 1) as source:
        assert served_engine.request("/weights/pull", pull_message(source))[0] == 200
    served_engine.server.worker.call(lambda engine: may_continue.wait(60))

    async def time_out():
        async with aiohttp.ClientSession() as client:
            async with asyncio.timeout(0.3):
                await client.post(served_engine.url + "/weights/commit", json=commit)

    with pytest.raises(TimeoutError):
        asyncio.run(time_out())
    assert served_engine.request("/weights")[1]["receiving"] == 1
    status, response = served_engine.request("/weights/abort", commit)
    assert (
        status == 409
        and "is complete, and the engine is loading it" in response["error"]["message"]
    )
    with offering(params(2), 2) as source:
        assert served_engine.request("/weights/pull", pull_message(source, "b"))[0] == 409
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        repeated = pool.submit(served_engine.request, "/weights/commit", commit)
        may_continue.set()
        status, response = repeated.result()
    assert (status, response["version"], response["checksum"]) == (
        200,
        *served_engine.version_and_checksum,
    )
    assert served_engine.version_and_checksum[0] == 1 and served_engine.bits == bits_after_update(
        params()
    )


class WrongChecksumServer(Server):
    """Server that answers a complete push with another checksum."""

    def routes(self):
        routes = super().routes()
        post = routes["POST"] | {
            path: functools.partial(self._change_checksum, routes["POST"][path])
            for path in ("/weights/commit", "/update_weights")
        }
        return routes | {"POST": post}

    async def _change_checksum(self, answer, request):
        body = json.loads((await answer(request)).text)
        return json_response(body | {"checksum": "0" * 32})


def test_rejects_engine_that_reports_other_checksum(tmp_path):
    with serving(kind=WrongChecksumServer) as server:
        for version, pusher in enumerate(
            (
                NetworkPusher(CFG, [server.url], SMALL),
                SharedStoragePusher(CFG, tmp_path, [server.url], SMALL),
            ),
            1,
        ):
            with pytest.raises(PushFailed, match=f"holds {'0' * 32}, not [0-9a-f]{{32}}"):
                pusher.push(params(version), version)


def test_rejects_transfer_with_wrong_fingerprint(monkeypatch):
    engine, before, fingerprint = make_engine(), bits_after_update(params(0)), reshard.fingerprint
    calls = iter(range(1000))
    monkeypatch.setattr(reshard, "fingerprint", lambda x: fingerprint(x) + (next(calls) == 1))
    with pytest.raises(ValueError, match="has arrived with other numbers than it was sent with"):
        ReshardPusher([engine]).push(params(), 1)
    assert engine.version == 0 and bits(engine) == before


def test_names_array_that_trainer_does_not_send(served_engine):
    before = served_engine.bits
    offer, shards = make_offer(params(), CFG, 1)
    shards.discard("final_norm")
    library = ShardLibrary()
    library.versions[offer.checksum] = shards
    with ShardServer(offer, library, ListenConfig(port=0)).running() as source:
        status, response = served_engine.request("/weights/pull", pull_message(source))
    assert status == 502 and "final_norm 0:128 did not arrive" in response["error"]["message"]
    assert "final_norm 0:128 is not held here" in response["error"]["message"]
    assert served_engine.bits == before
    assert served_engine.request("/weights/commit", {"push": "a"})[0] == 409


def test_names_trainer_that_does_not_answer(served_engine):
    message = pull_message("http://127.0.0.1:9")
    status, response = served_engine.request("/weights/pull", message)
    assert status == 502 and "http://127.0.0.1:9/weights/offer" in response["error"]["message"]
    assert served_engine.request("/weights")[1]["receiving"] is None


def test_pulls_from_hosts_of_its_run_only(served_engine):
    message = pull_message("http://169.254.169.254")
    status, response = served_engine.request("/weights/pull", message)
    assert status == 400 and response["error"]["param"] == "sources"
    assert "pulls no weights from '169.254.169.254'" in response["error"]["message"]
    assert served_engine.request("/weights")[1]["receiving"] is None


def test_pulls_from_trainer_what_other_engine_does_not_pass_on(served_engine):
    """The other engine should pull, and ends before it does."""
    size = sum(x.nbytes for x in jax.tree.leaves(params()))
    with offering(params(), 1) as source:
        peers = [[served_engine.url], ["http://127.0.0.1:9"]]
        message = pull_message(source, peers=peers)
        status, reply = served_engine.request("/weights/pull", message)
    assert (status, reply["from_trainer"], reply["from_engines"]) == (200, size, 0)


def test_rejects_second_push_during_first(served_engine, tmp_path):
    with offering(params(), 1) as source, offering(params(2), 2) as other_source:
        assert served_engine.request("/weights/pull", pull_message(source))[0] == 200
        assert served_engine.request("/weights")[1]["receiving"] == 1
        for path, body in (
            ("/weights/pull", pull_message(other_source, "b")),
            ("/update_weights", {"path": str(tmp_path), "version": 2}),
        ):
            status, response = served_engine.request(path, body)
            assert status == 409 and "version 1 is being loaded" in response["error"]["message"]
    message = "version 1 is being loaded; push again after that"
    with pytest.raises(PushFailed, match=message) as raised:
        NetworkPusher(CFG, [served_engine.url], SMALL).push(params(), 2)
    assert not raised.value.is_refused
    for path in ("/weights/commit", "/weights/abort"):
        assert served_engine.request(path, {"push": "b"})[0] == 409
    assert served_engine.request("/weights/abort", {"push": "a"})[0] == 200
    assert NetworkPusher(CFG, [served_engine.url], SMALL).push(params(), 2).failed_engines == ()


def test_abandoned_push_expires():
    now = 0.0
    with serving(push_timeout_s=5.0, clock=lambda: now) as server:
        before = server.bits
        with offering(params(), 1) as source:
            server.request("/weights/pull", pull_message(source, "killed"))
        now = 4.9
        with pytest.raises(PushFailed, match="version 1 is being loaded"):
            NetworkPusher(CFG, [server.url], SMALL).push(params(), 2)
        assert server.bits == before
        now = 5.1
        assert server.request("/weights")[1]["receiving"] is None
        assert NetworkPusher(CFG, [server.url], SMALL).push(params(), 2).failed_engines == ()
        assert server.bits == bits_after_update(params())


def test_aborts_push_that_fails_at_sender(served_engine):
    before = served_engine.bits
    weights = params()
    weights = weights | {"lm_head": {"weight": UnreadableLeaf(weights["lm_head"]["weight"])}}
    with pytest.raises(RuntimeError, match="device is gone"):
        NetworkPusher(CFG, [served_engine.url], SMALL).push(weights, 2)
    status = served_engine.request("/weights")[1]
    assert status.pop("instance")
    assert status == {"version": 0, "checksum": None, "frozen": None, "receiving": None}
    assert served_engine.bits == before


class UnreadableLeaf:
    """Leaf that cannot be read."""

    def __init__(self, like):
        self.shape, self.dtype = like.shape, like.dtype

    def __array__(self, *_, **__):
        raise RuntimeError("the trainer's device is gone")


@pytest.fixture
def silent():
    """Returns the URL of a socket that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_names_engines_that_missed_push(served_engine, silent):
    unreachable = "http://127.0.0.1:9"
    pushed = NetworkPusher(CFG, [served_engine.url, unreachable], SMALL).push(params(), 1)
    assert pushed.failed_engines == (unreachable,) and "Cannot connect" in pushed.acks[1].error
    assert served_engine.bits == bits_after_update(params())
    short_timeout = dataclasses.replace(SMALL, timeout_s=0.3)
    message = "no engine has taken version 3: http.*no answer to /weights within 0.3 s"
    with pytest.raises(PushFailed, match=message) as raised:
        NetworkPusher(CFG, [silent, unreachable], short_timeout).push(params(), 3)
    assert not raised.value.is_refused


@pytest.mark.slow
def test_reports_silent_engine_and_serves_others(served_engine, silent, tmp_path):
    network_config, storage_config = (
        dataclasses.replace(SMALL, **change)
        for change in ({"timeout_s": 1.5}, {"load_timeout_s": 4.0})
    )
    unreachable = "http://127.0.0.1:9"
    for version, pusher in enumerate(
        (
            NetworkPusher(CFG, [silent, served_engine.url, unreachable], network_config),
            SharedStoragePusher(
                CFG, tmp_path, [silent, served_engine.url, unreachable], storage_config
            ),
        ),
        1,
    ):
        pushed = pusher.push(params(version), version)
        assert pushed.failed_engines == (silent, unreachable)
        reasons = [ack.error for ack in pushed.acks]
        assert (
            reasons[0]
            == (
                "no answer to /weights within 1.5 s",
                "no answer to /update_weights within 4.0 s",
            )[version - 1]
        )
        assert reasons[1] is None and "Cannot connect" in reasons[2]
        assert served_engine.bits == bits_after_update(params(version))
    message = "no engine has taken version 3: http.*no answer to"
    with pytest.raises(PushFailed, match=message) as raised:
        NetworkPusher(CFG, [silent, unreachable], network_config).push(params(), 3)
    assert not raised.value.is_refused
    with pytest.raises(ValueError, match="nowhere to go"):
        NetworkPusher(CFG, []).push(params(), 3)


def test_retries_broken_connection(served_engine):
    """A relay drops the first connections."""
    port = int(served_engine.url.rpartition(":")[2])
    dropped = []

    def relay(listener):
        with contextlib.suppress(OSError):
            while True:
                client_end, _ = listener.accept()
                if len(dropped) < 2:  # aiohttp itself retries one GET
                    dropped.append(client_end)
                    client_end.close()
                    continue
                server_end = socket.create_connection(("127.0.0.1", port))
                for a, b in ((client_end, server_end), (server_end, client_end)):
                    threading.Thread(target=copy, args=(a, b), daemon=True).start()

    def copy(a, b):
        with contextlib.suppress(OSError):
            while data := a.recv(2**16):
                b.sendall(data)
        for end in (a, b):
            end.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=relay, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        one_try = dataclasses.replace(SMALL, max_tries=1)
        with pytest.raises(PushFailed):
            NetworkPusher(CFG, [url], one_try).push(params(), 1)
        dropped.clear()
        assert (
            NetworkPusher(CFG, [url], SMALL).push(params(), 1).failed_engines == ()
            and len(dropped) == 2
        )
        listener.shutdown(socket.SHUT_RDWR)


# (message of a push through a folder, of one over the network, changed fields)
OTHER_MODELS = [
    (
        "wrong dtype: model.embed_tokens.weight is float16, not float32",
        "wrong dtype: dense_layers/attn/k_b is float16, not float32",
        {"dtype": "float16"},
    ),
    (
        "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 128], not",
        "wrong shape: dense_layers/mlp/gate is [1, 128, 96], not",
        {"intermediate_size": 96},
    ),
    (
        "another model: rope_parameters.rope_theta 500000.0 (here 10000.0)",
        "another model: rope_parameters.rope_theta 500000.0 (here 10000.0)",
        {"rope_parameters": dataclasses.replace(CFG.rope_parameters, rope_theta=5e5)},
    ),
    (
        "missing: model.layers.2.",
        "missing: mtp/",
        {"num_nextn_predict_layers": 0},
    ),
]


def test_rejects_weights_of_other_model_before_sending(served_engine, tmp_path):
    before = served_engine.bits
    for number, (storage_message, network_message, changes) in enumerate(OTHER_MODELS):
        cfg = dataclasses.replace(CFG, **changes)
        other = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), glm5.abstract_params(cfg))
        for message, pusher in (
            (network_message, NetworkPusher(cfg, [served_engine.url], SMALL)),
            (
                storage_message,
                SharedStoragePusher(cfg, tmp_path / str(number), [served_engine.url], SMALL),
            ),
        ):
            with pytest.raises(PushFailed) as raised:
                pusher.push(other, 1)
            assert message in str(raised.value) and raised.value.is_refused
    assert served_engine.bits == before and served_engine.version_and_checksum == (0, None)


def test_pusher_rejects_incomplete_tree(served_engine):
    weights = {name: leaf for name, leaf in params().items() if name != "final_norm"}
    with pytest.raises(ValueError, match="final_norm is missing"):
        NetworkPusher(CFG, [served_engine.url], SMALL).push(weights, 1)
    with pytest.raises(ValueError, match="final_norm is missing"):
        ReshardPusher([make_engine()]).push(weights, 1)
    assert served_engine.version_and_checksum == (0, None)


def test_rejects_changed_folder(served_engine, tmp_path):
    storage = SharedStoragePusher(CFG, tmp_path, [], SMALL)
    storage.push(params(), 1)
    before, file = served_engine.bits, tmp_path / "1" / "model.safetensors"
    content = bytearray(file.read_bytes())
    manifest_path = tmp_path / "1" / "manifest.json"
    manifest = manifest_path.read_text()

    def check_rejected(message, version=1):
        body = {"path": str(tmp_path / "1"), "version": version}
        status, response = served_engine.request("/update_weights", body)
        assert status == 400 and message in response["error"]["message"], response
        assert served_engine.bits == before and served_engine.version_and_checksum == (0, None)

    check_rejected("holds version 1, not 2", 2)
    content[-5] ^= 1
    file.write_bytes(content)
    check_rejected("in model.safetensors has another checksum")
    file.write_bytes(content[:-100])
    check_rejected("cannot be read")
    content[-5] ^= 1
    file.write_bytes(content)
    manifest_path.write_text(manifest.replace("float32", "bfloat16", 1))
    check_rejected("does not match its checksum")
    manifest_path.write_text("{")
    check_rejected("is not a manifest")
    manifest_path.write_text(manifest)
    assert (
        served_engine.request("/update_weights", {"path": str(tmp_path / "1"), "version": 1})[0]
        == 200
    )
    assert served_engine.bits == bits_after_update(params())


def test_failed_write_changes_nothing(served_engine, tmp_path, monkeypatch):
    storage = SharedStoragePusher(CFG, tmp_path / "a", [served_engine.url], SMALL)
    storage.push(params(0), 1)
    before = served_engine.bits
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patcher:
        patcher.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(ValueError, match="has 0.000 GB free"):
            storage.push(params(1), 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        SharedStoragePusher(CFG, tmp_path / "file" / "b", [served_engine.url], SMALL).push(
            params(1), 2
        )
    assert served_engine.bits == before and served_engine.version_and_checksum[0] == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]


def test_keeps_newest_versions_and_removes_partial_ones(served_engine, tmp_path):
    partial = tmp_path / ".3.4711.partial"  # left by a trainer that was killed while it wrote
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    storage = SharedStoragePusher(
        CFG, tmp_path, [served_engine.url], dataclasses.replace(SMALL, keep=2)
    )
    for version in (3, 9, 10):
        pushed = storage.push(params(version % 3), version)
        assert served_engine.version_and_checksum == (version, pushed.checksum)
    assert {path.name for path in tmp_path.iterdir()} == {"9", "10"}
    # The same version again, to a new engine.
    with serving() as other:
        storage.engines = (other.url,)
        assert storage.push(params(1), 10).sent_bytes == 0
        assert (
            other.version_and_checksum == served_engine.version_and_checksum
            and other.bits == served_engine.bits
        )


def test_serves_pushed_folder_with_its_version(tmp_path, monkeypatch):
    SharedStoragePusher(CFG, tmp_path, tokenizer=TOKENIZER).push(params(), 12)
    monkeypatch.setattr(serve, "make_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
    options = dict(page_size=16, max_num_seqs=2, prefill_chunk=32, max_length=64)
    config = serve.ServeConfig(
        checkpoint=str(tmp_path / "12"),
        engine=EngineConfig(**options),
        server=ServerConfig(port=0),
        warm=False,
    )
    with serve.make_server(config).running() as url:
        server = ServedEngine(None, url)
        assert server.version_and_checksum == (12, None)
        pushed = NetworkPusher(CFG, [url], SMALL).push(params(), 13)
        assert server.version_and_checksum == (13, pushed.checksum)


def test_push_requires_loader_and_key():
    with Server(make_engine(), TOKENIZER, ServerConfig(port=0)).running() as url:
        with pytest.raises(PushFailed, match="this server accepts no weights"):
            NetworkPusher(CFG, [url], SMALL).push(params(), 1)
    with serving(api_key="secret") as server:
        with pytest.raises(PushFailed, match="the API key is missing or wrong"):
            NetworkPusher(CFG, [server.url], SMALL).push(params(), 1)
        config = dataclasses.replace(SMALL, api_key="secret")
        assert NetworkPusher(CFG, [server.url], config).push(params(), 1).failed_engines == ()
        assert server.bits == bits_after_update(params())
