"""Weights pushed to engines: the same bits by every way, and what stays as it was when something fails."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import shutil
import socket
import threading
import time

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save

from experiments import serve
from glm5_jax.checkpoint import models
from glm5_jax.checkpoint.hf_export import named_tensors
from glm5_jax.checkpoint.manifest import Manifest, travelling
from glm5_jax.core.mesh import make_mesh
from glm5_jax.core.tree import Lazy, flatten, map_with_path
from glm5_jax.inference import runner, weights as receiving
from glm5_jax.inference.engine import Engine
from glm5_jax.inference.quantize import rotation, table
from glm5_jax.inference.request import EngineConfig
from glm5_jax.inference.sampling import Sampling
from glm5_jax.inference.server import Server, ServerConfig
from glm5_jax.inference.worker import Worker
from glm5_jax.model import glm5
from glm5_jax.rl import reshard
from glm5_jax.rl.pushed import NotPushed, SyncConfig
from glm5_jax.rl.reshard import Reshard, fingerprint
from glm5_jax.rl.weight_sync import Network, SharedStorage, pieces
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import CFG, model

TOKENIZER = Tokenizer.default()
OPTIONS = dict(page_size=16, num_pages=16, max_batch=4, chunk=64, max_length=64)
NARROW = dataclasses.replace(CFG, dtype="bfloat16")
SMALL = SyncConfig(bucket_bytes=2**16, seconds=20.0, load_seconds=60.0)
DELTA = dataclasses.replace(SMALL, delta=True)


def params(seed=1):
    """As a trainer has them."""
    return glm5.params_of(model(seed))


def made(cfg=CFG, weights=None, version=0, **options):
    weights = params(0) if weights is None else weights
    return Engine(glm5.Glm5(cfg, params=weights), TOKENIZER, version=version, **OPTIONS | options)


class Served:
    """An engine behind HTTP."""

    def __init__(self, engine, url, server=None):
        self.engine, self.url, self.server = engine, url, server

    def ask(self, path, body=None, **params):
        """(status, JSON)."""

        async def inner():
            told = {"data": body} if isinstance(body, bytes) else {"json": body}
            async with aiohttp.ClientSession() as client:
                method = "GET" if body is None else "POST"
                call = client.request(method, self.url + path, params=params, **told)
                async with call as response:
                    return response.status, await response.json()

        return asyncio.run(asyncio.wait_for(inner(), 60))

    @property
    def held(self):
        """(version, checksum) as it tells them."""
        status, told = self.ask("/weights")
        assert status == 200
        return told["version"], told["checksum"]

    @property
    def bits(self):
        return bits(self.engine)


@contextlib.contextmanager
def serving(cfg=CFG, port=0, version=0, **config):
    engine = made(cfg, version=version)
    config = ServerConfig(port=port, model="tiny", **config)
    server = Server(engine, TOKENIZER, config, models.loader_like(glm5.Glm5(cfg, params=params(0))))
    with server.running() as url:
        yield Served(engine, url, server)


@pytest.fixture
def served():
    with serving() as one:
        yield one


def bits(engine):
    """What an engine computes with, bit by bit."""
    return {
        path: np.asarray(x).tobytes()
        for path, leaf in flatten(engine.computation.params).items()
        for path, x in [(f"{path}/{i}", own) for i, own in enumerate(jax.tree.leaves(leaf))]
    }


def loaded(weights, cfg=CFG):
    """The bits of an engine that was given weights as they are."""
    engine = made(cfg)
    engine.update_weights(weights, 1)
    return bits(engine)


def moved(weights, count=7, seed=0):
    """The same but for a few numbers of one leaf in three."""
    rng = np.random.default_rng(seed)
    out = {}
    for i, (path, x) in enumerate(flatten(weights).items()):
        x = np.array(x)
        if i % 3 == 0:
            where = rng.choice(x.size, min(count, x.size), replace=False)
            x.reshape(-1)[where] += 0.5
        out[path] = jnp.asarray(x)
    return map_with_path(lambda path, _: out[path], weights)


KINDS = {
    "float32": CFG,
    "bfloat16": NARROW,
    "experts as int4": dataclasses.replace(NARROW, int4_group=16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_delivers_the_bits_that_the_engine_would_compute_with(kind, tmp_path):
    cfg, weights = KINDS[kind], params()
    want = loaded(weights, cfg)
    assert want != loaded(params(0), cfg)
    resharded = made(cfg)
    told = [Reshard([resharded], SMALL).push(weights, 5)]
    assert bits(resharded) == want and resharded.version == 5
    with serving(cfg) as one, serving(cfg) as two:
        told.append(SharedStorage(cfg, tmp_path, [one.url], SMALL).push(weights, 5))
        told.append(Network(cfg, [one.url, two.url], SMALL).push(weights, 6))
        assert one.bits == two.bits == want
        assert one.held == two.held == (6, told[2].checksum)
    assert told[1].checksum == told[2].checksum
    size = sum(x.size * travelling(cfg)[path].itemsize for path, x in flatten(weights).items())
    for own in told:
        assert own.whole_bytes == size and own.seconds > 0 and own.lost == ()
    assert told[0].bytes == told[1].bytes == size
    assert 2 * size < told[2].bytes < 2.1 * size  # to two engines, with the names of tensors


def test_changes_alone_travel_and_make_the_same_weights(served):
    first, then = params(), moved(params())
    pusher = Network(CFG, [served.url], DELTA)
    whole = pusher.push(first, 1)
    [told] = (changed := pusher.push(then, 2)).engines
    assert (whole.engines[0].how, told.how) == ("whole", "changes")
    assert served.bits == loaded(then) and served.held == (2, changed.checksum)
    assert whole.checksum != changed.checksum and changed.bytes < whole.bytes / 10
    # What did not change at all costs a message and no weight.
    assert pusher.push(then, 3).bytes == 0
    assert served.held == (3, changed.checksum) and served.bits == loaded(then)


def test_an_engine_that_holds_another_base_gets_all(served):
    with serving() as steady:
        pusher = Network(CFG, [steady.url, served.url], DELTA)
        pusher.push(params(), 1)
        Network(CFG, [served.url], SMALL).push(moved(params(), 3), 2)  # somebody else's
        then = moved(params())
        assert [own.how for own in pusher.push(then, 3).engines] == ["changes", "whole"]
        assert steady.bits == served.bits == loaded(then)
        assert served.held == steady.held


def test_an_engine_that_was_started_anew_gets_all():
    with serving() as one:
        port = int(one.url.rpartition(":")[2])
        pusher = Network(CFG, [one.url], DELTA)
        pusher.push(params(), 4)
    with serving(port=port) as one:
        assert one.held == (0, None)
        pushed = pusher.push(moved(params()), 5)
        assert pushed.engines[0].how == "whole" and one.held == (5, pushed.checksum)


def test_the_base_is_what_the_engine_verifies(served):
    """Changes of other weights than it holds are refused, whatever the sender thinks."""
    Network(CFG, [served.url], DELTA).push(params(), 1)
    said = begun(2) | {"base": {"version": 1, "checksum": "0" * 32}}
    status, told = served.ask("/weights/begin", said)
    assert status == 409 and "changes of version 1 cannot be applied" in told["error"]["message"]


@pytest.mark.parametrize("delta", [False, True])
def test_a_push_of_what_is_held_changes_nothing(served, delta):
    pusher = Network(CFG, [served.url], DELTA if delta else SMALL)
    first = pusher.push(params(), 3)
    before = served.engine.computation.params
    again = pusher.push(params(), 3)
    assert again.engines == ((served.url, "held", 0, None),)
    assert (again.bytes, again.checksum) == (0, first.checksum)
    assert served.engine.computation.params is before
    # Another pusher, which knows nothing, finds out as much.
    assert Network(CFG, [served.url], SMALL).push(params(), 3).bytes == 0


def test_reshard_pushes_what_is_held_once():
    engine = made()
    pusher = Reshard([engine])
    pusher.push(params(), 3)
    before = engine.computation.params
    again = pusher.push(params(), 3)
    assert again.engines[0].how == "held" and engine.computation.params is before
    with pytest.raises(ValueError, match="version 3 is held with other numbers"):
        pusher.push(params(2), 3)
    with pytest.raises(ValueError, match="version 3 is held, 2 is older"):
        pusher.push(params(2), 2)
    pusher.push(params(2), 2, rewind=True)
    assert engine.version == 2 and bits(engine) == loaded(params(2))


def test_versions_go_back_only_when_the_trainer_says_so(served, tmp_path):
    """It went back to a checkpoint: what it makes anew has the same versions and other numbers."""
    network = Network(CFG, [served.url], SMALL)
    storage = SharedStorage(CFG, tmp_path, [served.url], SMALL)
    storage.push(params(0), 6)
    storage.push(params(1), 8)
    before = served.bits
    for pusher in (network, storage):
        with pytest.raises(NotPushed, match="version 8 is held, 7 is older; if the trainer went"):
            pusher.push(params(2), 7)
    with pytest.raises(NotPushed, match="version 8 is held with other numbers"):
        network.push(params(2), 8)
    with pytest.raises(ValueError, match="holds version 8 with other numbers"):
        storage.push(params(2), 8)
    assert served.held[0] == 8 and served.bits == before
    storage.push(params(2), 7, rewind=True)
    assert served.held[0] == 7 and served.bits == loaded(params(2))
    # The other lineage is gone from the folder, too.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "7"]
    assert network.push(params(0), 8).lost == () and served.bits == loaded(params(0))
    network.push(params(1), 8, rewind=True)
    assert served.bits == loaded(params(1))


# -- what fails leaves the weights as they were ------------------------------------------------------------


def begun(version, name="a", cfg=CFG):
    """The first message of a push."""
    manifest = Manifest.of(cfg, version)
    tensors = {n: [own.dtype, own.shape] for n, own in manifest.tensors.items()}
    return {
        "push": name,
        "version": version,
        "tensors": tensors,
        "arithmetic": manifest.arithmetic,
    }


def sent(served, weights, name="a"):
    """All parts of a push; the checksums."""
    manifest = Manifest(1, {})
    for tensor, array in named_tensors(weights, CFG, travelling(CFG)):
        manifest.add(tensor, array)
        for piece in pieces(tensor, array, None, 2**16):
            assert served.ask("/weights/part", save(piece), push=name)[0] == 200
    return [own.checksum for own in manifest.tensors.values()]


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
    goes_on = threading.Event()
    served.ask("/weights/begin", begun(1))
    said = {"push": "a", "checksums": sent(served, params())}
    served.server._worker.call(lambda engine: goes_on.wait(60))

    async def impatient():
        async with aiohttp.ClientSession() as client:
            async with asyncio.timeout(0.3):
                await client.post(served.url + "/weights/commit", json=said)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert served.ask("/weights")[1]["receiving"] == 1
    status, told = served.ask("/weights/abort", {"push": "a"})
    assert status == 409 and "is complete, and the engine is taking it" in told["error"]["message"]
    assert served.ask("/weights/begin", begun(2, "b"))[0] == 409
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        again = pool.submit(served.ask, "/weights/commit", said)
        goes_on.set()
        status, told = again.result()
    assert (status, told["version"], told["checksum"]) == (200, *served.held)
    assert served.held[0] == 1 and served.bits == loaded(params())


@pytest.mark.parametrize("way", ["network", "storage"])
def test_an_engine_that_tells_another_checksum_has_not_taken_it(served, tmp_path, monkeypatch, way):
    told = receiving._answer
    monkeypatch.setattr(receiving, "_answer", lambda own: told(own) | {"checksum": "0" * 32})
    pusher = {
        "network": Network(CFG, [served.url], SMALL),
        "storage": SharedStorage(CFG, tmp_path, [served.url], SMALL),
    }[way]
    with pytest.raises(NotPushed, match=f"holds {'0' * 32}, not [0-9a-f]{{32}}"):
        pusher.push(params(), 1)


def test_numbers_that_another_device_did_not_get_are_refused(monkeypatch):
    engine, before, told = made(), loaded(params(0)), reshard.fingerprint
    calls = iter(range(1000))
    monkeypatch.setattr(reshard, "fingerprint", lambda x: told(x) + (next(calls) == 1))
    with pytest.raises(ValueError, match="has arrived with other numbers than it was sent with"):
        Reshard([engine]).push(params(), 1)
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


@pytest.mark.parametrize(
    "part, words",
    [
        (b"junk", "no safetensors"),
        (save({"model.norm.weight": np.zeros(10**5, np.float32)}), "are too many"),
        (save({"model.norm.weight@-3": np.zeros(1, np.float32)}), "is no piece of a tensor"),
        (save({"model.norm": np.zeros(1, np.float32)}), "is no piece of a tensor"),
        (save({"model.norm.weight": np.zeros(3, np.float16)}), "comes as F16, not float32"),
        (save({"model.norm.weight@0#mask": np.zeros(1, np.uint8)}), "came without"),
        (
            save(
                {
                    "model.norm.weight@0#mask": np.full(1, 255, np.uint8),
                    "model.norm.weight@0#values": np.zeros(8, np.float32),
                }
            ),
            "has no base",
        ),
    ],
)
def test_a_part_that_is_none_is_refused(served, part, words):
    served.ask("/weights/begin", begun(1))
    status, told = served.ask("/weights/part", part, push="a")
    assert status == 400 and words in told["error"]["message"]


def test_one_push_at_a_time(served, tmp_path):
    assert served.ask("/weights/begin", begun(1))[0] == 200
    assert served.ask("/weights")[1]["receiving"] == 1
    for path, body in (
        ("/weights/begin", begun(2, "b")),
        ("/update_weights", {"path": str(tmp_path), "version": 2}),
    ):
        status, told = served.ask(path, body)
        assert status == 409 and "version 1 is being taken" in told["error"]["message"]
    with pytest.raises(NotPushed, match="version 1 is being taken; push again once that is over"):
        Network(CFG, [served.url], SMALL).push(params(), 2)
    for path, body in (
        ("/weights/commit", {"push": "b", "checksums": []}),
        ("/weights/abort", {"push": "b"}),
    ):
        assert served.ask(path, body)[0] == 409
    assert served.ask("/weights/part", b"", push="b")[0] == 409
    assert served.ask("/weights/abort", {"push": "a"})[0] == 200
    assert Network(CFG, [served.url], SMALL).push(params(), 2).lost == ()


def test_a_push_whose_trainer_was_killed_holds_nobody_up_for_long():
    with serving(push_seconds=0.5) as one:
        before = one.bits
        one.ask("/weights/begin", begun(1, "killed"))
        one.ask(
            "/weights/part", save({"model.norm.weight@0": np.zeros(3, np.float32)}), push="killed"
        )
        with pytest.raises(NotPushed, match="version 1 is being taken"):
            Network(CFG, [one.url], SMALL).push(params(), 2)
        assert one.bits == before
        time.sleep(0.6)
        assert one.ask("/weights")[1]["receiving"] is None
        assert Network(CFG, [one.url], SMALL).push(params(), 2).lost == ()
        assert one.bits == loaded(params())


def test_a_push_that_is_cut_short_is_taken_back(served):
    before = served.bits
    weights = params()
    weights = weights | {"lm_head": {"weight": Broken(weights["lm_head"]["weight"])}}
    with pytest.raises(RuntimeError, match="device is gone"):
        Network(CFG, [served.url], SMALL).push(weights, 2)
    assert served.ask("/weights")[1] == {
        "version": 0,
        "checksum": None,
        "base": False,
        "receiving": None,
    }
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


def test_an_engine_that_does_not_answer_is_told_of_and_holds_up_nobody(served, silent, tmp_path):
    one, other = (
        dataclasses.replace(SMALL, **own) for own in ({"seconds": 1.5}, {"load_seconds": 4.0})
    )
    gone = "http://127.0.0.1:9"  # nobody listens
    for version, pusher in enumerate(
        (
            Network(CFG, [silent, served.url, gone], one),
            SharedStorage(CFG, tmp_path, [silent, served.url, gone], other),
        ),
        1,
    ):
        pushed = pusher.push(params(version), version)
        assert pushed.lost == (silent, gone)
        reasons = [own.error for own in pushed.engines]
        assert (
            reasons[0]
            == (
                "no answer to /weights within 1.5 s",
                "no answer to /update_weights within 4.0 s",
            )[version - 1]
        )
        assert reasons[1] is None and "Cannot connect" in reasons[2]
        assert served.bits == loaded(params(version))
    with pytest.raises(NotPushed, match="no engine has taken version 3: http.*no answer to"):
        Network(CFG, [silent, gone], one).push(params(), 3)
    with pytest.raises(ValueError, match="nowhere to go"):
        Network(CFG, []).push(params(), 3)


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
        once = dataclasses.replace(SMALL, tries=1)
        with pytest.raises(NotPushed):
            Network(CFG, [url], once).push(params(), 1)
        dropped.clear()
        assert Network(CFG, [url], SMALL).push(params(), 1).lost == () and len(dropped) == 2
        own.shutdown(socket.SHUT_RDWR)


OTHERS = {
    "wrong dtype: model.embed_tokens.weight is float16, not float32": {"dtype": "float16"},
    "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 128], not": {"intermediate_size": 96},
    "another model: rope_parameters.rope_theta 500000.0 (here 10000.0)": {
        "rope_parameters": dataclasses.replace(CFG.rope_parameters, rope_theta=5e5)
    },
    "missing: model.layers.2.": {"num_nextn_predict_layers": 0},
}


@pytest.mark.parametrize("words", OTHERS)
def test_weights_of_another_model_are_refused_before_they_are_sent(served, words, tmp_path):
    cfg, before = dataclasses.replace(CFG, **OTHERS[words]), served.bits
    other = glm5.init_params(cfg, jax.random.key(0))
    for pusher in (
        Network(cfg, [served.url], SMALL),
        SharedStorage(cfg, tmp_path, [served.url], SMALL),
    ):
        with pytest.raises(NotPushed) as caught:
            pusher.push(other, 1)
        assert words in str(caught.value)
    assert served.bits == before and served.held == (0, None)


def test_a_tree_of_another_config_is_refused_where_it_is(served):
    weights = {name: own for name, own in params().items() if name != "final_norm"}
    with pytest.raises(ValueError, match="missing: final_norm"):
        Network(CFG, [served.url], SMALL).push(weights, 1)
    with pytest.raises(ValueError, match="final_norm is missing"):
        Reshard([made()]).push(weights, 1)
    assert served.held == (0, None)


def test_a_folder_that_was_changed_is_refused(served, tmp_path):
    storage = SharedStorage(CFG, tmp_path, [], SMALL)
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
    refused("does not have the checksum that it tells")
    told.write_text("{")
    refused("is no manifest")
    told.write_text(manifest)
    assert served.ask("/update_weights", {"path": str(tmp_path / "1"), "version": 1})[0] == 200
    assert served.bits == loaded(params())


def test_what_cannot_be_written_changes_nothing(served, tmp_path, monkeypatch):
    storage = SharedStorage(CFG, tmp_path / "a", [served.url], SMALL)
    storage.push(params(0), 1)
    before = served.bits
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(ValueError, match="has 0.000 GB free"):
            storage.push(params(1), 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        SharedStorage(CFG, tmp_path / "file" / "b", [served.url], SMALL).push(params(1), 2)
    assert served.bits == before and served.held[0] == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]


def test_the_newest_versions_stay_and_half_written_ones_go(served, tmp_path):
    half = tmp_path / ".3.4711.partial"  # of a trainer that was killed while it wrote
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    storage = SharedStorage(CFG, tmp_path, [served.url], dataclasses.replace(SMALL, keep=2))
    for version in (3, 9, 10):
        pushed = storage.push(params(version % 3), version)
        assert served.held == (version, pushed.checksum)
    assert {path.name for path in tmp_path.iterdir()} == {"9", "10"}
    # Again, to an engine that was lost meanwhile.
    with serving() as other:
        storage.engines = (other.url,)
        assert storage.push(params(1), 10).bytes == 0
        assert other.held == served.held and other.bits == served.bits


def test_a_pushed_folder_is_served_with_its_version(tmp_path, monkeypatch):
    SharedStorage(CFG, tmp_path, tokenizer=TOKENIZER).push(params(), 12)
    monkeypatch.setattr(serve, "make_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
    options = dict(page_size=16, max_batch=2, chunk=32, max_length=64)
    config = serve.ServeConfig(
        str(tmp_path / "12"),
        engine=EngineConfig(**options),
        server=ServerConfig(port=0),
        warm=False,
    )
    with serve.make_server(config).running() as url:
        one = Served(None, url)
        assert one.held == (12, None)
        pushed = Network(CFG, [url], SMALL).push(params(), 13)
        assert one.held == (13, pushed.checksum)


def test_a_server_without_a_loader_takes_nothing_and_a_key_is_asked_for():
    with Server(made(), TOKENIZER, ServerConfig(port=0)).running() as url:
        with pytest.raises(NotPushed, match="this server takes no weights"):
            Network(CFG, [url], SMALL).push(params(), 1)
    with serving(api_key="secret") as one:
        with pytest.raises(NotPushed, match="the API key is missing or wrong"):
            Network(CFG, [one.url], SMALL).push(params(), 1)
        config = dataclasses.replace(SMALL, api_key="secret")
        assert Network(CFG, [one.url], config).push(params(), 1).lost == ()
        assert one.bits == loaded(params())


# -- in the middle of replies ------------------------------------------------------------------------------


def drawn(prompt, count, seed):
    """Greedy, by an engine with one version of the weights alone."""
    sampling = Sampling(max_tokens=count, temperature=0, ignore_eos=True)
    return made(weights=params(seed)).generate([prompt], sampling)[0]


@pytest.mark.parametrize("way", ["network", "storage", "reshard"])
@pytest.mark.parametrize("policy", ["finish", "keep", "recompute"])
def test_a_push_in_the_middle_of_a_reply(way, policy, tmp_path):
    """Each token tells the version of the weights that drew it, and what it stands on is as the policy says."""
    config = dataclasses.replace(SMALL, policy=policy)
    prompt, count = [5, 9, 2, 7], 30
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    engine = made(weights=params(0))
    loader = models.loader_like(glm5.Glm5(CFG, params=params(0)))
    server = Server(engine, TOKENIZER, ServerConfig(port=0), loader)
    with server.running() as url, concurrent.futures.ThreadPoolExecutor(1) as pool:
        one = Served(engine, url)
        pusher = {
            "network": lambda: Network(CFG, [url], config),
            "storage": lambda: SharedStorage(CFG, tmp_path, [url], config),
            "reshard": lambda: Reshard([server._worker], config),
        }[way]()
        gate = Gate(engine, server._worker, 16)
        waiting = pool.submit(one.ask, "/generate", body)
        assert gate.reached.wait(60)
        pushed = pusher.push(params(1), 7)
        status, told = waiting.result()
        assert status == 200 and pushed.lost == ()
        after = one.ask("/generate", body | {"return_logprob": False})[1]
    ids, meta = told["output_ids"], told["meta_info"]
    versions = meta["weight_versions"]
    assert after["meta_info"]["weight_versions"] == [7] * count
    assert after["output_ids"] == drawn(prompt, count, 1).ids
    if policy == "finish":
        assert versions == [0] * count and ids == drawn(prompt, count, 0).ids
        return
    old = versions.count(0)
    assert versions == [0] * old + [7] * (count - old) and 8 <= old < count
    assert ids[:old] == drawn(prompt, count, 0).ids[:old]
    anew = drawn(prompt + ids[:old], count - old, 1)
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    if policy == "recompute":
        assert ids[old:] == anew.ids
        np.testing.assert_allclose(logprobs[old:], anew.logprobs, atol=1e-4)
    else:  # the first token drawn after it still stands on the old weights' latents
        assert not np.isclose(logprobs[old], anew.logprobs[0], atol=1e-3)


class Gate:
    """Holds an engine after so many steps, in the middle of a reply, until something else is asked of it."""

    def __init__(self, engine, worker, count):
        self.reached = threading.Event()
        self._step, self._worker, self._count = engine.step, worker, count
        engine.step = self.step

    def step(self):
        self._count -= 1
        if not self._count:
            self.reached.set()
            until = time.monotonic() + 60
            while not self._worker._calls:
                assert time.monotonic() < until
                time.sleep(0.01)
        return self._step()


# -- what engines do with it -------------------------------------------------------------------------------


def test_a_quantised_engine_quantises_what_is_pushed_as_it_was(tmp_path):
    held, cfg = table.quantise(params(0), CFG, 32)
    engine = Engine(glm5.Glm5(cfg, params=held), TOKENIZER, **OPTIONS)
    want = Engine(glm5.Glm5(cfg, params=table.quantise(params(1), CFG, 32)[0]), **OPTIONS)
    worker = Worker(engine)
    worker.start()
    Reshard([worker], SMALL).push(params(1), 1)
    worker.stop()
    assert bits(engine) == bits(want) != bits(made(cfg, held))
    turned, cfg = table.quantise(*rotation.rotate(params(0), CFG), 32)
    engine = Engine(glm5.Glm5(cfg, params=turned), TOKENIZER, **OPTIONS)
    with pytest.raises(ValueError, match="weights are rotated, those that came are not"):
        engine.update_weights(params(1), 1)
    with pytest.raises(ValueError, match="quantised otherwise than the engine's"):
        made().update_weights(held, 1)
    assert engine.version == 0


def test_a_part_at_a_time_is_made_and_lets_go_of_what_it_replaces(monkeypatch):
    monkeypatch.setattr(runner, "LOADED_BYTES", 2**16)
    want, engine = loaded(params()), made(weights=jax.tree.map(jnp.copy, params(0)))
    seen = []

    def lazy(path, x):
        def make():
            seen.append(path)
            return jnp.asarray(np.array(x))

        return Lazy(x.shape, x.dtype, make)

    engine.update_weights(map_with_path(lazy, params()), 1)
    assert bits(engine) == want and sorted(seen) == sorted(flatten(params()))
    assert engine.generate([[1, 2]], Sampling(max_tokens=3))[0].versions == [1] * 3


def test_weights_that_break_off_half_way_end_the_engine(monkeypatch):
    """Nothing can be computed with a mixture; before the first is replaced, nothing has happened."""
    monkeypatch.setattr(runner, "LOADED_BYTES", 2**16)

    def breaking(at):
        count = iter(range(1000))

        def lazy(path, x):
            def make():
                if next(count) == at:
                    raise RuntimeError("no memory")
                return x

            return Lazy(x.shape, x.dtype, make)

        return map_with_path(lazy, params())

    with serving() as one:
        before, worker = one.bits, one.server._worker
        first = worker.call(lambda own: own.update_weights(breaking(0), 1))
        with pytest.raises(RuntimeError, match="no memory"):
            first.result(60)
        assert one.bits == before and one.held == (0, None)
        later = worker.call(lambda own: own.update_weights(breaking(9), 1))
        with pytest.raises(runner.WeightsLost, match="broke off at .*: RuntimeError no memory"):
            later.result(60)
        for _ in range(200):
            status, told = one.ask("/health")
            if status == 503:
                break
            time.sleep(0.05)
        assert told == {"status": "failed"}
        with pytest.raises(NotPushed, match="the engine has ended"):
            Network(CFG, [one.url], SMALL).push(params(), 2)


def test_a_push_is_no_other_program_to_an_engine_of_narrow_weights():
    """As of a HuggingFace folder in bfloat16, whose routers are, too; its programs stay those that it has compiled."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(0))
    engine = made(NARROW, narrow)

    def kinds():
        leaves = jax.tree.leaves(engine.computation.params)
        return [(x.dtype, x.committed, x.weak_type) for x in leaves]

    before = kinds()
    for number, way in enumerate((Reshard([engine]).push, engine.update_weights), 1):
        way(params(), number)
        assert kinds() == before


