"""What fails on the way of weights to engines leaves those that they have as they were."""

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
from safetensors.numpy import save

from experiments import serve
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.model import glm5
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.rl.weights import reshard
from glm5_jax.rl.weights.pusher import PushFailed
from glm5_jax.rl.weights.reshard import ReshardPusher
from glm5_jax.rl.weights.weight_sync import NetworkPusher, SharedStoragePusher
from glm5_jax.runtime.http_server import json_response
from tests.rl.pushing import (
    CFG,
    SMALL,
    TOKENIZER,
    Served,
    begun,
    bits,
    loaded,
    made,
    params,
    sent,
    serving,
)


def test_numbers_that_changed_on_the_way_are_refused(served):
    before = served.bits
    assert served.ask("/weights/begin", begun(1))[0] == 200
    checksums = sent(served, params())
    checksums[3] = "0" * 32
    status, told = served.ask("/weights/commit", {"push": "a", "checksums": checksums})
    assert status == 400 and "has the checksum" in told["error"]["message"]
    assert list(begun(1)["tensors"])[3] in told["error"]["message"]
    assert served.bits == before and served.held == (0, None)
    # The push is over; the same may begin anew, and be told twice.
    for _ in range(2):
        assert served.ask("/weights/begin", begun(1))[0] == 200
    said = {"push": "a", "checksums": sent(served, params())}
    sent(served, params(2))  # too late: these are complete
    first, again = (served.ask("/weights/commit", said) for _ in range(2))
    assert first == again and first[0] == 200
    assert served.bits == loaded(params()) and served.held == (1, first[1]["checksum"])


def test_what_is_complete_is_taken_whether_or_not_its_sender_waits(served):
    """The engine is busy, and the trainer's patience ends: it must not be left between two versions."""
    requires_checkpoint = threading.Event()
    served.ask("/weights/begin", begun(1))
    said = {"push": "a", "checksums": sent(served, params())}
    served.server.worker.call(lambda engine: requires_checkpoint.wait(60))

    async def impatient():
        async with aiohttp.ClientSession() as client:
            async with asyncio.timeout(0.3):
                await client.post(served.url + "/weights/commit", json=said)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert served.ask("/weights")[1]["receiving"] == 1
    status, told = served.ask("/weights/abort", {"push": "a"})
    assert status == 409 and "is complete, and the engine is loading it" in told["error"]["message"]
    assert served.ask("/weights/begin", begun(2, "b"))[0] == 409
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        again = pool.submit(served.ask, "/weights/commit", said)
        requires_checkpoint.set()
        status, told = again.result()
    assert (status, told["version"], told["checksum"]) == (200, *served.held)
    assert served.held[0] == 1 and served.bits == loaded(params())


class Lying(Server):
    """Answers a complete push with another checksum."""

    def routes(self):
        own = super().routes()
        post = own["POST"] | {
            path: functools.partial(self._lie, own["POST"][path])
            for path in ("/weights/commit", "/update_weights")
        }
        return own | {"POST": post}

    async def _lie(self, answer, request):
        said = json.loads((await answer(request)).text)
        return json_response(said | {"checksum": "0" * 32})


def test_an_engine_that_tells_another_checksum_has_not_taken_it(tmp_path):
    with serving(kind=Lying) as one:
        for version, pusher in enumerate(
            (
                NetworkPusher(CFG, [one.url], SMALL),
                SharedStoragePusher(CFG, tmp_path, [one.url], SMALL),
            ),
            1,
        ):
            with pytest.raises(PushFailed, match=f"holds {'0' * 32}, not [0-9a-f]{{32}}"):
                pusher.push(params(version), version)


def test_numbers_that_another_device_did_not_get_are_refused(monkeypatch):
    engine, before, told = made(), loaded(params(0)), reshard.fingerprint
    calls = iter(range(1000))
    monkeypatch.setattr(reshard, "fingerprint", lambda x: told(x) + (next(calls) == 1))
    with pytest.raises(ValueError, match="has arrived with other numbers than it was sent with"):
        ReshardPusher([engine]).push(params(), 1)
    assert engine.version == 0 and bits(engine) == before


def test_what_did_not_come_is_named(served):
    before = served.bits
    served.ask("/weights/begin", begun(1))
    [name, *_] = begun(1)["tensors"]
    part = save({f"{name}@0": np.zeros(10, np.float32)})
    assert served.ask("/weights/part", part, push="a") == (200, {"complete": 0})
    told = served.ask(
        "/weights/commit", {"push": "a", "checksums": ["x"] * len(begun(1)["tensors"])}
    )
    assert told[0] == 400 and f"{name} is missing, 10 of its " in told[1]["error"]["message"]
    assert served.bits == before and served.held == (0, None)


def test_refuses_part_that_is_none(served):
    def array(name, count, dtype=np.float32):
        return {name: np.zeros(count, dtype)}

    mask, values = "model.norm.weight@0#mask", "model.norm.weight@0#values"
    cases = [
        (b"junk", "no safetensors"),
        (save(array("model.norm.weight", 10**5)), "are too many"),
        (save(array("model.norm.weight@-3", 1)), "is no piece of a tensor"),
        (save(array("model.norm", 1)), "is no piece of a tensor"),
        (save(array("model.norm.weight", 3, np.float16)), "arrives as F16, not float32"),
        (save(array(mask, 1, np.uint8)), "arrived without"),
        (save({mask: np.full(1, 255, np.uint8)} | array(values, 8)), "has no base"),
    ]
    for number, (part, words) in enumerate(cases):
        name = f"push{number}"
        assert served.ask("/weights/begin", begun(1, name))[0] == 200
        status, told = served.ask("/weights/part", part, push=name)
        assert status == 400 and words in told["error"]["message"], told
        assert served.ask("/weights/abort", {"push": name})[0] in (200, 409)


def test_one_push_at_a_time(served, tmp_path):
    assert served.ask("/weights/begin", begun(1))[0] == 200
    assert served.ask("/weights")[1]["receiving"] == 1
    for path, body in (
        ("/weights/begin", begun(2, "b")),
        ("/update_weights", {"path": str(tmp_path), "version": 2}),
    ):
        status, told = served.ask(path, body)
        assert status == 409 and "version 1 is being loaded" in told["error"]["message"]
    taken = "version 1 is being loaded; push again after that"
    with pytest.raises(PushFailed, match=taken) as caught:
        NetworkPusher(CFG, [served.url], SMALL).push(params(), 2)
    assert not caught.value.is_refused
    for path, body in (
        ("/weights/commit", {"push": "b", "checksums": []}),
        ("/weights/abort", {"push": "b"}),
    ):
        assert served.ask(path, body)[0] == 409
    assert served.ask("/weights/part", b"", push="b")[0] == 409
    assert served.ask("/weights/abort", {"push": "a"})[0] == 200
    assert NetworkPusher(CFG, [served.url], SMALL).push(params(), 2).failed_engines == ()


def test_a_push_whose_trainer_was_killed_holds_nobody_up_for_long():
    now = 0.0
    with serving(push_timeout_s=5.0, clock=lambda: now) as one:
        before = one.bits
        one.ask("/weights/begin", begun(1, "killed"))
        now = 4.0
        part = save({"model.norm.weight@0": np.zeros(3, np.float32)})
        one.ask("/weights/part", part, push="killed")
        now = 8.9
        with pytest.raises(PushFailed, match="version 1 is being loaded"):
            NetworkPusher(CFG, [one.url], SMALL).push(params(), 2)
        assert one.bits == before
        now = 9.1
        assert one.ask("/weights")[1]["receiving"] is None
        assert NetworkPusher(CFG, [one.url], SMALL).push(params(), 2).failed_engines == ()
        assert one.bits == loaded(params())


def test_a_push_that_is_cut_short_is_taken_back(served):
    before = served.bits
    weights = params()
    weights = weights | {"lm_head": {"weight": Broken(weights["lm_head"]["weight"])}}
    with pytest.raises(RuntimeError, match="device is gone"):
        NetworkPusher(CFG, [served.url], SMALL).push(weights, 2)
    told = served.ask("/weights")[1]
    assert told.pop("instance")
    assert told == {"version": 0, "checksum": None, "base": False, "receiving": None}
    assert served.bits == before


class Broken:
    """A leaf that cannot be read."""

    def __init__(self, like):
        self.shape, self.dtype = like.shape, like.dtype

    def __array__(self, *_, **__):
        raise RuntimeError("the trainer's device is gone")