def test_the_learner_may_write_over_its_weights_after_a_push():
    weights = jax.tree.map(jnp.copy, params())
    engine = made()
    Reshard([engine]).push(weights, 1)
    for leaf in jax.tree.leaves(weights):
        leaf.delete()
    assert bits(engine) == loaded(params())
    assert engine.generate([[1, 2]], Sampling(max_tokens=3))[0].versions == [1] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_fingerprints_tell_a_bit_and_a_place(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (4, 3, 8)), dtype)
    own = tuple(np.asarray(fingerprint(x)))
    assert tuple(np.asarray(fingerprint(jnp.copy(x)))) == own
    swapped = x.at[0, 0, 0].set(x[1, 2, 3]).at[1, 2, 3].set(x[0, 0, 0])
    assert x[0, 0, 0] != x[1, 2, 3]
    others = [x.at[2, 1, 5].add(1), swapped, x.reshape(3, 4, 8).swapaxes(0, 1), x * 0]
    assert len({own, *(tuple(np.asarray(fingerprint(other))) for other in others)}) == 5
    zeros = jnp.zeros(3, "float32")
    assert not np.array_equal(fingerprint(zeros), fingerprint(-zeros))


@pytest.mark.parametrize("changed", [0, 3, 400, 1000])
def test_pieces_of_changes_are_the_shorter_of_two_forms(changed):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((40, 25)).astype(jnp.bfloat16)
    new = base.copy()
    new.reshape(-1)[rng.choice(1000, changed, replace=False)] += 1
    found = list(pieces("x", new, base, 512))
    size = sum(array.nbytes for piece in found for array in piece.values())
    assert size <= new.nbytes and (changed > 0) == bool(found)
    if changed == 3:
        assert size <= 3 * (32 + 3 * 2)
    whole = list(pieces("x", new, None, 512))
    assert [key for piece in whole for key in piece] == [f"x@{i}" for i in range(0, 1000, 256)]
    assert all(array.nbytes <= 512 for piece in whole for array in piece.values())


@pytest.mark.parametrize(
    "field, value",
    [
        ("policy", "soon"),
        ("seconds", 0),
        ("load_seconds", -1.0),
        ("tries", 0),
        ("keep", 0),
        ("bucket_bytes", 10),
    ],
)
def test_a_config_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        SyncConfig(**{field: value})


def test_a_manifest_says_the_same_in_a_file(tmp_path):
    manifest = Manifest(3, {"a": (1, 2)})
    manifest.add("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    manifest.save(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["checksum"] == manifest.checksum
    assert Manifest.read(tmp_path).checksum == manifest.checksum
    other = Manifest(3, {})
    other.add("x", np.arange(6, dtype=np.float32).reshape(3, 2))
    assert other.checksum != manifest.checksum