@pytest.fixture
def silent():
    """A socket that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        yield f"http://127.0.0.1:{own.getsockname()[1]}"


def test_names_engines_that_did_not_get_the_weights(served, silent):
    gone = "http://127.0.0.1:9"  # nobody listens
    pushed = NetworkPusher(CFG, [served.url, gone], SMALL).push(params(), 1)
    assert pushed.failed_engines == (gone,) and "Cannot connect" in pushed.acks[1].error
    assert served.bits == loaded(params())
    impatient = dataclasses.replace(SMALL, timeout_s=0.3)
    words = "no engine has taken version 3: http.*no answer to /weights within 0.3 s"
    with pytest.raises(PushFailed, match=words) as caught:
        NetworkPusher(CFG, [silent, gone], impatient).push(params(), 3)
    assert not caught.value.is_refused


@pytest.mark.slow
def test_an_engine_that_does_not_answer_is_told_of_and_holds_up_nobody(served, silent, tmp_path):
    one, other = (
        dataclasses.replace(SMALL, **own) for own in ({"timeout_s": 1.5}, {"load_timeout_s": 4.0})
    )
    gone = "http://127.0.0.1:9"  # nobody listens
    for version, pusher in enumerate(
        (
            NetworkPusher(CFG, [silent, served.url, gone], one),
            SharedStoragePusher(CFG, tmp_path, [silent, served.url, gone], other),
        ),
        1,
    ):
        pushed = pusher.push(params(version), version)
        assert pushed.failed_engines == (silent, gone)
        reasons = [own.error for own in pushed.acks]
        assert (
            reasons[0]
            == (
                "no answer to /weights within 1.5 s",
                "no answer to /update_weights within 4.0 s",
            )[version - 1]
        )
        assert reasons[1] is None and "Cannot connect" in reasons[2]
        assert served.bits == loaded(params(version))
    none = "no engine has taken version 3: http.*no answer to"
    with pytest.raises(PushFailed, match=none) as caught:
        NetworkPusher(CFG, [silent, gone], one).push(params(), 3)
    assert not caught.value.is_refused
    with pytest.raises(ValueError, match="nowhere to go"):
        NetworkPusher(CFG, []).push(params(), 3)


def test_a_connection_that_breaks_is_tried_again(served):
    """Through a relay that drops its first connections."""
    port = int(served.url.rpartition(":")[2])
    dropped = []

    def relay(own):
        with contextlib.suppress(OSError):
            while True:
                near, _ = own.accept()
                if len(dropped) < 2:  # one GET of aiohttp's own accord
                    dropped.append(near)
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", port))
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=(a, b), daemon=True).start()

    def copy(a, b):
        with contextlib.suppress(OSError):
            while data := a.recv(2**16):
                b.sendall(data)
        for end in (a, b):
            end.close()

    with socket.create_server(("127.0.0.1", 0)) as own:
        threading.Thread(target=relay, args=(own,), daemon=True).start()
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
        once = dataclasses.replace(SMALL, max_tries=1)
        with pytest.raises(PushFailed):
            NetworkPusher(CFG, [url], once).push(params(), 1)
        dropped.clear()
        assert (
            NetworkPusher(CFG, [url], SMALL).push(params(), 1).failed_engines == ()
            and len(dropped) == 2
        )
        own.shutdown(socket.SHUT_RDWR)


OTHERS = {
    "wrong dtype: model.embed_tokens.weight is float16, not float32": {"dtype": "float16"},
    "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 128], not": {"intermediate_size": 96},
    "another model: rope_parameters.rope_theta 500000.0 (here 10000.0)": {
        "rope_parameters": dataclasses.replace(CFG.rope_parameters, rope_theta=5e5)
    },
    "missing: model.layers.2.": {"num_nextn_predict_layers": 0},
}


def test_refuses_weights_of_another_model_before_they_are_sent(served, tmp_path):
    before = served.bits
    for number, (words, changes) in enumerate(OTHERS.items()):
        cfg = dataclasses.replace(CFG, **changes)
        other = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), glm5.abstract_params(cfg))
        for pusher in (
            NetworkPusher(cfg, [served.url], SMALL),
            SharedStoragePusher(cfg, tmp_path / str(number), [served.url], SMALL),
        ):
            with pytest.raises(PushFailed) as caught:
                pusher.push(other, 1)
            assert words in str(caught.value) and caught.value.is_refused
    assert served.bits == before and served.held == (0, None)


def test_a_tree_of_another_config_is_refused_where_it_is(served):
    weights = {name: own for name, own in params().items() if name != "final_norm"}
    with pytest.raises(ValueError, match="missing: final_norm"):
        NetworkPusher(CFG, [served.url], SMALL).push(weights, 1)
    with pytest.raises(ValueError, match="final_norm is missing"):
        ReshardPusher([made()]).push(weights, 1)
    assert served.held == (0, None)


def test_a_folder_that_was_changed_is_refused(served, tmp_path):
    storage = SharedStoragePusher(CFG, tmp_path, [], SMALL)
    storage.push(params(), 1)
    before, file = served.bits, tmp_path / "1" / "model.safetensors"
    content = bytearray(file.read_bytes())
    told = tmp_path / "1" / "manifest.json"
    manifest = told.read_text()

    def refused(words, version=1):
        said = {"path": str(tmp_path / "1"), "version": version}
        status, answer = served.ask("/update_weights", said)
        assert status == 400 and words in answer["error"]["message"], answer
        assert served.bits == before and served.held == (0, None)

    refused("holds version 1, not 2", 2)
    content[-5] ^= 1
    file.write_bytes(content)
    refused("in model.safetensors has another checksum")
    file.write_bytes(content[:-100])
    refused("cannot be read")
    content[-5] ^= 1
    file.write_bytes(content)
    told.write_text(manifest.replace("float32", "bfloat16", 1))
    refused("does not match its checksum")
    told.write_text("{")
    refused("is not a manifest")
    told.write_text(manifest)
    assert served.ask("/update_weights", {"path": str(tmp_path / "1"), "version": 1})[0] == 200
    assert served.bits == loaded(params())


def test_what_cannot_be_written_changes_nothing(served, tmp_path, monkeypatch):
    storage = SharedStoragePusher(CFG, tmp_path / "a", [served.url], SMALL)
    storage.push(params(0), 1)
    before = served.bits
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(ValueError, match="has 0.000 GB free"):
            storage.push(params(1), 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        SharedStoragePusher(CFG, tmp_path / "file" / "b", [served.url], SMALL).push(params(1), 2)
    assert served.bits == before and served.held[0] == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]


def test_the_newest_versions_stay_and_half_written_ones_go(served, tmp_path):
    half = tmp_path / ".3.4711.partial"  # of a trainer that was killed while it wrote
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    storage = SharedStoragePusher(CFG, tmp_path, [served.url], dataclasses.replace(SMALL, keep=2))
    for version in (3, 9, 10):
        pushed = storage.push(params(version % 3), version)
        assert served.held == (version, pushed.checksum)
    assert {path.name for path in tmp_path.iterdir()} == {"9", "10"}
    # Again, to an engine that was lost meanwhile.
    with serving() as other:
        storage.engines = (other.url,)
        assert storage.push(params(1), 10).sent_bytes == 0
        assert other.held == served.held and other.bits == served.bits


def test_a_pushed_folder_is_served_with_its_version(tmp_path, monkeypatch):
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
        one = Served(None, url)
        assert one.held == (12, None)
        pushed = NetworkPusher(CFG, [url], SMALL).push(params(), 13)
        assert one.held == (13, pushed.checksum)


def test_a_server_without_a_loader_takes_nothing_and_a_key_is_asked_for():
    with Server(made(), TOKENIZER, ServerConfig(port=0)).running() as url:
        with pytest.raises(PushFailed, match="this server accepts no weights"):
            NetworkPusher(CFG, [url], SMALL).push(params(), 1)
    with serving(api_key="secret") as one:
        with pytest.raises(PushFailed, match="the API key is missing or wrong"):
            NetworkPusher(CFG, [one.url], SMALL).push(params(), 1)
        config = dataclasses.replace(SMALL, api_key="secret")
        assert NetworkPusher(CFG, [one.url], config).push(params(), 1).failed_engines == ()
        assert one.bits == loaded(params())
